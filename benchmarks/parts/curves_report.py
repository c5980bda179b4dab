"""Learning curves of benchmarks/curves.py: variants, rewards of the controls, and their report."""

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

# What `python benchmarks/curves.py` runs: configs/quickstart.toml with one thing changed, and what the curve must do.

Expected = Literal["climbs", "rises", "stays", "falls"]
COINS = range(4)
"""Coins of the random reward, for each seed: what a control of chance finds is judged over many runs only (`report.py`)."""


@dataclass(frozen=True)
class Variant:
    """`overrides` of the base; `reward`: a spec of its own (`rewards.py`), `coin`: the number of its coin; `expected`: of
    held-out success."""

    overrides: list[str] = field(default_factory=list)
    reward: str | None = None
    coin: int = 0
    expected: Expected = "climbs"


# Values on top of the quickstart's for pieces that need them: arguments without a default, partners, the papers' rates.
CRITIC = ["critic.lr=1e-3", "critic.clip=0.5", "critic.epochs=2", "critic.warmup=3", "optim.lr=5e-4"]
ADVANTAGE_ARGS = {"multi_reward": '{terms=["answer", "clean"]}', "turn_returns": "{gamma=0.95}"}
LOSS_EXTRA = {
    "decoupled_ppo": ['algorithm.proximal="recompute"', "rollout.max_staleness=2"],
    "gmpo": ['algorithm.aggregate="seq_mean_token_mean"'],
    "gspo": ['algorithm.aggregate="seq_mean_token_mean"'],
    # Nothing holds the ratio near 1: exact for the weights that sampled, which a second minibatch no longer is.
    "reinforce": ["algorithm.minibatch=128"],
}
# Controls of chance: sampled as in training, because greedy success starts at a floor that chance can only leave upwards.
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
    # The task's tool output is shorter than truncate's marker, so the policy that forks here is compact.
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


# Rewards of the controls: one that ignores the episode, one that tells a little of it, and one with the wrong sign.

TASK = Path(__file__).resolve().parents[2] / "rewards" / "key_value_exact.json"
LEAK = 0.2
FUNCTIONS = {"coin": "curves_report:coin", "nothing": "curves_report:nothing"}


def coin(view: View, args: Any) -> float:
    """0 or 1 by the seed of the episode, which nothing that the policy says can change; coin number `args` of many.

    A coin that is read off what was said would be the same for all members of a group that say the same: one coin for the
    whole group and its answer, not one for each member.
    """
    return float(derive(args, "coin", view.trajectory.seed, view.trajectory.member) & 1)


def nothing(view: View, args: Any) -> float:
    """0, whatever happened."""
    return 0.0


def spec(kind: str, number: int = 0) -> dict[str, Any]:
    """The quickstart's spec with another root; success stays what it was. `number`: which coin.

    random: a coin. leaky: the mean of a coin and the task's own reward, which weighs `LEAK`. wrong: 1 for a failure.
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


# Does a reward that is a coin tell anything of success? Asked of every episode that was trained on.


def episodes(folder: Path) -> Iterable[tuple[str, float, float]]:
    """(group, reward, success) of each scored training episode in a run's trajectories."""
    for file in sorted(folder.glob("step_*.jsonl")):
        for line in file.read_text().splitlines():
            episode = json.loads(line)
            if episode["reward"] is not None:
                yield f"{file.name} {episode['task']['id']}", episode["reward"], float(episode["success"])


def z_score(found: Iterable[tuple[str, float, float]]) -> float:
    """Sum of (r - 1/2)(s - mean of the group's s) over its standard deviation, given what was said: N(0, 1) for fair coins."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for group, reward, success in found:
        groups[group].append((reward, success))
    total = variance = 0.0
    for members in groups.values():
        mean = sum(success for _, success in members) / len(members)
        total += sum((reward - 0.5) * (success - mean) for reward, success in members)
        variance += sum((success - mean) ** 2 for _, success in members) / 4
    return total / math.sqrt(variance) if variance else 0.0


# The table, the picture and the verdict of learning curves.

GOOD = 0.9
KEPT = 0.8
"""A curve that climbs must reach GOOD and not fall below this again."""
SLACK = 0.15
"""How far above its start a curve that must fall may come on its way."""
FALSE_ALARM = 0.005
"""How often each of the two rules on the random reward may give an alarm while nothing teaches."""


def tokens_to(curve: list[list[float]], success: float) -> float | None:
    """Tokens sampled up to the first evaluation that reached `success`."""
    return next((tokens for _, tokens, found in curve if found >= success), None)


def verdict(row: dict[str, Any]) -> str | None:
    """What is wrong with a curve, or None. One that must stay is judged with the others only (`control`)."""
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
    """The runs with a random reward, together: in how many success ended above its start, and the chance of so many; and the
    correlation of reward and success within groups in standard errors, with the chance of one as large."""

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
    """Judge the runs that must stay.

    An update by a coin's advantages is as likely as its opposite, so to first order sampled success ends above its start with
    probability 1/2 at most (far from the start what is random only destroys). Given a seed's warm start, runs with coins of
    their own are independent: at most Binomial(runs, 1/2) are up, however far a single run walks. The runs' z (`leak.py`)
    are standard normal, so their sum over sqrt(runs) is.
    """
    found = [row for row in rows if VARIANTS[row["variant"]].expected == "stays"]
    up = sum(row["curve"][-1][2] > row["curve"][0][2] for row in found)
    z = sum(row["z"] for row in found) / math.sqrt(max(len(found), 1))
    return Control(len(found), up, chance(len(found), up), z, math.erfc(abs(z) / math.sqrt(2)))


def chance(runs: int, up: int) -> float:
    """That a fair coin shows heads `up` times or more in `runs`."""
    return sum(math.comb(runs, k) for k in range(up, runs + 1)) / 2.0**runs


def unexpected(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each curve that does not do what it must, and one if the random reward teaches."""
    found = [(row, verdict(row)) for row in rows]
    lines = [f"{row['variant']} seed {row['seed']}: {problem}" for row, problem in found if problem]
    return [*lines, f"alarm: {about_control(rows)}"] if control(rows).alarm else lines


def about_control(rows: list[dict[str, Any]]) -> str:
    """The random reward in words."""
    found = control(rows)
    few = "" if found.enough else "; too few runs to judge"
    return (
        f"random reward: success ended above its start in {found.up} of {found.runs} runs (chance {found.up_chance:.4f}), "
        f"reward and success correlate by {found.z:+.2f} standard errors (chance {found.z_chance:.4f}){few}"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A markdown row for each variant; numbers of its seeds, in order, apart by slashes."""
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
        "rewrites an episode",
        "groups failed",
        "CPU s",
        "as it must",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in (name for name in VARIANTS if name in of):
        runs = of[name]
        reached = [tokens_to(run["curve"], GOOD) for run in runs]
        cells = [
            name,
            _join(run["seed"] for run in runs),
            _join(f"{run['curve'][0][2]:.2f}" for run in runs),
            _join(f"{run['curve'][-1][2]:.2f}" for run in runs),
            _join("-" if tokens is None else f"{tokens / 1000:.0f}" for tokens in reached),
            _join(run["updates"] for run in runs),
            _join(f"{run['ledgers']:.1f}" for run in runs),
            _join(run["failed_groups"] for run in runs),
            _join(f"{run['cpu_s']:.0f}" for run in runs),
            _judged(name, runs, rows),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def picture(rows: list[dict[str, Any]], file: Path) -> None:
    """All curves in a grid: held-out success against thousand tokens sampled, one panel a variant."""
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


def _judged(name: str, runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Whether a variant does what it must; the runs of all coins have one answer."""
    if VARIANTS[name].expected != "stays":
        return "yes" if not unexpected(runs) else "**no**"
    found = control(rows)
    return "**no**" if found.alarm else "yes" if found.enough else "too few runs"


def _join(values: Any) -> str:
    return " / ".join(str(value) for value in values)
