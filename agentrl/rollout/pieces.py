"""Task samplers and context policies by name, as a config asks for them."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.algorithm.registry import bind
from agentrl.config import Choice
from agentrl.rollout.context.base import ContextPolicy, Stop
from agentrl.rollout.context.compact import Compact
from agentrl.rollout.context.truncate import Truncate
from agentrl.rollout.sampler.base import TaskSampler
from agentrl.rollout.sampler.fresh import UniformSampler
from agentrl.rollout.sampler.staged import StagedSampler
from agentrl.rollout.sampler.weighted import SuccessWeightedSampler

SAMPLERS: dict[str, Callable[..., TaskSampler]] = {
    "staged": StagedSampler,
    "success_weighted": SuccessWeightedSampler,
    "uniform": UniformSampler,
}

CONTEXTS: dict[str, Callable[..., ContextPolicy]] = {
    "compact": Compact,
    "stop": Stop,
    "truncate": Truncate,
}


def make_sampler(choice: Choice) -> TaskSampler:
    """A new sampler. Raises ConfigError for an unknown name or argument, naming the nearest."""
    sampler: TaskSampler = bind("rollout.sampler", SAMPLERS, choice.name, choice.args)()
    return sampler


def make_context(choice: Choice) -> ContextPolicy:
    """A context policy. Raises ConfigError for an unknown name or argument, naming the nearest."""
    context: ContextPolicy = bind("rollout.context", CONTEXTS, choice.name, choice.args)()
    return context
