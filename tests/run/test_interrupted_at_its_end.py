"""A signal that comes when the training loop is over, while a run's curve and summary are written."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from agentrl.run import main
from agentrl.run.folder import RunFolder
from tests.e2e.inside import config_of
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
