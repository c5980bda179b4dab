"""Compare all advantage estimators and policy losses on two environments, at equal sampled tokens, from the same start.

    python benchmarks/estimators.py run [--seeds 0,1,2,3,4] [--envs key_value,function_calling] [--entries grpo,gae]
    python benchmarks/estimators.py table                  the ranking of finished runs, as Markdown

A tiny model starts from one warm start per environment and seed. `run` appends a line per run to
benchmarks/learning/estimators.jsonl, and skips those that have one, so it continues after Ctrl-C. A seed covers warm start, tasks
and sampling. Estimators are trained with `ppo_clip`, losses with `grpo`; every argument has its default (else: EXTRA),
and all have one learning rate. `tree` is left out: without branches it is `grpo`.

Held-out success at temperature 1 is measured at the start and after every second update. `table` compares its mean over the
first TOKENS sampled tokens (the area under the curve), because most entries end near 1, and success at TOKENS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "parts"))

import numpy as np
import numpy.typing as npt
from long_runs import COMMON, at, average, curve, run, warm, work

OUT = Path(__file__).parent / "learning" / "estimators.jsonl"
CRITIC = "critic={lr=1e-3, epochs=2}"
EXTRA: dict[str, list[str]] = {
    "decoupled_ppo": ["algorithm.proximal=recompute"],
    "gae": [CRITIC],
    "gae_turns": [CRITIC],
    "gmpo": ["algorithm.aggregate=seq_mean_token_mean"],
    "gspo": ["algorithm.aggregate=seq_mean_token_mean"],
    "multi_reward": ["algorithm.advantage.args.terms=['success']"],
}
ADVANTAGES = (
    "grpo", "dr_grpo", "rloo", "opo", "gpg", "maxrl", "max_variance", "pass_at_k", "multi_reward", "remax", "reinforce_pp",
    "reinforce_pp_baseline", "turn_returns", "gigpo", "gae", "gae_turns",
)  # fmt: skip
LOSSES = ("reinforce", "decoupled_ppo", "gspo", "gmpo", "cispo", "dppo", "sapo", "clip_cov", "kl_cov")
CONFIGS = {
    "key_value": """
[env]
id = "key_value"
reward = "key_value_exact"
params = { calls = [4, 5], set_share = 0.0, max_value = 4 }

[sft]
params = { calls = [2, 6], set_share = 0.0 }
""",
    "function_calling": """
[env]
id = "function_calling"
reward = "function_calling"
params = { kinds = ["missing", "irrelevance"], distractors = 0 }

[sft]
teacher = { abstain = 0.55 }
params = {}
gate = 0.0
gate_params = {}
""",
}
COMMON_CONFIG = """base = "quickstart"
name = "estimators"
steps = {steps}
stop_at_success = false
next = false

[rollout]
groups = 4
group_size = 8

[algorithm]
minibatch = 16

[optim]
lr = 5e-4
schedule = "constant"

[eval]
tasks = 100
every = 2
temperature = 1.0
"""
STEPS = {"key_value": 12, "function_calling": 16}
TOKENS = {"key_value": 16_000, "function_calling": 4_000}


def config_of(env: str) -> str:
    """Write the config of all runs of an environment, and return its path."""
    path = work() / f"estimators-{env}.toml"
    path.write_text(COMMON_CONFIG.format(steps=STEPS[env]) + CONFIGS[env], encoding="utf-8")
    return str(path)


def overrides(entry: str) -> list[str]:
    """Return the overrides of an estimator or a loss."""
    chosen = ("advantage", "loss") if entry in ADVANTAGES else ("loss", "advantage")
    names = {chosen[0]: entry, chosen[1]: "ppo_clip" if entry in ADVANTAGES else "grpo"}
    return [*(f"algorithm.{kind}={{name='{name}'}}" for kind, name in names.items()), *EXTRA.get(entry, [])]


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.is_file() else []


def train(args: argparse.Namespace) -> None:
    """Train every selected run without a line; all entries of a seed before the next seed."""
    done = {(one["env"], one["entry"], one["seed"]) for one in lines()}
    for seed in map(int, args.seeds.split(",")):
        for env in args.envs.split(","):
            for entry in args.entries.split(","):
                if (env, entry, seed) in done:
                    continue
                name, number = f"estimators-{env}-{entry}-{seed}", f"seed={seed}"
                start, began = warm(False, config_of(env), f"warm-estimators-{env}-{seed}", [number]), time.monotonic()
                run(name, config_of(env), [*COMMON, start, number, *overrides(entry)])
                folder = work() / "runs" / name
                line = {
                    "env": env,
                    "entry": entry,
                    "seed": seed,
                    "seconds": round(time.monotonic() - began),
                    "weights": hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()[:16],
                    "curve": [[int(step), int(tokens), success] for step, tokens, success in curve(name, ["success"])],
                }
                with OUT.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def interval(values: Sequence[float]) -> str:
    """Format mean and 95 % percentile bootstrap over seeds (Efron, 1979); no interval for one seed."""
    found: npt.NDArray[np.float64] = np.asarray(values)
    if len(found) < 2:
        return f"{found.mean():.3f}"
    means = found[np.random.default_rng(0).integers(len(found), size=(10_000, len(found)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{found.mean():.3f} ({low:.3f} to {high:.3f})"


T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t at 97.5 % by the number of differences."""


def paired(values: Sequence[float]) -> str:
    """Format mean and half of its 95 % t-interval; no interval for one seed."""
    half = T95[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{np.mean(values):+.3f} ± {half:.3f}"


def table(args: argparse.Namespace) -> None:
    """Print a row per environment and entry, largest mean first; a seed has the same start and tasks in all of them."""
    for env, tokens in TOKENS.items():
        mine = [one for one in lines() if one["env"] == env]
        curves: dict[str, dict[int, list[list[float]]]] = {}
        for one in mine:
            curves.setdefault(one["entry"], {})[one["seed"]] = one["curve"]
        short = sorted({one["entry"] for one in mine if one["curve"][-1][1] < tokens})
        print(f"\n{env}, {tokens:,} sampled tokens" + (f"; fewer in {', '.join(short)}" if short else ""))
        print("\n| | seeds | mean until then (95 %) | minus `grpo`, paired by seed | success then |\n|---|--:|---|---|---|")
        means = {entry: {seed: average(rows, tokens) for seed, rows in of.items()} for entry, of in curves.items()}
        for entry, of in sorted(means.items(), key=lambda pair: -float(np.mean(list(pair[1].values())))):
            last = interval([at(rows, tokens) for rows in curves[entry].values()])
            gain = paired([of[seed] - means["grpo"][seed] for seed in of]) if entry != "grpo" else ""
            print(f"| `{entry}` | {len(of)} | {interval(list(of.values()))} | {gain} | {last} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    start = commands.add_parser("run")
    start.add_argument("--seeds", default="0,1,2,3,4")
    start.add_argument("--envs", default=",".join(CONFIGS))
    start.add_argument("--entries", default=",".join((*ADVANTAGES, *LOSSES)))
    start.set_defaults(then=train)
    commands.add_parser("table").set_defaults(then=table)
    args = parser.parse_args()
    args.then(args)


if __name__ == "__main__":
    main()
