"""What is known of a group from its members alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from agentrl.trajectory import Group, Trajectory


def alike(group: Group) -> bool:
    """Whether all scored members, and the greedy episode if there is one, have the same reward (zero variance)."""
    return len({t.reward for t in [*group.scored(), *([group.baseline] if group.baseline else [])]}) == 1


def roots(group: Group) -> list[Trajectory]:
    """The scored members that were played from the beginning: draws of the policy that do not depend on each other, unlike an
    episode and its branches."""
    return [member for member in group.scored() if member.parent is None]


def unscored_cause(trajectory: Trajectory) -> str:
    """Why an episode has no score: the fault that ended it, or `reward_spec`, whose root was null."""
    return trajectory.stop.value if trajectory.stop.infrastructure else "reward_spec"


def first_of(error: BaseException) -> BaseException:
    """The first error of a group of errors, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def more(count: int, factor: float) -> int:
    """How many more than `count` an oversampling factor starts (rounded up; 1e-9 absorbs 1.1 x 10 = 11.000..01)."""
    return math.ceil(count * (factor - 1.0) - 1e-9)


def sound(members: Mapping[int, Trajectory]) -> int:
    """How many members ended without a fault of the infrastructure."""
    return sum(not trajectory.stop.infrastructure for trajectory in members.values())
