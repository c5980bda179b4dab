"""Callbacks of a run: functions called after an update or a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agentrl.config import Choice
from agentrl.data.trajectory import Group
from agentrl.rollout.collector import call_user_function
from agentrl.utils.errors import did_you_mean
from agentrl.utils.registry import Registry

HOOKS = ("on_step", "on_group")


class Callback:
    """Observes a run, in the driver. Methods may be coroutine functions; an exception ends the run and names the callback."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                hint = did_you_mean(name, HOOKS, f"known: {', '.join(HOOKS)}")
                raise TypeError(f"{cls.__name__}.{name}: no run calls it; {hint}")

    def on_step(self, row: Mapping[str, Any], session: Any) -> Any:
        """Called after update `row["step"]`; `row`: as in metrics.jsonl, `session`: the run's live parts (run/session.py)."""
        return None

    def on_group(self, group: Group) -> Any:
        """Called with a finished group with enough scored members, before filters decide whether it is trained."""
        return None


class Functions(Callback):
    """Callback made of functions."""

    def __init__(
        self, on_step: Callable[[Mapping[str, Any], Any], Any] | None = None, on_group: Callable[[Group], Any] | None = None
    ) -> None:
        given = {"on_step": on_step, "on_group": on_group}
        vars(self).update({name: function for name, function in given.items() if function is not None})


CALLBACKS: Registry[Callable[..., Callback]] = Registry("callbacks", "CALLBACKS", "agentrl.run.callbacks")


class Callbacks:
    """All callbacks of a run, in order."""

    def __init__(self, choices: Sequence[Choice] = (), more: Sequence[Callback] = ()) -> None:
        """Make the configured callbacks and append `more`. Raises ConfigError for an unknown name or argument."""
        self.all = [(choice.name, CALLBACKS.build(choice.name, choice.args, kind=Callback)) for choice in choices]
        self.all += [(type(one).__name__, one) for one in more]

    async def call(self, hook: Literal["on_step", "on_group"], *args: Any) -> None:
        """Call a method of each callback. Raises CallbackError that names the callback or its function."""
        for name, one in self.all:
            called = getattr(vars(one).get(hook), "__qualname__", name)
            await call_user_function(f"callback {hook} {called!r}", getattr(one, hook), *args)
