"""`model.tool_parser`: every name is taken or refused with the nearest one; a parser must fit the template."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "render"))
from families import FAMILIES
from render_tokenizers import build_tokenizer
from transformers import PreTrainedTokenizerFast

from agentrl.config import ModelConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.render.template import TemplateRenderer
from agentrl.run.assembly import renderer_of


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    template, tokens, bos, eos, *_ = FAMILIES[family]
    return build_tokenizer(tokens, template, bos=bos, eos=eos)


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen2.5", "hermes"), ("qwen3-coder", "qwen_xml"), ("llama3", "llama_json"), ("mistral", "mistral")],
)
def test_a_named_parser_is_used_where_it_fits_and_refused_where_not(family: str, name: str) -> None:
    assert isinstance(renderer_of(ModelConfig(tool_parser=name), tokenizer(family)), TemplateRenderer)
    other = "mistral" if name == "hermes" else "hermes"
    with pytest.raises(ModelError, match="does not read what the chat template writes"):
        renderer_of(ModelConfig(tool_parser=other), tokenizer(family))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("hermez", "did you mean 'hermes'"), ("kimi_k2", "is written 'vllm:kimi_k2'")],
)
def test_an_unknown_name_says_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"model.tool_parser.*{hint}"):
        renderer_of(ModelConfig(tool_parser=name), tokenizer("qwen2.5"))
