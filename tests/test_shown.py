"""What a terminal is told: nothing of a policy, a tool, a file or a server acts on it, by whichever door it goes."""

import ast
import io
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import agentrl
from agentrl.cli import env as env_command
from agentrl.env import Message, Task, ToolEnv, tool
from agentrl.env.catalog import EnvRef
from agentrl.run.display import Display
from agentrl.run.folder import LogFile
from agentrl.utils.redaction import REDACTED, remember
from agentrl.utils.search_path import give
from agentrl.utils.terminal import console, say
from tests.sources import nodes

NASTY = "a\x1b]0;title\x07b\x1b[2Jc\rd\x08e\x9b31mf\u202eg\u2066h\u200bi\u2028j\x00k\x7fl"
WRITTEN = "a\\x1b]0;title\\x07b\\x1b[2Jc\\x0dd\\x08e\\x9b31mf\\u202eg\\u2066h\\u200bi\\u2028j\\x00k\\x7fl"
ACTS = set(NASTY) - set(WRITTEN)


def test_say_writes_out_what_a_terminal_could_act_on(capsys: pytest.CaptureFixture[str]) -> None:
    say(NASTY, 1, None, sep="|")
    assert capsys.readouterr().out == f"{WRITTEN}|1|None\n"
    out = io.StringIO()
    say("x\n\ty", file=out, flush=True)
    assert out.getvalue() == "x\n\ty\n"


def test_a_console_writes_it_out_in_everything_that_rich_can_draw() -> None:
    out = io.StringIO()
    screen = console(file=out, width=200, highlight=False, markup=False)
    table = Table(NASTY, title=NASTY)
    table.add_row(NASTY)
    for one in (NASTY, Text(NASTY), Panel(NASTY, title=NASTY), table):
        screen.print(one)
    assert set(out.getvalue()) & ACTS == set(), ascii(out.getvalue())
    assert out.getvalue().count("\\x1b]0;title") >= 4
    colours = io.StringIO()
    screen = console(file=colours, width=200, force_terminal=True, color_system="standard")
    with Live(Text(NASTY, style="bold"), console=screen, transient=True, auto_refresh=False):
        pass
    drawn = colours.getvalue()
    assert "\x1b[1m" in drawn and "\x1b[2K" in drawn, "rich's own colours and movements stay"
    assert "\x1b]0;" not in drawn and "\x1b[2J" not in drawn and "\u202e" not in drawn


class Hostile(ToolEnv):
    """Clears \x1b[2J the screen \u202e."""

    id, summary = "t/Hostile-v0", "x"

    def __init__(self, *, text: str = NASTY, **base: Any) -> None:
        """Its parameters \x1b]0;x\x07."""
        super().__init__(**base)
        self.text = text

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"t/{split}/{rng_seed}", rng_seed, split, {}, {})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", NASTY)]

    @tool(read_only=True)
    async def look(self) -> str:
        """look \x1b[31m"""
        return NASTY


@pytest.mark.parametrize("terminal", [False, True])
def test_columns_of_0_are_no_width(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """A container's terminal has no size: a run, and `agentrl runs`, showed not one line there."""
    monkeypatch.setenv("COLUMNS", "0")
    out = io.StringIO()
    console(file=out, force_terminal=terminal).print("a long line")
    assert out.getvalue() == "a long line\n"


def test_env_show_prints_nothing_that_acts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    give(Hostile, "hostile-shown")
    monkeypatch.setattr(env_command, "reference", lambda *args: EnvRef("given:hostile-shown"))
    assert env_command.run_show(type("Args", (), {"env": "x\x1b", "params": []})()) == 0
    said = capsys.readouterr().out
    assert set(said) & ACTS == set(), ascii(said)
    assert "Clears \\x1b[2J the screen \\u202e." in said and "Its parameters \\x1b]0;x\\x07." in said and WRITTEN in said


def test_the_display_and_the_log_of_a_run_in_python_hold_no_secret_and_nothing_that_acts(tmp_path: Path) -> None:
    """Without the commands' guards: `agentrl.train` in a program of the user's."""
    remember("planted-display-0123456789")
    out = io.StringIO()
    with Display(console(file=out, soft_wrap=True)) as display:
        display.say(f"{NASTY} engine:one: planted-display-0123456789 sk-abcdefghijklmnop1234")
    assert out.getvalue() == f"{WRITTEN} engine:one: {REDACTED} {REDACTED}\n"  # rich has a picture for ":one:"
    handler, log = LogFile(tmp_path / "log.txt"), logging.getLogger("agentrl.of-this-test")
    log.addHandler(handler)
    try:
        raise ValueError(f"{NASTY} planted-display-0123456789")
    except ValueError:
        log.exception("failed %s", NASTY)
    finally:
        log.removeHandler(handler)
        handler.close()
    written = (tmp_path / "log.txt").read_text()
    assert set(written) & ACTS == set() and f"failed {WRITTEN}\nTraceback" in written
    assert f"ValueError: {WRITTEN} {REDACTED}\n" in written


PROGRAMS = {
    "contrib/sandboxes/notebook.py": "runs in a sandbox; its output is an answer",
    "contrib/sandboxes/code_tests/runner.py": "runs in a sandbox; pytest catches what the code prints",
    "contrib/toolkit/keeper.py": "begins an agent's program; its standard error is kept and redacted",
}
"""Files that are programs of their own, whose output goes to agentrl and to no terminal."""


def test_nothing_of_agentrl_prints_by_another_door() -> None:
    root, wrong = Path(agentrl.__file__).parent, []
    for path in root.rglob("*.py"):
        name = str(path.relative_to(root))
        if name in PROGRAMS or name == "utils/terminal.py" or name.startswith("_shelf/"):
            continue
        for node in nodes(path):
            prints = isinstance(node, ast.Name) and node.id == "print"
            console_ = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
            writes = isinstance(node, ast.Attribute) and node.attr in ("write", "writelines") and _is_standard(node.value)
            if prints or console_ or writes:
                wrong.append(f"{name}:{node.lineno}")
    assert [one for one in wrong if not one.startswith("redaction.py:")] == [], "use say or console of agentrl.utils.terminal"


def _is_standard(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "__stdout__", "__stderr__")
