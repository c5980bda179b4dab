"""What of an environment is copied: snapshots, forks, and copies of an episode that has just begun."""

from __future__ import annotations

import copy
from typing import Any, Self

from agentrl.env.copying import Copier, Snapshot, copier, copy_parts
from agentrl.env.hooks import EnvHooks
from agentrl.env.toolside import ToolSide
from agentrl.tool import ToolSet


class Forkable(ToolSide):
    """Copies of a `ToolEnv` in its episode's state: all attributes but those that the class names in `shared`."""

    _random_of: Any = None
    _awaited: bool = False

    @property
    def np_random(self) -> Any:  # type: ignore[override]
        """The generator of `reset`'s seed. A copy of an environment gets a copy of it when it asks for it."""
        if self._np_random is None and self._random_of is not None:
            self._np_random = copy.deepcopy(self._random_of)
        return super().np_random

    @np_random.setter
    def np_random(self, value: Any) -> None:
        self._np_random = value

    def snapshot(self) -> Snapshot:
        """The current episode, detached from this environment. Picklable if its attributes are."""
        return Snapshot(type(self).__name__, copy_parts(self, self, self._unshared()))

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of an environment of the same class; the snapshot stays usable.

        Raises ValueError for a snapshot of another class.
        """
        if snapshot.owner != type(self).__name__:
            raise ValueError(f"a snapshot of {snapshot.owner} does not fit {type(self).__name__}")
        for name in set(self._unshared()) - set(snapshot.parts):
            del self.__dict__[name]
        self.__dict__.update(snapshot.thaw(self))

    def fork(self) -> Self:
        """A second environment in the same state; from here on neither affects the other.

        An environment with attributes that cannot be copied (a connection, a process) overrides this.
        """
        # Spaces are left out: the cached action space refers to this environment's toolbox.
        forked = type(self).__new__(type(self))
        forked.__dict__.update({name: value for name, value in self.__dict__.items() if name not in _SPACES})
        forked.__dict__.update(copy_parts(self, forked, self._unshared()))
        return forked

    def copier(self) -> Copier | None:
        """What makes environments in the state of this one, which is then left as it is. None if that may not be: it `holds`
        something, or its opening is awaited, and so not the same in every episode."""
        if self.holds or self._awaited:
            return None
        return copier(self, self._unshared() if type(self).fork is Forkable.fork else None)

    @property
    def holds(self) -> bool:
        """Whether an episode may hold something outside of this object, that has to be freed: a `teardown` of its own or sessions
        say so."""
        frees = any(type(item).close is not ToolSet.close for item in self._sets.values())
        return frees or bool(self._sessions) or type(self).teardown is not EnvHooks.teardown

    def _unshared(self) -> list[str]:
        kept = _SHARED | self.shared
        return [name for name in self.__dict__ if name not in kept]


_SPACES = frozenset({"observation_space", "action_space"})
_SHARED = _SPACES | {
    "scorer",
    "spec",
    "split",
    "render_mode",
    "initial_seed",
    "teardown_timeout",
    "_tools_before",
    "_user_tools_before",
    "opening_timeout",
    "_sources",
    "_set_makers",
    "_built_with",
}
