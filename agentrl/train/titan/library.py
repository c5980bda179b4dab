"""The package torchtitan, of which models and parallelism are used: no trainer, no data, no checkpoints."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from agentrl.errors import DependencyError

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def require_torchtitan() -> None:
    """Make torchtitan importable. Raises DependencyError if it is not installed, or is another version than it works with.

    Its models import Triton kernels for one way to exchange tokens between experts, which is not used here. Without Triton,
    which builds of torch for CPUs lack, a module that only refuses to be called is put in place of these kernels.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise DependencyError("model.engine = \"titan\" needs torchtitan: pip install 'agentrl[titan]'")
    if KERNELS not in sys.modules and importlib.util.find_spec("triton") is None:
        sys.modules[KERNELS] = _Missing(KERNELS)
    try:
        import torchtitan.models.llama3
        import torchtitan.models.qwen3  # noqa: F401
    except ImportError as error:
        reason = "this torchtitan is not one that agentrl works with (see the extra `titan`), or a package of its is missing"
        raise DependencyError(f'model.engine = "titan": {reason}: {error}') from error


class _Missing(ModuleType):
    """A module whose names are functions that raise."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise DependencyError(f"{self.__name__}.{name} needs Triton")

        return refuse
