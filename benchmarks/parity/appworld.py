"""AppWorld's own evaluation against the suite, on the same code.

    python benchmarks/parity/appworld.py --source ROOT [--python PYTHON] [--most N]

ROOT has AppWorld's `data`. Each task whose solution is in the data (train and dev) is played in these variants: the solution,
nothing, a completion without any work, the solution without its completion, a solution that fails at its middle. Official: its
class, closed, and its `evaluate_task` on the databases that it left on disk. Compared are success, the tests that passed and
failed, and what each execution printed. Prints counts by variant; exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.contrib.suites.foreign import foreign
from agentrl.env import Message, ToolCall
from agentrl.env.catalog import find_env

HERE = Path(__file__).resolve().parent


def variants(code: str) -> Iterator[tuple[str, list[str]]]:
    """The solution and what is made of it; codes that are executed one after the other."""
    yield "gold", [code]
    yield "nothing", []
    yield "completed", ["apis.supervisor.complete_task()"]
    yield "no completion", ["apis.supervisor.complete_task = None", code]
    lines = code.splitlines()
    body = [number for number, line in enumerate(lines) if line.startswith("    ") and not line.startswith("     ")]
    yield (
        "broken off",
        ["\n".join([*lines[: body[len(body) // 2]], "    raise ValueError('broken off')", "solution(apis, requester)"])],
    )


def ours(env: Any, split: str, seed: int, codes: list[str]) -> dict[str, Any]:
    """The same codes through the suite, and silence after them."""
    env.reset(seed=seed, options={"split": split})
    told: list[str] = []
    for code in codes:
        observation, _, over, _, _ = env.step(Message("assistant", "", (ToolCall("execute", {"code": code}),)))
        told += [message.content for message in observation]
        if over:
            break
    else:
        env.step("")
    return {**env.trajectory.state["verdict"], "told": told, "value": env.trajectory.reward}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", required=True)
    parser.add_argument("--python")
    parser.add_argument("--most", type=int, help="stop after so many tasks of each split")
    args = parser.parse_args()
    env: Any = find_env("appworld").load()(source=args.source, python=args.python, processes=1)
    official = foreign(env.python, HERE / "appworld_official.py", (str(env.source),))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong, began = [], time.time()
    for split in ("train", "heldout"):
        for seed in range(min(env.task_count(split), args.most or sys.maxsize)):
            task = env.make_task(seed, split)
            code = env.gold_turns(task)[0].tool_calls[0].arguments["code"]
            for variant, codes in variants(code):
                theirs = official.ask("official", task=task.data["name"], codes=codes)
                found = ours(env, split, seed, codes)
                names = {kind: [one["requirement"] for one in theirs[kind]] for kind in ("passes", "failures")}
                same = {
                    "success": theirs["success"] == found["success"] == (found["value"] == 1.0),
                    "tests": all(names[kind] == found[kind] for kind in names),
                    "output": [text.strip() for text in theirs["told"]] == [text.strip() for text in found["told"]],
                }
                bad = [what for what, equal in same.items() if not equal]
                counts[variant]["different" if bad else "equal"] += 1
                counts[variant]["success"] += found["success"]
                wrong += [f"{task.id}, {variant}: {', '.join(bad)}: {theirs} against {found}"] if bad else []
    for variant, count in counts.items():
        print(f"{variant:14} {count['equal']:4} equal {count['different']:4} different; {count['success']} successes")
    print(f"{time.time() - began:.0f} s")
    print("\n".join(wrong[:20]))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
