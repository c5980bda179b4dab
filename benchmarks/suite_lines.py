"""Lines of code of each suite: what a person has to write for a benchmark, without docstrings, comments and blank lines.

    python benchmarks/suite_lines.py [--check]

Prints the table of docs/benchmarks.md; `--check`: exit code 1 if the page has another one. "of these inside": run by the
benchmark's own Python (`agentrl.contrib.suites.foreign`).
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
SUITES = ("appworld", "bfcl", "tau2", "toolsandbox")
INSIDE = ("inside.py", "gold.py")
BEGIN, END = "<!-- python benchmarks/suite_lines.py -->", "<!-- end of the lines -->"
_SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(text: str) -> int:
    """The lines of a module that have code on them; the lines of a docstring, and of a string that stands alone, do not count."""
    strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    told = {number for node in strings for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _SILENT]
    return len({number for token in tokens for number in range(token.start[0], token.end[0] + 1)} - told)


def table() -> str:
    """A row for each suite, in Markdown."""
    rows = ["| suite | lines of code | of these inside | files |", "|---|---|---|---|"]
    for name in SUITES:
        files = sorted((ROOT / "envs" / name).glob("*.py"))
        counts = {file.name: code_lines(file.read_text(encoding="utf-8")) for file in files if not file.name.startswith("test_")}
        inside = sum(count for file, count in counts.items() if file in INSIDE)
        rows.append(
            f"| {name} | {sum(counts.values())} | {inside} | {', '.join(f'{file} {count}' for file, count in counts.items())} |"
        )
    return "\n".join(rows)


def shown() -> str:
    """The table that the page has. Raises ValueError if it has none."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN, 1)[1].split(END, 1)[0].strip()


def main() -> int:
    """Print the table; returns 1 if it was to be checked and is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with docs/benchmarks.md")
    args = parser.parse_args()
    print(table())
    return int(args.check and shown() != table())


if __name__ == "__main__":
    raise SystemExit(main())
