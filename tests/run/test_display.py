"""The progress display: what is shown, in what order, and that a terminal stays in order; plain lines where there is none."""

import asyncio
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from agentrl.cli.main import main
from agentrl.rollout.engine import EngineStats
from agentrl.run import display as module
from agentrl.run import session as feed
from agentrl.run.display import Activity, Count, Display, Shown, animates, frame
from agentrl.utils.errors import EngineError


class Screen:
    """What a terminal shows of these bytes: the control codes that rich uses, and wrapping at `width`."""

    def __init__(self, text: str, width: int) -> None:
        self.rows, self.row, self.column, self.cursor = [""], 0, 0, True
        for code, character in re.findall(r"\x1b\[(\??[\d;]*[A-Za-z])|(.)", text, re.DOTALL):
            if code:
                self._control(code)
            elif character == "\n":
                self.row, self.column = self.row + 1, 0  # as a terminal's driver has it
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif character == "\r":
                self.column = 0
            else:
                if self.column == width:
                    self.row, self.column = self.row + 1, 0
                    self.rows += [""] * (self.row + 1 - len(self.rows))
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1

    def _control(self, code: str) -> None:
        if code in ("?25l", "?25h"):
            self.cursor = code == "?25h"
        elif code == "2K":
            self.rows[self.row] = ""
        elif code.endswith("A"):
            self.row = max(self.row - int(code[:-1] or 1), 0)
        else:
            assert code.endswith("m"), f"unknown control code {code!r}"

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.rows if line.strip()]


def a_step(width: int) -> list[str]:
    count = Count(96)
    count.done = 33
    rollout = Activity("rollout", 1000.0, count.__str__, lambda: "", 14.0)
    shown = Shown("train", 40, 0, 12, 940.0, {"success": 0.62, "reward": 0.3, "tokens/s": 2094.4}, best=0.71, doing=(rollout,))
    shown.details = {"term/right": 0.4, "mismatch max": 1.5e-06, "cache hit": None, "staleness": 0.5}
    shown.engine = "12 running, 3 waiting, KV cache 45.0 %"
    shown.held, shown.best_held, shown.trouble = (0.5, 10), (0.745, 5), "3 episodes came to no score; the first: env_error: boom"
    return frame(shown, 1008.0, width).plain.split("\n")


def test_a_frame_says_phase_activity_success_with_its_best_and_what_went_wrong() -> None:
    first, doing, engine, values, details, trouble = a_step(110)
    assert re.fullmatch(r"train  ━{7}─{17} 12/40  1:08  ETA 2:38", first), "68 s for 12 steps: 159 for the other 28"
    assert doing == "  rollout 33/96 episodes  8 s of ~14"
    assert engine == "  engine: 12 running, 3 waiting, KV cache 45.0 %"
    assert values == "  success 0.620 (best 0.710)  reward 0.300  tokens/s 2,094  held-out 50.0 % (best 74.5 % at 5)"
    assert details == "  term/right 0.400  mismatch max 1.5e-06  staleness 0.500", "nothing of what is unknown"
    assert trouble == "  3 episodes came to no score; the first: env_error: boom"


@pytest.mark.parametrize("width", [1, 12, 20, 30, 45, 60, 80, 200])
def test_no_line_of_a_frame_is_wider_than_the_terminal(width: int) -> None:
    lines = a_step(width)
    assert max(map(len, lines)) <= width and 5 <= len(lines) <= 7 and lines[0].startswith("train"[:width] if width > 5 else "")


def test_what_takes_long_says_what_it_waits_for_and_stops_when_something_moves() -> None:
    count = Count(8)
    activity = Activity("evaluation", 0.0, count.__str__, lambda: "episode heldout3.m0 for 20 s on the engine")
    assert activity.describe(1.0) == "evaluation 0/8 episodes  1 s"
    assert activity.describe(20.0) == "evaluation 0/8 episodes  20 s  waits: episode heldout3.m0 for 20 s on the engine"
    count(None)
    assert activity.describe(21.0) == "evaluation 1/8 episodes  21 s"


def plain(monkeypatch: pytest.MonkeyPatch) -> tuple[Display, Any, io.StringIO]:
    """A display for a pipe whose thread never looks (the test does), its clock, and the pipe."""
    monkeypatch.setattr(module, "_BEAT_S", 1e6)
    out, clock = io.StringIO(), SimpleNamespace(now=1000.0)
    return Display(Console(file=out, highlight=False, soft_wrap=True, width=200), now=lambda: clock.now), clock, out


def test_plain_lines_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases, steps every few seconds, and what goes on within a long one, less and less often."""
    display, clock, out = plain(monkeypatch)
    count = Count(6)

    def wait(seconds: int) -> None:
        for _ in range(seconds):
            clock.now += 1
            display.beat()

    with display:
        display.phase("start", 1)
        with display.doing("starting the engine (vllm)"):
            wait(6)
        display.phase("train", 3)
        with display.doing("rollout", count.__str__, lambda: "episode g0.m1.a0 for 40 s on a tool"):
            wait(4)
            count(None)
            wait(40)
        moved = {"kl behaviour": 0.0012, "kl to reference": None, "entropy": 0.5, "grad norm": 0.0, "lr": 2e-5, "cache hit": 0.5}
        display.step(1, {"success": 0.25, "reward": 0.5, "tokens/s": 1234.5}, moved)  # right behind a line of what goes on
        clock.now += 1
        display.step(2, {"success": 0.5})
        display.say("[eval] held-out success 50.0 %")
        display.show_evaluation(2, 0.5)
        with display.doing("evaluation"), display.doing("publish"):
            wait(5)
        display.step(3, {"success": 0.25}, {"kl behaviour": 0.0, "kl to reference": 0.002, "grad norm": 0.25})
    assert out.getvalue().splitlines() == [
        "[start]",
        "[start]  starting the engine (vllm)  5 s",
        "[train] 3 steps",
        "[train] 0/3  rollout 1/6 episodes  5 s",
        "[train] 0/3  rollout 1/6 episodes  15 s",
        "[train] 0/3  rollout 1/6 episodes  35 s  waits: episode g0.m1.a0 for 40 s on a tool",
        "[train] 1/3  success 0.250  reward 0.500  tokens/s 1,234  kl behaviour 0.001  entropy 0.500  lr 2.0e-05  ETA 1:28",
        "[eval] held-out success 50.0 %",
        "[train] 2/3  evaluation > publish  5 s",
        "[train] 3/3  success 0.250 (best 0.500)  kl to reference 0.002  grad norm 0.250  ETA 0:00",
    ]


def test_trouble_is_said_once_with_its_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    display, _, out = plain(monkeypatch)
    with display:
        display.beat()
        display.trouble = lambda: "2 episodes came to no score; the first: env_error: [Errno 2] no such tool"
        display.beat()
        display.beat()
    assert out.getvalue() == "warning: 2 episodes came to no score; the first: env_error: [Errno 2] no such tool\n"


def test_the_best_evaluation_of_a_resumed_run_is_remembered() -> None:
    display = Display(Console(file=io.StringIO()))
    for step, success in [(0, 0.1), (10, 0.8), (20, 0.6)]:
        display.show_evaluation(step, success)
    display.phase("train", 40, first=20)
    assert (display._shown.held, display._shown.best_held) == ((0.6, 20), (0.8, 10))


def test_what_cannot_be_looked_at_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed() -> str:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(module, "_BEAT_S", 0.001)
    monkeypatch.setattr(module, "_PLAIN_EVERY_S", 0.0)
    with Display(Console(file=io.StringIO()), live=True) as display, display.doing("rollout", changed):
        time.sleep(0.02)
        assert display._thread is not None and display._thread.is_alive()


def test_a_reader_that_goes_during_a_long_step_ends_the_command_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The display's thread met it first: its exit was that thread's alone, and the run went on without a word."""
    for name, seconds in (("_BEAT_S", 0.001), ("_PLAIN_EVERY_S", 0.0)):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # standard output is not the pipe here
    pipe = MagicMock(io.StringIO, **{"write.side_effect": BrokenPipeError})
    with Display(Console(file=pipe, width=80), live=False) as display, display.doing("rollout"):
        assert display._thread is not None
        display._thread.join(5)
        with pytest.raises(SystemExit):
            display.say("a step")
        display.say("what it says at its end")


def test_lines_that_are_said_stay_above_the_frame_and_the_frame_goes() -> None:
    """What a terminal shows at the end: all that was said, in order, with nothing of a frame between; the last step as a line."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, highlight=False, soft_wrap=True, legacy_windows=False)
    with Display(console, live=True) as display:
        display.say("agentrl train: runs/x (new)")
        display.phase("train", 2)
        with display.doing("rollout", Count(12).__str__):
            display.warn(f"a line that is longer than the terminal is wide: {'x' * 40} end")
            display._live.refresh()  # type: ignore[union-attr]
        display.step(1, {"success": 0.5}, {"term/right": 0.25})
        display._live.refresh()  # type: ignore[union-attr]
        assert "  success 0.500  term/right 0.250" in Screen(out.getvalue(), 60).lines()
        display.say("[eval] held-out success 50.0 %")
        display.step(2, {"success": 0.75}, {"term/right": 0.25})
    screen = Screen(out.getvalue(), 60)
    long = f"warning: a line that is longer than the terminal is wide: {'x' * 40} end"
    assert screen.cursor and screen.lines() == [
        "agentrl train: runs/x (new)",
        long[:60].rstrip(),
        long[60:],
        "[eval] held-out success 50.0 %",
        "[train] 2/2  success 0.750  ETA 0:00",
    ]


def test_frames_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a pipe that FORCE_COLOR passes off as one, nor for one that cannot move its cursor, nor in CI."""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    with os.fdopen(slave, "w") as terminal:
        assert animates(Console(file=terminal))
        monkeypatch.setenv("CI", "true")
        assert not animates(Console(file=terminal))
        monkeypatch.delenv("CI")
        monkeypatch.setenv("TERM", "dumb")
        assert not animates(Console(file=terminal))
    os.close(master)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not animates(Console(file=io.StringIO()))


CHILD = """
import time
from agentrl.run.display import Display
from agentrl.run.display import Count
with Display() as display:
    display.say("begins")
    display.phase("train", 9)
    display.step(1, {"success": 0.5, "tokens/s": 2094.4}, {f"term/part_{n}": 0.25 for n in range(9)})
    with display.doing("rollout", Count(96).__str__):
        for number in range(400):
            time.sleep(0.05)
            display.say(f"line {number}")
"""


def test_ctrl_c_leaves_a_narrow_terminal_in_order() -> None:
    """A real terminal of 40 columns, made narrower meanwhile, without colors; the interrupt comes in the middle of a frame."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    for name in ("CI", "COLUMNS", "LINES", "FORCE_COLOR"):
        env.pop(name, None)
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=slave, stdout=slave, stderr=subprocess.DEVNULL, env=env)
    os.close(slave)
    text, resized, cut = "", 0, 0
    while b := read(master):
        text += b
        if not resized and "line 3" in text:
            ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
            resized = len(text)
        if resized and not cut and "line 12" in text:
            cut = len(text)
            child.send_signal(signal.SIGINT)
    assert child.wait(10) != 0
    os.close(master)
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d)m", text), "no colors"
    frames = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text[resized + 200 :]).replace("\r", "\n").split("\n")
    assert max(len(line) for line in frames if not line.startswith("[train]")) <= 40 and any(
        "ETA" in line and len(line) <= 30 for line in frames
    )
    whole = Screen(text[:resized], 40)
    last = whole.lines()
    assert [line for line in last if line.startswith(("begins", "line"))] == ["begins", *[f"line {n}" for n in range(4)]]
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def read(terminal: int) -> str:
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:  # the other end is closed
        return ""


def test_a_warning_is_said_once_where_no_log_is_kept() -> None:
    """`agentrl eval` and `agentrl rollout` keep none, and logging's own last resort would print it a second time."""
    code = "from agentrl.run.display import Display\nwith Display() as display:\n    display.warn('other than in the run')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.stdout + found.stderr).count("other than in the run") == 1, found


def test_the_display_is_told_what_the_engine_does_and_a_failed_look_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "REPORT_S", 0.001)
    said: list[str] = []
    new = EngineStats(3, 0, extra={"respawns": 1})
    answers: Any = iter([EngineError("a replica is started again"), EngineStats(2, 1, kv_used=0.45), new, new])
    display, _, out = plain(monkeypatch)
    monkeypatch.setattr(display, "engine", lambda *told: (said.append(told[0]), Display.engine(display, *told)))

    async def stats() -> EngineStats:
        answer = next(answers, EngineStats())
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, EngineStats)
        return answer

    async def work() -> str:
        async with asyncio.timeout(10):
            while len(said) < 2:
                await asyncio.sleep(0.001)
        return "episodes"

    session: Any = SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(max_staleness=0)), engine=SimpleNamespace(stats=stats), display=display
    )
    assert asyncio.run(feed.republish_to_new_replicas(session, work())) == "episodes"
    assert said[:2] == ["2 running, 1 waiting, KV cache 45.0 %", "3 running, 0 waiting, 0 tokens/s"]
    assert said[-1] == "", "nothing that matters any more"
    assert out.getvalue().count("a replica of the engine died") == 1


@pytest.mark.parametrize(
    ("words", "replaced", "said"),
    [
        (["train", "quickstart", "--dry-run"], "agentrl.run.plan.Planner.dry_run", "[dry run]  checking the config and what it"),
        (["export", "run", "out"], "agentrl.trainer.model_folder.export_run", "[export]  writing the model  0 s"),
    ],
)
def test_a_command_that_takes_long_says_on_stderr_that_it_works(
    words: list[str], replaced: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Made:
        def text(self) -> str:
            return "the plan"

    def work(*_: object, **__: object) -> Made:
        time.sleep(wait)
        return Made()

    monkeypatch.setattr(replaced, work)
    monkeypatch.setattr(module, "_BEAT_S", 0.01)
    for wait, pause in ((0.3, 0.05), (0.0, 60.0)):
        monkeypatch.setattr(module, "_PLAIN_EVERY_S", pause)
        assert main(words) == 0
        out, error = capsys.readouterr()
        assert "[" not in out and (said in error) is (wait > 0)
