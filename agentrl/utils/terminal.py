"""Make untrusted text safe for a terminal, and silence the progress bars of libraries."""

from __future__ import annotations

import logging
import os
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

from agentrl.utils.errors import FULL

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# Text of others for a terminal: what a policy, a tool or a file wrote may clear the screen, set its title or type for a user.
#
# `say` and `console` are the two doors to a terminal, and nothing else of agentrl prints (tests/test_shown.py holds it to that):
# what passes them is written out, whoever wrote it.

_KEPT = "\n\t"
_ENDLESS = 10_000
"""Columns of output that is not a terminal."""
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Kinds of characters that a terminal may act on or not show: controls, directions and joiners, surrogates, line separators."""


def safe(value: object, most: int = 0) -> str:
    """The text with what a terminal could act on written out (`\\x1b`); cut to `most` characters if that is not 0."""
    text = "" if value is None else str(value)
    if most and len(text) > most:
        text = text[: most - 3] + "..."
    if text.isprintable():
        return text
    shown = []
    for character in text:
        if character not in _KEPT and unicodedata.category(character) in _UNSAFE:
            number = ord(character)
            character = f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"
        shown.append(character)
    return "".join(shown)


def columns(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.ljust) -> list[str]:
    """A line for each row, whose cells stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(justify, row, widths)).rstrip() for row in rows]


def say(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print`, with what a terminal could act on written out."""
    out = sys.stdout if file is None else file
    out.write(safe(sep.join(map(str, values))) + end)
    if flush:
        out.flush()


def console(*, gone: str = "", **options: Any) -> Console:
    """A console of rich with these `options`, which writes out what a terminal could act on, but for rich's own colours and
    movements. ":one:" in the name of a task or a judge is no picture. Output outside a terminal (`| grep`, a job's log) is not
    wrapped, unless COLUMNS says otherwise: rich takes 80 columns there, and breaks the names of episodes and models in two."""
    found: Console = _console_class()(**{"emoji": False, **options})
    found.gone = gone  # type: ignore[attr-defined]
    # 0 columns are those of a terminal without a size; rich would show nothing.
    sized = "width" in options or os.environ.get("COLUMNS", "").strip("0")
    if not (found.width and (found.is_terminal or sized)):
        found.width = 80 if found.is_terminal else _ENDLESS
    return found


@cache
def _console_class() -> Any:
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        gone = ""
        """Message on stderr for a closed pipe, before rich ends the process with code 1."""

        def on_broken_pipe(self) -> None:
            if self.gone and not self.quiet:
                say(self.gone, file=sys.stderr)
            super().on_broken_pipe()

        def render(self, renderable: Any, options: Any = None) -> Any:
            for part in super().render(renderable, options):
                yield part if part.control or part.text.isprintable() else Segment(safe(part.text), part.style)

    return SafeConsole


def cell(value: object) -> str:
    """`safe`, for a cell or a title of a table of rich, which takes [brackets] for its own marks."""
    from rich.markup import escape

    return escape(safe(value))


def folding(*columns: str, title: str | None = None) -> Table:
    """A table of rich for `cell`s that goes on in the next line where a terminal is narrow: rich cuts words instead, and the
    columns `policy_gold` and `policy_idle` would both read "policy_…"."""
    from rich.table import Column, Table

    return Table(*(Column(name, overflow="fold") for name in columns), title=title)


# Silence libraries

log = logging.getLogger(__name__)
_plain_hook = threading.excepthook


def quiet_libraries() -> None:
    """Silence the progress bars of transformers and of the hub's library, a note that torch writes about each traced graph, and
    its warning that a checkpoint of one process is saved by one process."""
    import transformers
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    threading.excepthook = _thread_failed


def _thread_failed(args: threading.ExceptHookArgs, /) -> None:
    """A library's writing thread (TensorBoard's) on a full disk: a line in the log; the run itself says that it is full."""
    if isinstance(args.exc_value, OSError) and args.exc_value.errno in FULL:
        log.warning("%s: %s", args.thread.name if args.thread else "a thread", args.exc_value)
    else:
        _plain_hook(args)
