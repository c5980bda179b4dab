"""A room that is also a call: `agentrl.rollout` is a package of this library, and `agentrl.rollout(...)` plays episodes.

Importing `agentrl.rollout.episode` anywhere makes `agentrl.rollout` the package, whatever `agentrl/__init__.py` says; so the
package itself can be called.
"""

from __future__ import annotations

import inspect
import types
from importlib import import_module
from typing import Any


class CallableModule(types.ModuleType):
    """A package whose call is the function `rollout` of the API, loaded when it is called."""

    @property
    def function(self) -> Any:
        """The function itself."""
        return import_module("agentrl.run.api.functions").rollout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def aio(self, *args: Any, **kwargs: Any) -> Any:
        """The same call, awaited."""
        return await self.function.aio(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)
