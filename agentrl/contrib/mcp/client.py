"""Tools of servers of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from pydantic import ValidationError

from agentrl.config.load import check_unread
from agentrl.config.schema import McpServerConfig
from agentrl.contrib.toolkit import keeper
from agentrl.data.images import Image
from agentrl.env.call_options import Options
from agentrl.env.toolbox import as_text
from agentrl.env.tools import TOOL_SOURCES, Tool
from agentrl.utils.errors import AgentrlError, ConfigError, EnvError, ImageError, ToolError, need_package
from agentrl.utils.redaction import learn, redact, redact_json, redact_said, resolve_references
from agentrl.utils.schemas import as_2020
from agentrl.utils.threads import by_size

if TYPE_CHECKING:
    from mcp import Client


# Tools of a server

_CLOSE_SECONDS = 10.0
_MOST_PAGES = 1000
"""Maximum pages of a list of tools."""
_SHOWN = 300
"""Maximum characters of a server's text in an error."""
_CLOSED = (-32000, "Connection closed")
_NO_ANSWER = (
    (-32000, "SSE stream "), (-32600, "Redirect"), (-32600, "Session terminated"), (-32600, "Unexpected content type: "),
    (-32600, "server answered a request with "), (-32601, "Not Found"), (-32603, "Server returned an error response"),
    (-32700, "Failed to parse JSON response: "), (-32700, "Failed to parse SSE message: "),
)  # fmt: skip
"""Errors that the SDK itself raises over HTTP without an answer: code and message prefix. Servers use the same codes."""


@TOOL_SOURCES.register("mcp")
class McpSource:
    """An MCP server by name and config; gives each episode its own session (and process, over stdio)."""

    def __init__(self, name: str, server: McpServerConfig, build: Callable[[], Any] | None = None) -> None:
        """`build` makes an SDK server object in this process, instead of a command or url.

        Raises DependencyError without the SDK, ConfigError unless exactly one of command, url and `build` is set.
        """
        need_package("mcp", "tools.mcp needs the MCP SDK: pip install 'agentrl[mcp]'")
        if sum((bool(server.command), bool(server.url), build is not None)) != 1:
            raise ConfigError(f"tools.mcp.{name}: give either a command (a list of words) or a url")
        if not server.command and build is None:
            check_unread(f"tools.mcp.{name}", server, ("env",), "a command")
        learn({"command": server.command, "url": server.url, "env": server.env})
        self.name, self.server, self.build = name, server, build

    def session(self) -> McpSession:
        """Return a new, unopened session."""
        return McpSession(self)


class McpSession:
    """One connection. The SDK's client must be entered and exited by the same task, so one task holds it open."""

    def __init__(self, source: McpSource) -> None:
        self.name, self.server, self._build = source.name, source.server, source.build
        self._stop = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._stderr: TextIO | None = None
        self._strange = self._status = ""
        self._unread = 0

    def __str__(self) -> str:
        return f"MCP server {self.name!r}"

    def __deepcopy__(self, memo: Mapping[int, Any]) -> McpSession:
        raise TypeError(f"the session of MCP server {self.name!r} cannot be copied: it runs in another process")

    async def open(self) -> list[Tool]:
        """Start or reach the server and list its tools (only those named in `tools`, if any).

        Raises EnvError if the server does not start or answer in time, lacks a named tool, lists a name twice, or has a tool with
        an unusable schema.
        """
        ready: asyncio.Future[tuple[Client, list[Any]]] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._run_session(ready), name=f"mcp {self.name}")
        try:
            async with asyncio.timeout(self.server.timeout):
                client, listed = await ready
        except TimeoutError:
            self._holder.cancel()  # before the session is open, it does not wait for `close`
            raise EnvError(f"{self}: no answer within {self.server.timeout:g} s{self._output_text()}") from None
        wanted = self.server.tools
        known = [item.name for item in listed]
        for name in wanted or ():
            if name not in known:
                raise EnvError(f"{self} has no tool {name!r}; it has {', '.join(known)}")
        tools: dict[str, Tool] = {}
        for item in listed:
            if wanted is not None and item.name not in wanted:
                continue
            if item.name in tools:
                raise EnvError(f"{self} lists two tools with the name {item.name!r}; leave them out: give the others in `tools`")
            tools[item.name] = self._tool(client, item)
        return list(tools.values())

    async def close(self) -> None:
        """End the session, and the server's process if this session started it."""
        if self._holder is None:
            return
        # Stop first, so that the client ends the server's process; cancel only if it does not finish.
        self._stop.set()
        done, _ = await asyncio.wait([self._holder], timeout=_CLOSE_SECONDS)
        if not done:
            self._holder.cancel()
            await asyncio.wait([self._holder], timeout=_CLOSE_SECONDS)
        if self._stderr is not None:
            self._stderr.close()

    async def _run_session(self, ready: asyncio.Future[tuple[Client, list[Any]]]) -> None:
        # The SDK logs a traceback per invalid line; `_output_text` shows the first line instead.
        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
        try:
            from mcp import Client  # here, so that errors of another SDK version are reported

            async with Client(self._target(), message_handler=self._note) as client:
                # Policies read answers as text, so do not validate them against the server's output schema.
                client.session.validate_tool_result = _accept  # type: ignore[method-assign]
                tools = await self._list_tools(client)
                if not ready.done():
                    ready.set_result((client, tools))
                await self._stop.wait()
        except Exception as fault:
            # Once the session is open, a broken connection fails the next call, so nothing is reported here.
            if not ready.done():
                where = self.server.url or " ".join(self.server.command) or "in this process"
                problem = EnvError(redact_said(f"{self} ({where}): {_cause(fault)}{self._output_text()}"))
                ready.set_exception(fault if isinstance(fault, ConfigError) else problem)

    def _target(self) -> Any:
        """Return the target of the SDK's client. Raises ConfigError for an unset environment variable."""
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        server = McpServerConfig.model_validate(resolve_references(self.server.model_dump(), f"tools.mcp.{self.name}"))
        if not server.command:
            return self._over_http(str(server.url)) if self._build is None else self._build()
        # An unnamed file for stderr: a server may write a traceback for each error.
        self._stderr = cast(TextIO, tempfile.TemporaryFile("w+"))  # noqa: SIM115 - `close` ends it
        first, *rest = server.command
        if sys.platform == "linux":  # child processes end with the server, and the server with this process
            first, *rest = sys.executable, "-I", "-S", keeper.__file__, "--stdin", *server.command
        program = StdioServerParameters(command=first, args=rest, env=dict(server.env) or None)
        return stdio_client(program, errlog=self._stderr)

    @asynccontextmanager
    async def _over_http(self, url: str) -> AsyncIterator[Any]:
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        async def note(response: Any) -> None:
            if response.request.method == "POST":
                self._status = f"HTTP {response.status_code} {response.reason_phrase}" if response.status_code >= 400 else ""

        async with create_mcp_http_client() as client:
            client.event_hooks = {"response": [note]}
            async with streamable_http_client(url, http_client=client) as streams:
                yield streams

    async def _list_tools(self, client: Client) -> list[Any]:
        tools: list[Any] = []
        seen: set[str] = set()
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools
            if cursor in seen:
                raise EnvError(f"its list of tools repeats the cursor {cursor[:_SHOWN]!r}")
            seen.add(cursor)
            if len(seen) >= _MOST_PAGES:
                raise EnvError(f"its list of tools has more than {_MOST_PAGES} pages")

    async def _note(self, message: Any) -> None:
        """Handle notifications of the SDK, and its errors about invalid lines."""
        if isinstance(message, Exception):
            line = str(message.errors()[0]["input"] if isinstance(message, ValidationError) else message)
            self._strange = self._strange or line
            self._unread += "jsonrpc" in line

    def _output_text(self) -> str:
        """Format for an error: the HTTP status of a failed request, the last line of stderr, and an invalid line of output; ""
        without these."""
        said = f"; it answered {self._status}" if self._status else ""
        if self._stderr is not None:
            number = self._stderr.fileno()
            written = os.pread(number, 4096, max(0, os.fstat(number).st_size - 4096)).decode("utf-8", "replace")
            lines = [line.strip() for line in written.splitlines() if line.strip()]
            said += f"; it wrote: {lines[-1][:_SHOWN]}" if lines else ""
        if self._strange:
            said += f"; its output has a line that is no message of MCP: {self._strange[:_SHOWN]!r}"
        return redact_said(said)

    def _tool(self, client: Client, item: Any) -> Tool:
        async def call(**arguments: Any) -> Any:
            from mcp import InputRequiredRoundsExceededError, MCPError

            before = self._unread
            try:
                result = await client.call_tool(item.name, arguments)
            except asyncio.CancelledError:
                if self._unread > before:  # not a timeout: it answered, but the SDK could not read that
                    raise self._fault(item.name, EnvError("its answer cannot be read")) from None
                raise
            except MCPError as problem:
                # The SDK's errors for a lost connection, and timeouts of a server behind, are not answers of the server.
                late = problem.code == -32001 and "timed out" in problem.message.lower()
                made = self.server.url is not None and any(
                    problem.code == code and problem.message.startswith(words) for code, words in _NO_ANSWER
                )
                if late or made or (problem.code, problem.message) == _CLOSED:
                    raise self._fault(item.name, problem) from problem
                details = "" if problem.data is None else f": {as_text(item.name, problem.data)}"
                raise ToolError(f"{problem}{details}") from problem
            except InputRequiredRoundsExceededError as problem:
                raise ToolError("the server goes on asking for more input, which nobody here gives") from problem
            except Exception as problem:
                raise self._fault(item.name, problem) from problem
            parts = [await _part(block) for block in result.content]
            if result.structured_content is not None and not any(part for part in parts if isinstance(part, str)):
                if not (parts or result.is_error):
                    return result.structured_content
                parts.append(as_text(item.name, result.structured_content))
            if result.is_error:
                text = "\n".join(part if isinstance(part, str) else part.line for part in parts)
                raise ToolError(text if text.strip() else "the server calls this an error and does not say why")
            texts = [part for part in parts if isinstance(part, str)]
            return "\n".join(texts) if len(texts) == len(parts) else parts

        hints = item.annotations
        read_only = bool(hints is not None and hints.read_only_hint)
        # Calls of a turn that may write run sequentially, so that no race decides the outcome.
        options = Options(
            timeout=self.server.timeout,
            late=self.server.late,
            max_output=self.server.max_output,
            parallel=read_only,
            read_only=read_only,
            check=self.server.check,
            on_error="stop",
        )
        try:
            schema = {key: value for key, value in as_2020(item.input_schema).items() if key != "title"}
            said, schema = redact(item.description or ""), redact_json(schema)
            tool = Tool.from_schema(self.server.prefix + item.name, said, schema, call, options)
            _ = tool.schema, tool.check
        except (TypeError, ValueError) as problem:
            raise EnvError(
                f"{self}, tool {item.name!r}: {problem}. Correct the schema on the server, or leave the tool out: give the "
                "others in `tools`"
            ) from problem
        return tool

    def _fault(self, tool: str, fault: Exception) -> EnvError:
        return EnvError(redact_said(f"tool {tool} of {self} failed: {_cause(fault)}{self._output_text()}"))


async def _accept(name: str, result: Any) -> None:
    return


async def _part(block: Any) -> str | Image:
    """Convert a result block to its text or image; other content becomes a line with its type and size."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return f"[link to a resource: {', '.join(str(part) for part in (block.uri, block.name, block.mime_type) if part)}]"
    held = block.resource if block.type == "resource" else block
    if hasattr(held, "text"):
        return str(held.text)
    size = f"{len(block.model_dump_json())} bytes as JSON"
    kind = (held.mime_type or "").partition(";")[0].strip().lower()
    encoded = held.blob if block.type == "resource" else held.data
    image = block.type == "image" or (kind.startswith("image/") and not _is_text(kind))
    shown = "image" if image else f"{block.type} {getattr(held, 'uri', '')}".strip()
    try:
        data = base64.b64decode(encoded, validate=True)
        if block.type == "resource" and _is_text(kind):
            return data.decode()
    except ValueError as problem:
        return f"[{shown}, {size}, not shown: {problem}]"
    return await by_size(len(data), _read_image, data, size) if image else f"[{shown}, {size}, not shown]"


def _read_image(data: bytes, size: str) -> Image | str:
    """Decode an untrusted image; a refused one becomes a line with the reason. `size`: for that line."""
    try:
        return Image.read(data)
    except ImageError as problem:
        return f"[image, {size}, not shown: {problem}]"


def _is_text(kind: str) -> bool:
    names = ("json", "xml", "yaml", "toml", "javascript", "typescript", "sql", "csv", "x-sh", "x-yaml", "x-python", "x-ndjson")
    return kind.startswith("text/") or kind.endswith(("+json", "+xml", "+yaml")) or kind in {f"application/{n}" for n in names}


def _cause(fault: BaseException) -> str:
    """Describe the first leaf exception of nested exception groups."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    if isinstance(fault, ValidationError):  # pydantic's message has a line per alternative
        first = fault.errors()[0]
        return f"{fault.title}: {'.'.join(map(str, first['loc']))}: {first['msg']}. Correct it on the server"
    return str(fault) if isinstance(fault, AgentrlError) else f"{type(fault).__name__}: {fault}"
