"""Readers of untrusted text, as functions of one text: they refuse it in their own way or read it right."""

import asyncio
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from agentrl.config import load_config
from agentrl.contrib.agents.protocols import Exchange, read_anthropic, read_chat, read_responses
from agentrl.contrib.remote_envs.server import EnvApp, EnvOffer
from agentrl.contrib.remote_envs.sessions import Secret
from agentrl.contrib.toolkit.turns import ProseReader
from agentrl.contrib.view.library import overview
from agentrl.data.trajectory import Message, Task, Trajectory
from agentrl.engines.chat_format import RequestError
from agentrl.env import Tool, Toolbox
from agentrl.env.address import EnvRequest
from agentrl.env.catalog import EnvRef
from agentrl.render.syntaxes import SYNTAXES
from agentrl.render.tool_calls import ForTools
from agentrl.reward import compile_spec
from agentrl.rollout.engine import Sampling
from agentrl.run.reader import RunRecord, episode_of
from agentrl.trainer.checkpoint import MANIFEST, check_intact, is_whole
from agentrl.utils.errors import CatalogError, CheckpointError, ConfigError, RewardSpecError, RunFolderError
from agentrl.utils.parsing import json_text, read_json
from agentrl.utils.redaction import references
from agentrl.utils.schemas import compile_pattern, within_seconds
from agentrl.utils.terminal import console, safe
from agentrl.utils.threads import TooLongError
from tests.strict_json import strict

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/parts"))
from call_shapes import PARTS

Read = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """`inputs`: of the 100,000 of `python -m tests.hostile.fuzz`."""

    read: Read
    texts: st.SearchStrategy[str]
    inputs: int


# -- texts -----------------------------------------------------------------------------------------

NASTY = st.sampled_from([
    "\x1b]0;x\x07", "\x00", "\r", "\u202e", "\ue000", "\ue0000\ue001", "\ufffd", "é", "🙂", "1e999", "-1e999", "9" * 400,
    "9" * 4400, "NaN", "Infinity", "null", "../x", "/etc/passwd", "a" * 300, " " * 200, "\n" * 50, "\\ud800", "[" * 120,
    '{"a":' * 120, "(" * 120, "-" * 300, "$ref", "#", "<think>", "</think>", "%s{0}", "0x1f", "1_000", "'''", '"""', "\\",
])  # fmt: skip
NUMBERS = st.sampled_from([0, -1, 1, 2, 1e308, -0.0, 1e-320, 10**30, 10**320, math.inf, -math.inf, math.nan, 0.5])
BIG = "an integer of 4,400 digits"
LEAVES = st.just(BIG) | st.none() | st.booleans() | NUMBERS | NASTY | st.text(max_size=6)


def long_json(value: Any) -> str:
    """JSON as Python writes it, with numbers and depths that Python itself would not write."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {long_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(long_json, value)) + "]"
    return "9" * 4400 if value == BIG else json.dumps(value)


def json_of(*keys: str, values: st.SearchStrategy[Any] = LEAVES, leaves: int = 12) -> st.SearchStrategy[str]:
    """Texts of JSON objects with these keys, and some that are cut, repeated or spliced."""
    names = st.sampled_from(keys) | st.text(max_size=4)
    value = st.recursive(
        values, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=leaves
    )
    whole = st.dictionaries(names, value, max_size=6).map(long_json)
    return whole | st.tuples(whole, st.integers(0, 60), NASTY).map(lambda it: it[0][: it[1]] + it[2] + it[0][it[1] :])


def pieces(*parts: str) -> st.SearchStrategy[str]:
    """Texts of these parts, in any order, with others between them."""
    return st.lists(st.sampled_from(parts) | NASTY | st.text(max_size=4), max_size=16).map("".join)


# -- what a policy writes --------------------------------------------------------------------------

_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "k": {"type": ["integer", "number", "object", "null"]}, "j": {"anyOf": [{"$ref": "#/$defs/t"}]}},
        "$defs": {"t": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "integer"}]}}}}}
]  # fmt: skip


@cache
def _parser(name: str) -> Any:
    parser = SYNTAXES[name].parser
    return parser.bind(_TOOLS) if isinstance(parser, ForTools) else parser


def calls(syntax: str, text: str) -> None:
    """A parser never raises, and what it reads can be written: as JSON, and as an episode's row."""
    prose, found = _parser(syntax)(text)
    assert isinstance(prose, str)
    for call in found:
        assert (call.arguments is None) == bool(call.error), call
        if call.arguments is not None:
            strict(json.dumps(call.arguments, ensure_ascii=False))
    strict(json_text([call.arguments for call in found]))


class _Letters:
    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))

    def piece(self, number: int) -> str:
        return chr(number)


def stream(text: str) -> None:
    """What is told of a turn while it is sampled is the beginning of what is read in the end."""
    reader = ProseReader(_Letters(), ("<think>", "</think>"), ("<tool_call>", "stop"))
    told = "".join(reader.read([ord(letter)]) for letter in text)
    rest = text.lstrip()
    if rest.startswith("<think>"):
        rest = rest.removeprefix("<think>").partition("</think>")[2]
    ends = [at for end in ("<tool_call>", "stop") if (at := rest.find(end)) >= 0]
    assert rest[: min(ends, default=len(rest))].strip().startswith(told), (told, text)


# -- what others declare ---------------------------------------------------------------------------


def an_object(text: str) -> dict[str, Any] | None:
    """The JSON object of a text, if it is one."""
    with suppress(ValueError):
        return value if isinstance(value := read_json(text), dict) else None
    return None


def schema(text: str) -> None:
    """A schema is refused by name, or its tool answers any arguments; nothing is fetched."""
    if (parameters := an_object(text)) is None:
        return
    try:
        box = Toolbox([Tool.from_schema("t", "", parameters, lambda **given: 1)])
    except TypeError as problem:
        assert "tool t:" in str(problem)
        return
    for arguments in ({}, {"a": "aaaa", "b": [1, {"a": {}}, 10**400]}, {"type": {"type": {"a": [[], [1.0], [True]]}}}):
        with suppress(TimeoutError, TooLongError):
            box["t"].check(arguments)


def pattern(text: str) -> None:
    try:
        found = compile_pattern(text)
    except ValueError:
        return
    with suppress(TimeoutError):
        within_seconds(found.search, "aab" * 200 + "!", 0.2)


_EPISODE = Trajectory("e", Task("t", 0, "train", {}, {"answer": "1"}), seed=0, messages=[Message("user", "go")], turns=[])


def spec(text: str) -> None:
    try:
        value = read_json(text)
        scorer = compile_spec(value) if isinstance(value, dict) else None
    except (RewardSpecError, ValueError):
        return
    if scorer is not None:
        strict(json_text(scorer(_EPISODE).evidence))


# -- what clients send -----------------------------------------------------------------------------


def body(read: Callable[[Exchange], Any], text: str) -> None:
    if (value := an_object(text)) is not None:
        session: Any = SimpleNamespace(kept={}, served=SimpleNamespace(sampling=Sampling(max_tokens=9)))
        with suppress(RequestError):
            read(Exchange(session, value, "m"))


class _Nothing:
    name, summary = "e", ""

    def card(self, asked: Any) -> dict[str, Any]:
        return {"env": "e"}

    def __getattr__(self, name: str) -> Any:
        def refuse(*args: Any, **named: Any) -> Any:
            raise ConfigError("there is none")

        return refuse


@cache
def _app() -> tuple[Any, asyncio.AbstractEventLoop]:
    offer: Any = _Nothing()
    return EnvApp(offer, Secret("a-token-of-the-tests-only")).asgi(), asyncio.new_event_loop()


def env_server(text: str) -> None:
    """Whatever the body, no answer of the environment server is its own error."""
    app, loop = _app()
    kind = ("/v1/describe", "/v1/ask", "/v1/sessions/s/step", "/v1/sessions/s/reset")[len(text) % 4]
    headers = [(b"authorization", b"Bearer a-token-of-the-tests-only"), (b"content-type", b"application/json")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": kind,
             "raw_path": kind.encode(), "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1),
             "server": ("127.0.0.1", 2)}  # fmt: skip
    sent: list[Any] = []
    parts = iter([{"type": "http.request", "body": text.encode("utf-8", "replace"), "more_body": False}])

    async def receive() -> Any:
        return next(parts, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    loop.run_until_complete(asyncio.wait_for(app(scope, receive, send), 5))
    assert sent[0]["status"] < 500, sent


# -- files -----------------------------------------------------------------------------------------


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="agentrl-hostile-"))


def run_folder(text: str) -> None:
    """The same text as each file of a run: the folder is read, or damaged by name."""
    folder = _folder() / "run"
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "config.toml", "summary.json", "trajectories/step_000001.jsonl"):
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    run = RunRecord(folder)
    strict(json.dumps(safe(overview(run))))
    for look in (lambda: run.metrics, lambda: run.summary, lambda: run.table, lambda: list(run.folder.read_metrics())):
        with suppress(RunFolderError):
            look()
    for line in text.split("\n")[:3]:
        with suppress(RunFolderError):
            strict(json_text(episode_of(line, "here").to_json()))


def manifest(text: str) -> None:
    folder = _folder() / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    whole = is_whole(folder)
    with suppress(CheckpointError):
        check_intact(folder)
        assert whole


def config(text: str) -> None:
    file = _folder() / "config.toml"
    file.write_text(text, encoding="utf-8", errors="replace")
    with suppress(ConfigError):
        load_config(file)


def override(text: str) -> None:
    file = _folder() / "base.toml"
    if not file.exists():
        file.write_text("name = 'x'\n")
    with suppress(ConfigError):
        made = load_config(file, [text])
        place = (Path("/out") / made.name).resolve()
        assert place.parent == Path("/out"), place


def params(text: str) -> None:
    """Built or refused by name, from client and config; a client's references lead to nothing here."""
    if (given := an_object(text)) is None:
        return
    with suppress(ConfigError, CatalogError):
        EnvOffer(EnvRef("key_value")).build(EnvRequest("key_value", given))
        assert not list(references(given)), given
    with suppress(ConfigError, CatalogError):
        EnvRef("key_value", given).build()


# -- ways out --------------------------------------------------------------------------------------


def shown(text: str) -> None:
    out = safe(text)
    acts = [*range(9), *range(11, 32), *range(127, 160), *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x2070)]
    assert not set(map(ord, out)) & set(acts), ascii(out)
    out.encode()
    drawn = io.StringIO()
    console(file=drawn, markup=False, highlight=False).print(text)
    assert not set(map(ord, drawn.getvalue())) & set(acts), ascii(drawn.getvalue())


def written(text: str) -> None:
    with suppress(ValueError):
        strict(json_text(read_json(text)).encode("ascii").decode())


_SCHEMA_WORDS = (
    "$ref", "$dynamicRef", "$id", "$schema", "$anchor", "$defs", "type", "properties", "items", "prefixItems", "allOf", "anyOf",
    "oneOf", "not", "if", "then", "else", "pattern", "patternProperties", "additionalProperties", "unevaluatedProperties",
    "unevaluatedItems", "uniqueItems", "multipleOf", "enum", "const", "required", "minLength", "maxItems", "contains",
    "dependentSchemas", "dependentRequired", "propertyNames", "format", "default", "a", "b",
)  # fmt: skip
_SCHEMA_LEAVES = LEAVES | st.sampled_from([
    "#", "#/$defs/a", "#/properties/a", "#a", "http://127.0.0.1:9/x", "file:///etc/passwd", "object", "array", "string",
    "integer", "(a+)+$", "(a|aa)+!", "(?R)?a", "((a{90}){90}){90}", "a{0,9}", "[", "^(?=a)", "date-time",
])  # fmt: skip
_PATTERN = (
    "(", ")", "[", "]", "{2}", "{9,}", "{99}", "{0,5000}", "*", "+", "?", "|", "^", "$", ".", "\\d", "\\1", "(?:", "(?=",
    "(?<n>", "(?P<n>", "(?&n)", "(?R)", "(?i)", "(?x)", "#", "a", "b", "a+", "\\p{L}", "[[a]&&b]", "{e<=3}", "\\K", "(?|",
)  # fmt: skip
_BODY = (
    "model", "messages", "role", "content", "tools", "function", "name", "parameters", "tool_choice", "response_format",
    "json_schema", "schema", "type", "stream", "n", "stop", "temperature", "seed", "max_tokens", "input", "instructions",
    "previous_response_id", "text", "format", "system", "input_schema", "tool_calls", "arguments", "tool_use", "stop_sequences",
    "protocol", "env",
)  # fmt: skip
_BODY_LEAVES = LEAVES | st.sampled_from(
    ["user", "assistant", "tool", "system", "text", "function", "json_schema", "auto", "required"]
)
_ROW = (
    "phase", "step", "success", "time/x", "task", "messages", "turns", "ledgers", "stop", "env_id", "seed", "id", "split",
    "data", "gold", "results", "message", "tool_calls", "metrics", "timings", "spans", "status", "seconds", "files", "size",
    "sha256", "config", "../x", "/etc/hostname", "sum", "kind", "episode",
)  # fmt: skip
_LEAF = (
    "agentrl_reward", "name", "root", "use", "args", "op", "of", "if", "then", "else", "expect", "where", "pattern", "id",
    "weight", "success", "metrics", "path", "equals", "ref",
)  # fmt: skip
_LEAF_LEAVES = LEAVES | st.sampled_from(
    ["text.equals", "format.regex", "text.number", "calls.schema", "sum", "gate", "mean", "answer"]
)
_REFERENCES = st.sampled_from(["env:HOME", "x${env:PATH}", "env:", "${env:}", "env:NOWHERE_SET", "${env:${env:HOME}}"])
_TOML = (
    "name", "=", " ", "\n", "[", "]", "[[", "]]", "{", "}", ".", ",", '"', "'", "'''", "model", "path", "env", "id", "steps",
    "1", "true", "base", "a.b", "rollout.groups", "2026-01-01", "inf", "nan", "#",
)  # fmt: skip


def _targets() -> Iterator[tuple[str, Target]]:
    for name in SYNTAXES:
        yield f"calls:{name}", Target(partial(calls, name), pieces(*PARTS[name]), 3000)
    yield "stream", Target(stream, pieces("<think>", "</think>", "<tool_call>", "stop", "<", " ", "\n", "a"), 3000)
    yield "schema", Target(schema, json_of(*_SCHEMA_WORDS, values=_SCHEMA_LEAVES, leaves=20), 9000)
    yield "pattern", Target(pattern, pieces(*_PATTERN), 7000)
    yield "spec", Target(spec, json_of(*_LEAF, values=_LEAF_LEAVES), 6000)
    for name, read in (("chat", read_chat), ("responses", read_responses), ("anthropic", read_anthropic)):
        yield f"body:{name}", Target(partial(body, read), json_of(*_BODY, values=_BODY_LEAVES, leaves=20), 3000)
    yield "env_server", Target(env_server, json_of(*_BODY, "seed", "action", "key", "arguments"), 3000)
    yield "run_folder", Target(run_folder, json_of(*_ROW) | pieces("{", "}", "\n", '"phase": "train"', '"step": 1', ","), 5000)
    yield "manifest", Target(manifest, json_of(*_ROW), 2000)
    yield "config", Target(config, pieces(*_TOML), 3000)
    yield "override", Target(override, pieces(*_TOML, "../", "name=", "..", "/", "\\"), 2000)
    yield "params", Target(params, json_of("calls", "keys", "level", "x", values=LEAVES | _REFERENCES), 2000)
    yield "shown", Target(shown, st.text() | pieces("\x1b[2J", "\x9b", "\u2066"), 2000)
    yield "written", Target(written, json_of("a", "b"), 2000)


TARGETS: dict[str, Target] = dict(_targets())
