"""Tools of any Model Context Protocol server, through the official SDK; each episode has its own session."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from agentrl.config.schema import McpServerConfig
from agentrl.errors import ConfigError, DependencyError, EnvError, ToolError
from agentrl.executors import by_size
from agentrl.images import Image
from agentrl.redaction import learn, redact_said, resolved, stderr_of_children
from agentrl.tool.pictures import read
from agentrl.tool.tool import Options, Tool

if TYPE_CHECKING:
    from mcp import Client

_CLOSE_SECONDS = 10.0
_INVALID_PARAMS = -32602


class McpSource:
    """A server by name and config: gives each episode its own session (and process, over stdio)."""

    def __init__(self, name: str, server: McpServerConfig, build: Callable[[], Any] | None = None) -> None:
        """`build` makes an SDK server object that runs in this process, instead of a command or url.

        Raises DependencyError without the SDK, ConfigError unless exactly one of command, url and `build` is set.
        """
        if find_spec("mcp") is None:
            raise DependencyError("tools.mcp needs the MCP SDK: pip install 'agentrl[mcp]'")
        if sum((bool(server.command), bool(server.url), build is not None)) != 1:
            raise ConfigError(f"tools.mcp.{name}: give either a command (a list of words) or a url")
        learn({"command": server.command, "url": server.url, "env": server.env})
        self.name = name
        self.server = server
        self.build = build

    def session(self, errlog: TextIO | None = None) -> McpSession:
        """A new, unopened session; what its process writes to standard error goes to `errlog`, by default to this process's."""
        return McpSession(self.name, self.server, self.build, errlog)


class McpSession:
    """One connection. The SDK's client must be entered and exited in the same task, so one task holds it open."""

    def __init__(
        self, name: str, server: McpServerConfig, build: Callable[[], Any] | None = None, errlog: TextIO | None = None
    ) -> None:
        self.name = name
        self.server = server
        self._build, self._errlog = build, errlog
        self._stop = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    def __deepcopy__(self, memo: Mapping[int, Any]) -> McpSession:
        raise TypeError(f"the session of MCP server {self.name!r} cannot be copied: it runs in another process")

    async def open(self) -> list[Tool]:
        """Start or reach the server and list its tools (only those named in `tools`, if any are).

        Raises EnvError if the server does not start or answer in time, or does not have a named tool.
        """
        ready: asyncio.Future[tuple[Client, list[Any]]] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(ready), name=f"mcp {self.name}")
        try:
            async with asyncio.timeout(self.server.timeout):
                client, listed = await ready
        except TimeoutError:
            self._holder.cancel()  # it waits for `close` only once the session is open
            raise EnvError(f"MCP server {self.name!r}: no answer within {self.server.timeout:g} s") from None
        wanted = self.server.tools
        known = [item.name for item in listed]
        for name in wanted or ():
            if name not in known:
                raise EnvError(f"MCP server {self.name!r} has no tool {name!r}; it has {', '.join(known)}")
        try:
            return [self._tool(client, item) for item in listed if wanted is None or item.name in wanted]
        except TypeError as problem:
            raise EnvError(f"MCP server {self.name!r}: {problem}") from problem

    async def close(self) -> None:
        """End the session, and the server's process if this session started it."""
        if self._holder is None:
            return
        # Asked first, since the client ends the server's process as it closes; cancelled is only one that does not get there.
        self._stop.set()
        done, _ = await asyncio.wait([self._holder], timeout=_CLOSE_SECONDS)
        if not done:
            self._holder.cancel()
            await asyncio.wait([self._holder], timeout=_CLOSE_SECONDS)

    async def _hold(self, ready: asyncio.Future[tuple[Client, list[Any]]]) -> None:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        try:
            server = McpServerConfig.model_validate(resolved(self.server.model_dump(), f"tools.mcp.{self.name}"))
        except ConfigError as problem:
            ready.set_exception(problem)
            return
        target: Any = server.url
        if server.command:
            program = StdioServerParameters(command=server.command[0], args=server.command[1:], env=dict(server.env) or None)
            # Not sys.stderr, which the SDK binds at import: in a notebook or a test it has no file descriptor.
            target = stdio_client(program, errlog=self._errlog or stderr_of_children())
        elif self._build is not None:
            target = self._build()
        try:
            async with Client(target) as client:
                tools, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                if not ready.done():
                    ready.set_result((client, tools))
                await self._stop.wait()
        except Exception as fault:
            # Once the session is open, a broken connection makes the next call fail, so nothing is reported here.
            if not ready.done():
                where = server.url or " ".join(server.command) or "in this process"
                ready.set_exception(EnvError(redact_said(f"MCP server {self.name!r} ({where}): {_cause(fault)}")))

    def _tool(self, client: Client, item: Any) -> Tool:
        async def call(**arguments: Any) -> Any:
            from mcp import MCPError

            try:
                result = await client.call_tool(item.name, arguments)
            except MCPError as problem:
                # The policy's own error, of which it is told; the others are the server's and leave the episode unscored.
                if problem.code == _INVALID_PARAMS:
                    raise ToolError(str(problem)) from problem
                raise
            parts = [await _part(block) for block in result.content]
            if result.is_error:
                raise ToolError("\n".join(part if isinstance(part, str) else part.line for part in parts))
            if not parts and result.structured_content is not None:
                return json.dumps(result.structured_content, ensure_ascii=False)
            texts = [part for part in parts if isinstance(part, str)]
            return "\n".join(texts) if len(texts) == len(parts) else parts

        hints = item.annotations
        read_only = bool(hints is not None and hints.read_only_hint)
        # Calls of one turn that may write run one after another: their outcome must not depend on a race.
        options = Options(
            timeout=self.server.timeout,
            late=self.server.late,
            max_output=self.server.max_output,
            parallel=read_only,
            read_only=read_only,
            check=self.server.check,
            on_error="stop",
        )
        schema = {key: value for key, value in item.input_schema.items() if key not in ("$schema", "title")}
        return Tool.from_schema(self.server.prefix + item.name, item.description or "", schema, call, options)


async def _part(block: Any) -> str | Image:
    """A block of a result: its text or its image; for what is not shown, a line of its kind and size."""
    if block.type == "text":
        return str(block.text)
    size = f"{len(block.model_dump_json())} bytes as JSON"
    if block.type != "image":
        return f"[{block.type}, {size}, not shown]"
    try:
        data = base64.b64decode(block.data, validate=True)
    except ValueError as problem:
        return f"[image, {size}, not shown: {problem}]"
    return await by_size(len(data), read, data, size)


def _cause(fault: BaseException) -> str:
    """The first real cause inside the exception groups that task groups raise."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return f"{type(fault).__name__}: {fault}"
