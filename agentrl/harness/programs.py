"""The three kinds of agents: a command, an async function, a URL."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx

from agentrl.config.schema import AgentConfig
from agentrl.errors import ConfigError
from agentrl.harness.brief import Brief, Outcome
from agentrl.harness.clean import text_of
from agentrl.harness.process import AgentProcess
from agentrl.plain_data import read_json
from agentrl.proxies import exempt, exempt_own, through_proxy
from agentrl.redaction import learn, redact, resolved
from agentrl.shelves import function_named
from agentrl.trajectory import Json, ToolResult

ALWAYS_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Environment variables that every command gets of the run's own."""
_LONGEST_VARIABLE = 100_000
"""Bytes; Linux takes 131,072 with the name."""
_SHOWN = 2_000
"""Characters of an agent's own words in an error."""


MAX_ANSWER = 16 << 20
"""Bytes of the answer of an agent behind a URL."""


class Doors(Protocol):
    """What the episode does for an agent that runs in this process."""

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult: ...

    async def say(self, text: str) -> list[str] | None: ...


class Program(Protocol):
    """An agent that plays one episode at a time, many side by side."""

    async def run(self, brief: Brief, doors: Doors, record: dict[str, Json]) -> Outcome:
        """Play an episode to the agent's own end. Cancelled, it ends the agent and all its processes; `record` then also has
        what it wrote so far."""
        ...

    async def close(self) -> None:
        """Free everything; idempotent."""
        ...


def program_of(config: AgentConfig) -> Program:
    """The agent that the config names. Raises ConfigError unless it names exactly one that is there."""
    given = [name for name in ("command", "python", "url") if getattr(config, name)]
    if len(given) != 1:
        said = " and ".join(f"agent.{name}" for name in given) or "none"
        raise ConfigError(f"[agent]: expected exactly one of agent.command, agent.python and agent.url, got {said}")
    if config.command:
        return Command(config)
    return Function(config.python) if config.python else Remote(config.url or "")


class Command:
    """A program that is started for each episode."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ConfigError if there is no such program, or a variable that it should get is not set."""
        learn({"command": config.command, "env": config.env})
        self._command, self._env = list(config.command), dict(config.env)
        resolved({"command": self._command, "env": self._env}, "agent")  # raises here and not in the first episode
        if shutil.which(self._command[0]) is None:
            raise ConfigError(f"agent.command: {self._command[0]!r} is neither a program on PATH nor a file that can be executed")
        if missing := [name for name in config.pass_env if name not in os.environ]:
            raise ConfigError(f"agent.pass_env: {missing[0]} is not set here")
        if taken := sorted(_GIVEN & {*config.pass_env, *config.env}):
            raise ConfigError(f"agent.env, agent.pass_env: {taken[0]} is set for each episode; choose another name")
        self._passed = [*ALWAYS_PASSED, *config.pass_env]

    async def run(self, brief: Brief, doors: Doors, record: dict[str, Json]) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="agentrl-agent-", ignore_cleanup_errors=True) as folder:
            process = await AgentProcess.start(resolved(self._command, "agent.command"), self._variables(brief, Path(folder)))
            code: int | None = None
            try:
                code = await process.wait()
            finally:
                await process.end()
                stdout, stderr = (redact(stream.text(brief.key)) for stream in (process.stdout, process.stderr))
                record |= {"exit_code": code, "stdout": stdout, "stderr": stderr}
        failure = None if code == 0 else f"exit code {code}{_tail(stderr or stdout)}"
        return Outcome(stdout.strip() or None, failure, record)

    def _variables(self, brief: Brief, folder: Path) -> dict[str, str]:
        own = {name: os.environ[name] for name in self._passed if name in os.environ}
        given = brief.variables()
        file = folder / "task.json"
        file.write_text(given["AGENTRL_TASK"])
        host = httpx.URL(brief.openai_url).host
        fixed = {"AGENTRL_TASK_FILE": str(file), "AGENTRL_FOLDER": str(folder)}
        short = {name: value for name, value in given.items() if len(value.encode()) <= _LONGEST_VARIABLE}
        found = {**own, **resolved(self._env, "agent.env"), **short, **fixed}
        exempt(host, environ=found)
        return found

    async def close(self) -> None:
        return None


class Episode:
    """What an agent that is an async function gets as its only argument."""

    def __init__(self, brief: Brief, doors: Doors) -> None:
        self.task = brief.task()
        self.prompt, self.messages, self.tools = brief.prompt, self.task["messages"], self.task["tools"]
        self.model, self.api_key = brief.to_json()["model"], brief.key
        self.openai_base_url, self.anthropic_base_url = brief.openai_url, brief.anthropic_url
        self.mcp_url, self._doors = brief.tools_url, doors

    async def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Call one of the environment's tools; its answer, also if it is an error's text."""
        return (await self._doors.call(name, arguments)).content

    async def say(self, text: str) -> list[str] | None:
        """Say something to the environment's user; returns the user's answer, or None if the conversation is over."""
        return await self._doors.say(text)


class Function:
    """An async function in this process: cheap, but what blocks in it blocks everything."""

    def __init__(self, target: str) -> None:
        """Raises ConfigError if it cannot be imported or is not async."""
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # as for `python my_agent.py`; last, so that it hides no package
        function = function_named("agent.python", target)
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"agent.python = {target!r}: expected an async function (`async def`), since one that blocks would hold up all "
                "episodes; start an agent that blocks by agent.command"
            )
        self._function: Callable[[Episode], Awaitable[Any]] = function

    async def run(self, brief: Brief, doors: Doors, record: dict[str, Json]) -> Outcome:
        task = asyncio.current_task()
        try:
            answer = await self._function(Episode(brief, doors))
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            return Outcome(None, "it was cancelled from inside", record)
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # somebody else's code may raise anything, which must not stop the run
            record["error"] = text_of(f"{type(fault).__name__}: {fault}", brief.key)
            return Outcome(None, record["error"][:_SHOWN], record)
        if answer is not None and not isinstance(answer, str):
            return Outcome(None, f"it returned {type(answer).__name__}, expected text or None", record)
        return Outcome(None if answer is None else text_of(answer, brief.key), None, record)

    async def close(self) -> None:
        return None


class Remote:
    """An agent behind a URL: it gets a POST per episode and answers it with JSON when it is done."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL of another form, or a variable that is not set."""
        if not resolved(url, "agent.url").startswith(("http://", "https://")):
            raise ConfigError(f"agent.url = {url!r}: expected http://... or https://...")
        self._url = url  # as it is written, for messages
        learn({"url": url})
        self._client: httpx.AsyncClient | None = None

    async def run(self, brief: Brief, doors: Doors, record: dict[str, Json]) -> Outcome:
        if self._client is None:
            exempt_own(resolved(self._url, "agent.url"))
            # Without limits of its own: the episode's are kept by who waits for this.
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        try:
            async with self._client.stream("POST", resolved(self._url, "agent.url"), json=brief.to_json()) as answer:
                data = await _limited(answer)
        except httpx.HTTPError as fault:
            why = f"{type(fault).__name__}: {fault}{through_proxy(resolved(self._url, 'agent.url'))}"
            return Outcome(None, text_of(f"{self._url}: {why}", brief.key), record)
        record["status"] = answer.status_code
        if data is None:
            return Outcome(None, f"{self._url}: the answer has more than {MAX_ANSWER} bytes", record)
        words = text_of(data.decode(errors="replace"), brief.key)
        record["body"] = words[:_SHOWN]
        if answer.is_error:
            proxied = through_proxy(resolved(self._url, "agent.url"))
            return Outcome(None, f"{self._url}: HTTP {answer.status_code}{proxied}{_tail(words)}", record)
        try:
            body = read_json(data)
        except (ValueError, RecursionError):
            body = None
        output = body.get("answer") if isinstance(body, dict) else None
        if not isinstance(body, dict) or not isinstance(output, str | None):
            return Outcome(None, f'{self._url}: expected a JSON object (with "answer": text), got {words[:200]!r}', record)
        return Outcome(None if output is None else text_of(output, brief.key), None, record)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


async def _limited(answer: httpx.Response) -> bytes | None:
    """The body; None if it is too long, of which no more is read."""
    data = bytearray()
    async for chunk in answer.aiter_bytes():
        data += chunk
        if len(data) > MAX_ANSWER:
            return None
    return bytes(data)


_GIVEN = {
    "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "NO_PROXY", "no_proxy", "AGENTRL_MODEL",
    "AGENTRL_PROMPT", "AGENTRL_TASK", "AGENTRL_TASK_FILE", "AGENTRL_FOLDER", "AGENTRL_MCP_URL", "AGENTRL_USER_URL",
}  # fmt: skip


def _tail(text: str) -> str:
    """The end of what an agent wrote, to append to a sentence."""
    text = text.strip()
    return f": {text[-_SHOWN:]}" if text else ""
