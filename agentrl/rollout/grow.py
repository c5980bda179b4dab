"""Groups that grow where they say nothing yet: more members of a task that all have won, or that none has (`rollout.grow`)."""

from __future__ import annotations

from agentrl.config import RolloutConfig
from agentrl.rollout.group import alike, more
from agentrl.trajectory import Group


def largest(config: RolloutConfig) -> int:
    """The most members that a group may have."""
    return config.group_size + more(config.group_size, config.grow)


def growth(group: Group, config: RolloutConfig) -> range:
    """The numbers of the members that a group is given besides those that have all ended: none if their scores differ, none is
    scored, or it is as large as it may be. A member's draw depends on its number alone, not on when it was begun."""
    size = len(group.trajectories)
    return range(size, min(size + config.group_size, largest(config)) if alike(group) else size)
