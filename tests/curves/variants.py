"""What `python -m tests.curves` runs: configs/quickstart.toml with one thing changed, and what the curve must do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.losses import POLICY_LOSSES

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
