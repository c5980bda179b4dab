"""The end of a run: reached by `stop_at_success` and by a kill before it was said, and signals while a checkpoint, the curve and
the summary are written."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.rollout.player import summarize
from agentrl.run import driver as main
from agentrl.run import loop
from agentrl.run.folder import RunFolder
from agentrl.run.session import Saver
from agentrl.trainer.checkpoint import Checkpoints
from tests.conftest import proof
from tests.e2e.inside import config_of, execute, numbers, updates
from tests.e2e.runs import exit_code

SOLVED = ["steps=4", "eval.every=2", "stop_at_success=0.0"]  # any success is enough: at the first evaluation


def killed_before_the_final_model(out: str, name: str, overrides: list[str]) -> None:
    """A process that is killed after its last evaluation, before the trained model is written."""

    def kill(_: RunFolder) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    RunFolder.clear_final = kill  # type: ignore[method-assign]
    execute(config_of(Path(out), name, *overrides))


def test_killed_at_its_end_it_does_not_train_on(tmp_path: Path) -> None:
    whole = execute(config_of(tmp_path, "whole", *SOLVED))
    assert exit_code(killed_before_the_final_model, str(tmp_path), "killed", SOLVED) == -signal.SIGKILL
    assert not (tmp_path / "killed" / "final").exists()
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
    expected = "has reached stop_at_success = 0.0 at update 2: no more updates; to continue: stop_at_success=false"
    assert (expected in told) == said, told


def test_an_evaluation_that_an_outage_spoiled_ends_no_run_and_rates_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 4 episodes after update 1 one has a success, which is all of those that are known."""
    whole = loop.evaluate_env

    async def spoiled(session: Any, *args: Any, **more: Any) -> Any:
        found = await whole(session, *args, **more)
        for number, one in enumerate(found.trajectories if session.collector.version == 1 else ()):
            one.success = one.reward = None if number else 1.0
        return summarize(found.trajectories)

    monkeypatch.setattr(loop, "evaluate_env", spoiled)
    folder = execute(config_of(tmp_path, "run", "steps=2", "eval.every=1", "stop_at_success=1.0", "checkpoint.every=1"))
    assert [row["step"] for row in updates(folder)] == [1, 2]
    assert [row["success"] for row in numbers(folder) if row["phase"] == "eval"] == [1.0], "the row has what was measured"
    assert Checkpoints(folder / "checkpoints", 2).best() == (2, 0.0)


def run_with_signals_at_the_curve(out: str, numbers: list[signal.Signals]) -> None:
    """A process that gets these signals while it draws the curve, and ends with the run's exit code."""
    draw = main.draw_curve

    def signalled(*args: object) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
        draw(*args)  # type: ignore[arg-type]

    main.draw_curve = signalled  # type: ignore[assignment]
    config = config_of(Path(out), "run", "steps=1")
    sys.exit(main.execute(config, RunFolder.create(config), resumed=False))


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_one_signal_leaves_the_summary_and_the_exit_code_as_they_are_and_the_second_ends_it(
    signals: list[signal.Signals], tmp_path: Path
) -> None:
    """What is written last may not end, a tracker's upload say."""
    code, summary = exit_code(run_with_signals_at_the_curve, str(tmp_path), signals), tmp_path / "run" / "summary.json"
    if len(signals) == 2:
        assert code not in (0, None) and not summary.exists()
        return
    assert code == 0 and json.loads(summary.read_text())["status"] == "done"
    assert (tmp_path / "run" / "curve.png").exists()


def resumed_with_a_signal_in_an_evaluation(out: str, overrides: list[str]) -> None:
    """A process that goes on with a run, and gets SIGINT in its first evaluation."""
    evaluate = loop.evaluate_env

    async def signalled(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return await evaluate(*args, **options)

    loop.evaluate_env = signalled
    sys.exit(main.execute(config_of(Path(out), "run", *overrides), RunFolder(Path(out) / "run"), resumed=True))


def test_in_an_evaluation_that_it_lacked_it_ends_with_that_and_plays_no_step(tmp_path: Path) -> None:
    execute(config_of(tmp_path, "run", "steps=1"))
    assert exit_code(resumed_with_a_signal_in_an_evaluation, str(tmp_path), ["steps=2", "eval.every=1"]) == 130
    found = [(row["phase"], row["step"]) for row in numbers(tmp_path / "run")]
    assert found[-2:] == [("train", 1), ("eval", 1)]


def run_with_a_signal_in_a_checkpoint(out: str, overrides: list[str]) -> None:
    """A process that gets SIGINT while it saves its second checkpoint, that of the first update."""
    save, saved = Saver.save, list[int]()

    async def signalled(self: Saver, evaluated: Any = None) -> None:
        saved.append(len(saved))
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        await save(self, evaluated)

    Saver.save = signalled  # type: ignore[method-assign]
    config = config_of(Path(out), "run", *overrides)
    sys.exit(main.execute(config, RunFolder.create(config), resumed=False))


def test_in_a_checkpoint_it_ends_with_that_and_plays_no_further_step(tmp_path: Path) -> None:
    steps = ["steps=3", "checkpoint.every=1"]
    assert exit_code(run_with_a_signal_in_a_checkpoint, str(tmp_path), steps) == 130
    assert [row["step"] for row in updates(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "manifest.json").is_file()
    resumed, whole = execute(config_of(tmp_path, "run", *steps), resumed=True), execute(config_of(tmp_path, "whole", *steps))
    assert numbers(resumed) == numbers(whole)
