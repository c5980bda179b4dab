"""Damage each file of a run folder in each way, and check the commands on it (docs/damage.md).

    python benchmarks/damage.py [--out FILE] [--commands resume,eval,show,view,runs] [--files driver.json,...]

A case is a fresh copy of a tiny run with one file damaged in one way, and one command, in this process (`tests/run/damage.py`
has the files, the kinds and the verdicts). Cases in FILE are skipped. Exit code 1 if one is a fault.
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
os.environ.setdefault("AGENTRL_SURVEY", "0")  # skip the check that gold solutions fit
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.run import damage  # noqa: E402

TAIL = 2000
Case = dict[str, str]
FAULTS = ("traceback", "hang", "wrong", "unnamed")


def play(out: Path, commands: list[str], files: list[str]) -> None:
    """Play the cases that are not in `out` yet, and add a line of JSON each."""
    done = {(case["command"], case["file"], case["kind"]) for case in read(out)}
    with tempfile.TemporaryDirectory(prefix="agentrl-damage-") as folder, out.open("a") as written:
        place = Path(folder)
        place.chmod(0o755)  # unreadable files are tested as user nobody
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


def read(out: Path) -> list[Case]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def main() -> int:
    """Play the cases and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("damage.jsonl"), help="file of the results")
    parser.add_argument("--commands", default=",".join(damage.COMMANDS))
    parser.add_argument("--files", default="", help="parts of names of files to damage, separated by commas")
    arguments = parser.parse_args()
    play(arguments.out, arguments.commands.split(","), [name for name in arguments.files.split(",") if name])
    counts = Counter((case["command"], case["verdict"]) for case in read(arguments.out))
    for (command, verdict), count in sorted(counts.items()):
        print(f"{command:8} {verdict:10} {count}")
    return int(any(verdict in FAULTS for _, verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
