"""`stop_at_success`: a run that has reached it is at its end, also if it is killed or stopped before it has said so."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentrl.run.folder import RunFolder
from tests.conftest import proof
from tests.e2e.inside import config_of, execute, numbers, updates
from tests.e2e.runs import forked

SOLVED = ["steps=4", "eval.every=2", "stop_at_success=0.0"]  # any success is enough: at the first evaluation


def killed_before_the_final_model(out: str, name: str, overrides: list[str]) -> None:
    """A process that is killed after its last evaluation, before the trained model is written."""

    def kill(_: RunFolder) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    RunFolder.clear_final = kill  # type: ignore[method-assign]
    execute(config_of(Path(out), name, *overrides))


def test_killed_at_its_end_it_does_not_train_on(tmp_path: Path) -> None:
    whole = execute(config_of(tmp_path, "whole", *SOLVED))
    process = forked(killed_before_the_final_model, str(tmp_path), "killed", SOLVED)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL and not (tmp_path / "killed" / "final").exists()
    killed = execute(config_of(tmp_path, "killed", *SOLVED), resumed=True)
    assert [row["step"] for row in updates(whole)] == [1, 2]
    assert numbers(killed) == numbers(whole)
    assert (killed / "final" / "model.safetensors").read_bytes() == (whole / "final" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("more", "trained", "said"), [
    ([], [1, 2], True),  # it has ended
    pytest.param(["steps=6"], [1, 2], True, marks=proof),
    pytest.param(["stop_at_success=1.0"], [1, 2, 3, 4], False, marks=proof),  # a harder goal, which this policy does not reach
    (["stop_at_success=false"], [1, 2, 3, 4], False),
])  # fmt: skip
def test_resumed_after_its_end_it_says_why_it_trains_no_more(
    more: list[str], trained: list[int], said: bool, tmp_path: Path, capsys: Any
) -> None:
    execute(config_of(tmp_path, "run", *SOLVED))
    capsys.readouterr()
    folder = execute(config_of(tmp_path, "run", *SOLVED, *more), resumed=True)
    assert [row["step"] for row in updates(folder)] == trained
    assert [row["step"] for row in numbers(folder) if row["phase"] == "after"] == trained[-1:]
    told = capsys.readouterr().out
    expected = "has reached stop_at_success = 0.0 at update 2: no more updates; to go on: stop_at_success=false, or a higher one"
    assert (expected in told) == said, told
