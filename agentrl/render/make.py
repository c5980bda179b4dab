"""Chooses the renderer for a tokenizer by its chat template."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

from agentrl.errors import ModelError, RenderError
from agentrl.render.base import Renderer
from agentrl.render.chat_templates import advice
from agentrl.render.chatml import CHATML_TEMPLATE, ChatML
from agentrl.render.parsers import ForTools, Parser, Syntax
from agentrl.render.template import TemplateRenderer
from agentrl.render.template_text import Placeholders

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_renderer(
    tokenizer: PreTrainedTokenizerBase,
    parser: Parser | ForTools | Syntax | None = None,
    pictures: Placeholders | None = None,
    day: str | None = None,
) -> Renderer:
    """The renderer for a tokenizer. Raises ModelError if none fits.

    `parser` replaces the tool-call parser that is inferred from the chat template's syntax. `pictures`: of a model that takes
    images, what it has for one among its tokens. `day`: the date of a template that writes one, as YYYY-MM-DD; today by default.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        names = ", ".join(map(repr, template))
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has several chat templates ({names}): write the one to "
            f"use to a file that model.chat_template names, or {advice(tokenizer)}"
        )
    if not isinstance(template, str) or not template:
        raise ModelError(f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; {advice(tokenizer)}")
    if template.strip() == CHATML_TEMPLATE.strip() and parser is None and pictures is None:
        return ChatML(tokenizer)
    try:
        made = TemplateRenderer(tokenizer, parser, None if day is None else date.fromisoformat(day))
        return made if pictures is None else made.sees(pictures)
    except RenderError as problem:
        raise ModelError(f"a question and its answer cannot be rendered: {problem}; {advice(tokenizer)}") from problem
