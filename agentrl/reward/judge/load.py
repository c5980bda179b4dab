"""litellm, loaded on first use."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

from agentrl.errors import DependencyError

_IMPORTING = threading.Lock()


def load_litellm() -> Any:
    """litellm, imported on first use (it takes seconds). Its price table comes from the package, not the network."""
    name = "LITELLM_LOCAL_MODEL_COST_MAP"
    with _IMPORTING:  # the environment variable is set for the import only; concurrent imports must not see each other's
        before = os.environ.get(name)
        os.environ[name] = "True"
        try:
            litellm = importlib.import_module("litellm")
        except ImportError as error:
            raise DependencyError("API models need litellm: pip install 'agentrl[litellm]'") from error
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
    setattr(litellm, "suppress_debug_info", True)  # noqa: B010 - litellm has no types
    return litellm
