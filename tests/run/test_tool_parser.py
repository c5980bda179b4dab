"""`model.tool_parser`: every name is taken or refused with the nearest one; a parser must fit the template."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from agentrl.config import ModelConfig, load_config
from agentrl.render.template import TemplateRenderer
from agentrl.run.assembly import RunStart, renderer_of
from agentrl.run.checks import check_assembly
from agentrl.utils.errors import ConfigError, ModelError
from tests.render.families import FAMILIES
from tests.render.render_tokenizers import build_tokenizer
from tests.tiny import build

ROOT = Path(__file__).resolve().parents[2]


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


NO_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            NO_TOOLS,
            r"ignores tools \(it ends a turn with '<\|im_end\|>'\).*set model\.chat_template to \"hermes\".*model\.tool_parser",
        ),
        (None, 'has no chat template.*model\\.chat_template to "hermes"'),
    ],
)
def test_a_template_without_tools_is_refused_before_a_run(tmp_path: Path, template: str | None, reason: str) -> None:
    folder = build(tmp_path / "model")
    file = Path(folder) / "chat_template.jinja"
    file.unlink()
    if template is not None:
        file.write_text(template)
    config = load_config(ROOT / "configs" / "quickstart.toml", [f"model.path={folder}", "model.init=false", "sft=false"])
    with pytest.raises(ModelError, match=reason):
        check_assembly(RunStart(config))
