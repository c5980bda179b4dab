"""One training step over all roles, on the driver: what the loop calls once a batch of episodes is there.

    batch -> [reference] ref_logprobs -> [critic] values -> advantages -> [critic] update -> actor update

Roles in brackets exist only where the config asks for them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from tensordict import TensorDict

from agentrl.algorithm import AdvantageInput, advantages, kl_estimate
from agentrl.algorithm.anchors import anchors_of
from agentrl.batch.rows import jagged, offsets_of
from agentrl.batch.sharing import resolved, token_ratio, with_trees
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Worker
from agentrl.config.schema import AlgorithmConfig, KlConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.train.actor import Actor
from agentrl.train.critic import Critic
from agentrl.train.micro import has
from agentrl.train.reference import Reference
from agentrl.train.reward_model import RewardModel
from agentrl.train.update import check_algorithm

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools

STATE = "learner.json"
W = TypeVar("W", bound=Worker)


def mesh_of(config: TrainConfig, ranks: int | None = None) -> dict[str, int]:
    """The ranks of a role as a mesh: the ranks along "sp" get the same rows and share their tokens.

    `ranks`: of a role with a pool of its own; else `cluster.actors`. Raises ConfigError where
    `model.sequence_parallel` does not divide them.
    """
    share = config.model.sequence_parallel
    name, ranks = ("cluster.actors", config.cluster.actors) if ranks is None else ("a pool of processes", ranks)
    if ranks % share:
        raise ConfigError(f"model.sequence_parallel = {share} does not divide {name} = {ranks}")
    return {"dp": ranks // share, "sp": share}


def check_learner(config: TrainConfig) -> None:
    """Raise ConfigError for a combination of algorithm and roles that cannot mean what it says."""
    check_algorithm(config.algorithm)
    mesh_of(config)
    name = config.algorithm.advantage.name
    advantages(name, config.algorithm.advantage.args)
    if name == "gae" and config.critic is None:
        raise ConfigError('algorithm.advantage "gae" needs a critic: add a [critic] section')
    if name != "gae" and config.critic is not None:
        raise ConfigError(f'[critic] is there, but algorithm.advantage "{name}" has no use for it; use "gae"')
    if name in ("remax", "multi_reward") and config.reward_model is not None:
        raise ConfigError(
            f'algorithm.advantage "{name}" reads scores of the reward spec, which a [reward_model] is not part of'
        )
    kl = config.algorithm.kl
    if name == "multi_reward" and kl.coef > 0 and kl.where == "reward":
        raise ConfigError(
            'algorithm.advantage "multi_reward" reads single terms, which algorithm.kl.where = "reward" does '
            'not reach; use where = "loss"'
        )
    if kl.target is not None and kl.coef == 0:
        raise ConfigError("algorithm.kl.target steers algorithm.kl.coef, which must be above 0 to start from")


class Learner:
    """The training roles of a run: the actor, and a critic and a reference where the config names them."""

    def __init__(self, config: TrainConfig, actors: WorkerGroup[Actor], pools: Pools | None = None) -> None:
        """`pools`: where roles that have a place of their own are started."""
        check_learner(config)
        self.config, self.actors, self.pools = config, actors, pools
        self.critics: WorkerGroup[Critic] | None = None
        self.references: WorkerGroup[Reference] | None = None
        self.judges: WorkerGroup[RewardModel] | None = None
        self.kl_coef = config.algorithm.kl.coef

    async def open(self, path: str) -> None:
        """Start the further roles from the model at `path`: in their pools, or in the actors' own processes."""
        config = self.config
        if config.critic is not None:
            self.critics = self._start("critic", Critic)
            source = config.critic.path or path
            await self.critics.arun(Critic.init_model, source, config.model, config.optim, config.critic)
        if config.reward_model is not None:
            self.judges = self._start("reward_model", RewardModel)
            await self.judges.arun(
                RewardModel.init_model, config.reward_model.path, config.model, config.optim
            )
        if config.algorithm.kl.coef > 0:
            self.references = self._start("reference", Reference)
            await self.references.arun(Reference.init_model, path, config.model, config.optim)

    def _start(self, role: str, cls: type[W]) -> WorkerGroup[W]:
        if self.pools is not None and role in self.pools:
            return self.pools.launch(role, cls, mesh_of(self.config, self.pools.slots(role)))
        cluster = self.config.cluster
        return launch(
            cls,
            name=role,
            backend=cluster.backend,
            world_size=self.actors.world_size,
            mesh=mesh_of(self.config),
            on=self.actors if cluster.backend == "ray" else None,
            call_timeout=cluster.call_timeout,
        )

    async def step(self, batch: TensorDict, step: int) -> dict[str, float]:
        """One training step on what `collate` made. Returns the metrics of all roles."""
        algorithm, seed = self.config.algorithm, self.config.seed
        temperature = self.config.rollout.temperature
        batch = with_trees(batch.copy(), resolved(self.config.optim.prefix_sharing))
        judged: dict[str, float] = {}
        if self.judges is not None and self.config.reward_model is not None:
            scores = await self.judges.arun(RewardModel.compute_scores, batch)
            batch = with_scores(batch, scores["score"], self.config.reward_model.weight)
            judged = {"reward_model/score": float(scores["score"].mean())}
        if self.references is not None:
            found = await self.references.arun(Reference.compute_logprob, batch, temperature or 1.0)
            batch["ref_logprobs"] = same_offsets(found["logprobs"], batch)
        if self.critics is not None:
            values = await self.critics.arun(Critic.compute_values, batch)
            batch["values"] = same_offsets(values["values"], batch)
        batch, metrics = with_advantages(batch, algorithm, self.kl_coef)
        metrics |= judged
        metrics["prefix_ratio_possible"] = token_ratio(batch)
        if self.critics is not None:
            metrics |= await self.critics.arun(Critic.update, batch, algorithm, step=step, seed=seed)
        if self.config.critic is None or step >= self.config.critic.warmup:
            metrics |= await self.actors.arun(
                Actor.update,
                batch,
                algorithm,
                step=step,
                seed=seed,
                temperature=temperature,
                kl_coef=self.kl_coef,
            )
        if self.references is not None:
            measured = metrics.get("kl_reference", metrics.get("kl_reward"))
            metrics["kl_coef"] = self.kl_coef
            if measured is not None:
                self.kl_coef = steered(self.kl_coef, measured, len(batch), algorithm.kl)
        return metrics

    async def save(self, folder: Path) -> None:
        """All roles' state into `folder`, for `Checkpoints.writing`."""
        await self.actors.arun(Actor.save, str(folder / "actor"))
        if self.critics is not None:
            await self.critics.arun(Critic.save, str(folder / "critic"))
        (folder / STATE).write_text(json.dumps({"kl_coef": self.kl_coef}), encoding="utf-8")

    async def begin_save(self, folder: Path) -> None:
        """`save` in the background: returns when all roles' state is copied. See `saved`."""
        await self.actors.arun(Actor.begin_save, str(folder / "actor"))
        if self.critics is not None:
            await self.critics.arun(Critic.begin_save, str(folder / "critic"))
        (folder / STATE).write_text(json.dumps({"kl_coef": self.kl_coef}), encoding="utf-8")

    async def saved(self) -> bool:
        """Whether the save that `begin_save` began is written; raises what a role's part failed with."""
        done = await self.actors.arun(Actor.saved)
        return done and (self.critics is None or await self.critics.arun(Critic.saved))

    async def load(self, folder: Path) -> None:
        """What `save` wrote. Raises CheckpointError where a role's part is missing or does not fit."""
        await self.actors.arun(Actor.load, str(folder / "actor"))
        if self.critics is not None:
            await self.critics.arun(Critic.load, str(folder / "critic"))
        if (folder / STATE).is_file():
            self.kl_coef = float(json.loads((folder / STATE).read_text(encoding="utf-8"))["kl_coef"])

    def close(self) -> None:
        """End the further roles; the actors belong to whoever started them."""
        for group in (self.critics, self.references, self.judges):
            if group is not None:
                group.close()


def with_scores(batch: TensorDict, scores: torch.Tensor, weight: float) -> TensorDict:
    """Add `weight` times an episode's score to its reward, and to the token reward of its last sampled token.

    `scores` [N] are those of rows; an episode of several rows takes the score of its last row.
    """
    offsets = offsets_of(batch.get("token_ids"))
    keys = torch.stack([batch.get("group"), batch.get("member")], dim=1)
    unique, episode = torch.unique(keys, dim=0, return_inverse=True)
    last = torch.zeros(len(unique), dtype=torch.int64).scatter_reduce(
        0, episode, torch.arange(len(batch)), reduce="amax", include_self=False
    )
    added = weight * scores[last].to(torch.float32)
    tokens = batch.get("rewards").values().clone()
    tokens.index_add_(0, offsets[1:][last] - 1, added)
    out: TensorDict = batch.copy()
    return out.update({"reward": batch.get("reward") + added[episode], "rewards": jagged(tokens, offsets)})


def same_offsets(column: torch.Tensor, batch: TensorDict) -> torch.Tensor:
    """A ragged column over the batch's own offsets object, so that its columns can be combined."""
    return jagged(column.values(), offsets_of(batch.get("token_ids")))


def with_advantages(
    batch: TensorDict, algorithm: AlgorithmConfig, kl_coef: float
) -> tuple[TensorDict, dict[str, float]]:
    """The batch with `advantages` (and `returns`, where the estimator defines them), and metrics.

    Where `algorithm.kl.where` is "reward", the penalty is taken off the token rewards and the episode
    rewards first.
    """
    offsets = offsets_of(batch.get("token_ids"))
    mask = batch.get("sampled").values()
    rewards, reward = batch.get("rewards").values(), batch.get("reward")
    metrics: dict[str, float] = {}
    if has(batch, "ref_logprobs") and algorithm.kl.where == "reward":
        kl = kl_estimate(algorithm.kl.kind, batch["logprobs"].values(), batch["ref_logprobs"].values()) * mask
        metrics["kl_reward"] = float(kl.sum() / mask.sum().clamp(min=1))
        rewards = rewards - kl_coef * kl
        reward = reward - kl_coef * episode_sums(kl, batch)
    given = AdvantageInput(
        token_rewards=rewards,
        mask=mask,
        offsets=offsets,
        group=batch.get("group"),
        reward=reward,
        values=batch.get("values").values() if has(batch, "values") else None,
        turns=batch.get("turns").values(),
        member=batch.get("member"),
        baseline=batch.get("baseline") if has(batch, "baseline") else None,
        terms=batch.get("terms") if has(batch, "terms") else None,
    )
    name = algorithm.advantage.name
    if name == "gigpo":
        given = replace(given, anchors=anchors_of(batch.get("token_ids").values(), mask, offsets))
    found = advantages(name, algorithm.advantage.args)(given)
    out: TensorDict = batch.copy()
    out["advantages"] = jagged(found.advantages, offsets)
    if found.returns is not None:
        out["returns"] = jagged(found.returns, offsets)
    return out, metrics


def episode_sums(column: torch.Tensor, batch: TensorDict) -> torch.Tensor:
    """Sum of a token column over all rows of an episode, on each of its rows: [T] -> [N]."""
    offsets = offsets_of(batch.get("token_ids"))
    rows = torch.repeat_interleave(torch.arange(len(batch)), offsets.diff())
    keys = torch.stack([batch.get("group"), batch.get("member")], dim=1)
    unique, episode = torch.unique(keys, dim=0, return_inverse=True)
    return torch.zeros(len(unique)).index_add(0, episode[rows], column)[episode]


def steered(coef: float, measured: float, rows: int, cfg: KlConfig) -> float:
    """The next coefficient (Ziegler et al. 2019, arXiv:1909.08593): proportional control towards `target`."""
    if cfg.target is None:
        return coef
    error = min(max(measured / cfg.target - 1, -0.2), 0.2)
    return coef * (1 + error * rows / cfg.horizon)
