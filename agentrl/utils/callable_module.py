"""Make a package callable: `agentrl.rollout` is a package, and `agentrl.rollout(...)` runs episodes.

Any import of `agentrl.rollout.episode` binds `agentrl.rollout` to the package, whatever `agentrl/__init__.py` says; so the
package itself must be callable.
"""

from __future__ import annotations

import inspect
import types
from importlib import import_module
from typing import Any


class CallableModule(types.ModuleType):
    """A package whose call is the API function `rollout`, imported on first use."""

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
