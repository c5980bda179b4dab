"""Addresses that environments need: servers (`env.url`), sandbox providers, and folders with benchmark files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from agentrl.config.schema import EnvConfig
from agentrl.data.trajectory import Json
from agentrl.utils.errors import ConfigError
from agentrl.utils.redaction import remember
from agentrl.utils.registry import Registry

if TYPE_CHECKING:
    from agentrl.env import ToolEnv


AGENTRL = "agentrl"


@dataclass(frozen=True, slots=True)
class EnvRequest:
    """A client's request for an environment, from which the server makes an `EnvRef`."""

    id: str
    params: Mapping[str, Json] = field(default_factory=dict)
    sets: Sequence[str] = ()
    wrappers: Sequence[Mapping[str, Json]] = ()
    max_output: int | None = None

    def row(self) -> dict[str, Json]:
        """Return the request as JSON; `of` is the inverse."""
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Json]) -> EnvRequest:
        """Read a request from JSON. Raises ValueError for a row of another form."""
        try:
            return TypeAdapter(cls).validate_python(row)
        except ValidationError as problem:
            first = problem.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"env.{place}: {first['msg']}, got {first['input']!r}"[:200]) from None


@dataclass(frozen=True, slots=True)
class EnvAddress:
    """The server of an environment: `url`, `protocol`, and the environment variable with its token."""

    url: str
    protocol: Literal["agentrl", "openenv"] = "agentrl"
    token_env: str | None = None

    @classmethod
    def of(cls, config: EnvConfig) -> EnvAddress | None:
        """Read the address from a config; None if the environment is local. Raises ConfigError for an invalid one."""
        if config.url is None:
            if config.token_env is not None or config.protocol != AGENTRL:
                raise ConfigError("env.protocol, env.token_env: only for a remote environment. Set env.url")
            return None
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"env.url = {config.url!r}: expected http://HOST:PORT or https://HOST[:PORT][/PATH]")
        if parts.username or parts.password:
            raise ConfigError("env.url: it has a password in it, which would be written to files; use env.token_env")
        return cls(config.url.rstrip("/"), config.protocol, config.token_env)

    @property
    def is_agentrl(self) -> bool:
        """True for a server of `agentrl env serve`: with wrappers, tool sets, gold answers and reward specs."""
        return self.protocol == AGENTRL

    def token(self) -> str:
        """Read the server's token from the environment variable; "" without one. Raises ConfigError if it is not set."""
        return "" if self.token_env is None else token_in(self.token_env, "env.token_env")


class RemoteProtocol:
    """A protocol of environment servers, as registered in `PROTOCOLS`."""

    @staticmethod
    def env_class() -> Callable[..., ToolEnv]:
        """Return the client class for servers other than agentrl's; its arguments: `name`, `url`, `token`."""
        raise NotImplementedError

    @staticmethod
    def describe(address: EnvAddress) -> str:
        """Describe the server in one line, for `--dry-run`. Raises ConfigError if it cannot be reached."""
        raise NotImplementedError

    @staticmethod
    def build(address: EnvAddress, wanted: EnvRequest, extra: Mapping[str, Any]) -> ToolEnv:
        """Build the client of an agentrl server's environment; `extra`: base arguments such as `scorer`."""
        raise NotImplementedError

    @staticmethod
    def card(address: EnvAddress, wanted: EnvRequest, fresh: bool) -> dict[str, Json]:
        """Fetch an environment's description from an agentrl server, uncached if `fresh`. Blocks. Raises EnvError if the server
        does not answer."""
        raise NotImplementedError


PROTOCOLS: Registry[type[RemoteProtocol]] = Registry("env.protocol", "PROTOCOLS", "agentrl.env")

SANDBOXES: Registry[Callable[..., Any]] = Registry(
    "env.sandbox.provider",
    "SANDBOXES",
    "agentrl.env",
    traits={
        "images": "runs a container image, so a task that needs one can run",
        "lasting": "a process that a command leaves in the background goes on until the sandbox stops",
        "alone": "can forbid Python code to start any process (`SandboxSpec.processes`)",
        "remote": "runs on other machines, so it needs a key and costs money",
    },
)
"""Sandbox providers (`agentrl.contrib.sandboxes`); environments run the policy's commands in sandboxes."""

SOURCES: Registry[Callable[[], Mapping[str, str]]] = Registry("source", "SOURCES", "agentrl.env")
"""Functions that map benchmark names to the folders with their files on this machine."""
DRIVER_SOURCES = "AGENTRL_SOURCES"
"""Environment variable of cluster workers: the driver's `known_sources` as JSON."""


def known_sources() -> dict[str, str]:
    """Return the folders with benchmark files, by benchmark name."""
    return {suite: folder for name in SOURCES for suite, folder in SOURCES[name]().items()}


def module_folder(module: str) -> Path | None:
    """Find the folder of a top-level package without importing it; None if not found."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]).resolve() if places else None


def token_in(variable: str, key: str) -> str:
    """Read a token and register it for redaction. Raises ConfigError if the environment variable is not set."""
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"{key}: the environment variable {variable} is not set. Set it to the server's token")
    remember(token)
    return token
