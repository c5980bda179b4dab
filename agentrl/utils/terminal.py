"""Escape untrusted text for a terminal, and silence libraries."""

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


# Untrusted text on a terminal: text of a policy, a tool or a file may clear the screen, set its title or send key strokes.
#
# All output of agentrl to a terminal goes through `say` and `console`, which escape such
# characters.

_KEPT = "\n\t"
_ENDLESS = 10_000
"""Columns of output that is no terminal."""
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories that a terminal may act on or hide: controls, format characters, surrogates, line separators."""


def safe(value: object, most: int = 0) -> str:
    """Escape characters that a terminal could act on (`\\x1b`); cut to `most` characters if that is not 0."""
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
    """Format rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(justify, row, widths)).rstrip() for row in rows]


def say(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print` with escaped control characters."""
    out = sys.stdout if file is None else file
    out.write(safe(sep.join(map(str, values))) + end)
    if flush:
        out.flush()


def console(*, gone: str = "", **options: Any) -> Console:
    """Create a rich console that escapes control characters, except rich's own. It does not replace ":one:" by emoji. Outside a
    terminal (`| grep`, a job's log) it wraps no lines unless COLUMNS is set: rich would assume 80 columns there and split names.
    `gone`: the message for a closed pipe."""
    found: Console = _console_class()(**{"emoji": False, **options})
    found.gone = gone  # type: ignore[attr-defined]
    # 0 columns: a terminal without a size, where rich would show nothing.
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
        """Message on stderr for a closed pipe, before rich exits with code 1."""

        def on_broken_pipe(self) -> None:
            if self.gone and not self.quiet:
                say(self.gone, file=sys.stderr)
            super().on_broken_pipe()

        def render(self, renderable: Any, options: Any = None) -> Any:
            for part in super().render(renderable, options):
                yield part if part.control or part.text.isprintable() else Segment(safe(part.text), part.style)

    return SafeConsole


def cell(value: object) -> str:
    """Escape text for a cell or title of a rich table, including [brackets], which are markup."""
    from rich.markup import escape

    return escape(safe(value))


def folding(*columns: str, title: str | None = None) -> Table:
    """Create a rich table that wraps cells on a narrow terminal. By default rich truncates: the columns `policy_gold` and
    `policy_idle` would both read "policy_…"."""
    from rich.table import Column, Table

    return Table(*(Column(name, overflow="fold") for name in columns), title=title)


# Silencing libraries

log = logging.getLogger(__name__)
_plain_hook = threading.excepthook


def quiet_libraries() -> None:
    """Silence the progress bars of transformers and huggingface_hub, torch's note about each traced graph, and its warning about
    saving a checkpoint from a single process."""
    import transformers
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    threading.excepthook = _thread_failed


def _thread_failed(args: threading.ExceptHookArgs, /) -> None:
    """Log one line if a library's writer thread (TensorBoard) meets a full disk, which the run itself reports."""
    if isinstance(args.exc_value, OSError) and args.exc_value.errno in FULL:
        log.warning("%s: %s", args.thread.name if args.thread else "a thread", args.exc_value)
    else:
        _plain_hook(args)
