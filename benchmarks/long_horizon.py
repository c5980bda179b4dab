"""Measure long episodes: environment speed, per-turn credit against terminal reward, and a curriculum of horizons.

    python benchmarks/long_horizon.py --only speed
    python benchmarks/long_horizon.py --only credit [--seeds 0 1 2] [--quick]      # resumable: finished runs are skipped
    python benchmarks/long_horizon.py --only curriculum [--seeds 0] [--quick]
    python benchmarks/long_horizon.py --only reach [--seeds 0 1 2] [--quick]       # configs/long_horizon.toml as it is
    python benchmarks/long_horizon.py --only report                                # tables, CSV and PNG of finished runs

The runs of `credit` and `curriculum` start from one warm start, that of `configs/recipes/horizon/key_value.toml`: goals of 2
to 12 calls, of which its teacher stops nine in ten too early. A seed covers the tasks and the sampling.

Credit: three arms on key_value tasks of 8 and 10 calls. `terminal` has the success of the episode as its reward, compared by
GRPO; `turns` has half of the reward at the turns that made the gold calls, and `turn_returns` gives each turn its reward to go;
`dense` has the same reward, summed over the episode, by GRPO, which separates the effect of the reward from that of the credit.
Curves are over sampled tokens, and the table is at the tokens that every run of every arm has reached; a second table has the
ends of greedy held-out episodes before and after.

Curriculum: the recipe's stages, from 2 calls to 12, at its constant learning rate and at one that falls to 0, against tasks of 10
and 12 calls from the start; held-out success by horizon, from environments of weight 0.

Reach: `configs/long_horizon.toml`, including its warm start, with only the seed changed: held-out success at 5, 10, 20 and 24
calls over the updates, and the minutes of each run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent / "parts"))

from long_runs import COMMON, LADDER, QUICK, at, average, curve, draw, finished, run, save, table, warm, work

from agentrl.env import Message, Task, ToolEnv
from agentrl.env.catalog import make_env

ARMS = {
    "terminal": ["env.reward=key_value_exact", "algorithm.advantage.name=grpo"],
    "dense": ["env.reward=key_value_turns", "algorithm.advantage.name=grpo"],
    "turns": ["env.reward=key_value_turns", "algorithm.advantage.name=turn_returns"],
}
CREDIT = ["steps=12", "eval.every=5", "eval.tasks=48", "rollout.groups=4"]
CLIMB = ["eval.every=8"]
LESS_REVIEW = "rollout.sampler.args.review=0.15"
CURRICULA = {
    "review": [],  # the recipe: its rate falls, and one group in three is of an earlier stage
    "linear": [LESS_REVIEW],
    "staged": [LESS_REVIEW, "optim.schedule=constant"],
    "direct": ["env.train.sampler={name='uniform'}"],
}
HORIZONS = (2, 4, 6, 8, 10, 12)
REACHED = (5, 10, 20, 24)
REQUESTS = {8: [2, 3], 50: [8, 14], 100: [16, 28], 200: [32, 56]}


def speed(args: argparse.Namespace) -> None:
    """Measure the scripted gold policy's turns per second of processor time, and the one-time costs of a task."""
    rows = []
    wanted: list[tuple[str, dict[str, Any]]] = [("workspace", {"calls": n, "requests": r}) for n, r in REQUESTS.items()]
    wanted += [("service_desk", {"calls": n, "goals": [1, 4]}) for n in (10, 50, 100, 200)]
    for env_id, params in wanted:
        env = make_env(env_id, **params)
        made, tasks = timed(partial(make_tasks, env, 3 if args.quick else 10))
        setup = turns = played = 0.0
        for task in tasks:
            setup += timed(partial(env.reset, options={"task": task}))[0]
            gold = env.gold_turns(task)
            played += timed(partial(play, env, gold))[0]
            turns += len(gold)
            assert env.trajectory.reward == 1.0, task.id
        shown = timed(env.state)[0]
        rows.append([env_id, params["calls"], round(turns / len(tasks)), round(turns / played),
                     *(round(1000 * value, 2) for value in (made / len(tasks), setup / len(tasks), shown))])  # fmt: skip
    table(["environment", "calls", "turns", "turns/s", "make_task ms", "reset ms", "state ms"], rows, "speed.csv")


def make_tasks(env: ToolEnv, count: int) -> list[Task]:
    return [env.make_task(seed, "train") for seed in range(count)]


def play(env: ToolEnv, turns: Iterable[Message]) -> None:
    for turn in turns:
        env.step(turn)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return (processor seconds, result) of a call."""
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


def credit(args: argparse.Namespace) -> None:
    """Train the arms of every seed, one after the other."""
    size = ["steps=3", "eval.every=1", "eval.tasks=8", "rollout.groups=2"] if args.quick else CREDIT
    model = warm(args.quick)
    for seed in args.seeds:
        for arm, overrides in ARMS.items():
            tasks = [f"seed={seed}", model, "env.params.calls=[8,10]", "~rollout.sampler"]
            run(f"credit-{arm}-{seed}", LADDER, [*COMMON, *tasks, *overrides, *size])


def curriculum(args: argparse.Namespace) -> None:
    """Train on the stages, and on the longest tasks from the start, with every seed."""
    spec = work() / "horizons.toml"
    spec.write_text(horizons())
    model = warm(args.quick)
    size = ["steps=3", "eval.every=1", "rollout.groups=2"] if args.quick else CLIMB
    few = [f"env.calls{n}.eval.tasks=4" for n in HORIZONS] if args.quick else []
    for seed in args.seeds:
        for arm, own in CURRICULA.items():
            run(f"horizon-{arm}-{seed}", str(spec), [*COMMON, f"seed={seed}", model, *own, *size, *few])


def reach(args: argparse.Namespace) -> None:
    """Train the shipped config with every seed, one after the other."""
    few = ["steps=3", "sft.min_steps=30", "sft.max_steps=30", "eval.every=1", "eval.tasks=4"] if args.quick else []
    for seed in args.seeds:
        began = time.monotonic()
        run(f"reach-{seed}", "long_horizon", [f"seed={seed}", *few])
        print(f"seed {seed}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)


def horizons() -> str:
    """Return a key_value config with one more environment per horizon, which is only evaluated."""
    shared = "set_share = 0.0, keys = 14, max_value = 4"
    entry = '[[env]]\nname = "{}"\nid = "key_value"\nreward = "key_value_exact"\nweight = {}\nparams = {{ calls = {}, {} }}\n'
    parts = [entry.format("train", 1.0, "[10, 12]", shared) + "eval = { tasks = 1, weight = 0.0 }\n"]
    parts += [entry.format(f"calls{n}", 0.0, n, shared) + "eval = { tasks = 16 }\n" for n in HORIZONS]
    return f'base = "{LADDER}"\nname = "horizons"\n' + "\n".join(parts)


# -- results ---------------------------------------------------------------------------------------------


def report(args: argparse.Namespace) -> None:
    """Write tables, CSV and PNG of the finished runs."""
    done = sorted(path.name for path in work().glob("runs/*") if finished(path))
    curves = {(name.split("-")[1], name.split("-")[2]): curve(name, ["success"]) for name in done if name.startswith("credit-")}
    if curves:
        report_credit(curves)
    reached = [name.split("-")[1] for name in done if name.startswith("reach-")]
    if reached:
        report_reach(reached)
    climbs = [name.split("-")[1:] for name in done if name.startswith("horizon-")]
    if climbs:
        report_climbs([(arm, seed) for one in CURRICULA for arm, seed in climbs if arm == one])


def report_climbs(runs: Sequence[tuple[str, str]]) -> None:
    """Report held-out success by horizon: all evaluations, the last one of each run, and a picture of each arm's mean."""
    keys = [f"env/calls{n}/success" for n in HORIZONS]
    curves = {(arm, seed): curve(f"horizon-{arm}-{seed}", keys) for arm, seed in runs}
    head = ["arm", "seed", "update", "tokens", *(f"{n} calls" for n in HORIZONS)]
    save("horizons.csv", head, [[*key, *row] for key, rows in curves.items() for row in rows])
    print("\nheld-out success by horizon, at the last update")
    last = [(key, rows[-1]) for key, rows in curves.items()]
    rounded = [[*key, int(row[0]), f"{row[1]:,.0f}", *(f"{value:.2f}" for value in row[2:])] for key, row in last]
    table(head, rounded, "horizons_table.csv")
    for arm in CURRICULA:
        mine = [rows for (name, _), rows in curves.items() if name == arm]
        if not mine:
            continue
        means = [[statistics.mean(column) for column in zip(*rows, strict=True)] for rows in zip(*mine, strict=True)]
        lines = {f"{n} calls": (f"C{k}", [(row[0], row[2 + k]) for row in means]) for k, n in enumerate(HORIZONS)}
        draw(f"horizon-{arm}.png", lines, f"update (mean of {len(mine)} seeds)")


def report_reach(seeds: Sequence[str]) -> None:
    """Report held-out success by horizon: all evaluations, the first and the last, and a picture of all seeds."""
    keys = [f"env/calls{n}/success" for n in REACHED]
    curves = {seed: curve(f"reach-{seed}", keys) for seed in seeds}
    head = ["seed", "update", "tokens", *(f"{n} calls" for n in REACHED)]
    save("reach.csv", head, [[seed, *row] for seed, rows in curves.items() for row in rows])
    print("\nheld-out success by horizon, after the warm start and at the last update")
    rows = [[seed, int(row[0]), f"{row[1]:,.0f}", *(f"{value:.2f}" for value in row[2:]), minutes(f"reach-{seed}")]
            for seed, all_rows in curves.items() for row in (all_rows[0], all_rows[-1])]  # fmt: skip
    table([*head, "minutes in all"], rows, "reach_table.csv")
    lines = {f"{n} calls, seed {seed}": (f"C{k}", [(row[0], row[2 + k]) for row in rows])
             for seed, rows in curves.items() for k, n in enumerate(REACHED)}  # fmt: skip
    draw("reach.png", lines, "update")


def minutes(name: str) -> str:
    """Format a run's duration with its warm start."""
    return f"{json.loads((work() / 'runs' / name / 'summary.json').read_text())['seconds'] / 60:.1f}"


def report_credit(curves: dict[tuple[str, str], list[list[float]]]) -> None:
    """Report the success of each arm and seed at the tokens that all have sampled."""
    budget = min(points[-1][1] for points in curves.values())
    flat = [[*key, *row] for key, points in sorted(curves.items()) for row in points]
    save("credit.csv", ["arm", "seed", "update", "tokens", "success"], flat)
    print(f"\nheld-out success on tasks of 8 and 10 calls (greedy): after {budget:,.0f} sampled tokens, and its mean until then")
    seeds = sorted({seed for _, seed in curves})
    rows = []
    for arm in ARMS:
        mine = [curves.get((arm, seed)) for seed in seeds]
        rows.append(
            [arm, *(cell for what in (at, average) for cell in cells([None if p is None else what(p, budget) for p in mine]))]
        )
    table(["arm", *(f"{what}{n}" for what in ("", "until: ") for n in (*seeds, "mean"))], rows, "credit_table.csv")
    print("\nhow greedy held-out episodes end, all seeds")
    counted: list[list[Any]] = []
    for arm, phase in ((arm, phase) for arm in ARMS for phase in ("before", "after")):
        counts = sum((count_ends(f"credit-{name}-{seed}", phase) for name, seed in curves if name == arm), Counter[str]())
        counted.append([arm, phase, *(counts[kind] for kind in KINDS)])
    table(["arm", "", *KINDS], counted, "credit_ends.csv")
    lines = {f"{arm}, seed {seed}": (ARM_COLORS[arm], [(row[1], row[2]) for row in points])
             for (arm, seed), points in sorted(curves.items())}  # fmt: skip
    draw("credit.png", lines, "sampled tokens")


def cells(values: Sequence[float | None]) -> list[str]:
    """Format the values and their mean as table cells."""
    known = [value for value in values if value is not None]
    return ["-" if value is None else f"{value:.3f}" for value in (*values, statistics.mean(known) if known else None)]


KINDS = ("solved", "stopped early", "a wrong call", "went on, or a wrong answer")


def count_ends(name: str, phase: str) -> Counter[str]:
    """Count the ends of evaluated episodes of a phase ("before", "after") relative to the ordered gold calls."""
    found: Counter[str] = Counter()
    for path in (work() / "runs" / name / "trajectories").glob(f"{phase}_*.jsonl"):
        for episode in map(json.loads, path.read_text().splitlines()):
            calls = [call for message in episode["messages"] for call in message["tool_calls"]]
            made = [(call["name"], call["arguments"]) for call in calls]
            wanted = [(call["name"], call["arguments"]) for call in episode["task"]["gold"]["calls"]]
            kind = "a wrong call" if made[: len(wanted)] != wanted[: len(made)] else "stopped early"
            kind = "went on, or a wrong answer" if made[: len(wanted)] == wanted else kind
            found["solved" if episode["success"] else kind] += 1
    return found


ARM_COLORS = {"terminal": "tab:blue", "dense": "tab:green", "turns": "tab:orange"}


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "speed": speed, "credit": credit, "curriculum": curriculum, "reach": reach, "report": report,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(QUICK, action="store_true", help="a few updates, to try the script")
    args = parser.parse_args()
    for name in args.only or PARTS:
        print(f"-- {name}", flush=True)
        PARTS[name](args)


if __name__ == "__main__":
    main()
