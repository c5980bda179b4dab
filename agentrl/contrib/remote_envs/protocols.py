"""Clients of environment servers, by `env.protocol`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl.contrib.remote_envs.client import RemoteEnv, card_of, link_to
from agentrl.contrib.remote_envs.openenv import OpenEnv, action_schema
from agentrl.data.trajectory import Json
from agentrl.env import ToolEnv
from agentrl.env.address import PROTOCOLS, Asked, EnvAddress, RemoteProtocol


@PROTOCOLS.register("agentrl")
class AgentrlProtocol(RemoteProtocol):
    """The protocol of `agentrl env serve --http`."""

    @staticmethod
    def build(address: EnvAddress, wanted: Asked, extra: Mapping[str, Any]) -> ToolEnv:
        return RemoteEnv(link_to(address.url, address.token()), wanted, **extra)

    @staticmethod
    def card(address: EnvAddress, wanted: Asked, fresh: bool) -> dict[str, Json]:
        return card_of(link_to(address.url, address.token()), wanted, fresh)


@PROTOCOLS.register("openenv")
class OpenEnvProtocol(RemoteProtocol):
    """OpenEnv's."""

    @staticmethod
    def env_class() -> Callable[..., ToolEnv]:
        return OpenEnv

    @staticmethod
    def describe(address: EnvAddress) -> str:
        fields = ", ".join(action_schema(address.url, address.token()).get("properties", {})) or "none"
        return f"environment: {address.url} (OpenEnv); fields of an action: {fields}"
