"""Every tool-call syntax over texts that are made to cost its parser much, up to 10 MB: seconds, and how they grow.

    python benchmarks/parsers.py [--megabytes 10] [--only hermes] [--shapes 400] > docs/parsers.json
    python benchmarks/parsers.py --page         docs/templates.md's table, from docs/parsers.json

All shapes of `parts/call_shapes.py` are read at 64 KB; the three that take longest per syntax at 1 MB and at the full size.
"linear" is a growth of time, from 1 MB to the full size, of at most twice that of the text. One JSON line per syntax.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "parts"))

from call_shapes import Shape, shapes

from agentrl.render.parsers import SYNTAXES, ForTools

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"k": {"type": "object"}}}}}
]


def seconds(parser: Any, text: str) -> float:
    began = time.process_time()
    parser(text)
    return time.process_time() - began


def measured(name: str, megabytes: float, most: int) -> dict[str, Any]:
    parser = SYNTAXES[name].parser
    read = parser.bind(TOOLS) if isinstance(parser, ForTools) else parser
    every = list(shapes(name))
    tried = every if len(every) <= most else random.Random(0).sample(every, most)
    slow: list[tuple[float, Shape]] = sorted(((seconds(read, s.text(64_000)), s) for s in tried), key=lambda it: -it[0])[:3]
    large = int(megabytes * 1e6)
    rows = [(seconds(read, s.text(large)), seconds(read, s.text(1_000_000)), s) for _, s in slow]
    longest, one, shape = max(rows, key=lambda row: row[0])
    return {
        "syntax": name, "shapes": len(tried), "longest": str(shape),
        "seconds_64KB": round(slow[0][0], 4), "seconds_1MB": round(one, 3),
        "megabytes": megabytes, "seconds": round(longest, 2),
        "growth": round(longest / one, 1), "linear": longest <= 2 * megabytes * one,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }  # fmt: skip


DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, RECORD = DOCS / "templates.md", DOCS / "parsers.json"
BEGIN, END = "<!-- from docs/parsers.json; python benchmarks/parsers.py --page -->\n", "<!-- end of parsers -->\n"


def page() -> str:
    """The page with the table that the record says, in seconds of one core."""
    rows = sorted((json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()), key=lambda row: row["syntax"])
    table = ["| syntax | shapes | 1 MB, s | 10 MB, s | growth | peak, MB |", "|---|---|---|---|---|---|"]
    for row in rows:
        assert row["megabytes"] == 10
        told = f"{row['seconds_1MB']:.3f} | {row['seconds']:.2f} | {row['growth']:.1f}"
        table.append(f"| `{row['syntax']}` | {row['shapes']} | {told} | {row['peak_mb']:,} |")
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(BEGIN)[0] + BEGIN + "\n".join(table) + "\n" + END + text.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--only", choices=sorted(SYNTAXES))
    parser.add_argument("--shapes", type=int, default=400, help="of each syntax; the rest is left out by chance")
    parser.add_argument("--page", action="store_true", help="write the table, measure nothing")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(), encoding="utf-8")
        return
    for name in [args.only] if args.only else SYNTAXES:
        print(json.dumps(measured(name, args.megabytes, args.shapes), ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
