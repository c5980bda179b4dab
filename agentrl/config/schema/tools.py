"""What an environment uses beside itself: sandboxes, tool servers, and an agent that plays in place of the built-in loop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.config.schema.base import Frozen, NotNegativeInt, PositiveInt, Seconds, Tokens, Unit


class SandboxConfig(Frozen):
    """Where an environment runs what the policy wrote (docs/sandboxes.md)."""

    provider: str = "auto"
    """Who makes the sandboxes: "local", "bubblewrap", "docker", "podman", "e2b", a plug-in's, or "auto": bubblewrap where it
    works, else the local one, as also with `args`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The provider's own arguments, such as `image`."""
    warm: Annotated[NotNegativeInt, Unit("sandboxes")] = 0
    """So many are started before anybody asks, so that an episode does not wait for a start."""
    limit: Annotated[PositiveInt, Unit("sandboxes")] = 64
    """How many run at once in each process that plays episodes; who comes later waits."""

    @model_validator(mode="after")
    def _warm_ones_run_too(self) -> SandboxConfig:
        if self.warm > self.limit:
            raise ValueError(f"warm = {self.warm} is more than limit = {self.limit}: warm sandboxes count as running")
        return self


class McpServerConfig(Frozen):
    """One Model Context Protocol server: the `command` that starts it, or the `url` of one that runs."""

    command: list[str] = Field(default_factory=list)
    """The words of the command that starts the server."""
    url: str | None = None
    """The address of a server that runs already."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, by name."""
    tools: list[str] | None = None
    """Only these of its tools; by default all."""
    prefix: str = ""
    """Text that is put before the name of each of its tools."""
    timeout: Seconds = 30.0
    """Limit of the start, and of every call."""
    max_output: Tokens | None = None
    """Limit of every answer; what is longer is cut, and says so. By default the environment's."""
    check: Literal["strict", "off"] = "strict"
    """"strict": arguments are checked against the schema that the server publishes, before it gets them; "off": it gets what the
    policy wrote, and its own words about it reach the policy."""
    late: Literal["infrastructure", "policy"] = "infrastructure"
    """Who is to blame if a call is late: the "infrastructure" (the episode ends unscored and is tried again), or the "policy",
    for servers that run code that the policy wrote (the episode ends there and is scored)."""


class ToolsConfig(Frozen):
    """Tools in addition to the environment's own."""

    sets: list[str] = Field(default_factory=list)
    """Tool sets: names on the shelves, or paths of files."""
    args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments of those sets that have a state (`files`, `sqlite`, ...), by the set's name. Texts that begin with `./` or `../`
    are paths."""
    mcp: dict[str, McpServerConfig] = Field(default_factory=dict)
    """Model Context Protocol servers, by a name of your choice."""


class AgentConfig(Frozen):
    """An agent that somebody already has and that plays the episodes in place of the built-in loop (docs/agents.md): exactly
    one of `command`, `python` and `url`."""

    command: list[str] = Field(default_factory=list)
    """The words of a program, started for each episode."""
    python: str | None = None
    """"module:function", an async function that plays one episode."""
    url: str | None = None
    """An address that gets a POST for each episode, and answers it when it is done."""
    tools: Literal["mcp", "own"] = "mcp"
    """"mcp": the agent is given the environment's tools, by an MCP server (a function also by a method); "own": it has only tools
    of its own, whose calls and results are read from its requests."""
    user: bool = False
    """The agent can talk with the environment's simulated user; without it an environment that has one is refused."""
    answer: Literal["last_message", "output"] = "last_message"
    """The episode's last word is the policy's "last_message", or the agent's "output": what the command printed, the function
    returned, or the URL answered as "answer"."""
    blame: Literal["infrastructure", "policy"] = "infrastructure"
    """Who is to blame if the agent fails by itself (an exit code other than 0, an exception, an HTTP status): the
    "infrastructure" (the episode is unscored and tried again), or the "policy" (it ends there and is scored)."""
    idle_timeout: Seconds = 120.0
    """Time without a request, a tool call or its end, after which the agent counts as failed."""
    concurrency: Annotated[PositiveInt, Unit("agents")] = 32
    """How many agents run at once in each process that plays."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of the environment variables that a command gets from the run's own, beside PATH, HOME and those of language and time
    zone."""
    env: dict[str, str] = Field(default_factory=dict)
    """Other environment variables of a command, by value."""
    host: str = "127.0.0.1"
    """The address on which the agent reaches the process that plays."""
