"""Define the `math.equal` leaf, which compares answers in separate processes (`worker.py`).

A policy's text may keep SymPy busy for a year (9**9**9) or exhaust the memory. Threads cannot be stopped, so processes compare:
the kernel ends a process at its limit of CPU time, and its address space is bounded."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Hashable
from contextlib import suppress
from decimal import Decimal
from multiprocessing import Pipe
from pathlib import Path
from queue import LifoQueue
from typing import Any, ClassVar

from agentrl.data.trajectory import Json
from agentrl.reward.leaf import LEAVES, Args, Context, Leaf, Reading, View, object_schema, or_ref
from agentrl.reward.leaves.answer import WHERE, spoken_text, wanted_texts
from agentrl.reward.values import UnscorableError, brief
from agentrl.utils.errors import need_package
from agentrl.utils.processor import usable_cpus
from agentrl.utils.threads import SCORING, after_fork

WORKER = Path(__file__).with_name("worker.py")
MOST_TEXT = 100_000
"""Longest answer that is read, in characters."""
PROCESSES = min(4, usable_cpus())
"""Maximum number of processes."""
OVERDUE = 20.0
"""Wall-clock limit as a multiple of the CPU time limit: beyond it, the machine is at fault, not the policy."""
_ANSWER_SIGNALS = frozenset({signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


class Process:
    """A process that compares one answer at a time."""

    def __init__(self) -> None:
        # Pass on only the paths of packages and libraries, no API keys.
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(WORKER.parents[3]), kept.get("PYTHONPATH"))))
        self._pipe, end = Pipe()
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "utf8", str(WORKER), str(end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[end.fileno()],
                env={**kept, "PYTHONHASHSEED": "0"},
                start_new_session=True,  # Ctrl-C must not interrupt it
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply, or None if the process ended before. Raises UnscorableError if it is overdue."""
        with suppress(EOFError, OSError):
            self._pipe.send_bytes(json.dumps(request).encode())
            if not self._pipe.poll(OVERDUE * request["seconds"] + 30):
                raise UnscorableError(f"math-verify got no answer in {OVERDUE:g} times {request['seconds']} s: a busy machine")
            return dict(json.loads(self._pipe.recv_bytes()))
        return None

    def close(self) -> int:
        """End the process and return its exit status; if it had already ended, that is its own."""
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.2)
        self._process.kill()
        return self._process.wait()


def _fill(idle: LifoQueue[Process | None]) -> LifoQueue[Process | None]:
    idle.__init__()  # type: ignore[misc] # a forked process has none of its parent's, nor the thread that held its lock
    for _ in range(PROCESSES):
        idle.put(None)
    return idle


IDLE = after_fork(_fill(LifoQueue()), _fill)
"""PROCESSES slots, each with an idle process or None; the last one put back is taken first."""


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to a process and return its reply (`worker.answer`). Blocks.

    An answer that crashes the process or exceeds its limits is wrong. Raises UnscorableError for gold that is not mathematics,
    and if the process was killed from outside or gets no CPU time.
    """
    process = IDLE.get()
    kept: Process | None = None
    try:
        process = process or Process()
        reply = process.ask(request)
        kept = None if reply is None or reply["worn"] else process
    finally:
        code = process.close() if process is not None and kept is None else 0
        IDLE.put(kept)
    if reply is None:
        if -code not in _ANSWER_SIGNALS:
            raise UnscorableError(f"the process of math-verify ended with status {code}")
        ended = f"it ended the comparison by {signal.Signals(-code).name}"
        return {
            "right": False,
            "why": f"more than {request['seconds']} s of processor time" if -code == signal.SIGXCPU else ended,
        }
    if "unread" in reply:
        raise UnscorableError(
            f"the gold answer {reply['unread'][:80]!r} is no mathematics as a whole. Give a number, an expression or LaTeX, "
            "with at most a unit after it"
        )
    return reply


@LEAVES.register("math.equal")
class MathEqual(Leaf):
    """Compare the mathematics in the text with the gold answer, in any notation: boxed, LaTeX, or plain."""

    formula: ClassVar[str] = (
        "1 if the answer, read as a whole, equals one of `expect` (numbers to 6 places, all else by math-verify) and is worked "
        "out (for a number no sum, no power, lowest terms), else 0; 0 too after `seconds` of processor time; null if `expect` is "
        "no mathematics as a whole"
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "expect": or_ref({"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}, "minItems": 1}),
            "where": WHERE,
            "boxed": {"type": "boolean", "description": "only an answer in a \\boxed{} counts"},
            "strict": {"type": "boolean", "description": "names of variables count: x + 1 is not y + 1 (default true)"},
            "seconds": {"type": "integer", "minimum": 1, "maximum": 60},
        },
        ("expect",),
    )
    example: ClassVar[dict[str, Any]] = {"expect": {"$": "/task/gold/answer"}}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        need_package("math_verify", "the leaf math.equal compares by math-verify: pip install 'agentrl[math]'")
        self.seconds = int(args.get("seconds", 5))

    def blocks(self) -> bool:
        return True

    def longest(self) -> tuple[Hashable, float] | None:
        # The answers that are scored at the same time may all take this long before it.
        return json.dumps([self.kind, dict(self.args)], sort_keys=True), self.seconds * SCORING.most / PROCESSES

    def gold_fault(self, args: Args) -> str | None:
        return self._compare(_gold(args["expect"]), None).get("why")

    def read(self, view: View, args: Args) -> Reading:
        wanted = _gold(args["expect"])
        text = spoken_text(view, args.get("where", "answer"))
        if text is None:
            return Reading(0.0, {"expected": brief(wanted), "why": "no final answer"})
        if len(text) > MOST_TEXT:
            why = f"an answer of {len(text)} characters; at most {MOST_TEXT} are read"
            return Reading(0.0, {"expected": brief(wanted), "why": why})
        found = self._compare(wanted, text)
        evidence: dict[str, Json] = {"expected": brief(wanted), "expected_as": brief(found.get("wanted", []))}
        evidence |= {"said": brief(found.get("said")), "said_as": found.get("as")}
        return Reading(float(found["right"]), {**evidence, "why": found["why"]} if "why" in found else evidence)

    def _compare(self, gold: list[str], answer: str | None) -> dict[str, Any]:
        strict, boxed = bool(self.args.get("strict", True)), bool(self.args.get("boxed"))
        return ask({"gold": gold, "answer": answer, "seconds": self.seconds, "strict": strict, "boxed": boxed})


def _gold(value: Json) -> list[str]:
    """Return the gold answers as texts, floats without exponents (1e+22 reads as 1 * e + 22). Raises UnscorableError if none."""
    items = value if isinstance(value, (list, tuple)) else [value]
    whole = [format(Decimal(repr(item)), "f") if isinstance(item, float) and math.isfinite(item) else item for item in items]
    found = wanted_texts(whole)
    if not found:
        raise UnscorableError("there is no gold answer in the list")
    return found
