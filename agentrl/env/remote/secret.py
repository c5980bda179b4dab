"""The secret token of a server, and the ways in which it is shown."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from agentrl.env.remote.sessions import RefusedError
from agentrl.errors import ConfigError
from agentrl.redaction import remember

SHORTEST = 16


class Secret:
    """The token of trainers, and one made of it for agents: who has only the second can play, and read no gold answer."""

    def __init__(self, token: str) -> None:
        """Raises ConfigError for a token that could be guessed."""
        if len(token) < SHORTEST:
            raise ConfigError(f"the server's token has {len(token)} characters; expected at least {SHORTEST}, random ones")
        self.token = token
        self.player = hmac.new(token.encode(), b"openenv", hashlib.sha256).hexdigest()[:32]

    @classmethod
    def of(cls, variable: str | None) -> Secret:
        """The token in an environment variable, or a new one. Raises ConfigError if the variable is not set."""
        if variable is None:
            return cls(secrets.token_urlsafe(24))
        return cls(token_in(variable, "--token-env"))

    def check(self, authorization: str) -> None:
        """Raises RefusedError unless the header has the token. Compared in constant time: how long it takes tells nothing."""
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
            how = "wants another token than this one" if authorization else "wants its token"
            raise RefusedError(401, "token", f"the server {how}, as `Authorization: Bearer TOKEN`")

    def check_player(self, shown: str) -> None:
        """The same for the agents' token."""
        if not hmac.compare_digest(shown.encode(), self.player.encode()):
            raise RefusedError(401, "token", "this address has another token than the server printed for OpenEnv")


def token_in(variable: str, key: str) -> str:
    """Raises ConfigError if the environment variable is not set."""
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"{key}: the environment variable {variable} is not set, which has the server's token")
    remember(token)
    return token
