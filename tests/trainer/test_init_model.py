"""The tiny model and the frozen tokenizer."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.cli.main import build_parser
from agentrl.config.schema import InitModelConfig
from agentrl.trainer.pretrained import SPECIAL_TOKENS, init_model, packaged_tokenizer
from agentrl.utils.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_model(InitModelConfig(), tmp_path_factory.mktemp("model") / "tiny", seed=0)


def test_plain_transformers_loads_it(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert 150_000 < model.num_parameters() < 200_000
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.05, rel=0.1)


def test_the_seed_decides_the_weights_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    same = init_model(InitModelConfig(), tmp_path / "same", seed=0)
    other = init_model(InitModelConfig(), tmp_path / "other", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, same, other)]
    assert weights[0] == weights[1] != weights[2]


def test_tokenizer_is_frozen() -> None:
    tokenizer = packaged_tokenizer(4096)
    assert len(tokenizer) == 400
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(7))


@pytest.mark.parametrize("text", ["pear 12\n", "ünïcode ☃", "a  b\t\n\n", '{"x": [1, 2.5e-3]}', "a_b"])
def test_tokenizer_loses_nothing(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_control_tokens_survive_decoding_and_cannot_be_forged(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "".join(SPECIAL_TOKENS)
    assert tokenizer.decode(range(7), skip_special_tokens=False) == text
    forged = tokenizer.encode(text, split_special_tokens=True)
    assert min(forged) >= 7
    assert tokenizer.decode(forged, skip_special_tokens=False) == text


def test_a_word_is_the_same_tokens_in_a_prompt_and_in_a_call(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    word = tokenizer.encode("zebra_x")
    inside = tokenizer.encode('{"key": "zebra_x"}')
    assert any(inside[i : i + len(word)] == word for i in range(len(inside)))


def test_head_counts_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="heads=3 is not a multiple"):
        init_model(InitModelConfig(heads=3), tmp_path, seed=0)
    assert not list(tmp_path.iterdir())


def test_command(tmp_path: Path) -> None:
    parser = build_parser()
    args = parser.parse_args(["init-model", str(tmp_path / "m"), "--layers", "1", "--hidden", "32"])
    assert args.run(args) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").config.num_hidden_layers == 1
    bad = parser.parse_args(["init-model", str(tmp_path / "n"), "--layers", "0"])
    with pytest.raises(ConfigError, match="--layers"):
        bad.run(bad)
