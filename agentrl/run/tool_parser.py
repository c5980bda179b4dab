"""Which parser reads the tool calls of a model: `model.tool_parser` of the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.config import ModelConfig
from agentrl.errors import ConfigError, did_you_mean
from agentrl.render import make_renderer
from agentrl.render.base import Renderer
from agentrl.render.parsers import PARSERS, ForTools, Parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VLLM = "vllm:"
"""What the name of one of vLLM's own parsers begins with."""


def renderer_of(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Renderer:
    """The renderer for a tokenizer with the parser that the config asks for. Raises ConfigError for an unknown
    name, DependencyError where vLLM is missing, ModelError where the parser does not fit the chat template."""
    return make_renderer(tokenizer, _parser(config.tool_parser, tokenizer))


def _parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Parser | ForTools | None:
    if name == "auto":
        return None
    if name.startswith(VLLM):
        from agentrl.backends.vllm_parsers import vllm_parser_for_tools

        return vllm_parser_for_tools(name.removeprefix(VLLM), tokenizer)
    if name not in PARSERS:
        hint = did_you_mean(name, PARSERS, f"a parser of vLLM is asked for as '{VLLM}{name}'")
        known = ", ".join(map(repr, PARSERS))
        raise ConfigError(f"model.tool_parser = {name!r}: expected 'auto', {known} or '{VLLM}NAME'; {hint}")
    return PARSERS[name]
