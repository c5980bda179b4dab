"""MCP servers as they are: what real ones answer and what hostile ones do, in this process, over stdio and over HTTP."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from agentrl.config.schema import McpServerConfig
from agentrl.contrib.mcp.client import McpSource
from agentrl.data.trajectory import StopReason, ToolResult
from agentrl.env.catalog import make_env
from agentrl.utils.errors import EnvError
from tests.strict_json import strict

pytest.importorskip("mcp", reason="needs the MCP SDK: pip install 'agentrl[mcp]'")

import mcp_types as types
from mcp import MCPError

from tests.contrib.mcp.test_mcp import env_with, gone
from tests.env.toyenvs import Notes, call
from tests.rollout.loopback import LoopbackServer

Answer = Callable[[str, Mapping[str, Any]], Any]


def png() -> bytes:
    from PIL import Image as Pictures

    file = io.BytesIO()
    Pictures.new("RGB", (4, 3), (10, 200, 30)).save(file, "PNG")
    return file.getvalue()


def tool(name: str = "act", schema: Mapping[str, Any] | None = None) -> types.Tool:
    return types.Tool(name=name, description="", input_schema=dict(schema or {"type": "object"}))


def built(answer: Answer, *tools: types.Tool) -> Callable[[], Any]:
    """Makes the SDK's server whose calls `answer` answers."""
    from mcp.server.lowlevel import Server

    async def on_list_tools(context: Any, params: Any) -> Any:
        return types.ListToolsResult(tools=list(tools or [tool()]))

    async def on_call_tool(context: Any, params: Any) -> Any:
        return answer(params.name, params.arguments or {})

    return lambda: Server("built", on_list_tools=on_list_tools, on_call_tool=on_call_tool)


def in_process(answer: Answer, *tools: types.Tool) -> Notes:
    return env_with(McpServerConfig(), built(answer, *tools))


async def result_of(env: Notes, name: str = "act", /, **arguments: Any) -> ToolResult:
    await env.areset(seed=0)
    try:
        await env.astep(call(name, **arguments))
        return env.trajectory.turns[-1].results[-1]
    finally:
        await env.aclose()


def blocks(*content: Any, **more: Any) -> types.CallToolResult:
    return types.CallToolResult(content=list(content), **more)


class Name(BaseModel):
    name: str


def embedded(**fields: Any) -> Any:
    kind = types.TextResourceContents if "text" in fields else types.BlobResourceContents
    return types.EmbeddedResource(type="resource", resource=kind(uri=fields.pop("uri", "repo://a/README.md"), **fields))


def b64(data: bytes | str) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


# -- what is shown of an answer (D1) -------------------------------------------------------------------

SHOWN = [
    (embedded(text="# Title\nbody", mime_type="text/markdown"), "# Title\nbody"),
    (embedded(text="no type"), "no type"),
    (embedded(blob=b64("a;b\n1;2"), mime_type="text/csv; charset=utf-8"), "a;b\n1;2"),
    (embedded(blob=b64('{"a": 1}'), mime_type="application/json"), '{"a": 1}'),
    (embedded(blob=b64("<svg/>"), mime_type="image/svg+xml"), "<svg/>"),
]
NAMED = [
    (types.ResourceLink(type="resource_link", uri="file:///a/b.md", name="b.md", mime_type="text/markdown"), "file:///a/b.md"),
    (embedded(blob=b64(b"%PDF-1.7"), mime_type="application/pdf", uri="file:///a.pdf"), "file:///a.pdf, "),
    (embedded(blob=b64(b"\xff\xfe"), mime_type="text/plain", uri="file:///a.txt"), "not shown: 'utf-8' codec"),
    (embedded(blob=b64(b"no picture"), mime_type="image/png"), "not shown"),
    (embedded(blob="!!", mime_type="image/png"), "not shown"),
    (types.AudioContent(type="audio", data=b64(b"la"), mime_type="audio/wav"), "[audio, "),
]


@pytest.mark.parametrize(("block", "text"), [*SHOWN, *NAMED])
async def test_text_in_a_resource_is_shown_and_what_cannot_be_shown_is_named(block: Any, text: str) -> None:
    said = types.TextContent(type="text", text="downloaded")
    result = await result_of(in_process(lambda *_: blocks(said, block)))
    first, _, rest = result.content.partition("\n")
    assert (first, result.error, result.images) == ("downloaded", None, ())
    assert rest == text if (block, text) in SHOWN else text in rest


async def test_an_image_in_a_resource_is_an_image() -> None:
    block = embedded(blob=b64(png()), mime_type="image/png", uri="shot://1")
    result = await result_of(in_process(lambda *_: blocks(block)))
    assert [image.bytes() for image in result.images] == [png()] and result.content == result.images[0].line


# -- whose fault an error is (D2, D5) ------------------------------------------------------------------

CODES = [-32602, -32603, -32600, -32601, -32700, -32000, -32001, -32002, -32042, -1, 0, 404, 500, None]


@pytest.mark.parametrize("code", CODES)
async def test_an_error_answer_is_the_policys(code: int | None) -> None:
    def answer(name: str, arguments: Mapping[str, Any]) -> Any:
        if code is None:  # a fault of the handler's own
            raise KeyError(arguments["city"])
        raise MCPError(code, f"no city {arguments['city']!r}", {"known": ["Oslo"], "rate": float("nan")})

    result = await result_of(in_process(answer), city="Osol")
    assert result.error == "tool_error"
    message = strict(result.content)["message"]
    assert code is None or (
        message.startswith("no city 'Osol': ") and strict(message.partition(": ")[2]) == {"known": ["Oslo"], "rate": "NaN"}
    )


@pytest.mark.parametrize(("made", "message"), [
    (blocks(structured_content={"code": 7, "why": "sold out"}, is_error=True), '{"code": 7, "why": "sold out"}'),
    (blocks(types.TextContent(type="text", text=""), structured_content={"why": 1}, is_error=True), '{"why": 1}'),
    (blocks(types.TextContent(type="text", text="no"), structured_content={"why": 1}, is_error=True), "no"),
    (blocks(embedded(text="the log"), is_error=True), "the log"),
    (blocks(is_error=True), "the server calls this an error and does not say why"),
])  # fmt: skip
async def test_an_error_has_a_message(made: Any, message: str) -> None:
    result = await result_of(in_process(lambda *_: made))
    assert result.error == "tool_error" and json.loads(result.content)["message"].strip() == message


async def test_input_that_nobody_gives_is_the_policys_error() -> None:
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context

    def build() -> Any:
        server = MCPServer("asks")

        async def elicits(ctx):  # type: ignore[no-untyped-def]
            return str(await ctx.elicit("your name?", Name))

        async def roots(ctx):  # type: ignore[no-untyped-def]
            return str(await ctx.session.list_roots())

        for asks in (elicits, roots):
            asks.__annotations__["ctx"] = Context
            server.tool()(asks)
        return server

    for name in ("elicits", "roots"):
        env = env_with(McpServerConfig(), build)
        assert (await result_of(env, name)).error == "tool_error", name


async def test_a_server_that_asks_on_and_on_is_the_policys_error() -> None:
    result = await result_of(in_process(lambda *_: types.InputRequiredResult(request_state="again")))
    assert result.error == "tool_error" and "more input" in result.content


async def test_an_answer_that_does_not_fit_the_servers_own_schema_is_shown() -> None:
    listed = types.Tool(
        name="act", input_schema={"type": "object"}, output_schema={"type": "object", "required": ["n"], "properties": {"n": 7}}
    )
    result = await result_of(in_process(lambda *_: blocks(types.TextContent(type="text", text="n is 3")), listed))
    assert (result.content, result.error) == ("n is 3", None)


# -- hostile programs ----------------------------------------------------------------------------------

HOSTILE = """
import json, sys, time, signal, os
mode = sys.argv[1]
if mode == "noisy":
    print("Shop server 1.0 starting", flush=True)
if mode in ("slow", "stubborn", "check"):
    signal.signal(signal.SIGTERM, signal.SIG_DFL if mode == "slow" else signal.SIG_IGN)
if mode == "dies":
    print("Traceback (most recent call last):", file=sys.stderr)
    print("ValueError: no database at /srv/shop.db key=sk-abcdefghijklmnop0123", file=sys.stderr)
    sys.exit(1)

def send(id, **what):
    print(json.dumps({"jsonrpc": "2.0", "id": id, **what}), flush=True)

SCHEMA = {"type": "object", "properties": {}}
pages = 0
for line in sys.stdin:
    m = json.loads(line)
    method, id = m.get("method"), m.get("id")
    if method == "initialize":
        info = {"serverInfo": {"name": "h", "version": "1"}, "capabilities": {"tools": {}}}
        send(id, result={"protocolVersion": "2025-06-18", **info})
    elif method == "tools/list":
        pages += 1
        more = {"same": "again", "circle": "abc"[pages % 3], "endless": str(pages), "empty": ""}
        names = ["twin", "twin"] if mode == "twins" else [f"act{pages}"]
        tools = [{"name": name, "inputSchema": SCHEMA} for name in names]
        if mode == "untyped":
            tools.append({"name": "untyped", "inputSchema": {"properties": {}}})
        if mode == "bad":
            tools.append({"name": "bad", "inputSchema": {"type": "object", "properties": {"pair": {"items": 7}}}})
        send(id, result={"tools": tools, **({"nextCursor": more[mode]} if mode in more else {})})
    elif method == "tools/call":
        print("Traceback: asked\\nLast: the line of the call", file=sys.stderr, flush=True)
        if mode == "crash":
            os._exit(3)
        if mode == "noisy":
            print("DEBUG handling the call", flush=True)
        if mode == "unread":  # half of an emoji, which a server of JavaScript writes where it cuts a text
            send(id, result={"content": [{"type": "text", "text": "\\ud83d"}]})
            continue
        if mode == "nan":
            mean = {"mean": float("nan"), "most": float("inf"), "least": [float("-inf")], "text": "Größe"}
            send(id, result={"content": [], "structuredContent": mean, "isError": "error" in m["params"]["arguments"]})
            continue
        send(id, result={"content": [{"type": "text", "text": "5" if mode == "check" else str(os.getpid())}]})
    elif id is not None:
        send(id, error={"code": -32601, "message": "Method not found"})
while mode in ("slow", "stubborn", "check"):
    time.sleep(1)
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., McpServerConfig]:
    path = tmp_path_factory.mktemp("hostile") / "server.py"
    path.write_text(HOSTILE)
    return lambda mode, **more: McpServerConfig(**{"command": [sys.executable, str(path), mode], "timeout": 20.0, **more})


@pytest.mark.parametrize(("mode", "says"), [
    ("same", "repeats the cursor 'again'"),
    ("circle", "repeats the cursor"),
    ("endless", "more than 1000 pages"),
    ("twins", "two tools with the name 'twin'"),
    ("untyped", r"ListToolsResult: tools.1.inputSchema.type: Field required. Correct it on the server$"),
    ("dies", "it wrote: ValueError: no database at /srv/shop.db"),
])  # fmt: skip
async def test_a_list_or_start_that_is_wrong_says_so_at_once(
    hostile: Callable[..., McpServerConfig], mode: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(EnvError, match=says) as caught:
        await env_with(hostile(mode)).areset(seed=0)
    assert time.monotonic() - began < 15 and "'shop'" in str(caught.value) and "sk-abc" not in str(caught.value)
    assert capfd.readouterr().err == ""


async def test_what_a_server_writes_is_not_printed(
    hostile: Callable[..., McpServerConfig], capfd: pytest.CaptureFixture[str]
) -> None:
    for mode in ("noisy", "empty"):  # an empty cursor is the end of a list
        assert (await result_of(env_with(hostile(mode)), "act1")).error is None
    assert capfd.readouterr() == ("", "")
    env = env_with(hostile("crash"))
    with pytest.raises(EnvError, match=r"tool act1 of MCP server 'shop' failed: .*; it wrote: Last: the line of the call"):
        await result_of(env, "act1")
    assert env.trajectory.stop is StopReason.ENV_ERROR and env.trajectory.reward is None
    assert capfd.readouterr() == ("", "")


async def test_output_that_is_no_message_is_named(hostile: Callable[..., McpServerConfig]) -> None:
    config = hostile("noisy", tools=["nothing"])
    with pytest.raises(EnvError, match="has no tool 'nothing'; it has act1"):
        await env_with(config).areset(seed=0)
    talks = McpServerConfig(
        command=[sys.executable, "-c", "print('Welcome', flush=True); import time; time.sleep(30)"], timeout=2.0
    )
    with pytest.raises(EnvError, match=r"no answer within 2 s.*a line that is no message of MCP: 'Welcome'"):
        await env_with(talks).areset(seed=0)


async def test_an_answer_that_cannot_be_read_is_no_late_policy(hostile: Callable[..., McpServerConfig]) -> None:
    env = env_with(hostile("unread", late="policy"))
    await env.areset(seed=0)
    env.toolbox.replace(env.toolbox["act1"].with_options(timeout=2.0))
    with pytest.raises(
        EnvError, match=r"act1 of MCP server 'shop' failed: its answer cannot be read; .*no message of MCP: '{.*ud83d"
    ):
        await env.astep(call("act1"))
    assert env.trajectory.stop is StopReason.ENV_ERROR


async def test_structured_answers_are_strict_json(hostile: Callable[..., McpServerConfig]) -> None:
    result = await result_of(env_with(hostile("nan")), "act1")
    found = strict(result.content)
    assert found == result.value == {"mean": "NaN", "most": "Infinity", "least": ["-Infinity"], "text": "Größe"}
    assert "Größe" in result.content
    result = await result_of(env_with(hostile("nan")), "act1", error=1)
    assert strict(json.loads(result.content)["message"]) == found


@pytest.mark.parametrize("mode", ["slow", "stubborn"])
async def test_a_server_that_does_not_end_by_itself_is_ended(hostile: Callable[..., McpServerConfig], mode: str) -> None:
    env = env_with(hostile(mode))
    await env.areset(seed=0)
    await env.astep(call("act1"))
    pid = int(env.trajectory.turns[-1].results[-1].content)
    began = time.monotonic()
    await env.aclose()
    assert time.monotonic() - began < 5.0 and not Path(f"/proc/{pid}").exists()


HOLDS = """
import asyncio, sys
from agentrl.config.schema import McpServerConfig
from agentrl.contrib.mcp.client import McpSource

async def main():
    session = McpSource("shop", McpServerConfig(command=sys.argv[1:])).session()
    tools = await session.open()
    print(await tools[0].function(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_process_that_started_it(hostile: Callable[..., McpServerConfig], number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, *hostile("stubborn").command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(number)
    process.wait(10)
    process.stdout.close()
    assert gone(pid)


# -- agentrl env check (40 B3) --------------------------------------------------------------------------


def checked(server: McpServerConfig, tasks: Path) -> subprocess.CompletedProcess[str]:
    words = ["env", "check", "mcp", f"command={json.dumps(server.command)}", f"tasks={tasks}"]
    return subprocess.run([sys.executable, "-m", "agentrl", *words], capture_output=True, text=True)


@pytest.mark.slow
def test_a_check_of_a_slow_noisy_server_is_short_and_quiet(hostile: Callable[..., McpServerConfig], tmp_path: Path) -> None:
    """An episode takes 1.4 s, since the server ends neither with its input nor at SIGTERM: 350 would take eight minutes."""
    gold = {"answer": 5, "calls": [{"name": "act1", "arguments": {}}]}
    rows = [{"id": f"t{n}", "split": ("train", "heldout")[n % 2], "prompt": f"ask {n}", "gold": gold} for n in range(40)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    began = time.monotonic()
    done = checked(hostile("check"), tmp_path / "tasks.jsonl")
    took = time.monotonic() - began
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stdout + done.stderr
    assert "checks are done" in done.stderr and len(done.stderr.splitlines()) < 14, "it says how far it is, and nothing else"
    assert took < 30 * max(1.0, os.getloadavg()[0] / 2), f"{took:.0f} s"


@pytest.mark.slow
def test_a_check_of_a_server_that_does_not_start_says_so_once(hostile: Callable[..., McpServerConfig], tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "x", "gold": {"answer": 1}}')
    done = checked(hostile("dies"), tmp_path / "tasks.jsonl")
    assert done.returncode != 0 and done.stderr.count("it wrote: ValueError: no database at /srv/shop.db") == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


# -- over HTTP: no answer is no error answer -----------------------------------------------------------


class Calls(LoopbackServer):
    """A server whose calls are answered with (status, content type, body); the rest is as it should be."""

    def __init__(self, *call_answer: Any) -> None:
        super().__init__()
        self.call_answer = call_answer

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.command != "POST":
            self.send(handler, "", 405 if handler.command == "GET" else 200)
            return
        asked = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        row = {"jsonrpc": "2.0", "id": asked.get("id")}
        info = {"serverInfo": {"name": "h", "version": "1"}, "capabilities": {"tools": {}}, "protocolVersion": "2025-06-18"}
        known = {"initialize": info, "tools/list": {"tools": [{"name": "act", "inputSchema": {"type": "object"}}]}}
        if asked["method"] in known:
            self.send(handler, json.dumps({**row, "result": known[asked["method"]]}))
        elif asked["method"] == "tools/call":
            status, kind, body = self.call_answer
            elsewhere = {"Location": "http://elsewhere.invalid/mcp"} if status == 307 else {}
            self.send(handler, body.replace("ID", json.dumps(asked["id"])), status, **{"Content-Type": kind}, **elsewhere)
        elif "id" in asked:
            self.send(handler, json.dumps({**row, "error": {"code": -32601, "message": "Method not found"}}))
        else:
            self.send(handler, "", 202)


ERROR = '{"jsonrpc": "2.0", "id": ID, "error": {"code": -32603, "message": "no such city"}}'


@pytest.mark.parametrize(("answer", "lost"), [
    ((500, "text/html", "<h1>oops</h1>"), True),
    ((502, "text/html", "bad gateway"), True),
    ((503, "application/json", '{"error": "down"}'), True),
    ((404, "text/plain", ""), True),
    ((202, "text/plain", ""), True),
    ((307, "text/plain", ""), True),
    ((200, "text/html", "<h1>login</h1>"), True),
    ((200, "application/json", "{"), True),
    ((200, "text/event-stream", "event: message\ndata: {\n\n"), True),
    ((200, "text/event-stream", ""), True),
    ((200, "application/json", ERROR), False),
    ((500, "application/json", ERROR), False),
    ((400, "application/json", ERROR), False),
    ((200, "text/event-stream", f"event: message\ndata: {ERROR}\n\n"), False),
])  # fmt: skip
async def test_over_http_only_an_answer_is_the_policys(answer: tuple[int, str, str], lost: bool) -> None:
    with Calls(*answer) as server:
        env = env_with(McpServerConfig(url=server.url, timeout=10.0))
        if lost:
            with pytest.raises(EnvError, match=rf"tool act of MCP server 'shop' failed.*{answer[0] if answer[0] >= 400 else ''}"):
                await result_of(env)
            assert env.trajectory.stop is StopReason.ENV_ERROR and env.trajectory.reward is None
        else:
            result = await result_of(env)
            assert result.error == "tool_error" and "no such city" in result.content


# -- schemas and names (D3) ----------------------------------------------------------------------------

NUMBER, TEXT = {"type": "number"}, {"type": "string"}
NEW = "https://json-schema.org/draft/{}/schema"
DRAFT = "http://json-schema.org/draft-0{}/schema#"
DRAFTS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"$schema": DRAFT.format(7), "items": [NUMBER, TEXT], "additionalItems": False}, [[1, "a"]], [["a", 1], [1, "a", 2]]),
    ({"items": [NUMBER, TEXT]}, [[1, "a"], [1, "a", None]], [["a"]]),
    ({"$schema": DRAFT.format(4), "minimum": 3, "exclusiveMinimum": True}, [4, 3.5], [3, 2]),
    ({"$schema": DRAFT.format(4), "maximum": 3, "exclusiveMaximum": False}, [3], [4]),
    ({"$schema": DRAFT.format(7), "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 2}, {}], [{"a": 1}]),
    ({"$schema": DRAFT.format(6), "dependencies": {"a": {"required": ["c"]}}}, [{"a": 1, "c": 2}], [{"a": 1}]),
    ({"$schema": DRAFT.format(7), "items": [NUMBER, {"$ref": "#/properties/x/items/0"}]}, [[1, 2]], [[1, "a"]]),
    ({"$schema": DRAFT.format(7), "allOf": [{"$ref": "#/definitions/n", "maximum": 3}], "d": 1}, [1, 5], ["a"]),
    ({"$schema": NEW.format("2019-09"), "items": [TEXT], "additionalItems": NUMBER}, [["a", 1]], [["a", "b"]]),
    ({"$schema": NEW.format("2020-12"), "prefixItems": [TEXT]}, [["a"]], [[1]]),
]


@pytest.mark.parametrize(("schema", "fits", "faults"), DRAFTS)
async def test_a_schema_is_read_by_its_draft(schema: dict[str, Any], fits: list[Any], faults: list[Any]) -> None:
    root = {"type": "object", "properties": {"x": schema}, "definitions": {"n": NUMBER, "items": NUMBER}}
    if "$schema" in schema:
        root["$schema"] = schema.pop("$schema")
    env = in_process(lambda *_: blocks(types.TextContent(type="text", text="took")), tool("act", root))
    await env.areset(seed=0)
    shown = env.toolbox["act"].schema["function"]["parameters"]
    assert "$schema" not in shown
    for value in fits:
        assert (await env.astep(call("act", x=value)))[0][0].content == "took", value
    for value in faults:
        assert env.toolbox["act"].check({"x": value}) is not None, value
    await env.aclose()


async def test_the_mcp_environment_leaves_out_a_bad_tool(hostile: Callable[..., McpServerConfig], tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "x", "gold": {"answer": 1}}')
    params = {"command": hostile("bad").command, "tasks": str(tmp_path / "tasks.jsonl")}
    with pytest.raises(EnvError, match=r"'server', tool 'bad': .*/properties/pair/items.*`tools`"):
        await make_env("mcp", **params).areset(seed=0)
    env = make_env("mcp", **params, tools=["act1"])
    await env.areset(seed=0)
    assert env.toolbox.names == ("act1",)
    await env.aclose()


async def test_two_servers_with_one_name_are_both_named() -> None:
    env = env_with(McpServerConfig(), built(lambda *_: blocks()), "north")
    env.add_source(McpSource("south", McpServerConfig(), built(lambda *_: blocks())))
    with pytest.raises(EnvError, match=r"'south'.*'act'.*'north'.*`prefix`"):
        await env.areset(seed=0)
    env = env_with(McpServerConfig(), built(lambda *_: blocks(), tool("write")), "north")
    with pytest.raises(EnvError, match=rf"'north'.*'write'.*{env.id}.*`prefix`"):
        await env.areset(seed=0)


# -- the server of tools for agents (a kin of D5) ------------------------------------------------------


async def test_an_agent_is_answered_with_the_pictures_of_its_tools() -> None:
    from mcp import Client

    from agentrl.contrib.agents.endpoint import ToolServer
    from agentrl.data.images import Image

    picture = Image.read(png())

    class Episode:
        def schemas(self) -> list[dict[str, Any]]:
            return [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

        async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
            return ToolResult("1", name, f"here\n{picture.line}\nit is", None, None, 0.0, (picture,))

        async def say(self, text: str) -> list[str] | None:
            return None

    server = ToolServer("127.0.0.1")
    await server.start()
    try:
        async with Client(f"{server.open(Episode())}/mcp") as client:  # type: ignore[arg-type]
            before, shown, after = (await client.call_tool("look", {})).content
        assert (before.text, shown.type, after.text) == ("here", "image", "it is")
        assert (shown.data, shown.mime_type) == (picture.data, "image/png")
    finally:
        await server.close()
