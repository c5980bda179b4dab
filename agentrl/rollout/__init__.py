"""Rollouts: engine interface, episode loop, groups, and the group ledger (staleness)."""

import inspect
import sys
import types
from importlib import import_module
from typing import Any


class _CallableModule(types.ModuleType):
    """Makes `agentrl.rollout(...)` the API function, although any import of `agentrl.rollout.episode` binds the name to this
    package."""

    @property
    def function(self) -> Any:
        """The API function."""
        return import_module("agentrl.run.api.functions").rollout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def aio(self, *args: Any, **kwargs: Any) -> Any:
        """Await the same call."""
        return await self.function.aio(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)


sys.modules[__name__].__class__ = _CallableModule
