"""Callbacks of a run: functions that are called after an update or a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agentrl.config import Choice
from agentrl.data.trajectory import Group
from agentrl.rollout.collector import call_user_function
from agentrl.utils.registry import Registry


class Callback:
    """Watches a run, in the driver. Either method may be a coroutine function; what it raises ends the run and names it."""

    def on_step(self, row: Mapping[str, Any], session: Any) -> Any:
        """After update `row["step"]`: `row` is that of metrics.jsonl, `session` the live parts of the run (Session of
        run/session.py)."""
        return None

    def on_group(self, group: Group) -> Any:
        """A finished group with enough scored members, before anything decides whether it is trained."""
        return None


class Functions(Callback):
    """The same from functions."""

    def __init__(
        self, on_step: Callable[[Mapping[str, Any], Any], Any] | None = None, on_group: Callable[[Group], Any] | None = None
    ) -> None:
        given = {"on_step": on_step, "on_group": on_group}
        vars(self).update({name: function for name, function in given.items() if function is not None})


CALLBACKS: Registry[Callable[..., Callback]] = Registry("callbacks", "CALLBACKS", "agentrl.run.callbacks")


class Callbacks:
    """All callbacks of a run, in order."""

    def __init__(self, choices: Sequence[Choice] = (), more: Sequence[Callback] = ()) -> None:
        """Raises ConfigError for an unknown name or argument."""
        self.all = [(choice.name, CALLBACKS.build(choice.name, choice.args, kind=Callback)) for choice in choices]
        self.all += [(type(one).__name__, one) for one in more]

    async def call(self, hook: Literal["on_step", "on_group"], *args: Any) -> None:
        """Call this method of each. Raises CallbackError, which names the callback, or the function that stands for it."""
        for name, one in self.all:
            called = getattr(vars(one).get(hook), "__qualname__", name)
            await call_user_function(f"callback {hook} {called!r}", getattr(one, hook), *args)
