"""Places that environments need: servers (`env.url`), sandboxes, and folders with the files of benchmarks."""

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
class Asked:
    """Environment that a client wants: as `EnvRef`, which a server makes of it."""

    id: str
    params: Mapping[str, Json] = field(default_factory=dict)
    sets: Sequence[str] = ()
    wrappers: Sequence[Mapping[str, Json]] = ()
    max_output: int | None = None

    def row(self) -> dict[str, Json]:
        """As JSON; `of` is the inverse."""
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Json]) -> Asked:
        """Raises ValueError for a row of another shape."""
        try:
            return TypeAdapter(cls).validate_python(row)
        except ValidationError as problem:
            first = problem.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"env.{place}: {first['msg']}, got {first['input']!r}"[:200]) from None


@dataclass(frozen=True, slots=True)
class EnvAddress:
    """The server of an environment: its `url`, whose `protocol` it speaks, and the environment variable with its token."""

    url: str
    protocol: Literal["agentrl", "openenv"] = "agentrl"
    token_env: str | None = None

    @classmethod
    def of(cls, config: EnvConfig) -> EnvAddress | None:
        """The address in a config; None if the environment is not elsewhere. Raises ConfigError for one that is not one."""
        if config.url is None:
            if config.token_env is not None or config.protocol != AGENTRL:
                raise ConfigError("env.protocol, env.token_env: only for an environment elsewhere; set env.url")
            return None
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"env.url = {config.url!r}: expected http://HOST:PORT or https://HOST[:PORT][/PATH]")
        if parts.username or parts.password:
            raise ConfigError("env.url: it has a password in it, which would be written to files; use env.token_env")
        return cls(config.url.rstrip("/"), config.protocol, config.token_env)

    @property
    def ours(self) -> bool:
        """True if the server is `agentrl env serve`, which has wrappers, tool sets, gold answers and the reward spec."""
        return self.protocol == AGENTRL

    def token(self) -> str:
        """The server's token, of this process's environment. Raises ConfigError if it is not set."""
        return "" if self.token_env is None else token_in(self.token_env, "env.token_env")


class RemoteProtocol:
    """A protocol of environment servers, as registered in `PROTOCOLS`."""

    @staticmethod
    def env_class() -> Callable[..., ToolEnv]:
        """Class of the client, built with `name`, `url` and `token`, for servers other than agentrl's."""
        raise NotImplementedError

    @staticmethod
    def describe(address: EnvAddress) -> str:
        """One line about the server for `--dry-run`. Raises ConfigError if it cannot be reached."""
        raise NotImplementedError

    @staticmethod
    def build(address: EnvAddress, wanted: Asked, extra: Mapping[str, Any]) -> ToolEnv:
        """An environment of a server of agentrl; `extra`: arguments that every environment takes, such as `scorer`."""
        raise NotImplementedError

    @staticmethod
    def card(address: EnvAddress, wanted: Asked, fresh: bool) -> dict[str, Json]:
        """The description that a server of agentrl gives of an environment; `fresh`: asked again. Blocks. Raises EnvError if it
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
"""Providers of sandboxes (`agentrl.contrib.sandboxes`), in which environments run the policy's commands."""

SOURCES: Registry[Callable[[], Mapping[str, str]]] = Registry("source", "SOURCES", "agentrl.env")
"""Functions that return the folders of this machine with the files of benchmarks, by the benchmark's name."""
DRIVER_SOURCES = "AGENTRL_SOURCES"
"""Set on the workers of a cluster: `known_sources` of the driver, as JSON."""


def known_sources() -> dict[str, str]:
    """The folders with the files of benchmarks."""
    return {suite: folder for name in SOURCES for suite, folder in SOURCES[name]().items()}


def module_folder(module: str) -> Path | None:
    """The folder of an importable top-level package, which is not imported; else None."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]).resolve() if places else None


def token_in(variable: str, key: str) -> str:
    """Raises ConfigError if the environment variable is not set."""
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"{key}: the environment variable {variable} is not set, which has the server's token")
    remember(token)
    return token
