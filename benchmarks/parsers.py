"""Measure each tool-call parser on expensive texts of up to 10 MB: seconds, growth and memory.

    python benchmarks/parsers.py [--megabytes 10] [--only hermes] [--shapes 400] > docs/parsers.json

All shapes of `parts/call_shapes.py` are parsed at 64 KB; the three slowest per syntax, and the three with the most memory, also
at 1 MB and at the full size, each in a separate process. "memory_mb" is the maximum in addition to the text. "linear": from
1 MB to the full size, time grows at most twice as much as the text. One JSON line per syntax.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "parts"))

from call_shapes import Shape, shapes

from agentrl.render.syntaxes import SYNTAXES
from agentrl.render.tool_calls import ForTools

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"k": {"type": "object"}}}}}
]


def seconds(parser: Any, text: str) -> float:
    began = time.process_time()
    parser(text)
    return time.process_time() - began


def traced(parser: Any, text: str) -> int:
    """Return the peak of Python's memory in bytes."""
    tracemalloc.start()
    try:
        parser(text)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_in_subprocess(parser: Any, shape: Shape, size: int) -> tuple[float, float]:
    """Measure seconds, and peak MB in addition to the text, in a separate process."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        text = shape.text(size)
        before = status_kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        spent = seconds(parser, text)
        os.write(writer, json.dumps([spent, (status_kib("VmHWM") - before) / 1024]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        spent, more = json.load(found)
    os.waitpid(child, 0)
    return spent, more


def status_kib(field: str) -> int:
    """Return a memory field of this process in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field)))


def measure_syntax(name: str, megabytes: float, most: int) -> dict[str, Any]:
    parser = SYNTAXES[name].parser
    read = parser.bind(TOOLS) if isinstance(parser, ForTools) else parser
    every = list(shapes(name))
    tried = every if len(every) <= most else random.Random(0).sample(every, most)
    short = [(seconds(read, s.text(64_000)), traced(read, s.text(64_000)), s) for s in tried]
    slow, large = (sorted(short, key=by, reverse=True)[:3] for by in (lambda row: row[0], lambda row: row[1]))
    picked = {str(row[2]): row[2] for row in (*slow, *large)}
    rows = [
        (*measure_in_subprocess(read, s, int(megabytes * 1e6)), measure_in_subprocess(read, s, 1_000_000)[0], s)
        for s in picked.values()
    ]
    longest, _, one, shape = max(rows, key=lambda row: row[0])
    largest = max(rows, key=lambda row: row[1])
    return {
        "syntax": name, "shapes": len(tried), "longest": str(shape),
        "seconds_64KB": round(max(row[0] for row in short), 4), "seconds_1MB": round(one, 3),
        "megabytes": megabytes, "seconds": round(longest, 2),
        "growth": round(longest / one, 1), "linear": longest <= 2 * megabytes * one,
        "largest": str(largest[3]), "memory_mb": round(largest[1]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--only", choices=sorted(SYNTAXES))
    parser.add_argument("--shapes", type=int, default=400, help="shapes per syntax, sampled at random if there are more")
    args = parser.parse_args()
    for name in [args.only] if args.only else SYNTAXES:
        print(json.dumps(measure_syntax(name, args.megabytes, args.shapes), ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
