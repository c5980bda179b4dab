"""Which renderer fits a tokenizer: decided by its chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.errors import ModelError
from agentrl.render.base import Renderer
from agentrl.render.chatml import CHATML_TEMPLATE, ChatML
from agentrl.render.parsers import ForTools, Parser
from agentrl.render.template import TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_renderer(tokenizer: PreTrainedTokenizerBase, parser: Parser | ForTools | None = None) -> Renderer:
    """The renderer for a tokenizer. Raises ModelError where none fits.

    `parser` reads tool calls instead of the parser that the chat template's own syntax suggests.
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
