"""Every kind of damage to every file of a run folder, and what each command then does: the table of docs/damage.md.

    python benchmarks/damage.py [--out FILE] [--commands resume,eval,show,view,runs] [--files driver.json,...]
    python benchmarks/damage.py --out FILE --write      the tables of docs/damage.md, from what was played; plays nothing

A case is a fresh copy of a tiny run, one of its files damaged in one way, and one command, in this process (`tests/run/damage.py`
has the files, the kinds and the verdicts). Cases that are in FILE already are not played again. Exit code 1 if one is a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("AGENTRL_SURVEY", "0")  # that gold solutions have room is not what is tested
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.run import damage  # noqa: E402

TAIL = 2000
Case = dict[str, str]
FAULTS = ("traceback", "hang", "wrong", "unnamed")
PAGE = ROOT / "docs/damage.md"
BEGIN, END = "<!-- benchmarks/damage.py -->", "<!-- end -->"
WAYS = {
    "goes on": "nothing that it needs is damaged, or it is made again",
    "falls back": "an older checkpoint, with a line that names the damaged one",
    "cuts": "lines of metrics.jsonl that are no rows, with a line that numbers them",
    "refuses": "one line that names the file and what to do, exit 2",
}
"""What a command does."""


def play(out: Path, commands: list[str], files: list[str]) -> None:
    """Play what is not in `out` yet; a line of JSON each."""
    done = {(case["command"], case["file"], case["kind"]) for case in read(out)}
    with tempfile.TemporaryDirectory(prefix="agentrl-damage-") as folder, out.open("a") as written:
        place = Path(folder)
        place.chmod(0o755)  # what nobody may read is tried as nobody
        runs = damage.make_runs(place / "runs")
        damage.warmed(runs, place / "case")
        wanted = [(file, kind) for file, kind in damage.cases(runs.cut) if not files or any(name in file for name in files)]
        for command in commands:
            for file, kind in wanted:
                if (command, file, kind) not in done:
                    verdict, outcome = damage.tried(command, file, kind, runs, place / "case")
                    case = {"command": command, "file": file, "kind": kind, "verdict": verdict, "code": str(outcome.code)}
                    written.write(json.dumps(case | {"said": outcome.said[-TAIL:].replace(folder, "")}) + "\n")
                    written.flush()
                    if verdict in FAULTS:
                        print(f"{verdict}: {command}, {file}, {kind}\n{outcome.said[-TAIL:]}", flush=True)


def way(case: Case) -> str:
    """Which of `WAYS`, by what it said; the fault, if it is one."""
    said = case["said"].replace("\n", " ")
    if case["verdict"] in FAULTS:
        return case["verdict"]
    if case["code"] != "0":
        return "refuses"
    if "going on from" in said:
        return "falls back"
    return "cuts" if "removed (" in said or "not as written" in said else "goes on"


def table(head: str, of: list[tuple[str, Case]]) -> list[str]:
    """A row for each name: how many cases ended in each way."""
    counts: dict[str, Counter[str]] = {}
    for name, case in of:
        counts.setdefault(name, Counter())[way(case)] += 1
    columns = [*WAYS, *FAULTS]
    rows = [[name, str(sum(found.values())), *(str(found[column] or "") for column in columns)] for name, found in counts.items()]
    totals = sum(counts.values(), Counter[str]())
    rows.append(["**all**", str(sum(totals.values())), *(str(totals[column]) for column in columns)])
    lines = [[head, "cases", *columns], ["---"] * (len(columns) + 2), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def write(cases: list[Case]) -> None:
    """The tables, into the page."""
    files, kinds = ({case[key] for case in cases} for key in ("file", "kind"))
    lines = [BEGIN, "", f"{len(cases)} cases: {len(files)} files and folders, {len(kinds)} kinds of damage.", ""]
    lines += table("command", [(case["command"], case) for case in cases])
    for head, key in (("damage", "kind"), ("file", "file")):
        rows = [(f"`{case[key]}`", case) for case in cases if case["command"] == "resume"]
        lines += ["", f"`train --resume` by {head}:", "", *table(head, rows)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + "\n".join([*lines, "", END]) + rest.partition(END)[2])


def read(out: Path) -> list[Case]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def main() -> int:
    """Play, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("damage.jsonl"), help="where each case is noted")
    parser.add_argument("--commands", default=",".join(damage.COMMANDS))
    parser.add_argument("--files", default="", help="parts of the names of the files to damage")
    parser.add_argument("--write", action="store_true", help="write the tables of what is in --out; play nothing")
    arguments = parser.parse_args()
    if arguments.write:
        write(read(arguments.out))
        return 0
    play(arguments.out, arguments.commands.split(","), [name for name in arguments.files.split(",") if name])
    counts = Counter((case["command"], case["verdict"]) for case in read(arguments.out))
    for (command, verdict), count in sorted(counts.items()):
        print(f"{command:8} {verdict:10} {count}")
    return int(any(verdict in FAULTS for _, verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
