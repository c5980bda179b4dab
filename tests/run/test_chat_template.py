"""`model.chat_template` gives a model tools and is saved with it; `model.tool_parser` must fit it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agentrl.cli.main import main
from agentrl.config import ModelConfig, TrainConfig, load_config
from agentrl.config.load import with_absolute_paths
from agentrl.data.trajectory import Message
from agentrl.render.chatml import CHAT_TEMPLATES
from agentrl.render.template import TemplateRenderer
from agentrl.run.assembly import RunStart, renderer_of, tokenizer_of
from agentrl.run.checks import check_assembly
from agentrl.run.checks.model_checks import check_tokenizer
from agentrl.trainer.model_folder import save_model
from agentrl.trainer.pretrained import load_model_config
from agentrl.utils.errors import ConfigError, ModelError
from tests.render.families import FAMILIES
from tests.render.render_tokenizers import build_tokenizer
from tests.tiny import build

ROOT = Path(__file__).resolve().parents[2]
IGNORED = r"ignores tools \(it ends a turn with '<\|im_end\|>'\).*set model\.chat_template to \"hermes\".*model\.tool_parser"
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "of a key", "parameters": {"type": "object"}}}]

NO_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose template knows no tools."""
    folder = build(tmp_path_factory.mktemp("models") / "plain")
    (Path(folder) / "chat_template.jinja").write_text(NO_TOOLS)
    return str(folder)


def config_of(model: str, *overrides: str) -> TrainConfig:
    return load_config(ROOT / "configs" / "quickstart.toml", [f"model.path={model}", "model.init=false", "sft=false", *overrides])


def prompt(config: TrainConfig) -> str:
    tokenizer = tokenizer_of(config.model)
    return str(tokenizer.decode(renderer_of(config.model, tokenizer).start([Message("user", "Which?")], TOOLS)))


def test_a_name_or_a_file_makes_tools_usable(model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(CHAT_TEMPLATES["chatml"].replace("Tools:", "At hand:"))
    with pytest.raises(ModelError, match=IGNORED):
        check_assembly(RunStart(config_of(model)))
    listed = 'You can call these tools:\n{"name": "look_up"'
    shown = {"hermes": listed, "chatml": "Tools: look_up()", str(file): "At hand: look_up()"}
    for given, written in shown.items():
        config = config_of(model, f"model.chat_template={given}")
        check_assembly(RunStart(config))
        assert written in prompt(config)
    assert "Tools: look_up()" in prompt(load_config(ROOT / "configs" / "quickstart.toml", ["model.chat_template=chatml"]))


@pytest.mark.parametrize(("given", "problem"), [
    ("hermez", "model.chat_template = 'hermez'.*did you mean 'hermes'"),
    ("no/such.jinja", "model.chat_template = 'no/such.jinja': expected 'chatml', 'hermes', .* or a file"),
    ("llama3", "the tokenizer has no token '<|start_header_id|>'.*set model.chat_template to \"hermes\""),
])  # fmt: skip
def test_one_that_does_not_fit_is_refused_by_key(model: str, given: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("|", r"\|")):
        check_assembly(RunStart(config_of(model, f"model.chat_template={given}")))


def test_a_base_model_without_a_template_gets_one(model: str, tmp_path: Path) -> None:
    base = Path(build(tmp_path / "base"))
    (base / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"like a base model's: set model\.chat_template to \"hermes\""):
        check_tokenizer(config_of(str(base)).model)
    check_tokenizer(config_of(str(base), "model.chat_template=hermes").model)


def test_a_saved_model_has_the_template_with_it(model: str, tmp_path: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(model).named_parameters()
    save_model(model, load_model_config(model), weights, torch.float32, tmp_path / "saved", chat_template="hermes")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == CHAT_TEMPLATES["hermes"]


def test_a_name_stays_a_name_where_a_folder_is_called_so(model: str, here: Path) -> None:
    (here / "hermes").mkdir()
    (here / "mine.jinja").write_text(NO_TOOLS)
    named = with_absolute_paths(config_of(model, "model.chat_template=hermes"))
    assert named.model.chat_template == "hermes"
    filed = with_absolute_paths(config_of(model, "model.chat_template=mine.jinja"))
    assert filed.model.chat_template == str(here / "mine.jinja")


def test_a_script_plays_the_environment_of_a_config_that_names_one(tmp_path: Path) -> None:
    file = tmp_path / "named.toml"
    file.write_text('base = "quickstart"\n[model]\nchat_template = "hermes"\n')
    assert main(["eval", "key_value", "--config", str(file), "--policy", "gold", "-n", "1", "--out", str(tmp_path / "gold")]) == 0


# `model.tool_parser`


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    template, tokens, bos, eos, *_ = FAMILIES[family]
    return build_tokenizer(tokens, template, bos=bos, eos=eos)


@pytest.mark.parametrize(
    ("family", "name"), [("qwen2.5", "hermes"), ("qwen3-coder", "qwen_xml"), ("llama3", "llama_json"), ("mistral", "mistral")]
)
def test_a_named_parser_is_used_where_it_fits_and_refused_where_not(family: str, name: str) -> None:
    assert isinstance(renderer_of(ModelConfig(tool_parser=name), tokenizer(family)), TemplateRenderer)
    other = "mistral" if name == "hermes" else "hermes"
    with pytest.raises(ModelError, match=r"does not read what the chat template writes .*\(model\.tool_parser\)"):
        renderer_of(ModelConfig(tool_parser=other), tokenizer(family))


@pytest.mark.parametrize(("name", "hint"), [("hermez", "did you mean 'hermes'"), ("kimi_k2", "is written 'vllm:kimi_k2'")])
def test_an_unknown_name_says_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"model.tool_parser.*{hint}"):
        renderer_of(ModelConfig(tool_parser=name), tokenizer("qwen2.5"))
