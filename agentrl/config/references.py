"""Which keys of a config may refer to environment variables (`env:NAME`), so that no reference is taken for plain text."""

from __future__ import annotations

from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from agentrl.config.schema import TrainConfig
from agentrl.errors import ConfigError
from agentrl.redaction import references, resolved

TAKEN = (
    "env.params", "env.system", "env.wrappers", "env.tools.args", "env.tools.mcp", "env.sandbox.args", "env.sft.params",
    "env.sft.gate_params", "tools.args", "tools.mcp", "sft.params", "sft.gate_params", "agent.command", "agent.env", "agent.url",
    "api.base", "api.args", "reward.judge.api_base", "reward.judge.args", "trackers.args",
)  # fmt: skip
"""Keys whose texts, or those below them, are resolved where they are used."""


def check_references(config: TrainConfig) -> None:
    """Raise ConfigError for a reference at a key that takes none, for a variable that is not set, and for an address that no API
    can be asked at.

    Reads: env, tools, sft, agent, api, reward, trackers, engine_args.
    """
    for key, text in references(config.model_dump(mode="json", exclude_none=True)):
        if not any(fnmatchcase(key, pattern) for name in TAKEN for pattern in (name, f"{name}.*")):
            raise ConfigError(
                f"{key} = {text!r}: a reference to an environment variable is not resolved here, and would be taken for plain "
                f"text; the keys that take one: {', '.join(TAKEN)}"
            )
        resolved(text, key)
    check_base(config.api.base, "api.base")
    check_base(config.reward.judge.api_base, "reward.judge.api_base")


def check_base(address: str | None, key: str) -> str:
    """The address of an API, with references resolved; "" for None. Raises ConfigError for a variable that is not set, and for an
    address with a query or a fragment: what is asked is written behind all of it, `/chat/completions` into the query."""
    found = str(resolved(address or "", key))
    parts = urlsplit(found)
    if "?" in found or "#" in found:
        server = parts.netloc.rpartition("@")[2]
        bare = f"{parts.scheme}://{server}{parts.path}"
        raise ConfigError(
            f"{key}: the address of {bare} goes on with a ? or #, and the path that is asked ({parts.path}/chat/completions) "
            f"would come after it; write {bare}, and give a key as the variable that litellm reads (OPENAI_API_KEY, ...) or as "
            f"a name and password: {parts.scheme}://NAME:${{env:PASSWORD}}@{server}{parts.path}"
        )
    return found
