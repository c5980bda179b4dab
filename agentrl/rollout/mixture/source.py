"""Which environment and which task each group gets: one task sampler for each environment, and one mixture over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentrl.catalog import EnvRef
from agentrl.config import Choice, TrainConfig
from agentrl.config.envs import alone, weight_at
from agentrl.config.schema import StartConfig, Steps
from agentrl.errors import ConfigError
from agentrl.rollout.mixture.base import EnvOutcome, make_mixture, pick
from agentrl.rollout.sampler.base import TaskChoice, make_sampler
from agentrl.rollout.sampler.source import TaskSource
from agentrl.rollout.seeds import derive


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
    parts = []
    for env in config.envs:
        one = alone(config, env)
        weight = 1.0 if env.weight is None else env.weight
        parts.append(Part(env.called, EnvRef.of(one), one.rollout.sampler, weight, one.rollout.start))
    return parts


class MixedTasks:
    """Draws an environment and a task for each group, and passes outcomes to mixture and samplers, at updates and in order.

    The groups of an environment are numbered by themselves for its sampler, so that a pool of tasks is gone through as if they
    were alone. With a single environment these numbers are the groups' own.
    """

    def __init__(self, parts: Sequence[Part], mixture: Choice, run_seed: int) -> None:
        self.name, self.run_seed = mixture.name, run_seed
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

    def draw(self, index: int) -> TaskChoice:
        """The environment and the task of a group; the same again if it was drawn before (a group that is run again)."""
        if index not in self._places:
            (name,) = self.sources if not self.several else (pick(self._shares(), self.run_seed, index),)
            self._places[index] = name, self._begun[name] if self.several else index
            self._begun[name] += 1
        name, place = self._places[index]
        return replace(self.sources[name].draw(place), env=name)

    def finished(self, index: int, success: float | None, tokens: int) -> None:
        """A group finished with this share of successes (None: unknown) and so many sampled tokens."""
        name, place = self._places.pop(index)
        whole = self.sources[name].finished(place, success)
        self._outcomes.append(EnvOutcome(index, name, whole, tokens))

    def forget(self, index: int) -> None:
        """A group that failed, went stale or was cancelled says nothing about its task, nor about its environment."""
        if index in self._places:
            name, place = self._places.pop(index)
            self.sources[name].forget(place)

    def update(self, step: int) -> None:
        """After update `step`: samplers and mixture learn from what finished since the last one."""
        for source in self.sources.values():
            source.update()
        # Sorted, because the order in which groups finish differs from run to run.
        outcomes, self._outcomes = sorted(self._outcomes, key=lambda outcome: outcome.index), []
        self.mixture.observe(outcomes)
        self._step = step

    def shares(self) -> dict[str, float]:
        """The present shares of the groups, which add up to 1."""
        shares = self._shares()
        return {name: share / sum(shares.values()) for name, share in shares.items()}

    def _shares(self) -> dict[str, float]:
        return self.mixture.shares({name: weight_at(weight, self._step) for name, weight in self.weights.items()})

    def metrics(self) -> dict[str, float]:
        """The samplers' metrics under `sampler/`, and, of several environments, `sampler/NAME/`; and those of the mixture under
        `mixture/NAME/`: `share`, and what it learned."""
        if not self.several:
            (source,) = self.sources.values()
            return source.metrics()
        found = {f"mixture/{name}/share": share for name, share in self.shares().items()}
        found |= {f"mixture/{key}": value for key, value in self.mixture.metrics().items()}
        for name, source in self.sources.items():
            found |= {f"sampler/{name}/{key.removeprefix('sampler/')}": value for key, value in source.metrics().items()}
        return found

    def to_json(self) -> dict[str, Any]:
        """The state of mixture and samplers, the choices of running groups, and the outcomes not yet told; with a single
        environment, that of its sampler."""
        if not self.several:
            (source,) = self.sources.values()
            return source.to_json()
        return {
            "mixture": self.name,
            "state": self.mixture.state(),
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
            self._places = {index: (next(iter(self.sources)), index) for index in source.running()}
            return
        there = sorted(state.get("samplers", {}))
        if state.get("mixture") != self.name or there != sorted(self.sources):
            raise ConfigError(
                f"env, rollout.mixture: the checkpoint was written with {state.get('mixture')!r} over "
                f"{there or 'one environment'}, but the config has {self.name!r} over {sorted(self.sources)}"
            )
        for name, source in self.sources.items():
            source.load_json(state["samplers"][name])
        self.mixture.load(state["state"])
        self._step, self._begun = state["step"], dict(state["begun"])
        self._places = {int(index): (name, place) for index, (name, place) in state["places"].items()}
        self._outcomes = [EnvOutcome(**outcome) for outcome in state["outcomes"]]
