"""litellm, loaded on first use, and how its calls are told an address."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from agentrl.config.references import check_base
from agentrl.errors import DependencyError
from agentrl.redaction import basic, learn

_IMPORTING = threading.Lock()


def addressed(base: str | None, key: str) -> dict[str, Any]:
    """What a call of litellm's gets for a server of one's own: its address, with references resolved, and the name and password
    that are in it as a header, since litellm's asynchronous calls fail on those in an address. `key`: its key in the config.
    Raises ConfigError for a variable that is not set, and for a query in the address."""
    address = check_base(base, key)
    if not address:
        return {}
    parts = urlsplit(address)
    if parts.username is None and parts.password is None:
        return {"api_base": address}
    learn(address)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return {"api_base": bare, "extra_headers": {"Authorization": f"Basic {basic(address)}"}}


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
