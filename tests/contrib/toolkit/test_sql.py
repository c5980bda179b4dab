"""The sql environment: gold, twins, what a query may not do, and what counts as the same result."""

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentrl.contrib.toolkit import sqlite
from agentrl.env import Message, ToolCall, ToolEnv
from agentrl.env.catalog import find_env, make_env
from agentrl.env.spaces import run_sync
from agentrl.utils.errors import ToolError
from agentrl.utils.search_path import load_module
from tests.conftest import examples
from tests.env.toyenvs import call
from tests.shelf.conversation_probes import play

FOLDER = Path(str(find_env("sql").path)).parent
results = load_module(FOLDER / "results.py")
worlds = load_module(FOLDER / "worlds.py")
IMAGE = worlds.database("shop", 1, 120)
LIMITS = sqlite.QueryLimits()
WORDS = """SELECT * FROM orders WHERE id = ( ) , ' " -- /* 1 x'ff' NULL AND LIKE""".split()  # noqa: SIM905


def score(env: ToolEnv) -> float | None:
    return env.scorer.score(env.trajectory).value  # type: ignore[union-attr,attr-defined]


def submitted(env: ToolEnv, seed: int, sql: str) -> float:
    env.reset(seed=seed)
    env.step(call("submit", sql=sql))
    value = score(env)
    assert value is not None
    return float(value)


# -- tasks and scoring -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_gold_scores_one_on_every_level(level: int, split: str) -> None:
    env = make_env("sql", level=level)
    for seed in range(8):
        env.reset(seed=seed, options={"split": split})
        assert play(env, list(env.gold_turns(env.task))) == (1.0, True)


def test_other_sizes_and_twins() -> None:
    for params in ({"rows": 50}, {"rows": 1000, "level": 5}, {"twins": 0}, {"twins": 3}, {"result_rows": 5}):
        env = make_env("sql", **params)
        for seed in range(3):
            env.reset(seed=seed)
            assert play(env, list(env.gold_turns(env.task))) == (1.0, True)
            assert len(env.task.gold["results"]) == 1 + params.get("twins", 1)


def test_gold_agrees_with_the_rows_counted_by_hand() -> None:
    """Three forms of question, answered in Python from the raw rows."""
    connection = sqlite3.connect(":memory:")
    connection.deserialize(IMAGE)
    people = connection.execute("SELECT * FROM customers").fetchall()
    things = {row[0]: row for row in connection.execute("SELECT * FROM products")}
    events = connection.execute("SELECT * FROM orders").fetchall()
    questions = load_module(FOLDER / "questions.py")
    world = worlds.WORLDS["shop"]

    class Fixed(random.Random):
        def choice(self, seq: Any) -> Any:
            return seq[0]

        def randint(self, a: int, b: int) -> int:
            return a

    def answer(form: Any) -> Any:
        question = form(world, Fixed())
        return results.canonical(sqlite.query(IMAGE, question.sql, sqlite.QueryLimits(rows=200)), question.ordered)

    lyon = {row[0]: row[1] for row in people if row[2] == "Lyon"}
    assert answer(questions.count_group) == [[sum(row[2] == "Lyon" and row[3] >= 1995 for row in people)]]
    assert answer(questions.group_total) == [[sum(e[3] for e in events if e[1] in lyon and e[4] >= "2024-01-01")]]
    tea = {e[1] for e in events if things[e[2]][2] == "tea"}
    never = sorted([row[1]] for row in people if row[0] not in tea and row[3] > 1995)
    assert answer(questions.never) == never


def test_the_result_counts_not_the_text() -> None:
    env = make_env("sql", level=1)
    for seed in range(30):
        env.reset(seed=seed)
        gold = env.task.gold["sql"]
        if "COUNT(*)" in gold and "GROUP" not in gold:
            break
    other = gold.replace("COUNT(*)", "SUM(1.0) AS n").replace("SELECT", "select", 1)
    assert submitted(env, seed, other) == 1.0
    assert submitted(env, seed, f"SELECT * FROM ({gold}) ORDER BY 1 DESC") == 1.0
    assert submitted(env, seed, gold.replace("COUNT(*)", "COUNT(*), 1")) == 0.0
    assert submitted(env, seed, gold.replace("COUNT(*)", "COUNT(*) + 1")) == 0.0


def test_order_counts_only_where_it_is_asked_for() -> None:
    env = make_env("sql", level=[2, 4])
    seen = set()
    for seed in range(40):
        env.reset(seed=seed)
        gold, ordered = env.task.gold, env.task.data["ordered"]
        if min(map(len, gold["results"])) < 2:
            continue
        columns = len(gold["results"][0][0])
        key = ", ".join(f"{i} {way}" for i, way in zip(range(columns, 0, -1), ("ASC", "DESC") * 2, strict=False))
        value = submitted(env, seed, f"SELECT * FROM ({gold['sql']}) ORDER BY {key}")
        if not ordered:
            assert value == 1.0
            seen.add("free")
        else:
            seen.add(("ordered", value))
    assert "free" in seen and ("ordered", 0.0) in seen


def test_a_constant_is_no_answer_where_there_are_twins() -> None:
    """The right rows of the database that can be looked at, written down as literals."""
    for twins, expected in ((0, 1.0), (1, 0.0)):
        env = make_env("sql", twins=twins)
        for seed in range(6):
            rows = env.make_task(seed, "train").gold["results"][0]
            literal = " UNION ALL ".join("SELECT " + ", ".join(map(repr, row)) for row in rows[:20])
            if len(rows) <= 20:
                assert submitted(env, seed, literal) == expected


def test_null_policies_score_nothing() -> None:
    env = make_env("sql", level=[1, 5])
    for seed in range(10):
        env.reset(seed=seed)
        gold, shown = env.task.gold["sql"], "\n".join(m.content for m in env.prompt(env.task))
        said: tuple[Message | str, ...] = ("", shown, gold, "0", Message("assistant", str(env.task.gold["results"])))
        for text in said:
            env.reset(seed=seed)
            assert play(env, [text]) == (0.0, True)
        env.reset(seed=seed)
        assert play(env, [call("query", sql=gold), call("tables"), ""]) == (0.0, True)
        for sql in ("SELECT 1", "SELECT NULL", "SELECT COUNT(*) FROM sqlite_master", "SELECT 1 WHERE 0"):
            assert submitted(env, seed, sql) == 0.0


def test_a_query_that_fails_is_not_taken_and_a_second_one_is_refused() -> None:
    env = make_env("sql")
    env.reset(seed=0)
    observation, _, over, _, _ = env.step(call("submit", sql="SELEC 1"))
    assert "syntax error" in observation[0].content and not over and env.state()["results"] is None
    gold = env.task.gold["sql"]
    both = Message("assistant", tool_calls=(ToolCall("submit", {"sql": "SELECT 1"}), ToolCall("submit", {"sql": gold})))
    observation, reward, over, _, _ = env.step(both)
    assert over and reward == 0.0 and "already" in observation[1].content


def test_too_many_rows_are_no_answer() -> None:
    env = make_env("sql", rows=1000, level=1)
    assert submitted(env, 0, f"SELECT a.id FROM {_event(env)} a, {_event(env)} b") == 0.0
    assert env.state()["results"] == ["too many rows"] * 2


def _event(env: ToolEnv) -> str:
    return str(worlds.WORLDS[env.make_task(0, "train").data["world"]].event.name)


def test_the_database_is_the_same_in_every_process_and_differs_by_seed() -> None:
    assert worlds.database.__wrapped__("shop", 1, 120) == IMAGE != worlds.database("shop", 2, 120)
    task = make_env("sql").make_task(7, "train")
    assert task == make_env("sql").make_task(7, "train")


def test_the_same_question_is_never_in_both_splits() -> None:
    env = make_env("sql", level=[1, 5])
    train = {env.make_task(seed, "train").gold["sql"] for seed in range(150)}
    held = {env.make_task(seed, "heldout").gold["sql"] for seed in range(60)}
    assert len(train) > 100 and len(held) > 30 and not train & held


def test_a_hidden_schema_is_told_by_a_tool() -> None:
    env = make_env("sql", show_schema=False)
    observation, _ = env.reset(seed=0)
    assert "CREATE TABLE" not in observation[1].content
    assert "CREATE TABLE" in env.step(call("tables"))[0][0].content


# -- what a query may not do -------------------------------------------------------------------------


@pytest.mark.parametrize("sql", [
    "INSERT INTO customers VALUES (999, 'x', 'y', 1)", "UPDATE customers SET name = 'x'", "DELETE FROM orders",
    "DROP TABLE orders", "CREATE TABLE t (x)", "CREATE TEMP TABLE t AS SELECT * FROM orders", "CREATE VIEW v AS SELECT 1",
    "ATTACH DATABASE 'agentrl_evil.db' AS e", "VACUUM INTO 'agentrl_evil.db'", "PRAGMA query_only = OFF",
    "PRAGMA writable_schema = ON", "SELECT * FROM pragma_database_list", "SELECT load_extension('x')",
    "SELECT writefile('agentrl_evil', 'x')", "SELECT readfile('/etc/passwd')", "SELECT fts3_tokenizer('x')",
    "SELECT randomblob(1000000000)", "SELECT zeroblob(1000000000)", "SELECT printf('%1000000000d', 1)",
    "SELECT 'a' GLOB '*a*a*a*a*'", "BEGIN", "EXPLAIN DELETE FROM orders", "SELECT 1; DELETE FROM orders",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c",
    "WITH x AS (SELECT 1) DELETE FROM orders", "", "-- nothing", "\0", "SELECT '\ud800'",
    # Nor is what answers too much, or asks at too great a length.
    "SELECT group_concat(a.name || b.name) FROM customers a, customers b, orders",
    "SELECT replace(replace(replace(name, 'a', 'aaaaaaaaaaaaaaaaaaaa'), 'a', 'aaaaaaaaaaaaaaaaaaaaaaaaa'), 'a', "
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa') FROM customers", "SELECT " + "(" * 200 + "1" + ")" * 200 + " + 1" * 200,
    "SELECT '" + "x" * 5000 + "'", " UNION ".join(["SELECT 1"] * 40),
])  # fmt: skip
def test_only_reading_is_allowed(sql: str, here: Path) -> None:
    with pytest.raises(ToolError):
        sqlite.query(IMAGE, sql, LIMITS)
    assert not list(here.iterdir())
    assert sqlite.query(IMAGE, "SELECT COUNT(*) FROM orders", LIMITS).rows == [[120]]


def test_a_query_that_never_ends_is_stopped_by_steps_then_by_time() -> None:
    cross = "SELECT COUNT(*) FROM orders a, orders b, orders c, orders d"
    with pytest.raises(ToolError, match="more than 3000000 steps"):
        sqlite.query(IMAGE, cross, LIMITS)
    with pytest.raises(ToolError, match=r"more than 0\.05 s"):
        sqlite.query(IMAGE, cross, sqlite.QueryLimits(steps=10**12, seconds=0.05))


def test_like_takes_no_exponential_time() -> None:
    """SQLite's own would not come back; the step counter does not see inside one call."""
    text, pattern = "a" * 1500, "%a" * 30 + "%b"
    assert sqlite.query(IMAGE, f"SELECT '{text}' LIKE '{pattern}'", LIMITS).rows == [[0]]


@settings(max_examples=examples(150), deadline=None)
@given(st.text("abé_%", max_size=7), st.text("abABÉ", max_size=7))
@example("é", "É")
@example("0.3", 0.1 + 0.2)
@example("1.0e+20", 1e20)
@example("2.%", 2.0)
def test_like_agrees_with_sqlite(pattern: str, text: str | float) -> None:
    plain = sqlite3.connect(":memory:")
    expected = plain.execute("SELECT ? LIKE ?", (text, pattern)).fetchone()[0]
    assert sqlite._like(lambda: False, pattern, text) == expected


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=60) | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_text_is_answered(sql: str) -> None:
    env = make_env("sql")
    env.reset(seed=0)
    for name in ("query", "submit"):
        result = run_sync(env.toolbox.call(ToolCall(name, {"sql": sql}, id="c")))
        assert result.content
        result.content.encode()


def test_results_are_json_whatever_they_hold() -> None:
    rows = sqlite.query(IMAGE, "SELECT x'ff00', 9e999, -9e999, NULL, 1.5, 'é', cast(x'ff' AS TEXT)", LIMITS).rows
    assert rows == [["ff00", "inf", "-inf", None, 1.5, "é", "\ufffd"]]
    shown = sqlite.query(IMAGE, "SELECT name FROM customers LIMIT 6", sqlite.QueryLimits(rows=5)).text()
    assert "only the first 5 rows" in shown and len(shown.splitlines()) == 7
    assert sqlite.query(IMAGE, "SELECT 1 WHERE 0", LIMITS).text().endswith("(no rows)")
