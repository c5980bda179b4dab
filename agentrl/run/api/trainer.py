"""Trainer of the step-wise loop: batches, gradients, optimizer steps, publishing of weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate

import torch

from agentrl.cluster.group import check_arrived
from agentrl.config import Choice
from agentrl.config.envs import one_temperature
from agentrl.config.load import check_idle_keys
from agentrl.config.schema import AlgorithmConfig
from agentrl.data.rows import Ragged, on_mask
from agentrl.data.schedule import cut_minibatches
from agentrl.data.trajectory import Group, Trajectory
from agentrl.run.api.base import Both, P, R, section_of_call
from agentrl.run.loop import make_batch
from agentrl.run.session import Session
from agentrl.trainer.actor import Actor
from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput, LossInput, LossOutput
from agentrl.trainer.checkpoint import MANIFEST, Checkpoints, check_intact
from agentrl.trainer.estimator_inputs import check_terms
from agentrl.trainer.minibatch import cut_update
from agentrl.trainer.train_engine import offloads_when_idle
from agentrl.trainer.update import check_algorithm
from agentrl.utils.errors import BrokenWeightsError, CheckpointError, ConfigError, NonFiniteError, StepOrderError
from agentrl.utils.search_path import HELD, give, pack_given, unpack
from agentrl.utils.threads import in_thread

LossFunction = Callable[..., LossOutput]
Estimator = Callable[[AdvantageInput], AdvantageOutput]
Named = str | Choice | Mapping[str, Any]
Metrics = dict[str, float]
UNUSED_KEYS = {"advantage", "epochs", "minibatch", "experience", "demonstrations", "distillation"}
"""Keys of [algorithm] that do not affect the gradient of one batch."""


@dataclass(frozen=True)
class TrainBatch:
    """Scored episodes with their advantages, ready for `Trainer.forward_backward`.

    `view`: columns, one row per ledger. `episodes`: in the given order. `version`: of the weights when it was made. `parts`:
    number of minibatches by `algorithm.minibatch`; `part`: one of them (None: all rows together). `metrics`: of the forward
    passes that made it.
    """

    view: Ragged
    episodes: tuple[Trajectory, ...]
    version: int
    parts: int
    metrics: Metrics = field(default_factory=dict)
    part: int | None = None

    def __len__(self) -> int:
        return len(self.episodes)

    def __repr__(self) -> str:
        part = "" if self.part is None else f", minibatch {self.part} of {self.parts}"
        return f"<TrainBatch of {len(self)} episodes, {int(self.view.tokens('sampled').sum())} sampled tokens{part}>"

    @property
    def advantages(self) -> list[float]:
        """Mean advantage over the sampled tokens of each episode."""
        episode = torch.from_numpy(self.view.episode).repeat_interleave(self.view.offsets.diff())[self.view.tokens("sampled")]
        values = self.view.tokens("advantages")[self.view.tokens("sampled")].double()
        count = torch.bincount(episode, minlength=len(self)).clamp(min=1)
        return (torch.zeros(len(self), dtype=torch.float64).index_add_(0, episode, values) / count).tolist()

    def minibatches(self) -> list[TrainBatch]:
        """Return the minibatches of an update, in order: each for one `forward_backward` and one `optim_step`."""
        return [replace(self, part=part) for part in range(self.parts)]


def in_turn(work: Callable[Concatenate[Trainer, P], Awaitable[R]]) -> Both[Concatenate[Trainer, P], R]:
    """Make a call of a trainer that runs after those that began before it: overlapping ones would mix their gradients."""

    @wraps(work)
    async def run(self: Trainer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._holder is asyncio.current_task():  # a call within a call
            return await work(self, *args, **kwargs)
        async with self._turn:
            self._holder = asyncio.current_task()
            try:
                return await work(self, *args, **kwargs)
            finally:
                self._holder = None

    return Both(run)


class Trainer:
    """Trains the policy of a step-wise loop (`agentrl.session`). Calls block; `NAME.aio(...)` is awaitable."""

    def __init__(self, session: Session) -> None:
        self._session, self.held = session, HELD.get()
        self.config = session.config
        self.waiting = 0
        """Number of calls of `forward_backward` since the last `optim_step`."""
        self.unpublished = 0
        """Number of optimizer steps since the last `publish`."""
        self.collected: list[Group] | None = None
        self.counts_groups = True
        self.resting = self._broken = False
        self._aggregate = ""
        self._sent: dict[str, Any] = {}
        self._turn = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None

    @property
    def version(self) -> int:
        """Version of the engine's weights: number of published updates."""
        return self._session.collector.version

    # -- a batch -----------------------------------------------------------------------------------

    @in_turn
    async def batch(
        self, groups: Sequence[Group], advantage: Named | Estimator | Sequence[float] | torch.Tensor | None = None
    ) -> TrainBatch:
        """Make a batch of the scored members, with advantages and, as the config needs, logprobs and critic values.

        Logprobs are those of the proximal and the reference policy. `advantage`: a registered estimator by name (or with its
        arguments), a function of the same signature, or one number per scored member, in order; by default
        `algorithm.advantage`. Raises ConfigError if no member has a reward or a task is not of the split "train", NonFiniteError
        if a number in the batch is not finite.
        """
        members = tuple(member for group in groups for member in group.scored())
        if not members:
            stops = sorted({f"{t.stop}: {t.error}" for group in groups for t in group.trajectories})
            raise ConfigError(
                f"trainer.batch: no episode of {len(groups)} groups has a reward ({'; '.join(stops) or 'no groups'})"
            )
        if held := [member.task for member in members if member.task.split != "train"]:
            raise ConfigError(
                f"trainer.batch: task {held[0].id!r} is of the split {held[0].split!r}, on which nothing is trained; play tasks "
                'of the split "train"'
            )
        if twice := [number for number, count in Counter(group.index for group in groups).items() if count > 1]:
            raise ConfigError(
                f"trainer.batch: two groups have the number {twice[0]}, by which members are compared: one was given twice, or "
                "comes from another session. Leave it out"
            )
        if offloads_when_idle(self.config, "actor"):
            if self.waiting:
                raise StepOrderError(
                    'trainer.batch: model.offload = "idle" would drop the waiting gradients; call trainer.optim_step() first'
                )
            await self.drop.aio()  # those of a call that failed half-way may be there
        algorithm = self._session.learner.algorithm
        by_env: dict[str, Choice] | None = None
        estimator: Estimator | None = None
        if isinstance(advantage, str | Mapping | Choice):
            algorithm, by_env = algorithm.model_copy(update={"advantage": _choice(advantage)}), {}
        elif advantage is not None:  # a function or numbers replace the estimators of config and environments
            algorithm, by_env = algorithm.model_copy(update={"advantage": Choice(name="grpo")}), {}
            estimator = advantage if callable(advantage) else partial(_spread_advantages, advantage)
        if estimator is None and not (self._session.learner._by_env if by_env is None else by_env):
            known = {key for member in members for key in member.metrics}
            # Include nodes of the specs that none of these episodes reached.
            known.update(*(env.scorer.ids for env in self._session.envs if any(group.env == env.name for group in groups)))
            check_terms(algorithm.advantage, known, "no episode has a term")
        batch = await in_thread("batch", make_batch, list(groups), algorithm.advantage, by_env or {})
        if self.config.rollout.colocate and not self.resting:
            await self._session.rest()
            self.resting = True
        view, metrics, broken = await self._session.learner.ready(batch, algorithm, by_env, estimator)
        if broken:
            raise NonFiniteError(f"trainer.batch: numbers are not finite: {broken}")
        parts = len(cut_minibatches(view, self.config.algorithm, self.config.seed, self.version))
        return TrainBatch(view, members, self.version, parts, metrics)

    # -- gradients and steps -----------------------------------------------------------------------

    @in_turn
    async def forward_backward(
        self,
        batch: TrainBatch,
        loss: Named | LossFunction | None = None,
        *,
        kl_coef: float | None = None,
        algorithm: Mapping[str, Any] | None = None,
    ) -> Metrics:
        """Accumulate the gradients of a batch or minibatch; returns the metrics of its rows.

        `loss`: a registered loss by name (or with its arguments), or a function `loss(given: LossInput) -> LossOutput`; by
        default `algorithm.loss`. `algorithm`: other keys of that section for this call: `{"aggregate": "token_mean"}`. Several
        calls before a step give the gradient of one joint batch; one that fails drops it. Raises StepOrderError for an old batch.
        """
        self._check_age(batch)
        chosen = await self._loss(loss, algorithm or {})
        if self.waiting and chosen.aggregate != self._aggregate:
            raise StepOrderError(
                f'trainer.forward_backward: gradients of aggregate = "{self._aggregate}" are waiting, and means over episodes '
                f'and over tokens ("{chosen.aggregate}") cannot be added; call trainer.optim_step() in between'
            )
        if chosen.kl.target is not None and kl_coef is None:
            raise ConfigError(
                "algorithm.kl.target: the coefficient is adapted once per update; use trainer.update(batch), or give a "
                "coefficient to each call: trainer.forward_backward(batch, kl_coef=...)"
            )
        if "moving" in (chosen.kl.reference, self.config.algorithm.kl.reference):
            raise ConfigError(
                'algorithm.kl.reference = "moving": the reference moves once per update; use trainer.update(batch), or set it to '
                '"start"'
            )
        coef = kl_coef if kl_coef is not None else chosen.kl.coef if "kl" in (algorithm or {}) else self._session.learner.kl_coef
        if coef and (not 0 < coef < float("inf") or self.config.algorithm.kl.coef == 0):
            raise ConfigError(
                f"algorithm.kl.coef = {coef}: expected a number of at least 0, in a session with a reference policy; open it "
                'with, for example, overrides={"algorithm.kl.coef": 0.1}'
            )
        read = chosen.model_copy(update={"kl": chosen.kl.model_copy(update={"coef": coef})})
        check_idle_keys(self.config.model_copy(update={"algorithm": read}), [f"algorithm.{key}." for key in algorithm or {}])
        if batch.part is None:  # all rows belong to one optimizer step
            chosen = chosen.model_copy(update={"minibatch": len(batch)})
        actors, step, seed, part = self._session.actors, batch.version, self.config.seed, batch.part or 0
        ranks = actors.mesh.size("dp")
        waiting, self.waiting = self.waiting, 0
        if not waiting:  # those of a call that failed half-way may be there
            await actors.arun(Actor.drop_gradients)
        metrics = await actors.arun(
            Actor.forward_backward,
            await in_thread("batch", cut_update, batch.view.batch, chosen, ranks, step=step, seed=seed, part=part),
            chosen,
            step=step,
            seed=seed,
            temperature=one_temperature(self.config.rollout, "a trainer"),
            kl_coef=coef,
            part=part,
        )
        self.waiting, self._aggregate = waiting + 1, chosen.aggregate
        return metrics

    @in_turn
    async def optim_step(self, lr: float | None = None) -> Metrics:
        """Take an optimizer step with the accumulated gradients, clipped to `optim.max_grad_norm`.

        `lr`: by default the rate of the config's schedule. The metric `optimizer_steps` is 0 if the gradient is 0 or not finite;
        then the weights are unchanged. Raises StepOrderError if there are no gradients.
        """
        if not self.waiting:
            raise StepOrderError("trainer.optim_step: there are no gradients; call trainer.forward_backward(batch) first")
        if lr is not None and not 0 < lr < float("inf"):
            raise ConfigError(f"trainer.optim_step: lr = {lr}: expected a number above 0")
        with self._note_broken_weights():
            metrics = await self._session.actors.arun(Actor.optim_step, lr)
        self.waiting, self.unpublished = 0, self.unpublished + 1
        return metrics

    @in_turn
    async def drop(self) -> None:
        """Drop the accumulated gradients."""
        await self._session.actors.arun(Actor.drop_gradients)
        self.waiting = 0

    @in_turn
    async def critic_step(self, batch: TrainBatch) -> Metrics:
        """Update the critic on the batch, as in a run. Raises ConfigError without [critic]."""
        if self._session.learner.critics is None:
            raise ConfigError("trainer.critic_step: the config has no [critic]")
        self._check_age(batch)
        with self._note_broken_weights():
            return await self._session.learner.update_critic(batch.view.batch, batch.version)

    @in_turn
    async def update(self, batch: TrainBatch) -> Metrics:
        """Do a run's complete update on the batch: critic and actor, all minibatches and epochs, the KL coefficient. Raises
        StepOrderError if gradients are waiting."""
        self._check_age(batch)
        self._check_no_gradients("trainer.update")
        with self._note_broken_weights():
            metrics = await self._session.learner.learn(batch.view, batch.version, batch.metrics)
        self.unpublished += int(metrics.get("optimizer_steps", 0.0))
        return metrics

    # -- weights -----------------------------------------------------------------------------------

    @in_turn
    async def publish(self) -> int:
        """Publish the weights to the engine under the next version; returns it. Raises StepOrderError if gradients wait."""
        self._check_no_gradients("trainer.publish")
        await self._session.actors.arun(Actor.end_update)
        groups, self.collected = self.collected or [], None
        self.counts_groups &= bool(groups)
        self._session.collector.trained(groups)
        await self._session.publish()
        self.unpublished, self.resting = 0, False
        return self.version

    @in_turn
    async def save(self) -> Path:
        """Write a checkpoint of model, optimizer and schedule; returns its folder, for `load`."""
        self._check_no_gradients("trainer.save")
        if self.unpublished:
            raise StepOrderError(
                f"trainer.save: {self.unpublished} optimizer steps were taken since the last trainer.publish(); call it first"
            )
        await self._session.saver.save()
        await self._session.saver.wait()
        return self._session.folder.checkpoints / f"step_{self.version:06d}"

    @in_turn
    async def load(self, folder: str | Path) -> None:
        """Load and publish weights and optimizer of a checkpoint (from `save`, or a run's `checkpoints/step_NNNNNN`). Drops
        accumulated gradients. Raises CheckpointError if it is missing or damaged."""
        path = Path(folder).expanduser().absolute()
        if not (path / "actor").is_dir():
            newest = Checkpoints(self._session.folder.checkpoints, self.config.checkpoint.keep).newest()
            hint = "" if newest is None else f"; the newest of this session is {newest}"
            raise CheckpointError(f"trainer.load: {path} is not a checkpoint (step_NNNNNN){hint}")
        if (path / MANIFEST).is_file():
            await in_thread("files", check_intact, path)
        await self.drop.aio()
        await self._session.actors.arun(Actor.end_update)  # else `publish` would count steps before the load
        await self._session.learner.load(path)
        self._broken = False
        await self.publish.aio()

    @in_turn
    async def export(self, folder: str | Path) -> Path:
        """Write the weights as a folder for transformers and vLLM; returns it."""
        path = Path(folder).expanduser().absolute()
        if not str(folder) or (path.exists() and not path.is_dir()):
            raise ConfigError(f"trainer.export: {str(folder)!r} is not a folder; name one, which is made if it is missing")
        self._check_finite("trainer.export")
        await self._session.actors.arun(Actor.export_hf, str(path))
        await check_arrived(self._session.actors, path, "the trained model")
        return path

    # -- checks ------------------------------------------------------------------------------------

    def _check_age(self, batch: TrainBatch) -> None:
        """Raise StepOrderError if tokens or advantages come from weights older than `rollout.max_staleness` allows."""
        versions = batch.view.tokens("versions")[batch.view.tokens("sampled")]
        oldest = min(int(versions.min()), batch.version) if len(versions) else batch.version
        allowed = self.config.rollout.max_staleness
        if self.version - oldest > allowed:
            raise StepOrderError(
                f"stale batch: from weights of version {oldest}, and version {self.version} was published since; "
                f"rollout.max_staleness = {allowed} allows {allowed}: play new episodes, or raise it"
            )

    @contextmanager
    def _note_broken_weights(self) -> Iterator[None]:
        """Note BrokenWeightsError: with NaN or infinite weights nothing is published or saved until `load`."""
        try:
            yield
        except BrokenWeightsError:
            self.waiting, self._broken = 0, True
            raise

    def _check_finite(self, call: str) -> None:
        if self._broken:
            raise BrokenWeightsError(f"{call}: the weights are no longer finite. Go back to a checkpoint: trainer.load(FOLDER)")

    def _check_no_gradients(self, call: str) -> None:
        self._check_finite(call)
        if self.waiting:
            calls = "call" if self.waiting == 1 else "calls"
            raise StepOrderError(
                f"{call}: the gradients of {self.waiting} {calls} of trainer.forward_backward are waiting; call "
                "trainer.optim_step() to apply them, or trainer.drop()"
            )

    def check_fresh(self, call: str) -> None:
        """Raise StepOrderError before sampling if the engine sleeps or its weights are too old."""
        if self.resting:
            raise StepOrderError(
                f"{call}: the engine has slept since trainer.batch (rollout.colocate); call trainer.publish() first"
            )
        if self.unpublished and self.config.rollout.max_staleness == 0:
            raise StepOrderError(
                f"{call}: {self.unpublished} optimizer steps were taken since the last trainer.publish(), so the engine would "
                "sample from the weights before them; call trainer.publish() first, or allow it by rollout.max_staleness = 1"
            )

    # -- losses ------------------------------------------------------------------------------------

    async def _loss(self, loss: Any, changes: Mapping[str, Any]) -> AlgorithmConfig:
        """Return the [algorithm] section of a call, and send a loss written in Python to the actors."""
        algorithm = self._session.learner.algorithm
        if loss is not None:
            if callable(loss):
                name = give(loss)
                if self._sent.get(name) is not loss:  # a notebook cell that is run again defines a new function of this name
                    await self._session.actors.in_processes(unpack, pack_given([name]))
                    self._sent[name] = loss
                loss = Choice(name=name)
            changes = {**changes, "loss": _choice(loss)}
        if unread := sorted(UNUSED_KEYS & changes.keys()):
            raise ConfigError(
                f"trainer.forward_backward: algorithm.{unread[0]} would do nothing here; set it in the session's config, or give "
                "advantages to trainer.batch, and parts of it (batch.minibatches()) to this call"
            )
        if not changes:
            return algorithm
        algorithm = section_of_call("trainer.forward_backward", AlgorithmConfig, {**dict(algorithm), **changes})
        check_algorithm(algorithm)
        return algorithm


def _choice(named: Named) -> Choice:
    if isinstance(named, Choice):
        return named
    return section_of_call("trainer", Choice, {"name": named} if isinstance(named, str) else named)


def _spread_advantages(values: Sequence[float] | torch.Tensor, given: AdvantageInput) -> AdvantageOutput:
    """Spread one advantage per episode over its sampled tokens, in the order of the episodes."""
    try:
        numbers = torch.as_tensor(values, dtype=given.reward.dtype).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ConfigError(f"trainer.batch: advantage = {values!r:.80}: {problem}; expected a number for each episode") from None
    assert given.member is not None
    pairs = torch.stack([given.group, given.member], 1)
    # Number the episodes by their first row: `collate` keeps the rows of an episode together, in the order of the members.
    change = torch.cat([torch.tensor([0]), (pairs[1:] != pairs[:-1]).any(1).long().cumsum(0)])
    count = int(change.max()) + 1 if len(change) else 0
    if len(numbers) != count:
        raise ConfigError(f"trainer.batch: {len(numbers)} advantages for {count} scored episodes; expected one each")
    return AdvantageOutput(on_mask(numbers[change], given.mask, given.offsets))


__all__ = ["LossInput", "LossOutput", "TrainBatch", "Trainer"]
