"""Environments elsewhere: where one is (`env.url`), how it is built here, and what its server says before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from agentrl.config.schema import Choice, EnvConfig
from agentrl.data.trajectory import Json
from agentrl.utils.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from agentrl.contrib.remote_envs.client import Link
    from agentrl.contrib.remote_envs.wire import Asked
    from agentrl.env import ToolEnv

AGENTRL = "agentrl"


@dataclass(frozen=True, slots=True)
class EnvAddress:
    """The server of an environment: its `url`, whose `protocol` it speaks, and the environment variable with its token."""

    url: str
    protocol: Literal["agentrl", "openenv"] = "agentrl"
    token_env: str | None = None

    @classmethod
    def of(cls, config: EnvConfig) -> EnvAddress | None:
        """The address in a config; None if the environment is not elsewhere. Raises ConfigError for one that is none."""
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
        """Whether the server is `agentrl env serve`, which has wrappers, tool sets, gold answers and the reward spec."""
        return self.protocol == AGENTRL

    def token(self) -> str:
        """The server's token, of this process's environment. Raises ConfigError if it is not set."""
        from agentrl.contrib.remote_envs.sessions import token_in

        return "" if self.token_env is None else token_in(self.token_env, "env.token_env")

    def link(self) -> Link:
        """The connection of this process to the server."""
        from agentrl.contrib.remote_envs.client import link_to

        return link_to(self.url, self.token())


def asked(
    env_id: str, params: Mapping[str, Any], sets: Sequence[str], wrappers: Sequence[Choice], max_output: int | None = None
) -> Asked:
    """What a server is asked for."""
    from agentrl.contrib.remote_envs.wire import Asked

    around = tuple({"name": choice.name, "args": choice.args} for choice in wrappers)
    return Asked(env_id, params, tuple(sets), around, max_output)


def build_remote(address: EnvAddress, wanted: Asked, extra: Mapping[str, Any]) -> ToolEnv:
    """An environment of a server of agentrl; `extra`: arguments that every environment takes, such as `scorer`."""
    from agentrl.contrib.remote_envs.client import RemoteEnv

    return RemoteEnv(address.link(), wanted, **extra)


def server_card(address: EnvAddress, wanted: Asked, fresh: bool = False) -> dict[str, Json]:
    """What the server says of such an environment; `fresh`: asked again. Blocks.

    Raises ConfigError if it cannot be reached or speaks another protocol, and UserError for what it refuses.
    """
    from agentrl.contrib.remote_envs.client import card_of

    try:
        return card_of(address.link(), wanted, fresh)
    except EnvError as fault:
        raise ConfigError(f"env.url: {fault}; is this where `agentrl env serve {wanted.id} --http` runs?") from fault
