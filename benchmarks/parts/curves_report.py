"""Variants, control rewards and report of benchmarks/curves.py."""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentrl.reward.leaf import View
from agentrl.rollout.engine import derive
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.losses import POLICY_LOSSES

# Variants: configs/quickstart.toml with one change, and the requirement of the curve.

Expected = Literal["climbs", "rises", "stays", "falls"]
COINS = range(4)
"""Coins of the random reward, per seed: only many runs together can judge it (`control`)."""


@dataclass(frozen=True)
class Variant:
    """Overrides of the base config. `reward`: kind of control reward (`spec`), `coin`: number of its coin; `expected`: course of
    held-out success."""

    overrides: list[str] = field(default_factory=list)
    reward: str | None = None
    coin: int = 0
    expected: Expected = "climbs"


# Additional values of variants that need them: arguments without a default, required keys, the papers' rates.
CRITIC = ["critic.lr=1e-3", "critic.clip=0.5", "critic.epochs=2", "critic.warmup=3", "optim.lr=5e-4"]
ADVANTAGE_ARGS = {"multi_reward": '{terms=["answer", "clean"]}', "turn_returns": "{gamma=0.95}"}
LOSS_EXTRA = {
    "decoupled_ppo": ['algorithm.proximal="recompute"', "rollout.max_staleness=2"],
    "gmpo": ['algorithm.aggregate="seq_mean_token_mean"'],
    "gspo": ['algorithm.aggregate="seq_mean_token_mean"'],
    # Nothing bounds its ratio, so it is exact only for the sampling weights, which a second minibatch no longer has.
    "reinforce": ["algorithm.minibatch=128"],
}
# Controls by chance are sampled as in training, because greedy success starts at a floor, from which chance only leads up.
CHANCE = ["steps=12", "eval.temperature=1.0", "eval.tasks=200", "trajectories_every=1"]
BASE_ARGS = {"ppo_clip": "{clip_low=0.2, clip_high=0.28}"}


def _advantage(name: str) -> Variant:
    args = ADVANTAGE_ARGS.get(name, "{}")
    critic = CRITIC if "values" in ADVANTAGES.entry(name).needs else []
    return Variant([f'algorithm.advantage={{name="{name}", args={args}}}', *critic])


def _loss(name: str) -> Variant:
    return Variant([f'algorithm.loss={{name="{name}", args={BASE_ARGS.get(name, "{}")}}}', *LOSS_EXTRA.get(name, [])])


def _context(name: str, args: str) -> Variant:
    return Variant([f'rollout.context={{name="{name}", args={args}}}', "rollout.max_episode_tokens=1024"])


VARIANTS: dict[str, Variant] = {
    **{name: _advantage(name) for name in ADVANTAGES},
    **{f"loss_{name}": _loss(name) for name in POLICY_LOSSES if name != "ppo_clip"},
    "staleness_2": Variant(["rollout.max_staleness=2"]),
    "staleness_8": Variant(["rollout.max_staleness=8"]),
    "recompute": Variant(['algorithm.proximal="recompute"']),
    "truncated_importance": Variant(
        ['algorithm.proximal="recompute"', "rollout.max_staleness=2", 'algorithm.correction={name="truncated"}']
    ),
    # `compact`, because the task's tool outputs are shorter than the marker of `truncate`.
    "ledgers": _context("compact", '{tokens=150, summary_tokens=4, keep=2, prompt="note"}'),
    "ledgers_gae": Variant(
        [*_context("compact", '{tokens=150, summary_tokens=4, keep=2, prompt="note"}').overrides, *_advantage("gae").overrides]
    ),
    "lora": Variant(["model.lora.rank=16", "optim.lr=3e-3"]),
    "top_p": Variant(["rollout.top_p=0.95"]),
    "temperature_0.7": Variant(["rollout.temperature=0.7"]),
    "kl_in_loss": Variant(["algorithm.kl.coef=0.01"]),
    "kl_in_reward": Variant(["algorithm.kl.coef=0.01", 'algorithm.kl.where="reward"']),
    "entropy_bonus": Variant(["algorithm.entropy_bonus=0.001"]),
    "filter_zero_variance": Variant(["rollout.filter_zero_variance=true"]),
    **{f"random_reward_{coin}": Variant(CHANCE, reward="random", coin=coin, expected="stays") for coin in COINS},
    "leaky_reward": Variant(CHANCE, reward="leaky", expected="rises"),
    "wrong_sign": Variant(reward="wrong", expected="falls"),
}


# Control rewards: one ignores the episode, one depends on it weakly, one has the wrong sign.

TASK = Path(__file__).resolve().parents[2] / "rewards" / "key_value_exact.json"
LEAK = 0.2
FUNCTIONS = {"coin": "curves_report:coin", "nothing": "curves_report:nothing"}


def coin(view: View, args: Any) -> float:
    """Return 0 or 1 by seed and member of the episode; `args` is the coin's number.

    It must not depend on the sampled text, or members of a group with the same text would share a coin.
    """
    return float(derive(args, "coin", view.trajectory.seed, view.trajectory.member) & 1)


def nothing(view: View, args: Any) -> float:
    """Return 0."""
    return 0.0


def spec(kind: str, number: int = 0) -> dict[str, Any]:
    """Return the quickstart's spec with another root and the same success.

    random: coin `number`. leaky: the mean of the coin and the task's reward, which has weight `LEAK`. wrong: 1 for a failure.
    """
    true = json.loads(TASK.read_text())
    task = {**copy.deepcopy(true["root"]), "id": "task"}
    for place, leaf in enumerate(task["of"]):
        leaf["id"] = f"task_{place}"
    toss = {"use": "python", "args": {"name": "coin", "args": number}}
    root = {
        "random": toss,
        "leaky": {"op": "mean", "of": [{**toss, "weight": 1 - LEAK}, {**true["root"], "weight": LEAK}]},
        "wrong": {"op": "gate", "if": true["root"], "gte": 1, "then": {"use": "python", "args": {"name": "nothing"}}, "else": 1},
    }[kind]
    return {"agentrl_reward": 1, "name": f"{kind}_reward", "root": root, "success": task}


# Correlation of a coin reward with success, over every trained episode.


def episodes(folder: Path) -> Iterable[tuple[str, float, float]]:
    """Yield (group, reward, success) of each scored training episode in a run's trajectories."""
    for file in sorted(folder.glob("step_*.jsonl")):
        for line in file.read_text().splitlines():
            episode = json.loads(line)
            if episode["reward"] is not None:
                yield f"{file.name} {episode['task']['id']}", episode["reward"], float(episode["success"])


def z_score(found: Iterable[tuple[str, float, float]]) -> float:
    """Return the sum of (r - 1/2)(s - mean s of the group) over its standard deviation; N(0, 1) for fair coins."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for group, reward, success in found:
        groups[group].append((reward, success))
    total = variance = 0.0
    for members in groups.values():
        mean = sum(success for _, success in members) / len(members)
        total += sum((reward - 0.5) * (success - mean) for reward, success in members)
        variance += sum((success - mean) ** 2 for _, success in members) / 4
    return total / math.sqrt(variance) if variance else 0.0


# Report: verdicts, table and picture.

GOOD = 0.9
KEPT = 0.8
"""A climbing curve must reach GOOD, and end at this at least."""
SLACK = 0.15
"""Allowed rise of a falling curve above its start."""
FALSE_ALARM = 0.005
"""Probability of a false alarm of each of the two tests of the random reward."""


def tokens_to(curve: list[list[float]], success: float) -> float | None:
    """Return the tokens sampled until the first evaluation that reached `success`; None if none did."""
    return next((tokens for _, tokens, found in curve if found >= success), None)


def verdict(row: dict[str, Any]) -> str | None:
    """Return the problem of a curve, or None. Random rewards are judged together (`control`)."""
    expected = VARIANTS[row["variant"]].expected
    first, last, best = row["curve"][0][2], row["curve"][-1][2], max(point[2] for point in row["curve"])
    if expected == "climbs" and (best < GOOD or last < KEPT):
        return f"must reach {GOOD} and end above {KEPT}: {first:.2f} -> {last:.2f} (best {best:.2f})"
    if expected == "rises" and last <= first:
        return f"must rise: {first:.2f} -> {last:.2f}"
    if expected == "falls" and (last > first / 2 or best > first + SLACK):
        return f"must fall: {first:.2f} -> {last:.2f}"
    return None


class Control(NamedTuple):
    """All runs with a random reward. `up`: number of runs whose success ended above its start; `z`: correlation of reward and
    success within groups, in standard errors. The chances are probabilities of values at least as large."""

    runs: int
    up: int
    up_chance: float
    z: float
    z_chance: float

    @property
    def alarm(self) -> bool:
        return min(self.up_chance, self.z_chance) < FALSE_ALARM

    @property
    def enough(self) -> bool:
        return chance(self.runs, self.runs) < FALSE_ALARM


def control(rows: list[dict[str, Any]]) -> Control:
    """Judge the runs with a random reward.

    An update by a coin's advantages is as likely as its opposite, so to first order sampled success ends above its start with
    probability 1/2 at most (far from the start, random changes only harm). Given a seed's warm start, runs with different coins
    are independent: at most Binomial(runs, 1/2) end above it. The z of each run (`z_score`) is standard normal, and so is
    their sum over sqrt(runs).
    """
    found = [row for row in rows if VARIANTS[row["variant"]].expected == "stays"]
    up = sum(row["curve"][-1][2] > row["curve"][0][2] for row in found)
    z = sum(row["z"] for row in found) / math.sqrt(max(len(found), 1))
    return Control(len(found), up, chance(len(found), up), z, math.erfc(abs(z) / math.sqrt(2)))


def chance(runs: int, up: int) -> float:
    """Return the probability of at least `up` heads in `runs` tosses of a fair coin."""
    return sum(math.comb(runs, k) for k in range(up, runs + 1)) / 2.0**runs


def unexpected(rows: list[dict[str, Any]]) -> list[str]:
    """List the curves that miss their requirement, and an alarm if the random reward teaches."""
    found = [(row, verdict(row)) for row in rows]
    lines = [f"{row['variant']} seed {row['seed']}: {problem}" for row, problem in found if problem]
    return [*lines, f"alarm: {about_control(rows)}"] if control(rows).alarm else lines


def about_control(rows: list[dict[str, Any]]) -> str:
    """Describe the result of the random reward."""
    found = control(rows)
    few = "" if found.enough else "; too few runs to judge"
    return (
        f"random reward: success ended above its start in {found.up} of {found.runs} runs (chance {found.up_chance:.4f}), "
        f"reward and success correlate by {found.z:+.2f} standard errors (chance {found.z_chance:.4f}){few}"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Format a Markdown row per variant; the values of its seeds, in order, are separated by slashes."""
    of = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        of[row["variant"]].append(row)
    heads = [
        "variant",
        "seeds",
        "success before",
        "after",
        "thousand tokens to 0.9",
        "updates",
        "rewrites per episode",
        "groups failed",
        "CPU s",
        "as required",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in (name for name in VARIANTS if name in of):
        runs = of[name]
        reached = [tokens_to(run["curve"], GOOD) for run in runs]
        cells = [
            name,
            _join_seeds(run["seed"] for run in runs),
            _join_seeds(f"{run['curve'][0][2]:.2f}" for run in runs),
            _join_seeds(f"{run['curve'][-1][2]:.2f}" for run in runs),
            _join_seeds("-" if tokens is None else f"{tokens / 1000:.0f}" for tokens in reached),
            _join_seeds(run["updates"] for run in runs),
            _join_seeds(f"{run['ledgers']:.1f}" for run in runs),
            _join_seeds(run["failed_groups"] for run in runs),
            _join_seeds(f"{run['cpu_s']:.0f}" for run in runs),
            _verdict_cell(name, runs, rows),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def picture(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw held-out success over sampled tokens (thousands), one panel per variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    if not names:
        return
    wide = min(6, len(names))
    figure, panels = pyplot.subplots(
        math.ceil(len(names) / wide),
        wide,
        squeeze=False,
        sharey=True,
        layout="constrained",
        figsize=(2.4 * wide, 1.9 * math.ceil(len(names) / wide)),
    )
    for panel, name in zip(panels.flat, names, strict=False):
        for row in rows:
            if row["variant"] == name:
                panel.plot([point[1] / 1000 for point in row["curve"]], [point[2] for point in row["curve"]], lw=1)
        panel.set_title(f"{name}{'' if VARIANTS[name].expected == 'climbs' else f' ({VARIANTS[name].expected})'}", fontsize=8)
        panel.set_ylim(0, 1.02)
        panel.axhline(GOOD, lw=0.5, color="gray")
        panel.tick_params(labelsize=6)
    for panel in list(panels.flat)[len(names) :]:
        panel.axis("off")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _verdict_cell(name: str, runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Format if a variant meets its requirement; all coins together have one answer."""
    if VARIANTS[name].expected != "stays":
        return "yes" if not unexpected(runs) else "**no**"
    found = control(rows)
    return "**no**" if found.alarm else "yes" if found.enough else "too few runs"


def _join_seeds(values: Any) -> str:
    return " / ".join(str(value) for value in values)
