"""Mixtures: in which shares the groups of a run are divided among its environments; and the source of tasks.

The contract and its registry, then `fixed`, `by_tokens` and `by_success`; the task source asks one
sampler for each environment and one mixture over all, and keeps both in the checkpoint."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any

from pydantic import Field

from agentrl.config import Choice, TrainConfig
from agentrl.config.envs import weight_at
from agentrl.config.schema import StartConfig, Steps
from agentrl.env.catalog import EnvRef
from agentrl.rollout.engine import derive
from agentrl.rollout.samplers import GroupOutcome, Stateful, TaskChoice, TaskSampler, make_sampler, pick_arm, pool_seeds, uniform
from agentrl.rollout.starts import GoldStart, StartOutcome
from agentrl.utils.errors import ConfigError, call_method, user_code
from agentrl.utils.registry import Registry

# The contract

MIXTURES: Registry[Callable[..., Mixture]] = Registry("rollout.mixture", "MIXTURES", "agentrl.rollout.mixtures")

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class EnvOutcome:
    """Outcome of one group of an environment: the share (0..1) of successes among its members, None if the success of no member
    is known, and the tokens that all its members sampled."""

    index: int
    env: str
    success: float | None
    tokens: int


class Mixture(Stateful, ABC):
    """Turns the weights of the environments into their shares of the groups.

    Shares depend on the weights and on observations so far. `observe` is called only at updates, with the outcomes in the
    order of the groups' indices; so with `max_staleness` 0 shares do not depend on which group finished first.
    """

    @abstractmethod
    def shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The shares of the groups, up to a common factor. `weights` are those of the present step, each >= 0 and not all 0; an
        environment of weight 0 must have share 0."""

    def observe(self, outcomes: Sequence[EnvOutcome]) -> None:
        """Learn from the groups that finished since the last update (including filtered ones), by ascending index."""


def make_mixture(choice: Choice) -> Mixture:
    """A new mixture. Raises ConfigError for an unknown name or argument, naming the nearest."""
    mixture: Mixture = MIXTURES.build(choice.name, choice.args, kind=Mixture)
    return mixture


def pick(shares: Mapping[str, float], run_seed: int, index: int) -> str:
    """The environment of group `index`: a point of [0, 1) that depends only on the run's seed and the index falls into one of
    the shares, laid end to end by name.

    Points of consecutive groups are a golden section apart (the additive recurrence of Weyl, whose discrepancy is O(log n / n)):
    among any n consecutive groups of equal shares each environment has its share of them, to within a few, where independent
    draws would be off by the order of sqrt(n).
    """
    names = sorted(name for name, share in shares.items() if share > 0)
    point = (uniform(run_seed, 0, "env") + index * GOLDEN) % 1.0
    return names[pick_arm([shares[name] for name in names], point)]


# fixed


@MIXTURES.register("fixed")
@dataclass(kw_only=True)
class FixedMixture(Mixture):
    """Shares are the weights, and what happens to groups changes none."""

    def shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        return dict(weights)


@dataclass(kw_only=True)
class DiscountedMixture(Mixture):
    """Means over the groups of each environment, in which older ones are discounted by `decay` per group."""

    decay: Annotated[float, Field(gt=0.0, le=1.0)]

    def __post_init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def _add(self, env: str, value: float, first: float) -> None:
        """Count one more group; `first`: what stands for the groups before the first one, and how many of them."""
        total, count = self._sums.get(env, (first, first))
        self._sums[env] = (self.decay * total + value, self.decay * count + 1.0)

    def state(self) -> dict[str, Any]:
        return {name: list(pair) for name, pair in self._sums.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._sums = {name: (total, count) for name, (total, count) in state.items()}


# by_tokens


@MIXTURES.register("by_tokens")
@dataclass(kw_only=True)
class ByTokensMixture(DiscountedMixture):
    """share of the groups = weight / the mean number of tokens that a group of the environment samples.

    So an environment of long episodes takes no more of the sampling, and of a loss that is a mean over tokens, than its weight.
    Older groups are discounted by `decay` per group of the same environment. One without a finished group counts as the mean of
    the others, and before any has finished all count alike. Tokens of filtered groups count, and those of failed groups do not.
    """

    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.98

    def shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        known = self.tokens()
        typical = sum(known.values()) / len(known) if known else 1.0
        return {name: weight / known.get(name, typical) for name, weight in weights.items()}

    def tokens(self) -> dict[str, float]:
        """The running mean of a group's tokens, of the environments that have finished one."""
        return {name: max(total / count, 1.0) for name, (total, count) in self._sums.items()}

    def observe(self, outcomes: Sequence[EnvOutcome]) -> None:
        for outcome in outcomes:
            self._add(outcome.env, outcome.tokens, 0.0)

    def metrics(self) -> dict[str, float]:
        return {f"{name}/group_tokens": value for name, value in self.tokens().items()}


# by_success


@MIXTURES.register("by_success")
@dataclass(kw_only=True)
class BySuccessMixture(DiscountedMixture):
    """share = weight x max(`floor`, the mean of 4 s (1 - s) over the environment's groups), where s is a group's success.

    s (1 - s) is the variance of a 0/1 reward within a group: how much the group can teach (learnability in Rutherford et al.
    2024, arXiv 2408.15099); it is taken group by group, since an environment whose tasks are half solved always and half never
    teaches nothing. The factor 4 makes it 1 at s = 0.5. The mean begins at 1, as in one group, and older groups are discounted
    by `decay` per group of the same environment. `floor` keeps sampling all, so that forgetting is noticed.
    """

    floor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95

    def shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        return {name: weight * max(self.floor, self.learnable(name)) for name, weight in weights.items()}

    def learnable(self, name: str) -> float:
        """The running mean of 4 s (1 - s)."""
        total, count = self._sums.get(name, (1.0, 1.0))
        return total / count

    def observe(self, outcomes: Sequence[EnvOutcome]) -> None:
        for outcome in outcomes:
            if outcome.success is not None:
                self._add(outcome.env, 4.0 * outcome.success * (1.0 - outcome.success), 1.0)

    def metrics(self) -> dict[str, float]:
        return {f"{name}/learnable": self.learnable(name) for name in self._sums}


# Tasks of one environment

log = logging.getLogger(__name__)


class TaskSource:
    """Draws tasks for groups and passes their outcomes to the sampler, at updates and in order."""

    def __init__(self, env: EnvRef, sampler: TaskSampler, name: str, run_seed: int, start: StartConfig | None = None) -> None:
        self.env, self.sampler, self.name, self.run_seed = env, sampler, name, run_seed
        self._label = f"rollout.sampler {name!r}"
        self.start = None if start is None else GoldStart(start, env)
        self._starts: list[StartOutcome] = []
        self.drawn: dict[int, TaskChoice] = {}
        """Tasks of groups that have neither finished nor been forgotten, by index."""
        self._outcomes: list[GroupOutcome] = []

    @cached_property
    def pool(self) -> Sequence[int]:
        """Seeds of the tasks that the sampler chooses from; none if it makes new ones. Determined, and given to it, when first
        asked for."""
        return self.fill()

    def fill(self, say: Callable[[str], None] = log.warning) -> Sequence[int]:
        """Make the pool; `say` as `pool_seeds`."""
        wanted = call_method(self._label, TaskSampler.wants, self.sampler)
        if wanted is None:
            return ()
        env = self.env.build()
        self.pool = seeds = pool_seeds(env, wanted, say)
        env.close()
        call_method(self._label, TaskSampler.use, self.sampler, seeds)
        return seeds

    def variants(self) -> Sequence[Mapping[str, Any]]:
        """Environment parameters of the sampler, as `TaskSampler.variants`."""
        return call_method(self._label, TaskSampler.variants, self.sampler)

    def draw(self, index: int) -> TaskChoice:
        """The task of a group; the same again if it was drawn before (a group that is run again)."""
        if index not in self.drawn:
            _ = self.pool  # which the sampler has from then on
            choice = call_method(self._label, TaskSampler.choose, self.sampler, self.run_seed, index)
            self.drawn[index] = choice if self.start is None else self.start.begin(self.run_seed, index, choice)
        return self.drawn[index]

    def finish(self, index: int, success: float | None) -> float | None:
        """A group finished with this share of successes; None, which says nothing about its task, if the success of no
        member is known. The sampler does not hear of one that was given a part of the solution. Returns the success
        of a whole task, which mixtures may learn from."""
        choice = self.drawn.pop(index)
        if success is not None and choice.horizon is not None and choice.given:
            self._starts.append(StartOutcome(index, choice.horizon, choice.given, success))
            return None
        if success is not None:
            self._outcomes.append(GroupOutcome(index, choice.bucket, success))
        return success

    def update(self) -> None:
        """At an update: the sampler learns from what finished since the last one."""
        # Sorted, because the order in which groups finish differs from run to run.
        outcomes, self._outcomes = sorted(self._outcomes, key=attrgetter("index")), []
        call_method(self._label, TaskSampler.observe, self.sampler, outcomes)
        starts, self._starts = sorted(self._starts, key=attrgetter("index")), []
        if self.start is not None:
            self.start.observe(starts)

    def metrics(self) -> dict[str, float]:
        """The sampler's metrics, under `sampler/`; none before it has the pool that it wants."""
        waits = "pool" not in vars(self) and call_method(self._label, TaskSampler.wants, self.sampler) is not None
        known = {} if waits else call_method(self._label, TaskSampler.metrics, self.sampler)
        found = {f"sampler/{name}": value for name, value in known.items()}
        return found if self.start is None else found | {f"sampler/{k}": v for k, v in self.start.metrics().items()}

    def to_json(self) -> dict[str, Any]:
        """The sampler's state, the choices of running groups, and the outcomes that it has not seen yet."""
        return {
            "name": self.name,
            "state": call_method(self._label, TaskSampler.state, self.sampler),
            "drawn": {str(index): asdict(choice) for index, choice in self.drawn.items()},
            "outcomes": [asdict(outcome) for outcome in self._outcomes],
            **({} if self.start is None else {"start": self.start.state(), "starts": list(map(asdict, self._starts))}),
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of `to_json`. Raises ConfigError if another sampler wrote it."""
        if state["name"] != self.name:
            raise ConfigError(
                f"rollout.sampler: the checkpoint was written with {state['name']!r}, but the config names {self.name!r}"
            )
        if state["state"] or state["drawn"] or state["outcomes"]:  # else nothing was chosen: it may train nothing, without a pool
            _ = self.pool
        with user_code(f"{self._label}: load", self.sampler.load, self.sampler):
            self.sampler.load(state["state"])
        self.drawn = {int(index): TaskChoice(**choice) for index, choice in state["drawn"].items()}
        self._outcomes = [GroupOutcome(**outcome) for outcome in state["outcomes"]]
        if self.start is not None and "start" in state:
            self.start.load(state["start"])
            self._starts = [StartOutcome(**outcome) for outcome in state["starts"]]


# Tasks of all environments


@dataclass(frozen=True, slots=True)
class Part:
    """An environment of a mixture: the sampler of its tasks, its weight, and where its episodes begin."""

    name: str
    env: EnvRef
    sampler: Choice
    weight: Steps = 1.0
    start: StartConfig | None = None


def parts_of(config: TrainConfig) -> list[Part]:
    """The environments of a run as parts of its mixture."""
    return [
        Part(env.called, EnvRef.of(env, config.tools), own.sampler, 1.0 if env.weight is None else env.weight, own.start)
        for env, own in ((env, config.alone(env).rollout) for env in config.envs)
    ]


class MixedTasks:
    """Draws an environment and a task for each group, and passes outcomes to mixture and samplers, at updates and in order.

    The groups of an environment are numbered by themselves for its sampler, so that a pool of tasks is gone through as if they
    were alone. With a single environment these numbers are the groups' own.
    """

    def __init__(self, parts: Sequence[Part], mixture: Choice, run_seed: int) -> None:
        self.name, self.run_seed, self._label = mixture.name, run_seed, f"rollout.mixture {mixture.name!r}"
        self.mixture = make_mixture(mixture)
        self.weights = {part.name: part.weight for part in parts}
        self.several = len(parts) > 1
        self.sources: dict[str, TaskSource] = {}
        for part in parts:
            seed = derive(run_seed, "env", part.name) if self.several else run_seed
            self.sources[part.name] = TaskSource(part.env, make_sampler(part.sampler), part.sampler.name, seed, part.start)
        self._step = 0
        self._begun = dict.fromkeys(self.sources, 0)
        self._places: dict[int, tuple[str, int]] = {}
        self._outcomes: list[EnvOutcome] = []

    def fill_pools(self, say: Callable[[str], None]) -> None:
        """Make the pool of each sampler, which takes long for a large one; `say`: gets a line if it has too few tasks."""
        for source in self.sources.values():
            source.fill(say)

    def draw(self, index: int) -> TaskChoice:
        """The environment and the task of a group; the same again if it was drawn before (a group that is run again)."""
        if index not in self._places:
            (name,) = self.sources if not self.several else (pick(self._shares(), self.run_seed, index),)
            self._places[index] = name, self._begun[name] if self.several else index
            self._begun[name] += 1
        name, place = self._places[index]
        return replace(self.sources[name].draw(place), env=name)

    def finish(self, index: int, success: float | None, tokens: int) -> None:
        """A group finished with this share of successes (None: unknown) and this many sampled tokens."""
        name, place = self._places.pop(index)
        self._outcomes.append(EnvOutcome(index, name, self.sources[name].finish(place, success), tokens))

    def forget(self, index: int) -> None:
        """A group that failed, went stale or was cancelled says nothing about its task, nor about its environment."""
        if index in self._places:
            name, place = self._places.pop(index)
            self.sources[name].drawn.pop(place, None)

    def update(self, step: int) -> None:
        """After update `step`: samplers and mixture learn from what finished since the last one."""
        for source in self.sources.values():
            source.update()
        # Sorted, because the order in which groups finish differs from run to run.
        outcomes, self._outcomes = sorted(self._outcomes, key=attrgetter("index")), []
        call_method(self._label, Mixture.observe, self.mixture, outcomes)
        self._step = step

    def shares(self) -> dict[str, float]:
        """The present shares of the groups, which add up to 1."""
        shares = self._shares()
        return {name: share / sum(shares.values()) for name, share in shares.items()}

    def _shares(self) -> dict[str, float]:
        weights = {name: weight_at(weight, self._step) for name, weight in self.weights.items()}
        shares = call_method(self._label, Mixture.shares, self.mixture, weights)
        if shares.keys() != self.weights.keys() or min(shares.values()) < 0 or not sum(shares.values()):
            expected = f"expected one >= 0 for each of {', '.join(self.weights)}, not all 0"
            raise ConfigError(f"{self._label} returned shares {shares!r:.80}, {expected}")
        return shares

    def metrics(self) -> dict[str, float]:
        """The samplers' metrics under `sampler/`, and, of several environments, `sampler/NAME/`; and those of the mixture under
        `mixture/NAME/`: `share`, and what it learned."""
        if not self.several:
            (source,) = self.sources.values()
            return source.metrics()
        found = {f"mixture/{name}/share": share for name, share in self.shares().items()}
        found |= {f"mixture/{key}": value for key, value in call_method(self._label, Mixture.metrics, self.mixture).items()}
        for name, source in self.sources.items():
            found |= {f"sampler/{name}/{key.removeprefix('sampler/')}": value for key, value in source.metrics().items()}
        return found

    def to_json(self) -> dict[str, Any]:
        """The state of mixture and samplers, the choices of running groups, and the outcomes not yet observed; with a single
        environment, that of its sampler."""
        if not self.several:
            (source,) = self.sources.values()
            return source.to_json()
        return {
            "mixture": self.name,
            "state": call_method(self._label, Mixture.state, self.mixture),
            "step": self._step,
            "begun": self._begun,
            "places": {str(index): list(place) for index, place in self._places.items()},
            "outcomes": [asdict(outcome) for outcome in self._outcomes],
            "samplers": {name: source.to_json() for name, source in self.sources.items()},
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of `to_json`. Raises ConfigError if other samplers, another mixture or other environments wrote it."""
        if not self.several:
            (source,) = self.sources.values()
            source.load_json(state)
            self._places = {index: (next(iter(self.sources)), index) for index in source.drawn}
            return
        there = sorted(state.get("samplers", {}))
        if state.get("mixture") != self.name or there != sorted(self.sources):
            raise ConfigError(
                f"env, rollout.mixture: the checkpoint was written with {state.get('mixture')!r} over "
                f"{there or 'one environment'}, but the config has {self.name!r} over {sorted(self.sources)}"
            )
        for name, source in self.sources.items():
            source.load_json(state["samplers"][name])
        with user_code(f"{self._label}: load", self.mixture.load, self.mixture):
            self.mixture.load(state["state"])
        self._step, self._begun = state["step"], dict(state["begun"])
        self._places = {int(index): (name, place) for index, (name, place) in state["places"].items()}
        self._outcomes = [EnvOutcome(**outcome) for outcome in state["outcomes"]]
