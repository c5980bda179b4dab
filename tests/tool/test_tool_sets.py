"""The shelf of tools: what they answer and refuse, limits that hold, and a state per episode and fork."""

import asyncio
import gc
import json
import socket
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import TrainConfig
from agentrl.config.load import load_config, with_absolute_paths
from agentrl.config.schema import ToolsConfig
from agentrl.contrib.sandboxes import bubblewrap, local
from agentrl.contrib.sandboxes.contract import SANDBOXES, SandboxProvider
from agentrl.contrib.sandboxes.sandbox_pool import provider_of, sandbox_config
from agentrl.data.trajectory import ToolResult
from agentrl.env import Message, Task, Toolbox, ToolCall, ToolEnv
from agentrl.env.catalog import EnvRef, find_tools, load_tools
from agentrl.env.check import check_all
from agentrl.env.check_tools import Subject
from agentrl.env.spaces import run_sync
from agentrl.reward import compile_spec
from agentrl.run.digests import contents_of
from agentrl.utils.errors import CatalogError, ConfigError, EnvError, ResourceError
from tests.env.toyenvs import call

STATEFUL = ("files", "http", "notes", "retrieval", "shell", "sqlite")


def ref(name: str, **args: Any) -> EnvRef:
    return EnvRef("key_value", {"calls": 2}, tools=ToolsConfig(sets=[name], args={name: args} if args else {}))


def begun(name: str, **args: Any) -> ToolEnv:
    env = ref(name, **args).build()
    env.reset(seed=1)
    return env


def result(env: ToolEnv, name: str, /, **arguments: Any) -> ToolResult:
    return run_sync(env.toolbox.call(ToolCall(name, arguments)))


def ask(env: ToolEnv, name: str, /, **arguments: Any) -> str:
    answer = result(env, name, **arguments)
    assert answer.error is None, answer.content
    return answer.content


def refused(env: ToolEnv, name: str, /, **arguments: Any) -> str:
    answer = result(env, name, **arguments)
    assert answer.error == "tool_error", answer
    return str(json.loads(answer.content)["message"])


def held(env: ToolEnv, name: str) -> Any:
    return env.tool_set(name).state()


# -- files ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "main.py").write_text("one\ntwo\nthree\n")
    (root / "README.md").write_text("Two words\n")
    (root / "logo.bin").write_bytes(b"\xff\x00")
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    (root / "link.txt").symlink_to(secret)
    (root / "out").symlink_to(tmp_path)
    return root


def test_files_are_read_written_edited_and_found(folder: Path) -> None:
    env = begun("files", folder=str(folder))
    assert ask(env, "list_files") == "README.md 10\nlogo.bin 2\nsrc/main.py 14"
    assert ask(env, "list_files", folder="src/") == ask(env, "list_files", folder="./src") == "src/main.py 14"
    assert ask(env, "read_file", path="src/main.py") == "one\ntwo\nthree\n"
    assert ask(env, "read_file", path="src/../src/main.py", start=2, lines=1) == "two\n\n(1 more lines)"
    assert ask(env, "search_files", text="TWO") == "README.md:1: Two words\nsrc/main.py:2: two"
    assert ask(env, "search_files", text="two", folder="src") == "src/main.py:2: two"
    assert ask(env, "search_files", text="none of them") == "(not found)"
    ask(env, "write_file", path="long", text="x\n" * 20_000)
    assert ask(env, "search_files", text="X").endswith("long:50: x\n(19950 more)"), "counted, not kept"
    ask(env, "delete_file", path="long")
    assert ask(env, "edit_file", path="src/main.py", old="two", new="2") == "replaced"
    assert ask(env, "write_file", path="notes/é.txt", text="é") == "2 bytes written"
    assert ask(env, "delete_file", path="README.md") == "deleted"
    assert held(env, "files") == {"logo.bin": "base64:/wA=", "notes/é.txt": "é", "src/main.py": "one\n2\nthree\n"}
    assert (folder / "src" / "main.py").read_text() == "one\ntwo\nthree\n", "the folder itself is never written"
    env.reset(seed=1)
    assert sorted(held(env, "files")) == ["README.md", "logo.bin", "src/main.py"], "each episode begins anew"


@pytest.mark.parametrize(("tool", "arguments", "said"), [
    ("read_file", {"path": "../secret.txt"}, "leads out of the folder"),
    ("read_file", {"path": "src/../../secret.txt"}, "leads out of the folder"),
    ("read_file", {"path": "/etc/passwd"}, "leads out of the folder"), ("read_file", {"path": "link.txt"}, "no file"),
    ("read_file", {"path": "out/secret.txt"}, "no file"), ("read_file", {"path": "logo.bin"}, "is not text: 2 bytes"),
    ("read_file", {"path": "src/main.py", "start": 5}, "has 3 lines"), ("read_file", {"path": "src"}, "no file"),
    ("write_file", {"path": "../x", "text": ""}, "leads out"), ("write_file", {"path": "/x", "text": ""}, "leads out"),
    ("write_file", {"path": ".", "text": ""}, "not the path of a file"),
    ("write_file", {"path": "a\0b", "text": ""}, "is not a path"),
    ("write_file", {"path": "/".join("abcdefghijklmnopq"), "text": ""}, "is not a path"),
    ("write_file", {"path": "é" * 128, "text": ""}, "is not a path"),
    ("write_file", {"path": "src", "text": ""}, "name of a folder"),
    ("write_file", {"path": "README.md/x", "text": ""}, "name of a folder"),
    ("write_file", {"path": "big.txt", "text": "x" * 101}, "a file of 101 bytes, and 100 are allowed"),
    ("edit_file", {"path": "src/main.py", "old": "e", "new": ""}, "occurs 3 times"),
    ("edit_file", {"path": "src/main.py", "old": "four", "new": ""}, "occurs 0 times"),
    ("edit_file", {"path": "src/main.py", "old": "one", "new": "x" * 100}, "bytes, and 100 are allowed"),
    ("delete_file", {"path": "gone"}, "no file"), ("list_files", {"folder": "../"}, "leads out"),
    ("list_files", {"folder": "nowhere"}, "no folder"), ("search_files", {"text": "x", "folder": "../.."}, "leads out"),
])  # fmt: skip
def test_what_files_refuse_changes_nothing(folder: Path, tool: str, arguments: dict[str, Any], said: str) -> None:
    env = begun("files", folder=str(folder), file_bytes=100)
    before = held(env, "files")
    assert said in refused(env, tool, **arguments)
    assert held(env, "files") == before


def test_files_have_limits_together(folder: Path) -> None:
    env = begun("files", file_bytes=60, total_bytes=100, most=3)
    ask(env, "write_file", path="a", text="x" * 60)
    assert "120 bytes in all, and 100" in refused(env, "write_file", path="b", text="x" * 60)
    ask(env, "write_file", path="a", text="y" * 50), ask(env, "write_file", path="b", text="x" * 50)
    ask(env, "write_file", path="c", text="")
    assert "4 files, and 3" in refused(env, "write_file", path="d", text="")
    with pytest.raises(ConfigError, match=r"tools\.args\.files\.folder.*: a file of 14 bytes, and 13 are allowed"):
        ref("files", folder=str(folder), file_bytes=13).build()
    with pytest.raises(ConfigError, match="no such folder"):
        ref("files", folder=str(folder / "nowhere")).build()


@given(st.lists(st.sampled_from(["..", ".", "a", "", "b.txt", "//", "../..", "/etc/passwd"]), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_no_path_leads_out(parts: list[str]) -> None:
    env = begun("files")
    answer = result(env, "write_file", path="/".join(parts) or ".", text="x")
    for path in held(env, "files"):
        assert not path.startswith(("/", "..")) and ".." not in path.split("/") and answer.error is None


# -- shell ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "bubblewrap"])
def shell(folder: Path, request: pytest.FixtureRequest) -> Iterator[ToolEnv]:
    if reason := SANDBOXES.bind(request.param, {})().unavailable():
        pytest.skip(f"sandbox provider {request.param}: {reason}")
    box = {"provider": request.param}
    env = begun("shell", folder=str(folder), seconds=1.5, total_bytes=100_000, file_bytes=50_000, sandbox=box)
    yield env
    env.close()


def test_commands_and_file_tools_see_one_folder(shell: ToolEnv, tmp_path: Path) -> None:
    env = shell
    assert ask(env, "run_command", command="cat src/main.py; echo two > new.txt; exit 3") == "one\ntwo\nthree\n[exit status 3]"
    assert ask(env, "read_file", path="new.txt") == "two\n"
    ask(env, "write_file", path="sub/a.sh", text="echo $((6 * 7))")
    assert ask(env, "run_command", command="sh sub/a.sh") == "42"
    assert ask(env, "run_command", command="true") == "(no output)"
    assert ask(env, "search_files", text="two") == "README.md:1: Two words\nnew.txt:1: two\nsrc/main.py:2: two"
    assert ask(env, "run_command", command="sleep 9").endswith("stopped: not done after 1.5 s")
    # Links that the policy makes lead nowhere for the file tools, and commands read nothing outside.
    ask(env, "run_command", command=f"ln -s '{tmp_path}/secret.txt' l; ln -s '{tmp_path}' d")
    assert "no file" in refused(env, "read_file", path="l") and "no file" in refused(env, "read_file", path="d/secret.txt")
    assert "in the way" in refused(env, "write_file", path="d/x", text="")
    assert "hidden" not in ask(env, "run_command", command=f"cat l d/secret.txt '{tmp_path}/secret.txt' 2>&1")
    assert not (tmp_path / "x").exists() and "l " not in ask(env, "list_files").split("\n")
    assert "bytes, and 50000 are allowed" in refused(env, "write_file", path="big", text="x" * 50_001)
    forked = env.fork()
    ask(forked, "run_command", command="rm new.txt; echo forked > README.md")
    assert ask(env, "read_file", path="new.txt") == "two\n" and "no file" in refused(forked, "read_file", path="new.txt")
    run_sync(forked.aclose())


@pytest.mark.parametrize("provider", [local.LocalProvider, bubblewrap.BubblewrapProvider])
def test_a_shell_without_a_jail_is_refused_by_name(provider: type[SandboxProvider], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "unavailable", lambda self: "no jail")
    said = rf"tool set 'shell': no command can be run here: env.sandbox.provider = '{provider.name}': no jail"
    with pytest.raises(ResourceError, match=said):
        ref("shell", sandbox={"provider": provider.name}).build()
    with pytest.raises(ConfigError, match="unknown name 'locl'; did you mean 'local'"):
        ref("shell", sandbox={"provider": "locl"}).build()
    ref("shell", sandbox={"provider": "docker", "args": {"command": ["true"]}}).build()  # it cannot limit all files


# -- http ----------------------------------------------------------------------------------------------


def recorded(method: str, uri: str, text: str, code: int = 200, body: str | None = None) -> dict[str, Any]:
    request = {"method": method, "uri": uri, "body": body, "headers": {}}
    return {"request": request, "response": {"status": {"code": code, "message": ""}, "headers": {}, "body": {"string": text}}}


@pytest.fixture
def cassette(tmp_path: Path) -> str:
    tape = [
        recorded("GET", "https://Api.example/items?b=2&a=1", "[1]"),
        recorded("GET", "https://api.example/job", "running", 202),
        recorded("GET", "https://api.example/job", "done"),
        recorded("POST", "https://api.example/items", "made", 201, '{"a": 1, "b": 2}'),
        recorded("DELETE", "https://api.example/items", "", 204),
        recorded("GET", "https://api.example/tags?tag=b&n=1&tag=a", "ab"),
    ]
    (tmp_path / "tape.json").write_text(json.dumps({"version": 1, "interactions": tape}))
    return str(tmp_path / "tape.json")


def test_requests_are_answered_from_the_recording_alone(cassette: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    env = begun("http", cassette=cassette)
    get = lambda path, **more: ask(env, "http_request", url=f"https://api.example{path}", **more)  # noqa: E731
    assert get("/items?a=1&b=2") == "200\n[1]"
    assert [get("/job") for _ in range(3)] == ["202\nrunning", "200\ndone", "200\ndone"]
    assert get("/items", method="POST", body='{"b":2,"a":1}') == "201\nmade"
    assert get("/items", method="DELETE", body="any") == "204\n"
    said = refused(env, "http_request", url="https://api.example/items", method="PUT")
    assert said.startswith("no answer to PUT https://api.example/items is recorded") and said.endswith("there is DELETE, POST")
    for url in ("https://api.example/items?a=1", "http://api.example/job", "file:///etc/passwd", "x"):
        assert "there is no network" in refused(env, "http_request", url=url)
    assert "no answer to POST" in refused(env, "http_request", url="https://api.example/items", method="POST", body="{}")
    assert get("/tags?tag=a&tag=b&n=1") == "200\nab"
    assert held(env, "http")[-1]["query"] == {"n": "1", "tag": ["a", "b"]}, "a name that is there twice has both values"
    assert len(held(env, "http")) == 7
    env.reset(seed=1)
    assert get("/job") == "202\nrunning", "a new episode plays it from the start"


@pytest.mark.parametrize(("text", "said"), [
    ("{", "Expecting property name"),
    ("{}", "'interactions' is a required property"),
    ('{"interactions": [{"request": {"method": "GET", "uri": "x"}}]}', r"\$\.interactions\[0\]: 'response'"),
    ('{"interactions": [{"request": {"method": "GET", "uri": "http://[x"}, "response": '
     '{"status": {"code": 200}, "body": {"string": ""}}}]}', "is not an address"),
])  # fmt: skip
def test_what_is_no_cassette_is_said_before_an_episode(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"tools\.args\.http\.cassette = .*{said}"):
        ref("http", cassette=str(tmp_path / "t.json")).build()


# -- sqlite --------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> str:
    connection = sqlite3.connect(tmp_path / "shop.db")
    connection.executescript("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO items VALUES (1, 'kettle');")
    connection.close()
    return str(tmp_path / "shop.db")


def test_a_database_is_queried_and_changed(database: str, tmp_path: Path) -> None:
    env = begun("sqlite", database=database, rows=2)
    assert ask(env, "query_database", sql="SELECT * FROM items") == "id | name\n1 | kettle"
    assert ask(env, "change_database", sql="INSERT INTO items VALUES (2, 'jigsaw'), (3, 'pillow')") == "done; 2 rows changed"
    assert ask(env, "query_database", sql="SELECT id FROM items").endswith("(only the first 2 rows are shown)")
    for sql in (
        "CREATE TABLE other AS SELECT name FROM items WHERE id = 2", "CREATE VIEW names AS SELECT name FROM items",
        "ALTER TABLE other ADD COLUMN price REAL", "ALTER TABLE other RENAME COLUMN price TO cost",
        "UPDATE items SET name = upper(name) WHERE id = 1", "DELETE FROM items WHERE id = 3",
    ):  # fmt: skip
        ask(env, "change_database", sql=sql)
    assert held(env, "sqlite") == {"items": [[1, "KETTLE"], [2, "jigsaw"]], "other": [["jigsaw", None]]}
    assert sqlite3.connect(database).execute("SELECT * FROM items").fetchall() == [(1, "kettle")], "the file is never written"
    env.reset(seed=1)
    assert held(env, "sqlite") == {"items": [[1, "kettle"]]}
    (tmp_path / "made.sql").write_text("CREATE TABLE t (x); INSERT INTO t VALUES (x'ff');")
    assert held(begun("sqlite", database=str(tmp_path / "made.sql")), "sqlite") == {"t": [["ff"]]}
    empty = begun("sqlite")
    ask(empty, "change_database", sql="CREATE TABLE t (x)")
    assert held(empty, "sqlite") == {"t": []}


REFUSED = [
    "ATTACH DATABASE '/tmp/x.db' AS x", "DETACH DATABASE main", "PRAGMA writable_schema = ON", "SELECT load_extension('x')",
    "INSERT INTO items VALUES (9, load_extension('x'))",
    "INSERT INTO sqlite_master VALUES ('table', 'x', 'x', 2, 'CREATE TABLE x (y)')", "CREATE TEMP TABLE t (x)",
    "CREATE VIRTUAL TABLE t USING fts5(x)", "CREATE TRIGGER t AFTER INSERT ON items BEGIN SELECT 1; END",
    "VACUUM INTO '/tmp/x.db'", "BEGIN", "INSERT INTO items VALUES (1, 'twice')",
    "INSERT INTO items VALUES (7, 'a'); DELETE FROM items", "DROP TABLE sqlite_master", "nonsense",
    "INSERT INTO items SELECT NULL, readfile('/etc/passwd')",
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) INSERT INTO items SELECT x, '' FROM n",
]  # fmt: skip


@pytest.mark.parametrize("sql", REFUSED)
def test_a_statement_that_is_refused_changes_nothing(database: str, sql: str) -> None:
    env = begun("sqlite", database=database)
    assert refused(env, "change_database", sql=sql) and refused(env, "query_database", sql=sql)
    assert held(env, "sqlite") == {"items": [[1, "kettle"]]}


def test_a_database_has_limits(database: str, tmp_path: Path) -> None:
    env = begun("sqlite", database=database, seconds=0.2, most_bytes=1 << 16, characters=3000)
    assert "this changes nothing" in refused(env, "change_database", sql="SELECT 1")
    assert "one SELECT" in refused(env, "query_database", sql="DELETE FROM items")
    assert "too large" in refused(env, "change_database", sql=f"INSERT INTO items VALUES (5, '{'x' * 3000}')")
    grows = f"INSERT INTO items VALUES (5, replace(hex('{'x' * 1400}'), '7', '77'))"
    assert "too big" in refused(env, "change_database", sql=grows)
    row = f"INSERT INTO items (name) VALUES ('{'x' * 2900}')"
    for _ in range(30):
        if (answer := result(env, "change_database", sql=row)).error:
            break
    assert "full" in answer.content and len(env.tool_set("sqlite").image) <= 1 << 16  # type: ignore[attr-defined]
    cross = "SELECT count(*) FROM items a, items b, items c, items d, items e, items f, items g, items h"
    assert "more than 0.2 s" in refused(env, "query_database", sql=cross)
    closed = begun("sqlite", database=database, read_only=True)
    assert refused(closed, "change_database", sql="DELETE FROM items") == "the database is read-only"
    for number, text in enumerate(("\xff\xfe", "CREATE TABL")):
        (tmp_path / f"bad{number}").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match="neither a SQLite file nor a script"):
            ref("sqlite", database=str(tmp_path / f"bad{number}")).build()
    with pytest.raises(ConfigError, match="No such file"):
        ref("sqlite", database=str(tmp_path / "nowhere.db")).build()


# -- notes and retrieval -------------------------------------------------------------------------------


def test_notes() -> None:
    env = begun("notes", most=2, characters=5)
    assert ask(env, "read_notes") == "(no notes)"
    assert ask(env, "write_note", title="code", text="12345") == ask(env, "write_note", title="b", text="x") == "noted"
    assert ask(env, "read_notes") == "code\nb" and ask(env, "read_notes", title="code") == "12345"
    assert "6 characters, and at most 5" in refused(env, "write_note", title="code", text="123456")
    assert "2 notes already" in refused(env, "write_note", title="c", text="x")
    assert "there are: code, b" in refused(env, "read_notes", title="c")
    assert [ask(env, "write_note", title="b", text="") for _ in range(2)] == ["removed", "there was none"]
    assert ask(env, "write_note", title="code", text="new") == "noted"
    assert held(env, "notes") == {"code": "new"}


def test_a_policy_cannot_make_a_database_that_is_not_read(database: str) -> None:
    """Texts that are no UTF-8, infinities, columns that are worked out when the state is read: 15 times hex is 2**15 times as
    long."""
    env = begun("sqlite", database=database)
    ask(env, "change_database", sql="INSERT INTO items VALUES (2, CAST(x'ff41' AS TEXT))")
    ask(env, "change_database", sql="CREATE TABLE r (a REAL)"), ask(env, "change_database", sql="INSERT INTO r VALUES (9e999)")
    before = {"items": [[1, "kettle"], [2, "\ufffdA"]], "r": [["inf"]]}
    assert held(env, "sqlite") == before and json.dumps(before, allow_nan=False)
    long = "name"
    for _ in range(15):
        long = f"hex({long})"
    for sql in (f"ALTER TABLE items ADD COLUMN x AS ({long})", "CREATE TABLE t (a, b GENERATED ALWAYS AS (abs(a)) STORED)"):
        assert refused(env, "change_database", sql=sql) == "generated columns are not allowed"
        assert held(env, "sqlite") == before


def test_a_query_that_matches_or_shows_without_end_is_cut(database: str) -> None:
    env = begun("sqlite", database=database, seconds=0.2)
    ask(env, "change_database", sql=f"UPDATE items SET name = '{'a' * 15_000}'")
    began = time.monotonic()
    said = refused(env, "query_database", sql=f"SELECT name LIKE '%{'a' * 4500}b' FROM items")
    assert said == "the query was stopped: more than 0.2 s" and time.monotonic() - began < 5
    many = " UNION ALL ".join(["SELECT 1"] * 20)
    shown = result(env, "query_database", sql=f"SELECT {', '.join(['name'] * 50)} FROM items, ({many})").value
    assert 1 << 20 < len(shown) < 3 << 20 and shown.endswith("(only the first 2 rows are shown)"), "of 15 MB"


def test_documents_are_found_and_read(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    filler = "\n\n".join(f"Paragraph {n} speaks of nothing much at all, at some length." for n in range(40))
    (tmp_path / "docs" / "guide.md").write_text(f"{filler}\n\nThe zebra crossing is at Mill Lane.\n\n{filler}\n")
    (tmp_path / "docs" / "other.txt").write_text("A lane.\n")
    (tmp_path / "docs" / "image.png").write_bytes(b"zebra")
    (tmp_path / "out.txt").write_text("zebra outside")
    (tmp_path / "docs" / "link.txt").symlink_to(tmp_path / "out.txt")
    env = begun("retrieval", folder=str(tmp_path / "docs"), passage=200, shown=300, results=2)
    found = json.loads(ask(env, "search_documents", query="where is the ZEBRA?", most=9))
    [first] = found
    lines = (tmp_path / "docs" / "guide.md").read_text().splitlines()
    assert first["document"] == "guide.md" and "zebra crossing is at Mill Lane" in first["text"]
    assert lines[first["line"] - 1] == first["text"].splitlines()[0]
    assert len(json.loads(ask(env, "search_documents", query="paragraph"))) == 2
    assert ask(env, "search_documents", query="xyz") == "[]"
    page = ask(env, "read_document", document="guide.md", line=81)
    assert page.startswith("The zebra crossing") and "(cut; go on at line " in page
    again = int(page.rpartition("line ")[2].rstrip(")"))
    assert page.split("\n(cut")[0].count("\n") == again - 81
    assert "did you mean 'guide.md'" in refused(env, "read_document", document="guid.md")
    assert all("no document" in refused(env, "read_document", document=name) for name in ("../out.txt", "link.txt"))
    assert "has 1 lines" in refused(env, "read_document", document="other.txt", line=2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no documents there"):
        ref("retrieval", folder=str(tmp_path / "empty")).build()


# -- all of them ---------------------------------------------------------------------------------------


def test_a_document_of_one_long_line_is_cut_into_passages_and_never_read_in_circles(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("word " * 1000 + "zebra " + "tail " * 100 + "\nlast\n")
    env = begun("retrieval", folder=str(tmp_path), passage=100, shown=200)
    (found,) = json.loads(ask(env, "search_documents", query="zebra"))
    assert found["line"] == 1 and "zebra" in found["text"] and len(found["text"]) <= 200
    assert ask(env, "read_document", document="one.json").endswith(
        "(line 1 has 5507 characters; only its first 200 are shown, go on at line 2)"
    )
    assert ask(env, "read_document", document="one.json", line=2) == "last\n"


class Kept(ToolEnv):
    """An environment of somebody's that uses every set of the shelf by name, and shows what they hold."""

    id = "tests/Kept-v0"
    arguments: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - set by the fixture

    def __init__(self, **base: Any) -> None:
        from agentrl.env.catalog import add_tool_set

        super().__init__(**base)
        for name in ("calculator", "dates", *STATEFUL[: 6 if provider_of(sandbox_config(None)).unavailable() is None else 4]):
            if name != "files":  # whose tools the shell has too
                add_tool_set(self, name, self.arguments.get(name, {}))

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"kept/{split}/{rng_seed}", rng_seed, split, {"n": rng_seed, "split": split})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", f"note {task.data['n']} of {task.data['split']}")]

    def state(self) -> Any:
        return {name: self.tool_set(name).state() for name in ("notes", "sqlite", "http")} if self.is_open else None

    def gold_turns(self, task: Task) -> list[Message]:
        return [call("write_note", title="n", text="1"), Message("assistant", "done")]


@pytest.fixture
def kept(cassette: str, database: str, folder: Path) -> Callable[[], ToolEnv]:
    arguments = {"http": {"cassette": cassette}, "sqlite": {"database": database}, "retrieval": {"folder": str(folder)}}
    Kept.arguments = arguments
    return lambda: Kept(scorer=None)


def test_an_environment_with_every_set_passes_the_checks(kept: Callable[[], ToolEnv]) -> None:
    spec = {"agentrl_reward": 1, "name": "n", "root": {"use": "state.assert", "id": "n", "args": {"path": "/notes/n", "eq": "1"}}}
    wanted = ["contract", "same seed", "fuzzed calls", "instances apart", "fork", "hang", "crash", "teardown"]
    findings = check_all(Subject(kept, compile_spec(spec), tasks=2, fuzz=8), wanted)
    assert [finding for finding in findings if finding.ok is False] == []


def test_a_fork_and_a_snapshot_have_sets_of_their_own(kept: Callable[[], ToolEnv]) -> None:
    env = kept()
    env.reset(seed=1)
    note = lambda where, text: ask(where, "write_note", title="t", text=text)  # noqa: E731
    note(env, "first")
    ask(env, "change_database", sql="DELETE FROM items")
    ask(env, "http_request", url="https://api.example/job")
    snapshot, forked = env.snapshot(), env.fork()
    note(forked, "fork")
    ask(forked, "change_database", sql="INSERT INTO items VALUES (8, 'x')")
    assert ask(forked, "http_request", url="https://api.example/job") == "200\ndone"
    first = {"notes": {"t": "first"}, "sqlite": {"items": []}}
    assert {key: env.state()[key] for key in first} == first and len(env.state()["http"]) == 1
    note(env, "second")
    env.restore(snapshot)
    assert {key: env.state()[key] for key in first} == first
    assert forked.state()["notes"] == {"t": "fork"} and forked.state()["sqlite"] == {"items": [[8, "x"]]}
    other = kept()
    other.reset(seed=1)
    assert other.state()["notes"] == {}
    for each in (env, forked, other):
        each.close()


def test_a_set_ends_with_its_episode() -> None:
    """One without a `close`, which no teardown frees: all of an environment's episodes, and their forks, kept theirs."""
    env = begun("notes")
    past = weakref.ref(env.tool_set("notes"))
    env.close(), env.reset(seed=2)
    gc.collect()
    assert past() is None


def test_sets_are_opened_and_closed_once_an_episode(tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(
        "from agentrl.env import ToolSet, tool\n"
        "LOG = []\n"
        "class Watch(ToolSet):\n"
        "    name = 'watch'\n"
        "    def __init__(self, *, fail: bool = False): self.fail = fail\n"
        "    async def open(self):\n"
        "        LOG.append('open')\n"
        "        self.close = self.end  # of a program that it began, say\n"
        "        if self.fail: raise RuntimeError('no')\n"
        "    async def end(self): LOG.append('close')\n"
        "    @tool(inline=True)\n"
        "    def look(self) -> str:\n"
        "        '''looks'''\n"
        "        return 'seen'\n"
    )
    name = str(tmp_path / "watch.py")
    env = ref(name).build()
    kind = load_tools(Path(name))
    assert isinstance(kind, type)
    log = __import__("sys").modules[kind.__module__].LOG
    with pytest.raises(EnvError, match="no tool set 'watch'"):
        env.tool_set("watch")
    assert "look" in env.toolbox and log == []
    env.reset(seed=1)
    assert ask(env, "look") == "seen"
    env.close(), env.close()
    env.reset(seed=2), env.close()
    assert log == ["open", "close", "open", "close"]
    broken = ref(name, fail=True).build()
    with pytest.raises(RuntimeError, match="no"):
        broken.reset(seed=1)
    assert log[4:] == ["open", "close"]


@pytest.mark.parametrize(("tools", "error", "said"), [
    ({"sets": ["files"], "args": {"fils": {}}}, ConfigError, r"args\.fils: tools\.sets has no set.*did you mean 'files'"),
    ({"sets": ["files"], "args": {"files": {"foldr": "x"}}}, ConfigError, "unknown argument 'foldr'; did you mean 'folder'"),
    ({"sets": ["files"], "args": {"files": {"most": 0}}}, ConfigError, "argument most = 0: .*greater than or equal to 1"),
    ({"sets": ["http"]}, ConfigError, r"tools\.args\.http: argument 'cassette' is required"),
    ({"sets": ["dates"], "args": {"dates": {"x": 1}}}, ConfigError, r"tools\.args\.dates: its tools have no state"),
    ({"sets": ["files", "shell"]}, CatalogError, "'shell' has a tool 'list_files', which agentrl/KeyValue-v0 already has"),
])  # fmt: skip
def test_mistakes_are_said_when_the_environment_is_built(tools: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        EnvRef("key_value", {}, tools=ToolsConfig(**tools)).build()


def test_the_arguments_of_a_config_reach_the_set_and_its_files_the_identity(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        '[env]\nid = "key_value"\n[tools]\nsets = ["files"]\n[tools.args.files]\nfolder = "./project"\nmost = 7\n'
    )
    config = load_config(tmp_path / "own.toml", [])
    assert config.tools.args == {"files": {"folder": str(folder), "most": 7}}, "beside the config file"
    assert with_absolute_paths(config).tools.args == config.tools.args
    env = EnvRef.of(config.the_env, config.tools).build()
    env.reset(seed=1)
    assert ask(env, "read_file", path="README.md") == "Two words\n" and env.tool_set("files").most == 7  # type: ignore[attr-defined]
    before = contents_of(config, "train").digests
    (folder / "README.md").write_text("Other words\n")
    after = contents_of(config, "train").digests
    assert {key for key in before if before[key] != after[key]} == {"the files of tools.args"}
    plain = TrainConfig.model_validate({"env": {"id": "key_value"}})
    assert "the files of tools.args" not in contents_of(plain, "train").digests


# -- sets without a state --------------------------------------------------------------------------

BOX = Toolbox([item for name in ("calculator", "dates") for item in load_tools(find_tools(name))])  # type: ignore[union-attr]


def answered(name: str, **arguments: Any) -> str:
    return asyncio.run(BOX.call(ToolCall(name, arguments))).content


@pytest.mark.parametrize(("expression", "answer"), [
    ("1 + 2 * 3", "7"), ("(1 + 2) * 3", "9"), ("7 / 2", "3.5"), ("7 // 2", "3"), ("-2 ** 2", "-4"), ("2 ** 10", "1024"),
    ("10 % 4", "2"), ("sqrt(16)", "4.0"), ("round(1234.567, 1)", "1234.6"), ("round(1234, -2)", "1200"), ("round(2.5)", "2"),
    ("max(1, 2, 3) - abs(-4)", "-1"), (" 1e3 ", "1000.0"),
    ("-7 - -3", "-4"), ("-12 * -999", "11988"), ("999 + -999", "0"),
])  # fmt: skip
def test_arithmetic(expression: str, answer: str) -> None:
    assert answered("calculate", expression=expression) == answer


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "1 / 0", "a + 1", "__import__('os')", "(1).real", "9 ** 9 ** 9", "(-1) ** 0.5", "1e308 * 10",
     "[1]", "'a' * 9", "True + 1", "f(1)", "min()", "(" * 300, "round(5, -10**9)",
     "round(10**299, -10**299)", "1" * 2000, "10 ** 299 * 10 ** 299", "log(0)"],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused_in_words(expression: str) -> None:
    assert '"error": "tool_error"' in answered("calculate", expression=expression)


def test_dates() -> None:
    assert answered("add_days", date="2024-02-28", days=2) == "2024-03-01"
    assert answered("days_between", first="2024-02-28", last="2024-03-01") == "2"
    assert answered("weekday", date="2026-11-21") == "Saturday"
    for other in ("21 November", "0", "20261121", "2026-11-21T00:00:00", "2026-02-30"):
        assert "invalid_argument" in answered("weekday", date=other)
    assert "tool_error" in answered("add_days", date="9999-12-31", days=1)
