"""A room that is also a call: `agentrl.rollout` is a package of this library, and `agentrl.rollout(...)` plays episodes.

Importing `agentrl.rollout.episode` anywhere makes `agentrl.rollout` the package, whatever `agentrl/__init__.py` says; so the
package itself can be called.
"""

from __future__ import annotations

import inspect
import sys
import types
from importlib import import_module
from typing import Any


class CallableModule(types.ModuleType):
    """A package whose call is that of a function in another module, loaded when it is called."""

    _call: tuple[str, str]

    @property
    def function(self) -> Any:
        """The function itself."""
        module, name = self._call
        return getattr(import_module(module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def aio(self, *args: Any, **kwargs: Any) -> Any:
        """The same call, awaited."""
        return await self.function.aio(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)


def make_callable(package: str, module: str, name: str) -> None:
    """Let the imported `package` be called as `module.name`."""
    made = sys.modules[package]
    made.__class__ = CallableModule
    made._call = module, name  # type: ignore[attr-defined]
