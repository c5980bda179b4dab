"""`agentrl train --dry-run`: the memory that it prints is that of a computation by hand, and what cannot fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config.load import config_from
from agentrl.run.dry_run import GIB, Placed, memory_of

LAYERS, HIDDEN, MLP, HEADS, KV, SIZE, WORDS = 4, 64, 96, 4, 2, 16, 1000
LAYER = HIDDEN * (2 * HEADS * SIZE + 2 * KV * SIZE) + 3 * HIDDEN * MLP + 2 * HIDDEN + 2 * SIZE
ROOT = WORDS * HIDDEN + HIDDEN  # tied embeddings and the last norm
ALL = LAYERS * LAYER + ROOT


@pytest.fixture
def architecture(tmp_path: Path) -> Path:
    """A model folder with nothing but config.json."""
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": MLP, "num_attention_heads": HEADS}
    more = {"num_key_value_heads": KV, "head_dim": SIZE, "vocab_size": WORDS, "tie_word_embeddings": True}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096, **sizes, **more}
    (tmp_path / "architecture").mkdir()
    (tmp_path / "architecture/config.json").write_text(json.dumps(config))
    return tmp_path / "architecture"


def placed(path: Path, *overrides: str) -> dict[str, Placed]:
    base: dict[str, Any] = {"env": {"id": "key_value"}, "engine": "embedded", "model": {"path": str(path)}}
    return {one.role: one for one in memory_of(config_from(base, list(overrides)), 80 * GIB)}


def test_the_weights_of_the_actor_and_the_engine_are_counted_from_the_architecture_alone(architecture: Path) -> None:
    found = placed(architecture, "model.dtype=float32", "rollout.max_episodes=8", "rollout.max_episode_tokens=100")
    assert (found["actor"].memory.weights, found["actor"].memory.optimizer) == (4 * ALL, 8 * ALL)
    assert (found["rollout"].memory.weights, found["rollout"].memory.cache) == (4 * ALL, 8 * 100 * 2 * LAYERS * KV * SIZE * 4)
    # Two ranks: every first dimension is even, so each has half. In bf16, the default on cards, the masters stay float32 and the
    # engine's are halved.
    halves = placed(architecture, "cluster.actors=2")
    assert (halves["actor"].memory.weights, halves["actor"].memory.optimizer) == (2 * ALL, 4 * ALL)
    assert (halves["rollout"].memory.weights, halves["actor"].ranks) == (2 * ALL, 2)


def test_the_command_needs_no_weights_and_refuses_what_does_not_fit(
    architecture: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["train", "quickstart", "--dry-run", "sft=false", "model.init=false", f"model.path={architecture}", "engine=embedded"]
    assert main([*asked, "--gpu-memory", "1"]) == 0
    said = capsys.readouterr().out
    assert "actor" in said and "of 1.0 GiB" in said
    assert main([*asked, "--gpu-memory", "0.001"]) == 2
    assert "0.0 GiB" in capsys.readouterr().err
    assert main([*asked, "optim.micro_tokens=7"]) == 2  # the checks of a run
    assert "optim.micro_tokens = 7" in capsys.readouterr().err
    assert main(["train", "quickstart", "--gpu-memory", "80"]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["architecture"]  # nothing was started
