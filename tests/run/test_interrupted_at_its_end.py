"""A signal at the end of a step, while its checkpoint is written, or at that of the run, with its curve and summary."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.run import driver as main
from agentrl.run.folder import RunFolder
from agentrl.run.session import Saver
from tests.e2e.inside import config_of, execute, numbers, updates
from tests.e2e.runs import forked


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_leaves_the_summary_and_the_exit_code_as_they_are(number: signal.Signals, tmp_path: Path) -> None:
    process = forked(run_with_signals_at_the_curve, str(tmp_path), [number])
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"
    assert (tmp_path / "run" / "curve.png").exists()


def test_the_second_ends_it(tmp_path: Path) -> None:
    """What is written last may not end, a tracker's upload say."""
    process = forked(run_with_signals_at_the_curve, str(tmp_path), [signal.SIGINT, signal.SIGINT])
    process.start()
    process.join(120)
    assert process.exitcode != 0
    assert not (tmp_path / "run" / "summary.json").exists()


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
    process = forked(run_with_a_signal_in_a_checkpoint, str(tmp_path), steps)
    process.start()
    process.join(120)
    assert process.exitcode == 130
    assert [row["step"] for row in updates(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "manifest.json").is_file()
    resumed, whole = execute(config_of(tmp_path, "run", *steps), resumed=True), execute(config_of(tmp_path, "whole", *steps))
    assert numbers(resumed) == numbers(whole)
