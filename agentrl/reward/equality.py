"""Processes that compare mathematics (`equality_worker.py`): started when first needed, bounded, and replaced when one is ended.

What a policy writes may keep SymPy busy for a year (9**9**9) or ask it for all memory. Threads cannot be stopped, so another
process does it: the kernel ends it at its limit of processor time, and its address space is bounded."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import LifoQueue
from typing import Any

from agentrl.reward.values import UnscorableError
from agentrl.utils.errors import DependencyError
from agentrl.utils.processor import usable_cpus
from agentrl.utils.threads import fork_safe

WORKER = Path(__file__).with_name("equality_worker.py")
MOST_TEXT = 100_000
"""Characters of an answer that is read."""
MOST = 4
"""Processes at once, and not more than processors."""
OVERDUE = 20.0
"""Times its limit of processor time that an answer may take before the machine is blamed, not the policy."""
_ITS_OWN = frozenset({signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


@dataclass(frozen=True, slots=True)
class Compared:
    """`right`; `said`: the part of the text that is its answer, else None; `said_as` and `wanted_as`: how the answer
    and gold were read; `why`: why it is wrong, or what ended the comparison before its end."""

    right: bool
    said: str | None = None
    why: str | None = None
    said_as: str | None = None
    wanted_as: Sequence[str] = ()


def require_math() -> None:
    """Raises DependencyError if math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise DependencyError("the leaf math.equal compares by math-verify: pip install 'agentrl[math]'")


def equal(gold: Sequence[str], answer: str, seconds: int, strict: bool, boxed: bool = False) -> Compared:
    """Return True if an answer equals one of the gold ones. Blocks.

    An answer that takes more than `seconds` of processor time or the process's memory is wrong. Raises UnscorableError for gold
    that is no mathematics, and if the process was ended from outside or gets no time from this machine.
    """
    if len(answer) > MOST_TEXT:
        return Compared(False, why=f"an answer of {len(answer)} characters; at most {MOST_TEXT} are read")
    reply = _ask({"gold": list(gold), "answer": answer, "seconds": seconds, "strict": strict, "boxed": boxed})
    if "unread" in reply:
        raise UnscorableError(_unread(reply["unread"]))
    why = reply.get("why") or reply.get("fault")
    return Compared(reply["right"], reply.get("said"), why, reply.get("as"), reply.get("wanted", ()))


def fault_of(gold: Sequence[str], seconds: int) -> str | None:
    """Why gold cannot be compared with, or None. Blocks."""
    reply = _ask({"gold": list(gold), "answer": None, "seconds": seconds, "strict": True, "boxed": False})
    return _unread(reply["unread"]) if "unread" in reply else reply.get("why") or reply.get("fault")


def _unread(text: str) -> str:
    what = "is no mathematics that is read as a whole"
    return f"the gold answer {text[:80]!r} {what}. Give a number, an expression or LaTeX, with at most a unit behind it"


class _Worker:
    def __init__(self) -> None:
        # Nothing of this process's environment but where its packages are: keys are none of its business.
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(WORKER.parents[2]), kept.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**kept, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # not interrupted by Ctrl-C
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None if the process ended before it gave one. Raises TimeoutError if it is overdue."""
        process, until = self._process, time.monotonic() + OVERDUE * request["seconds"] + 30
        assert process.stdin is not None and process.stdout is not None
        found = b""
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        while not found.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                return None
            found += part
        return dict(json.loads(found))

    def end(self) -> int:
        """End it; its exit status."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close() if pipe is not None else None
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        process.kill()
        return process.wait()


def places() -> int:
    """Processes that compare at once."""
    return min(MOST, usable_cpus())


class _Workers:
    """Idle processes, the one used last first; as many as run at once."""

    def __init__(self) -> None:
        self._idle: LifoQueue[_Worker | None] = LifoQueue()
        for _ in range(places()):
            self._idle.put(None)
        atexit.register(self.end)

    @contextmanager
    def one(self) -> Iterator[list[_Worker | None]]:
        """A place with the worker in it, which is put back with its content at that time."""
        place = [self._idle.get()]
        try:
            yield place
        finally:
            self._idle.put(place[0])

    def end(self) -> None:
        with suppress(Exception):
            while True:
                if (worker := self._idle.get_nowait()) is not None:
                    worker.end()


@cache
def _workers(process: int) -> _Workers:
    return _Workers()


_STARTING = fork_safe(threading.Lock())


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    with _STARTING:  # by process: a child that was forked has none of its parent's
        workers = _workers(os.getpid())
    with workers.one() as place:
        worker, place[0] = place[0] or _Worker(), None
        try:
            reply = worker.ask(request)
        except TimeoutError:
            worker.end()
            raise UnscorableError(
                f"math-verify got no answer in {OVERDUE:g} times {request['seconds']} s: a busy machine"
            ) from None
        except BaseException:
            worker.end()
            raise
        if reply is None:
            return _ended_answer(worker.end(), request["seconds"])
        if reply.pop("worn"):
            worker.end()
        else:
            place[0] = worker
        return reply


def _ended_answer(code: int, seconds: int) -> dict[str, Any]:
    """The answer of a process that ended: wrong, if what it was asked ended it."""
    if -code == signal.SIGXCPU:
        return {"right": False, "why": f"more than {seconds} s of processor time"}
    if -code in _ITS_OWN:
        return {"right": False, "why": f"it ended the comparison by {signal.Signals(-code).name}"}
    raise UnscorableError(f"the process of math-verify ended with status {code}")
