"""What a library draws while it loads a model is kept off the terminal, whichever command loads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils import logging as library

from agentrl.cli.main import main


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    """As in a process that has just begun: another test may have silenced the library in this one."""
    library.enable_progress_bar()
    yield
    library.disable_progress_bar()


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_no_bar_of_transformers_is_drawn(command: str, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["rollout.max_turns=1", "rollout.max_turn_tokens=4", "cluster.backend=inline", "engine=embedded"]
    assert main([command, "key_value", "--model", tiny, "-n", "1", "--out", str(tmp_path / "out"), *sizes]) == 0
    shown = capsys.readouterr()
    assert "Loading weights" not in shown.err + shown.out


def test_writing_a_random_model_draws_no_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init-model", str(tmp_path / "model"), "--layers", "1", "--hidden", "32", "--mlp", "32"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and shown.out.startswith("wrote a random model of 1 layers, hidden size 32")
