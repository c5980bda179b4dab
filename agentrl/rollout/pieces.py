"""Task samplers and context policies by name, as a config asks for them."""

from __future__ import annotations

from agentrl.config import Choice
from agentrl.rollout.context.base import CONTEXTS, ContextPolicy
from agentrl.rollout.sampler.base import SAMPLERS, TaskSampler


def make_sampler(choice: Choice) -> TaskSampler:
    """A new sampler. Raises ConfigError for an unknown name or argument, naming the nearest."""
    sampler: TaskSampler = SAMPLERS.bind(choice.name, choice.args)()
    return sampler


def make_context(choice: Choice) -> ContextPolicy:
    """A context policy. Raises ConfigError for an unknown name or argument, naming the nearest."""
    context: ContextPolicy = CONTEXTS.bind(choice.name, choice.args)()
    return context
