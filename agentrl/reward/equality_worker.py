"""Compares answers with gold by math-verify, in a process of its own: `agentrl.reward.equality` starts it and bounds it.

A program, not a module: it reads one JSON request a line and answers each with a line. math-verify's own time limit is an alarm,
which works in the main thread of a program alone and is never met by a long multiplication; here the kernel ends the process.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

MEMORY = 1 << 30
"""Bytes of address space; SymPy and its parser take a fifth of that."""
WORN = 1 << 29
"""Bytes in memory from which on the process does not go on after an answer."""
WRITTEN = ("$", "\\(", "\\[", "\\boxed")
"""What begins mathematics in a text."""
_WORD, _TEXT = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}"), re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname)\{[^{}]*\}")
NAMES = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt max min mod gcd lcm and inf".split()  # noqa: SIM905
)
# An answer in a box is what the policy says it is, wherever "answer" stands in its text.
READ = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]


def parsed(text: str) -> list[Any]:
    """What a text says: an expression (none if there is none that SymPy reads), and the text of it."""
    return list(parse(text, READ, parsing_timeout=0))


def gold(text: str) -> list[Any]:
    """The same for gold, which may be LaTeX without dollars. Empty if it is no mathematics, but words: SymPy would read them as
    products of letters, to which every anagram is equal."""
    words = _WORD.findall(_TEXT.sub("", text))
    if not any(map(str.isdigit, text)) and not NAMES.issuperset(map(str.lower, words)):
        return []
    for form in [text] if any(mark in text for mark in WRITTEN) else [f"${text}$", text]:
        found = parsed(form)
        if any(not isinstance(item, str) for item in found):
            return found
    return []


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`{"unread": gold}` for gold that is no mathematics; else whether the answer equals one of them, and how it was read."""
    wanted = []
    for text in request["gold"]:
        try:
            wanted.append(gold(text))
        except (Exception, RecursionError):  # whatever it is, no answer is to blame
            return {"unread": text}
        if not wanted[-1]:
            return {"unread": text}
    if request["answer"] is None:
        return {"right": False}
    said = parsed(request["answer"])
    right = any(verify(one, said, strict=request["strict"], timeout_seconds=0) for one in wanted)
    # Its text as it was written: that of the expression may be as long as a number of a billion digits.
    return {"right": right, "said": next((item for item in said if isinstance(item, str)), None)}


def allow(seconds: int) -> None:
    """So many seconds of the processor from now on; the kernel then ends this process by SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + seconds, hard))


def in_memory() -> int:
    """Bytes. Not `ru_maxrss`, which a process that was started from a large one begins with."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def serve(lines: Sequence[bytes] | Any, out: int) -> None:
    for line in lines:
        request = json.loads(line)
        allow(request["seconds"])
        try:
            reply = answer(request)
        except (Exception, RecursionError) as fault:  # of what the policy wrote: gold was read before
            reply = {"right": False, "fault": type(fault).__name__}
        worn = in_memory() > WORN
        os.write(out, json.dumps({**reply, "worn": worn}).encode() + b"\n")
        if worn:
            return


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = os.dup(1)
    os.dup2(2, 1)
    serve(sys.stdin.buffer, pipe)
