"""Run an agent as a command, an async function, or a URL."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from agentrl.config.load import check_unread
from agentrl.config.schema import AgentConfig
from agentrl.contrib.agents.record import MASK, VARIABLES, Episode, Outcome, text_of
from agentrl.contrib.toolkit import keeper
from agentrl.data.trajectory import Json
from agentrl.utils.errors import AgentFaultError, ConfigError, fault_text, is_from_outside
from agentrl.utils.network import exempt, exempt_own, through_proxy
from agentrl.utils.parsing import read_json
from agentrl.utils.redaction import learn, redact, resolve_references
from agentrl.utils.search_path import function_named

log = logging.getLogger(__name__)

HEAD, TAIL = 16_384, 49_152
"""Bytes kept of the start and the end of an output."""
_MIN_MASKED = 9
"""Minimum characters of a part of the key that is masked at the edge of truncated text; fewer reveal nothing."""
_END_S = 30.0
"""Seconds to wait for an agent's processes to end, enough for a busy machine."""


class Output:
    """The start and the end of a process's output."""

    def __init__(self, head: int = HEAD, tail: int = TAIL) -> None:
        self._most, self._tail_most = head, tail
        self._head, self._tail, self._seen = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        """Append output."""
        self._seen += len(data)
        room = max(self._most - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(len(self._tail) - self._tail_most, 0)]

    def text(self, key: str = "") -> str:
        """Return the kept text, with a line about the omitted bytes; invalid UTF-8 becomes U+FFFD. `key`: masked, also where the
        gap cuts it."""
        missing = self._seen - len(self._head) - len(self._tail)
        if not missing:
            return text_of(bytes(self._head + self._tail).decode(errors="replace"), key)
        head, tail = (text_of(bytes(part).decode(errors="replace"), key) for part in (self._head, self._tail))
        lengths = range(len(key) - 1, _MIN_MASKED - 1, -1)
        if cut := next((length for length in lengths if head.endswith(key[:length])), 0):
            head = head[:-cut] + MASK
        if cut := next((length for length in lengths if tail.startswith(key[-length:])), 0):
            tail = MASK + tail[cut:]
        return f"{head}\n[{missing} bytes left out]\n{tail}"


class AgentProcess:
    """A running command. `stdout` and `stderr` grow while it runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.stdout, self.stderr = Output(), Output()
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            asyncio.create_task(_drain(process.stdout, self.stdout)),
            asyncio.create_task(_drain(process.stderr, self.stderr)),
        ]

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], folder: Path | None = None) -> AgentProcess:
        """Start `command` in `folder` with exactly the environment `env`. A missing command exits with code 127 and a message in
        `stderr`."""
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", keeper.__file__, *command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=dict(env), cwd=folder, start_new_session=True,  # away from the terminal's Ctrl-C: the run ends it
            )
        )  # fmt: skip
        try:
            return cls(await asyncio.shield(starting))
        except asyncio.CancelledError:
            # asyncio would kill the keeper, which may have started the command already and could then not end it.
            await cls(await starting).end()
            raise

    async def wait(self) -> int:
        """Wait until all of its processes have ended and the output is read; return the exit code (128 + signal number)."""
        code = await self._process.wait()
        await asyncio.gather(*self._readers)
        return code

    async def end(self) -> None:
        """End all of its processes and wait for them; idempotent."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # tells the keeper to end everything; it is never killed before
        done = asyncio.ensure_future(self.wait())
        await asyncio.wait([done], timeout=_END_S)
        if not done.done():
            # Not killed: the keeper continues to end processes, one of which may be stuck in the kernel.
            log.warning("an agent's processes did not end within %g s; keeper %d goes on", _END_S, self._process.pid)


async def _drain(stream: asyncio.StreamReader, output: Output) -> None:
    while data := await stream.read(65_536):
        output.add(data)


ALWAYS_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Environment variables that every command inherits from the run."""
_LONGEST_VARIABLE = 100_000
"""Maximum bytes; Linux allows 131,072 with the name."""
_SHOWN_CHARS = 2_000
"""Maximum characters of an agent's output in an error."""

MAX_ANSWER = 16 << 20
"""Maximum bytes of the answer of an agent behind a URL."""


class Program(ABC):
    """An agent that runs many episodes concurrently."""

    @abstractmethod
    async def run(self, episode: Episode, record: dict[str, Json]) -> Outcome:
        """Run an episode until the agent ends. Cancelling ends the agent and its processes; `record` then also has its output.
        Raises AgentFaultError if it cannot be reached."""

    async def close(self) -> None:
        """Free all resources; idempotent."""
        return None


def program_of(config: AgentConfig) -> Program:
    """Build the agent of the config. Raises ConfigError unless it names exactly one existing agent."""
    given = [name for name in ("command", "python", "url") if getattr(config, name)]
    if len(given) != 1:
        said = " and ".join(f"agent.{name}" for name in given) or "none"
        raise ConfigError(f"[agent]: expected exactly one of agent.command, agent.python and agent.url, got {said}")
    if config.command:
        return Command(config)
    check_unread("agent", config, ("pass_env", "env"), "agent.command")
    return Function(config.python) if config.python else Remote(config.url or "")


class Command(Program):
    """A program started for each episode."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ConfigError if the program does not exist, or a variable for it is not set."""
        learn({"command": config.command, "env": config.env})
        self._command, self._env = list(config.command), dict(config.env)
        resolve_references({"command": self._command, "env": self._env}, "agent")  # to raise here, not in the first episode
        if shutil.which(self._command[0]) is None:
            raise ConfigError(f"agent.command: {self._command[0]!r} is neither a program on PATH nor a file that can be executed")
        if missing := [name for name in config.pass_env if name not in os.environ]:
            raise ConfigError(f"agent.pass_env: {missing[0]} is not set here")
        if taken := sorted(_RESERVED_VARIABLES & {*config.pass_env, *config.env}):
            raise ConfigError(f"agent.env, agent.pass_env: {taken[0]} is set for each episode; choose another name")
        self._passed = [*ALWAYS_PASSED, *config.pass_env]

    async def run(self, episode: Episode, record: dict[str, Json]) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="agentrl-agent-", ignore_cleanup_errors=True) as folder:
            given, file = episode.variables(), Path(folder) / "task.json"
            file.write_text(given["AGENTRL_TASK"])
            own = {name: os.environ[name] for name in self._passed if name in os.environ}
            short = {name: value for name, value in given.items() if len(value.encode()) <= _LONGEST_VARIABLE}
            fixed = {"AGENTRL_TASK_FILE": str(file), "AGENTRL_FOLDER": folder}
            variables = {**own, **resolve_references(self._env, "agent.env"), **short, **fixed}
            exempt(httpx.URL(episode.openai_base_url).host, environ=variables)
            process = await AgentProcess.start(resolve_references(self._command, "agent.command"), variables)
            code: int | None = None
            try:
                code = await process.wait()
            finally:
                await process.end()
                stdout, stderr = (redact(stream.text(episode.api_key)) for stream in (process.stdout, process.stderr))
                record |= {"exit_code": code, "stdout": stdout, "stderr": stderr}
        failure = None if code == 0 else f"exit code {code}{_tail(stderr or stdout)}"
        return Outcome(stdout.strip() or None, failure)


class Function(Program):
    """An async function in this process. It is cheap, but blocks everything if it blocks."""

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

    async def run(self, episode: Episode, record: dict[str, Json]) -> Outcome:
        task = asyncio.current_task()
        try:
            answer = await self._function(episode)
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            return Outcome(None, "it was cancelled from inside")
        except BaseException as fault:  # a user's code may raise anything, which must not stop the run
            if is_from_outside(fault):
                raise
            record["error"] = text_of(fault_text(fault), episode.api_key)
            return Outcome(None, record["error"][:_SHOWN_CHARS])
        if answer is not None and not isinstance(answer, str):
            return Outcome(None, f"it returned {type(answer).__name__}, expected text or None")
        return Outcome(None if answer is None else text_of(answer, episode.api_key), None)


class Remote(Program):
    """An agent behind a URL, which receives a POST per episode and answers with JSON when done."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an invalid URL or an unset variable."""
        if not resolve_references(url, "agent.url").startswith(("http://", "https://")):
            raise ConfigError(f"agent.url = {url!r}: expected http://... or https://...")
        self._url = url  # unresolved, for messages
        learn({"url": url})
        self._client: httpx.AsyncClient | None = None

    async def run(self, episode: Episode, record: dict[str, Json]) -> Outcome:
        address = resolve_references(self._url, "agent.url")
        if self._client is None:
            exempt_own(address)
            # No timeouts here: the caller enforces those of the episode.
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        try:
            async with self._client.stream("POST", address, json=episode.to_json()) as answer:
                record["status"] = answer.status_code
                data = bytearray()
                async for chunk in answer.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_ANSWER:  # do not read the rest
                        return Outcome(None, f"{self._url}: the answer has more than {MAX_ANSWER} bytes")
        except httpx.HTTPError as fault:
            message = text_of(f"{self._url}: {fault_text(fault)}{through_proxy(address)}", episode.api_key)
            raise AgentFaultError(f"the agent cannot be reached: {message}") from fault
        words = text_of(data.decode(errors="replace"), episode.api_key)
        record["body"] = words[:_SHOWN_CHARS]
        if answer.is_error:
            message = f"{self._url}: HTTP {answer.status_code}{through_proxy(address)}{_tail(words)}"
            if answer.status_code in (502, 503, 504):  # of a proxy, or of a server that is busy
                raise AgentFaultError(f"the agent cannot be reached: {message}")
            return Outcome(None, message)
        try:
            body = read_json(data)
        except (ValueError, RecursionError):
            body = None
        output = body.get("answer") if isinstance(body, dict) else None
        if not isinstance(body, dict) or not isinstance(output, str | None):
            return Outcome(None, f'{self._url}: expected a JSON object (with "answer": text), got {words[:200]!r}')
        return Outcome(None if output is None else text_of(output, episode.api_key), None)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


_RESERVED_VARIABLES = {*VARIABLES, "AGENTRL_TASK", "AGENTRL_TASK_FILE", "AGENTRL_FOLDER", "NO_PROXY", "no_proxy"}


def _tail(text: str) -> str:
    """Format the end of an agent's output as the end of a sentence."""
    text = text.strip()
    return f": {text[-_SHOWN_CHARS:]}" if text else ""
