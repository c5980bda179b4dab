"""`model.tool_parser`: every name is taken or refused with the nearest one; a parser must fit the template."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from agentrl.config import ModelConfig
from agentrl.render.template import TemplateRenderer
from agentrl.run.assembly import renderer_of
from agentrl.utils.errors import ConfigError, ModelError
from tests.render.families import FAMILIES
from tests.render.render_tokenizers import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    template, tokens, bos, eos, *_ = FAMILIES[family]
    return build_tokenizer(tokens, template, bos=bos, eos=eos)


@pytest.mark.parametrize(
    ("family", "name"), [("qwen2.5", "hermes"), ("qwen3-coder", "qwen_xml"), ("llama3", "llama_json"), ("mistral", "mistral")]
)
def test_a_named_parser_is_used_where_it_fits_and_refused_where_not(family: str, name: str) -> None:
    assert isinstance(renderer_of(ModelConfig(tool_parser=name), tokenizer(family)), TemplateRenderer)
    other = "mistral" if name == "hermes" else "hermes"
    with pytest.raises(ModelError, match="does not read what the chat template writes"):
        renderer_of(ModelConfig(tool_parser=other), tokenizer(family))


@pytest.mark.parametrize(("name", "hint"), [("hermez", "did you mean 'hermes'"), ("kimi_k2", "is written 'vllm:kimi_k2'")])
def test_an_unknown_name_says_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"model.tool_parser.*{hint}"):
        renderer_of(ModelConfig(tool_parser=name), tokenizer("qwen2.5"))


NO_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
