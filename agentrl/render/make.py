"""Chooses the renderer for a tokenizer by its chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.errors import ModelError
from agentrl.render.base import Renderer
from agentrl.render.chatml import CHATML_TEMPLATE, ChatML
from agentrl.render.parsers import ForTools, Parser, Syntax
from agentrl.render.template import TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_renderer(tokenizer: PreTrainedTokenizerBase, parser: Parser | ForTools | Syntax | None = None) -> Renderer:
    """The renderer for a tokenizer. Raises ModelError if none fits.

    `parser` replaces the tool-call parser that is inferred from the chat template's syntax.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or not template:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; "
            "save one with it (agentrl.render.chatml.CHATML_TEMPLATE, for example)"
        )
    if template.strip() == CHATML_TEMPLATE.strip() and parser is None:
        return ChatML(tokenizer)
    return TemplateRenderer(tokenizer, parser)
