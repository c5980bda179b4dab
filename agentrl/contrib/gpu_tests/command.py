"""Command `agentrl test`: run test files on the cards that they declare."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.cli.arguments import COMMANDS, whole_number
from agentrl.utils.errors import need_package

OUT = Path(".pytest_cache") / "agentrl"
EPILOG = """examples:
  agentrl test                                   the folder tests, on all cards that are free
  agentrl test tests/gpu --cards 0,1             only on these two
  agentrl test tests/gpu -- -k engine -x         what stands behind -- goes to pytest
  agentrl test tests/gpu/test_engine.py::test_sleep_frees_the_memory
  agentrl test tests/gpu --json > results.json   one JSON object; lines go to stderr

A file says what it needs with `pytestmark = pytest.mark.gpus(2)`, or gpus(2, timeout=900) for a limit of its own; without that it
gets no card and runs on a slot. Logs and results.json are in .pytest_cache/agentrl (--out). Ctrl-C passes the
interrupt on to what runs and reports every test; a second one kills. Exit code 0 if all ran and none failed, 130 after Ctrl-C.
"""


@COMMANDS.register("test")
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Run test files, each on the GPUs that it declares."""
    parser.epilog = EPILOG
    parser.add_argument("tests", nargs="*", metavar="TEST", help="files, folders, or FILE::TEST (default: tests)")
    parser.add_argument(
        "--cards", type=_numbers, metavar="N,N", help="use only these (default: all that CUDA_VISIBLE_DEVICES leaves)"
    )
    parser.add_argument(
        "--slots", type=whole_number(0), metavar="N", help="files without cards at the same time (default: half the cores)"
    )
    parser.add_argument("--timeout", type=_seconds, default=1800.0, metavar="S", help="seconds for one file (default 1800)")
    parser.add_argument("--wait", type=_seconds, default=300.0, metavar="S", help="for cards that are not free (default 300)")
    parser.add_argument(
        "--in-use-mib", type=whole_number(0), default=256, metavar="M", help="a card with more in use is not free (default 256)"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help=f"logs and records (default: {OUT})")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.set_defaults(run=run, passed_on=[])


def run(args: argparse.Namespace) -> int:
    """Run the tests; returns 0, 1 if one failed or was not run, 130 after Ctrl-C."""
    need_package("pytest", "agentrl test needs pytest: pip install 'agentrl[testing]'")
    import asyncio

    from agentrl.contrib.gpu_tests.run import run_tests

    return asyncio.run(run_tests(args))


def _numbers(text: str) -> list[int]:
    return [whole_number(0)(part) for part in text.split(",")]


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} are no seconds")
    return found
