"""Mixtures: divide the groups of a run among its environments; and draw the groups' tasks.

Interface and registry, then `fixed`, `by_tokens` and `by_success`; the task sources: one sampler per environment and one
mixture over all, both saved in the checkpoint."""

from __future__ import annotations

import logging
import math
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

# Interface

MIXTURES: Registry[Callable[..., Mixture]] = Registry("rollout.mixture", "MIXTURES", "agentrl.rollout.mixtures")

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class EnvOutcome:
    """Outcome of one group. `success`: share (0..1) of successes among its members, None if no member's success is known.
    `tokens`: number of tokens that its members sampled."""

    index: int
    env: str
    success: float | None
    tokens: int


class Mixture(Stateful, ABC):
    """Turns the weights of the environments into their shares of the groups.

    Shares depend on the weights and on the observations so far. `observe` is called only at updates, with outcomes in index
    order, so that with `max_staleness` 0 shares do not depend on which group finished first.
    """

    @abstractmethod
    def shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return each environment's share of the groups, up to a common factor. `weights`: of the current step, each >= 0 and
        not all 0; an environment of weight 0 must get share 0."""

    def observe(self, outcomes: Sequence[EnvOutcome]) -> None:
        """Learn from the groups, filtered ones included, that finished since the last update, in index order."""


def make_mixture(choice: Choice) -> Mixture:
    """Build a mixture. Raises ConfigError for an unknown name or argument and suggests the nearest one."""
    mixture: Mixture = MIXTURES.build(choice.name, choice.args, kind=Mixture)
    return mixture


def pick(shares: Mapping[str, float], run_seed: int, index: int) -> str:
    """Return the environment of group `index`, by a low-discrepancy sequence over the shares.

    The point of [0, 1) depends only on the run's seed and the index, and selects from the shares laid end to end by name.
    Points of consecutive groups are a golden section apart (the additive recurrence of Weyl, with discrepancy O(log n / n)):
    among any n consecutive groups at constant shares, each environment gets its share to within a few groups; independent
    draws would deviate by the order of sqrt(n).
    """
    names = sorted(name for name, share in shares.items() if share > 0)
    point = (uniform(run_seed, 0, "env") + index * GOLDEN) % 1.0
    return names[pick_arm([shares[name] for name in names], point)]


# fixed


@MIXTURES.register("fixed")
@dataclass(kw_only=True)
class FixedMixture(Mixture):
    """Shares equal to the weights, whatever the outcomes."""

    def shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        return dict(weights)


@dataclass(kw_only=True)
class DiscountedMixture(Mixture):
    """Base of mixtures that keep a running mean per environment; older groups are discounted by `decay` per group."""

    decay: Annotated[float, Field(gt=0.0, le=1.0)]

    def __post_init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def _add(self, env: str, value: float, first: float) -> None:
        """Add a group's value to the mean; the prior is `first` groups of value 1."""
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
    """Share of the groups = weight / mean number of sampled tokens per group of the environment.

    So long episodes give an environment no more of the sampling, or of a token-mean loss, than its weight. Older groups are
    discounted by `decay` per group of the same environment. An environment without a finished group counts as the mean of the
    others; before any has finished, all count equally. Tokens of filtered groups count, those of failed groups do not.
    """

    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.98

    def shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        known = self.tokens()
        typical = sum(known.values()) / len(known) if known else 1.0
        return {name: weight / known.get(name, typical) for name, weight in weights.items()}

    def tokens(self) -> dict[str, float]:
        """Return the running mean of tokens per group for each environment that has finished a group."""
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
    """Share = weight x max(`floor`, mean of 4 s (1 - s) over the environment's groups), where s is a group's success rate.

    s (1 - s) is a group's expected learning signal, as in `SuccessWeightedSampler`. It is computed per group, since an
    environment with half of its tasks always solved and half never gives no signal. The prior is one group of value 1; older
    groups are discounted by `decay` per group of the same environment.
    """

    floor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95

    def shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        return {name: weight * max(self.floor, self.learnable(name)) for name, weight in weights.items()}

    def learnable(self, name: str) -> float:
        """Return the running mean of 4 s (1 - s) of an environment."""
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
    """Draws an environment's tasks for groups and passes their outcomes to the sampler, at updates and in index order."""

    def __init__(self, env: EnvRef, sampler: TaskSampler, name: str, run_seed: int, start: StartConfig | None = None) -> None:
        self.env, self.sampler, self.name, self.run_seed = env, sampler, name, run_seed
        self._label = f"rollout.sampler {name!r}"
        self.start = None if start is None else GoldStart(start, env)
        self._starts: list[StartOutcome] = []
        self.drawn: dict[int, TaskChoice] = {}
        """Group index -> task of each group that has neither finished nor been dropped."""
        self._outcomes: list[GroupOutcome] = []

    @cached_property
    def pool(self) -> Sequence[int]:
        """Task seeds that the sampler chooses from; empty without a pool. Computed, and passed to the sampler, on first use."""
        return self.fill()

    def fill(self, say: Callable[[str], None] = log.warning) -> Sequence[int]:
        """Compute the pool and pass it to the sampler; `say`: as for `pool_seeds`."""
        wanted = call_method(self._label, TaskSampler.wants, self.sampler)
        if wanted is None:
            return ()
        env = self.env.build()
        self.pool = seeds = pool_seeds(env, wanted, say)
        env.close()
        call_method(self._label, TaskSampler.use, self.sampler, seeds)
        return seeds

    def variants(self) -> Sequence[Mapping[str, Any]]:
        """Return the sampler's `TaskSampler.variants`."""
        return call_method(self._label, TaskSampler.variants, self.sampler)

    def draw(self, index: int) -> TaskChoice:
        """Return the task of a group: a new one, or the earlier one if the group is rerun."""
        if index not in self.drawn:
            _ = self.pool  # passes the pool to the sampler
            choice = call_method(self._label, TaskSampler.choose, self.sampler, self.run_seed, index)
            self.drawn[index] = choice if self.start is None else self.start.begin(self.run_seed, index, choice)
        return self.drawn[index]

    def finish(self, index: int, success: float | None) -> float | None:
        """Record a finished group's success rate (None: unknown, so the sampler learns nothing). Returns it for the mixture.

        A group that began inside of the gold solution is kept from the sampler and the mixture (None is returned)."""
        choice = self.drawn.pop(index)
        if success is not None and choice.horizon is not None and choice.given:
            self._starts.append(StartOutcome(index, choice.horizon, choice.given, success))
            return None
        if success is not None:
            self._outcomes.append(GroupOutcome(index, choice.bucket, success))
        return success

    def update(self) -> None:
        """Pass the outcomes since the last update to the sampler."""
        # Sorted, because the order in which groups finish differs from run to run.
        outcomes, self._outcomes = sorted(self._outcomes, key=attrgetter("index")), []
        call_method(self._label, TaskSampler.observe, self.sampler, outcomes)
        starts, self._starts = sorted(self._starts, key=attrgetter("index")), []
        if self.start is not None:
            self.start.observe(starts)

    def metrics(self) -> dict[str, float]:
        """Return the sampler's metrics, under `sampler/`; none while a pool that it needs is missing."""
        waits = "pool" not in vars(self) and call_method(self._label, TaskSampler.wants, self.sampler) is not None
        known = {} if waits else call_method(self._label, TaskSampler.metrics, self.sampler)
        found = {f"sampler/{name}": value for name, value in known.items()}
        return found if self.start is None else found | {f"sampler/{k}": v for k, v in self.start.metrics().items()}

    def to_json(self) -> dict[str, Any]:
        """Return the sampler's state, the tasks of running groups, and the outcomes not yet observed."""
        return {
            "name": self.name,
            "state": call_method(self._label, TaskSampler.state, self.sampler),
            "drawn": {str(index): asdict(choice) for index, choice in self.drawn.items()},
            "outcomes": [asdict(outcome) for outcome in self._outcomes],
            **({} if self.start is None else {"start": self.start.state(), "starts": list(map(asdict, self._starts))}),
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `to_json`. Raises ConfigError if another sampler wrote it."""
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
    """An environment of a mixture: its task sampler, its weight, and where its episodes begin."""

    name: str
    env: EnvRef
    sampler: Choice
    weight: Steps = 1.0
    start: StartConfig | None = None


def parts_of(config: TrainConfig) -> list[Part]:
    """Return the environments of a run as parts of its mixture."""
    return [
        Part(env.called, EnvRef.of(env, config.tools), own.sampler, 1.0 if env.weight is None else env.weight, own.start)
        for env, own in ((env, config.alone(env).rollout) for env in config.envs)
    ]


class MixedTasks:
    """Draws an environment and a task for each group, and passes outcomes to mixture and samplers at updates, in index order.

    For its sampler, an environment's groups are numbered separately, so that a task pool is drawn as if there were no other
    environment. With a single environment these numbers equal the group indices.
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

    def fill_pools(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        """Fill the pools of these environments, which is slow for large ones; `say`: receives a line if tasks are missing."""
        for name in names:
            self.sources[name].fill(say)

    def draw(self, index: int) -> TaskChoice:
        """Return the environment and task of a group: new ones, or the earlier ones if the group is rerun."""
        if index not in self._places:
            (name,) = self.sources if not self.several else (pick(self._shares(), self.run_seed, index),)
            self._places[index] = name, self._begun[name] if self.several else index
            self._begun[name] += 1
        name, place = self._places[index]
        return replace(self.sources[name].draw(place), env=name)

    def finish(self, index: int, success: float | None, tokens: int) -> None:
        """Record a finished group's success rate (None: unknown) and number of sampled tokens."""
        name, place = self._places.pop(index)
        self._outcomes.append(EnvOutcome(index, name, self.sources[name].finish(place, success), tokens))

    def forget(self, index: int) -> None:
        """Forget a group that failed, went stale or was cancelled; neither sampler nor mixture learns from it."""
        if index in self._places:
            name, place = self._places.pop(index)
            self.sources[name].drawn.pop(place, None)

    def update(self, step: int) -> None:
        """Pass the outcomes since the last update to samplers and mixture, after update `step`."""
        for source in self.sources.values():
            source.update()
        # Sorted, because the order in which groups finish differs from run to run.
        outcomes, self._outcomes = sorted(self._outcomes, key=attrgetter("index")), []
        call_method(self._label, Mixture.observe, self.mixture, outcomes)
        self._step = step

    def shares(self) -> dict[str, float]:
        """Return the current shares of the groups, which sum to 1."""
        shares = self._shares()
        return {name: share / sum(shares.values()) for name, share in shares.items()}

    def _shares(self) -> dict[str, float]:
        weights = {name: weight_at(weight, self._step) for name, weight in self.weights.items()}
        shares = call_method(self._label, Mixture.shares, self.mixture, weights)
        if shares.keys() != self.weights.keys() or min(shares.values()) < 0 or not 0 < sum(shares.values()) < math.inf:
            expected = f"expected one >= 0 for each of {', '.join(self.weights)}, not all 0"
            raise ConfigError(f"{self._label} returned shares {shares!r:.80}, {expected}")
        return shares

    def metrics(self) -> dict[str, float]:
        """Return the sampler's metrics under `sampler/`. With several environments they are under `sampler/NAME/`, with the
        mixture's under `mixture/NAME/`: `share` and the mixture's own."""
        if not self.several:
            (source,) = self.sources.values()
            return source.metrics()
        found = {f"mixture/{name}/share": share for name, share in self.shares().items()}
        found |= {f"mixture/{key}": value for key, value in call_method(self._label, Mixture.metrics, self.mixture).items()}
        for name, source in self.sources.items():
            found |= {f"sampler/{name}/{key.removeprefix('sampler/')}": value for key, value in source.metrics().items()}
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the state of mixture and samplers, the tasks of running groups, and the outcomes not yet observed. With a
        single environment, only the state of its task source."""
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
        """Restore the state of `to_json`. Raises ConfigError if samplers, mixture or environments differ."""
        if not self.several:
            (source,) = self.sources.values()
            source.load_json(state)
            self._places = {index: (next(iter(self.sources)), index) for index in source.drawn}
            return
        saved = sorted(state.get("samplers", {}))
        if state.get("mixture") != self.name or saved != sorted(self.sources):
            raise ConfigError(
                f"env, rollout.mixture: the checkpoint was written with {state.get('mixture')!r} over "
                f"{saved or 'one environment'}, but the config has {self.name!r} over {sorted(self.sources)}"
            )
        for name, source in self.sources.items():
            source.load_json(state["samplers"][name])
        with user_code(f"{self._label}: load", self.mixture.load, self.mixture):
            self.mixture.load(state["state"])
        self._step, self._begun = state["step"], dict(state["begun"])
        self._places = {int(index): (name, place) for index, (name, place) in state["places"].items()}
        self._outcomes = [EnvOutcome(**outcome) for outcome in state["outcomes"]]
