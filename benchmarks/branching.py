"""Compare branched episodes with plain ones at equal sampled tokens, and the cost of updates with shared prefixes.

    python benchmarks/branching.py                                        # all of it; finished runs are skipped
    python benchmarks/branching.py --envs key_value --horizons 5 10 --seeds 0 --arms flat middle
    python benchmarks/branching.py --cost                                 # only the cost of updates
    python benchmarks/branching.py --report                               # tables, CSV and PNG of finished runs
    python benchmarks/branching.py --quick --horizons 5 --seeds 0         # a few updates, to try the script

Tasks of one length are rewarded only for the success of the whole episode, so that the estimator must find the decisive turns
(`OTHER_REWARDS`: tasks that would give no reward).
All runs of a task start from the same warm start: that of `configs/long_horizon.toml`; on key_value with 10 calls that of
`configs/recipes/horizon/key_value.toml`, which solves none of them (the other solves two in three); or that of
`configs/workspace_ladder.toml`, with further training on 10 and 20 calls (`LEARNED`, `LENGTHENED`). Groups have 8 members.
`flat` starts all of them at the beginning, with GRPO; the other arms start half of them there and branch one episode off each,
with the advantage `tree`: `middle` before the middle turn of the gold solution, `entropy` before the least expected turn,
`failure` before a turn with a failed call.

A branch samples only its own turns, so an update of these arms has fewer tokens: curves are over sampled tokens, including
discarded ones, and the table has held-out success (greedy, or sampled: `SAMPLED`) at the tokens that every run of the task has
reached, and its mean until then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "parts"))

from long_runs import COMMON, LADDER, QUICK, at, average, curve, draw, finished, run, save, table, warm, work

from agentrl.run.reader import load_run

HORIZONS = (5, 10, 20)
BASES = {"key_value": "long_horizon", "workspace": "workspace_ladder"}
OTHER_STARTS = {("key_value", 10): LADDER}
"""Warm starts of tasks that do not use the one of their base config."""
LEARNED = {("workspace", 10): 10, ("workspace", 20): 10}
"""Number of preceding updates of the base config, for tasks whose warm start never succeeds when sampled."""
LENGTHENED = {
    ("workspace", 20): [
        "rollout.max_turns=44",
        "rollout.max_episode_tokens=4600",
        "sft.min_steps=300",
        "sft.gate=0.0",
        "sft.gate_every=100",
        "sft.params={calls=[1,20],requests=[1,12]}",
        "sft.teacher={skip=0.02,stop=0.3}",
        "sft.gate_params={calls=[18,20],requests=[8,12]}",
    ]
}
"""Tasks longer than any in these updates, and unsolved after them: 300 supervised steps follow, on transcripts up to their
length of a teacher that stops early in three of ten."""
APPS = 'apps = ["contacts"], offered = 0, distractors = 0, missing = 0.0, withheld = 0.0, questions = 0.0'
TASKS: dict[str, dict[int, str]] = {
    "key_value": {calls: f"calls = {calls}, set_share = {calls % 2}.0, keys = 14, max_value = 4" for calls in HORIZONS},
    "workspace": {
        5: f"calls = [4, 5], requests = [2, 4], {APPS}",
        10: f"calls = [9, 10], requests = [4, 6], {APPS}",
        20: f"calls = [18, 20], requests = [8, 12], {APPS}",
    },
}
REWARDS = {"key_value": "key_value_exact", "workspace": "workspace"}
OTHER_REWARDS = {("workspace", 10): "workspace_turns"}
"""Rewards of tasks that the start hardly solves when sampled: half for the whole task, half for right changes."""
SAMPLED = {("key_value", 20), ("workspace", 5), ("workspace", 10), ("workspace", 20)}
"""Tasks whose start does well greedily and badly when sampled; their held-out success is at temperature 1."""
SPEC = """base = "{base}"
name = "branching"
steps = {steps}
stop_at_success = false
next = false

[[env]]
name = "task"
id = "{env}"
reward = "{reward}"
params = {{ {params} }}
eval = {{ tasks = {tasks} }}

[rollout]
groups = 8
group_size = 8
max_turns = {turns}
max_episode_tokens = {tokens}

[algorithm]
minibatch = 32

[optim]
schedule = "constant"
{rate}
[eval]
temperature = {temperature}
"""
ARMS = ("flat", "middle", "entropy", "failure")
COLORS = {"flat": "k", "middle": "C0", "entropy": "C1", "failure": "C2"}
STEPS = {"flat": 16, "middle": 22, "entropy": 24, "failure": 16}
"""Number of updates by arm; more for arms with fewer tokens per update."""
LONG = {("workspace", 10), ("workspace", 20)}
"""Tasks whose updates take a minute; they run five eighths of the updates."""


def overrides(arm: str, calls: int) -> list[str]:
    """Return the overrides of an arm."""
    if arm == "flat":
        return ["algorithm.advantage={name='grpo'}"]
    place = f"at='depth', turns=[{calls // 2}]" if arm == "middle" else f"at='{arm}'"
    return ["algorithm.advantage={name='tree'}", f"rollout.branch={{roots=4, {place}}}"]


def spec(env: str, calls: int, quick: bool) -> str:
    """Write the config of all arms of a task, and return its path."""
    path = work() / f"branching-{env}-{calls}.toml"
    long = {"key_value": 60, "workspace": 200}[env] * calls
    path.write_text(
        SPEC.format(
            base=BASES[env],
            env=env,
            reward=OTHER_REWARDS.get((env, calls), REWARDS[env]),
            rate="lr = 3e-4\n" if env == "workspace" else "",
            temperature=1.0 if (env, calls) in SAMPLED else 0.0,
            params=TASKS[env][calls],
            steps=2 if quick else 16,
            tasks=4 if quick else 64,
            turns=2 * calls + 4 if env == "workspace" else calls + 4 + calls // 4,  # in `workspace` the user takes turns too
            tokens=600 + long,
        )
    )
    return str(path)


def start(env: str, calls: int, quick: bool) -> str:
    """Return the warm start of a task's runs as an override."""
    config = OTHER_STARTS.get((env, calls), BASES[env])
    model = warm(quick, config, f"warm-{config.replace('/', '-')}")
    if (env, calls) not in LEARNED:
        return model
    updates = 1 if quick else LEARNED[env, calls]
    name = f"learned-{env}-{updates}"
    run(name, config, ["engine=embedded", "cluster.backend=inline", "sft=false", model, f"steps={updates}", "eval.every=0"])
    learned = f"model.path={work() / 'runs' / name / 'final'}"
    more = LENGTHENED.get((env, calls))
    return learned if more is None else warm(quick, config, f"lengthened-{env}-{calls}", [learned, *more])


def train(args: argparse.Namespace) -> None:
    """Train the selected arms of every task and seed, one after the other."""
    for env in args.envs:
        for calls, seed, arm in ((c, s, a) for c in args.horizons for s in args.seeds for a in args.arms):
            model = start(env, calls, args.quick)
            steps = STEPS[arm] * 5 // 8 if (env, calls) in LONG else STEPS[arm]
            size = ["steps=2", "eval.every=1", "rollout.groups=2"] if args.quick else [f"steps={steps}", "eval.every=4"]
            words = [*COMMON, *size, f"seed={seed}", model, *overrides(arm, calls)]
            run(f"branching-{env}-{calls}-{arm}-{seed}", spec(env, calls, args.quick), words)


def cost(args: argparse.Namespace) -> None:
    """Run a few updates of each arm with and without shared prefixes on the same episodes."""
    env, calls = args.envs[0], max(args.horizons)
    model, steps = start(env, calls, args.quick), 1 if args.quick else 4
    for arm in ("flat", "middle"):
        for sharing in ("on", "off"):
            size = [f"steps={steps}", "eval.every=0", "eval.tasks=1", "optim.lr=1e-12", f"optim.prefix_sharing={sharing}"]
            words = [*COMMON, *size, "seed=0", model, *overrides(arm, calls)]
            run(f"branchcost-{env}-{calls}-{arm}-{sharing}", spec(env, calls, args.quick), words)


def report(args: argparse.Namespace) -> None:
    """Write a table and a picture of each finished task, a CSV of all evaluations, and the cost of updates."""
    done = [tuple(path.name.split("-")[1:]) for path in sorted(work().glob("runs/branching-*")) if finished(path)]
    curves = {key: curve("-".join(("branching", *key)), ["success"]) for key in done}
    if curves:
        save("branching.csv", ["environment", "calls", "arm", "seed", "update", "tokens", "success"],
             [[*key, *row] for key, rows in curves.items() for row in rows])  # fmt: skip
    rows: list[list[str]] = []
    for env, calls in ((env, calls) for env in BASES for calls in HORIZONS):
        mine = {key[2:]: found for key, found in curves.items() if key[:2] == (env, str(calls))}
        if mine:
            rows += lines_of(env, calls, mine, seeds_of(curves))
    if rows:
        print("\nheld-out success at the tokens that all runs of the task have sampled, and its mean until then")
        head = ["environment", "calls", "tokens", "arm", *(f"seed {seed}" for seed in seeds_of(curves)), "mean", "until: mean"]
        table(head, rows, "branching_table.csv")
    report_cost()


def seeds_of(curves: dict[Any, Any]) -> list[str]:
    return sorted({key[-1] for key in curves})


def lines_of(env: str, calls: int, curves: dict[Any, list[list[float]]], seeds: Sequence[str]) -> list[list[str]]:
    """Return the rows of a task, one per arm, and draw its picture."""
    budget = min(found[-1][1] for found in curves.values())
    rows, lines = [], {}
    for arm in ARMS:
        runs = {seed: found for (name, seed), found in curves.items() if name == arm}
        if not runs:
            continue
        ends = [f"{at(runs[seed], budget):.2f}" if seed in runs else "-" for seed in seeds]
        means = [statistics.mean(what(found, budget) for found in runs.values()) for what in (at, average)]
        rows.append([env, str(calls), f"{budget:,.0f}", arm, *ends, *(f"{value:.2f}" for value in means)])
        lines[f"{arm} ({len(runs)} seeds)"] = (COLORS[arm], mean(list(runs.values())))
    how = "sampled" if (env, int(calls)) in SAMPLED else "greedy"
    draw(f"branching-{env}-{calls}.png", lines, f"sampled tokens, {env}, {calls} calls", how)
    return rows


def mean(runs: Sequence[list[list[float]]]) -> list[tuple[float, float]]:
    """Return (tokens, success) at each evaluation, averaged over the seeds."""
    return [
        (statistics.mean(row[1] for row in rows), statistics.mean(row[2] for row in rows)) for rows in zip(*runs, strict=True)
    ]


def report_cost() -> None:
    """Report the tokens that the model computes in an update and its seconds, averaged over the updates."""
    rows = []
    for path in sorted(work().glob("runs/branchcost-*")):
        if finished(path):
            found = [row for row in load_run(path).metrics if row["phase"] == "train"]
            names = ("tokens_sampled", "tokens_computed", "prefix_ratio", "time/update_s")
            means = [statistics.mean(row[name] for row in found) for name in names]
            rows.append(
                [*path.name.split("-")[1:], f"{means[0]:,.0f}", f"{means[1]:,.0f}", *(f"{value:.2f}" for value in means[2:])]
            )
    if rows:
        print("\nan update with shared prefixes and without: means of the updates of a run")
        head = ["environment", "calls", "arm", "sharing", "sampled tokens", "computed tokens", "prefix_ratio", "seconds"]
        table(head, rows, "branching_cost.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--horizons", type=int, nargs="+", choices=HORIZONS, default=list(HORIZONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--cost", action="store_true", help="only the cost of updates")
    parser.add_argument("--report", action="store_true", help="only the tables and the pictures")
    parser.add_argument(QUICK, action="store_true", help="a few updates, to try the script")
    args = parser.parse_args()
    if not args.report:
        if not args.cost:
            train(args)
        cost(args)
    report(args)


if __name__ == "__main__":
    main()
