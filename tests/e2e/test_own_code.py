"""A model with its own code, by `model.trust_remote_code`: trained, saved, evaluated and replayed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.inside import config_of, execute
from tests.e2e.runs import Command, finish, updates

pytestmark = pytest.mark.slow

CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class MineConfig(Qwen3Config):
    model_type = "mine"


class MineForCausalLM(Qwen3ForCausalLM):
    config_class = MineConfig
"""
TRUSTED = "model.trust_remote_code=true"
SIZES = ["rollout.max_turns=2", "rollout.max_turn_tokens=8"]


@pytest.fixture
def own(tiny: str, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny, tmp_path / "own"))
    (folder / "modeling_mine.py").write_text(CODE)
    table = json.loads((folder / "config.json").read_text()) | {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    table["auto_map"] = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    (folder / "config.json").write_text(json.dumps(table))
    return folder


def test_it_is_trained_saved_and_evaluated_where_it_is_trusted(own: Path, tmp_path: Path) -> None:
    run = execute(config_of(tmp_path, "run", f"model.path={own}", TRUSTED, "steps=1", *SIZES))
    [update] = updates(run)
    assert update["mismatch_max"] < 1e-4 and update["tokens"] > 0
    final = json.loads((run / "final" / "config.json").read_text())
    assert final["architectures"] == ["MineForCausalLM"]
    assert final["auto_map"]["AutoModelForCausalLM"] == "modeling_mine.MineForCausalLM"
    assert (run / "final" / "modeling_mine.py").read_text() == CODE
    asked = ["--model", str(run / "final"), "-n", "2", "engine=embedded"]
    taken = Command(tmp_path, "eval", "key_value", *asked, "--out", str(tmp_path / "out"), *SIZES, TRUSTED)
    said = finish(taken)
    assert taken.returncode == 0, said
