"""The checked call: errors that teach, budgets, time limits, parallel turns."""

import asyncio
import copy
import difflib
import json
import math
import signal
import threading
import time
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import wraps
from itertools import product
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from agentrl.data.trajectory import ToolCall, ToolResult
from agentrl.env import Tool, tool
from agentrl.env.spaces import run_sync
from agentrl.env.toolbox import Toolbox
from agentrl.render.tagged_syntaxes import parse_glm, parse_qwen_xml
from agentrl.utils.errors import EnvError, ToolError, ToolSchemaError, ToolTimeoutError, did_you_mean
from tests.strict_json import strict


@tool
async def get(key: str, depth: int = 1) -> str:
    return f"{key}:{depth}"


@tool
async def refuse() -> None:
    raise ToolError("the shop is closed")


@tool
async def broken() -> None:
    raise ZeroDivisionError("oops")


@tool(timeout=0.02)
async def hang() -> None:
    await asyncio.sleep(60)


@tool(timeout=0.02, on_timeout="answer")
async def slow() -> None:
    await asyncio.sleep(60)


BOX = Toolbox([get, refuse, broken, hang, slow])


CAFE, CAFE_NFD = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize(("own", "said"), [(CAFE, CAFE_NFD), (CAFE_NFD, CAFE)])
def test_a_name_is_the_same_in_both_spellings_of_unicode(own: str, said: str) -> None:
    """Some tokenizers show the policy another spelling than the schema's, so that no call of the tool was ever right."""
    got: list[Any] = []
    schema = {"type": "object", "properties": {own: {"type": "string"}}, "required": [own], "additionalProperties": False}
    take = Tool.from_schema(f"get_{own}", "", schema, lambda **given: got.append(given))

    def answer(**arguments: str) -> ToolResult:
        return asyncio.run(Toolbox([take]).call(ToolCall(f"get_{said}", arguments)))

    assert answer(**{said: said}).error is None and got == [{own: said}]  # a value is as the policy wrote it
    assert "is given twice" in answer(**{own: "a", said: "b"}).content and len(got) == 1
    number = {"type": "object", "properties": {own: {"type": "integer"}}}
    declared = {"type": "function", "function": {"name": f"get_{own}", "parameters": number}}
    text = f"<tool_call><function=get_{said}><parameter={said}>7</parameter></function></tool_call>"
    glm = f"<tool_call>get_{said}<arg_key>{said}</arg_key><arg_value>7</arg_value></tool_call>"
    assert [read[1][0].arguments for read in (parse_qwen_xml(text, [declared]), parse_glm(glm, [declared]))] == [{said: 7}] * 2
    with pytest.raises(ToolSchemaError, match=r"two spellings of Unicode.*Rename one"):
        Tool.from_schema("get", "", {"type": "object", "properties": {own: {}, said: {}}}, print)
    with pytest.raises(ToolSchemaError, match="two tools are called"):
        Toolbox([take, replace(take, name=f"get_{said}")])


@pytest.mark.parametrize(("own", "said"), [(CAFE, CAFE_NFD), (CAFE_NFD, CAFE)])
def test_names_inside_of_arguments_and_choices_are_the_same_in_both_spellings(own: str, said: str) -> None:
    """Only the names of the arguments themselves were."""
    got: list[Any] = []
    item = {"type": "object", "properties": {own: {"enum": [own, 1]}}, "required": [own], "additionalProperties": False}
    either: Any = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/item"}]}
    by_name = {"type": "object", "propertyNames": {"enum": [1, own]}, "additionalProperties": either}
    either_list = {"type": "array", "prefixItems": [{}], "items": either}
    when = {"if": {"properties": {"e": {}}}, "then": {"properties": {"e": either}}}
    properties = {"a": either, "b": either_list, "c": by_name, "d": {"oneOf": [{"allOf": [by_name]}]}}
    schema = {"type": "object", "properties": properties, "$defs": {"item": item}, **when}
    box = Toolbox([Tool.from_schema("take", "", schema, lambda **given: got.append(given))])

    def given(name: str) -> Any:
        one = {name: name}
        return {"a": one, "b": [said, 3, one], "c": {name: one}, "d": {name: one}, "e": one}

    arguments = given(said)
    result = asyncio.run(box.call(ToolCall("take", arguments)))
    assert result.error is None and got == [given(own)] and arguments == given(said), "the record stays as it was said"
    assert "is given twice" in asyncio.run(box.call(ToolCall("take", {"a": {own: 1, said: 1}}))).content
    assert asyncio.run(box.call(ToolCall("take", {"a": {said: f"{said}s"}}))).error == "invalid_argument"
    with pytest.raises(ToolSchemaError, match=r"'caf.*two spellings of Unicode.*Rename one"):
        Tool.from_schema("get", "", {"properties": {"a": {"items": {"properties": {own: {}, said: {}}}}}}, print)


def call(name: str, arguments: Any, **more: Any) -> ToolResult:
    return asyncio.run(BOX.call(ToolCall(name, arguments, id="c1", **more)))


@pytest.mark.parametrize(("name", "arguments", "kind", "says"), [
    ("gte", {}, "unknown_tool", "did you mean 'get'"), ("zzz", {}, "unknown_tool", "known: get, refuse"),
    ("get", {}, "missing_argument", "'key'"), ("get", {"key": 3}, "wrong_type", "expected string, got integer 3"),
    ("get", {"key": None}, "wrong_type", "got null"),
    ("get", {"key": "a", "deptj": 1}, "unexpected_argument", "did you mean 'depth'"),
    ("get", None, "malformed_call", "not valid JSON"), ("get", "line 1 column 9", "malformed_call", "line 1 column 9"),
    ("refuse", {}, "tool_error", "the shop is closed"), ("slow", {}, "timeout", "0.02 s"),
])  # fmt: skip
def test_every_error_is_structured_and_says_what_was_wrong(name: str, arguments: Any, kind: str, says: str) -> None:
    """A text in place of arguments: the parser's own words, which reach the model."""
    result = call(name, None, error=arguments) if isinstance(arguments, str) else call(name, arguments)
    content = json.loads(result.content)
    assert result.error == kind and content["error"] == kind and says in content["message"]
    assert result.call_id == "c1" and result.value is None


def test_a_misspelt_name_among_thousands_is_compared_with_few_and_gets_the_hint_of_difflib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took 60 ms of the event loop for each such call."""
    words = ["get", "set", "list", "find", "user", "order", "item", "ticket", "event", "note"]
    names = ["_".join((*pair, str(n))) for n, pair in enumerate(product(words, repeat=3))]
    calls, ratio = list[str](), difflib.SequenceMatcher.ratio

    def counted(matcher: difflib.SequenceMatcher[str]) -> float:
        calls.append(name)
        return ratio(matcher)

    for name in ("get_usr_order_17", "list_evnt_note", "find_find_find", "zzz", "", *words):
        wanted = {most: difflib.get_close_matches(name, sorted(names), most, 0.5) for most in (1, 3)}
        with monkeypatch.context() as patch:
            patch.setattr(difflib.SequenceMatcher, "ratio", counted)
            for most, near in wanted.items():
                hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "no"
                assert did_you_mean(name, names, "no", most=most) == hint
    assert len(calls) < 500


def test_a_tool_that_is_not_listed_answers_and_is_not_shown() -> None:
    box = Toolbox([refuse])
    box.unlisted = {"get": get}
    assert asyncio.run(box.call(ToolCall("get", {"key": "a"}))).content == "a:1"
    assert json.loads(asyncio.run(box.call(ToolCall("get", {"key": 3}))).content)["error"] == "wrong_type"
    assert box.names == ("refuse",) and [schema["function"]["name"] for schema in box.schemas()] == ["refuse"]
    assert "known: refuse" in asyncio.run(box.call(ToolCall("zzz", {}))).content
    assert asyncio.run(copy.deepcopy(box).call(ToolCall("get", {"key": "a"}))).content == "a:1"  # a fork has it too


def test_a_tool_that_breaks_or_hangs_is_no_answer() -> None:
    """Neither is the policy's fault: the episode must end unscored, so both raise."""
    with pytest.raises(EnvError, match="broken failed: ZeroDivisionError: oops"):
        call("broken", {})
    with pytest.raises(ToolTimeoutError, match="hang"):
        call("hang", {})


class PanicException(BaseException):
    """As libraries written in Rust raise it."""


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise LookupError


class UnreadableRefusalError(ToolError):
    __str__ = UnreadableError.__str__


class UnreadablePanic(BaseException):
    __str__ = UnreadableError.__str__


RAISED = [
    (TimeoutError("the database"), "TimeoutError: the database"), (asyncio.CancelledError(), "was cancelled from inside"),
    (SystemExit("no such option"), "sys.exit.*no such option"), (PanicException("index out"), "PanicException: index out"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),  # by code of a policy that a tool runs: no user pressed Ctrl-C
    (GeneratorExit(), "GeneratorExit"), (UnreadableError(), "LookupError"), (UnreadableRefusalError(), "LookupError"),
    (UnreadablePanic(), "LookupError"),
]  # fmt: skip


def raise_of(number: int) -> None:
    raise RAISED[number][0]


WAYS = [  # what a child process says of its end is in test_process.py
    pytest.param(number, way, id=f"{type(error).__name__}-{way}")
    for number, (error, said) in enumerate(RAISED)
    for way in ("async", "thread", "inline", *["process"] * (said == "LookupError"))
]


@pytest.mark.parametrize(("number", "way"), WAYS)
def test_whatever_a_tool_raises_is_its_fault_and_ends_nothing_else(number: int, way: str) -> None:
    error, said = RAISED[number]

    async def on_the_loop(number: int) -> None:
        raise error

    options: Any = {"process": way == "process", "inline": way == "inline", "timeout": 30}
    made = tool(name="fails", **options)(on_the_loop if way == "async" else raise_of)
    with pytest.raises(EnvError, match=f"tool fails failed: .*{said}") as caught:
        asyncio.run(Toolbox([made]).call(ToolCall("fails", {"number": number})))
    assert not isinstance(caught.value, ToolTimeoutError)


async def awaits_what_was_cancelled() -> str:
    lost = asyncio.ensure_future(asyncio.sleep(60))
    lost.cancel()
    return str(await lost)


@pytest.mark.parametrize("options", [{}, {"late": "policy"}, {"on_timeout": "answer"}], ids=["stop", "policy", "answer"])
def test_a_cancellation_inside_the_tool_is_a_fault_and_nobody_was_late(options: Any) -> None:
    for function in (awaits_what_was_cancelled, lambda: raise_of(1)):
        with pytest.raises(EnvError, match=r"tool t failed: .*was cancelled from inside") as caught:
            asyncio.run(Toolbox([tool(name="t", **options)(function)]).call(ToolCall("t", {})))
        assert not isinstance(caught.value, ToolTimeoutError)


@pytest.mark.parametrize("run", [asyncio.run, run_sync])
def test_ctrl_c_while_a_tool_holds_the_loop_is_the_users(run: Any) -> None:
    """asyncio.run's handler cancels at the first and raises at the second; Python's own raises at once."""

    async def holds() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0)

    box = Toolbox([tool(holds), get])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if a shell runs the tests in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            run(box.call(ToolCall("holds", {})))
    finally:
        signal.signal(signal.SIGINT, before)
    assert run(box.call(ToolCall("get", {"key": "a"}))).value == "a:1"  # it is over with that


def nested(depth: int) -> Any:
    whole: Any = []
    for _ in range(depth):
        whole = [whole]
    return whole


def circle(kind: Any) -> Any:
    whole = kind()
    whole.append(whole) if kind is list else whole.update(a=[whole])
    return whole


class HostileList(list[int]):
    def __iter__(self) -> Any:
        raise LookupError

    __len__ = __iter__


class HostileDict(dict[str, int]):
    def items(self) -> Any:
        raise LookupError

    __len__ = __iter__ = keys = values = items


class HostileArray:
    def tolist(self) -> Any:
        raise SystemExit(3)


class HostileClass:
    @property
    def __class__(self) -> Any:
        raise LookupError

    def __getattr__(self, name: str) -> Any:
        raise LookupError


def breaks_off() -> Any:
    yield 1
    raise LookupError


@pytest.mark.parametrize(
    ("answer", "why"),
    [(lambda: nested(500), "too deep"), (lambda: nested(300), "too deep"), (lambda: nested(100_000), "too deep"),
     (lambda: circle(list), "contains itself"), (lambda: circle(dict), "contains itself"), (lambda: (circle(list),), "itself"),
     (lambda: HostileList([1]), "LookupError"), (lambda: HostileDict(a=1), "LookupError"), (HostileArray, "SystemExit: 3"),
     (HostileClass, "LookupError"), (breaks_off, "LookupError"), (object, "no JSON form")],
)  # fmt: skip
def test_an_answer_that_cannot_be_read_is_the_tools_fault(answer: Any, why: str) -> None:
    async def gives() -> Any:
        return answer()

    with pytest.raises(EnvError, match=rf"tool gives returned \w+, which has no JSON form: .*{why}"):
        asyncio.run(Toolbox([tool(gives)]).call(ToolCall("gives", {})))


def test_plain_functions_run_in_a_thread_unless_inline() -> None:
    main = threading.get_ident()

    def here() -> bool:
        return threading.get_ident() == main

    box = Toolbox([tool(name="outside")(here), tool(name="inside", inline=True)(here)])
    calls = box.call_all([ToolCall("outside", {}, "a"), ToolCall("inside", {}, "b")])
    assert [result.value for result in asyncio.run(calls)] == [False, True]


def test_calls_of_one_turn_overlap_unless_the_tool_forbids_it_and_a_limit_holds_over_all_boxes() -> None:
    running, most = 0, {"free": 0, "alone": 0, "scarce": 0}

    def make(name: str, **options: Any) -> Any:
        async def work(n: int) -> int:
            nonlocal running
            running += 1
            most[name] = max(most[name], running)
            await asyncio.sleep(0.001)
            running -= 1
            return n

        return tool(name=name, **options)(work)

    box, scarce = Toolbox([make("free"), make("alone", parallel=False)]), make("scarce", concurrency=2)

    async def turn(*names: str) -> list[Any]:
        calls = [ToolCall(name, {"n": n}, str(n)) for n, name in enumerate(names)]
        return [result.value for result in await box.call_all(calls)]

    assert asyncio.run(turn(*["free"] * 5)) == [0, 1, 2, 3, 4] and most["free"] == 5
    for names in (["alone"] * 5, ["free", "free", "alone", "free", "free"]):
        assert asyncio.run(turn(*names)) == [0, 1, 2, 3, 4] and most["alone"] == 1

    async def many() -> None:
        await asyncio.gather(*(Toolbox([scarce]).call(ToolCall("scarce", {"n": n})) for n in range(12)))

    asyncio.run(many())
    asyncio.run(many())
    assert most["scarce"] == 2


async def test_one_broken_call_cancels_its_neighbours() -> None:
    ended: list[str] = []

    @tool
    async def patient() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(EnvError):
        await Toolbox([patient, broken]).call_all([ToolCall("patient", {}, "a"), ToolCall("broken", {}, "b")])
    assert ended == ["cancelled"]


def test_outputs_as_the_model_reads_them() -> None:
    @dataclass
    class Row:
        name: str
        n: int

    answers = {"text": "as is", "none": None, "number": 4, "rows": [Row("ä", 1)], "odd": "\ud800x"}

    @tool(inline=True)
    def give(which: str) -> Any:
        if which not in answers:
            raise ToolError(answers["odd"])
        return answers[which]

    box = Toolbox([give])
    shown = {w: asyncio.run(box.call(ToolCall("give", {"which": w}))).content for w in answers}
    assert shown == {"text": "as is", "none": "ok", "number": "4", "rows": '[{"name": "ä", "n": 1}]', "odd": "\ufffdx"}
    assert "\ufffdx" in asyncio.run(box.call(ToolCall("give", {"which": "error"}))).content


@pytest.mark.parametrize("check", ["strict", "off"])
def test_a_default_that_a_call_changes_is_as_before_in_the_next(check: Any) -> None:
    """It went on from call to call, over all episodes of the process."""

    def add(item: int, to: list[int] = [], counts: dict[str, int] = {}) -> Any:  # noqa: B006 - what users write
        to.append(item)
        counts["all"] = counts.get("all", 0) + 1
        return [to, counts]

    @wraps(add)
    def around(*args: Any, **kwargs: Any) -> Any:
        return add(*args, **kwargs)

    for function in (add, around):
        box = Toolbox([tool(check=check)(function)])
        found = [asyncio.run(box.call(ToolCall("add", {"item": item}))).value for item in (1, 2)]
        assert found == [[[1], {"all": 1}], [[2], {"all": 1}]]


def test_a_plain_function_around_an_async_one_is_awaited_within_its_time() -> None:
    """As a decorator leaves it that is no coroutine function."""

    async def wait(s: float) -> str:
        await asyncio.sleep(s)
        return "slept"

    @wraps(wait)
    def around(*args: Any, **kwargs: Any) -> Any:
        return wait(*args, **kwargs)

    box = Toolbox([tool(name="f", timeout=0.2, on_timeout="answer")(around)])
    assert asyncio.run(box.call(ToolCall("f", {"s": 0}))).content == "slept"
    assert asyncio.run(box.call(ToolCall("f", {"s": 9}))).error == "timeout"
    assert asyncio.run(Toolbox([tool(name="f", inline=True)(around)]).call(ToolCall("f", {"s": 0}))).content == "slept"


def listed(refuse: bool) -> Any:
    yield 1
    if refuse:
        raise ToolError("no more")
    for _ in range(100):
        time.sleep(0.01)
    yield 2


def test_a_generator_makes_its_items_within_the_tools_time_and_refuses_as_a_tool() -> None:
    """They were made on the event loop, which stood still, and the refusal ended the run."""
    for late, ends in ((0.2, "timeout"), (30.0, None)):
        box = Toolbox([tool(timeout=late, on_timeout="answer")(listed)])
        refused, played = (asyncio.run(box.call(ToolCall("listed", {"refuse": refuse}))) for refuse in (True, False))
        assert (refused.error, played.error, played.value) == ("tool_error", ends, None if ends else [1, 2])


def test_adding_and_removing_changes_one_box_only() -> None:
    one, two = Toolbox([get, refuse]), Toolbox([get, refuse])
    before = one.table
    one.remove("get")
    one.add(slow)
    assert one.names == ("refuse", "slow") and two.names == ("get", "refuse")
    one.table = before
    assert one.names == ("get", "refuse")
    with pytest.raises(KeyError):
        one.remove("slow")


def test_a_shared_table_is_offered_before_what_is_there_and_stays_as_it_is():
    one, two, other = (Tool.from_schema(name, "", {"type": "object"}, lambda: None) for name in ("one", "two", "other"))
    table = {"one": one, "two": two}
    empty, box = Toolbox(), Toolbox([other])
    empty.offer(table)
    assert empty.table is table, "nothing is copied where nothing else is"
    box.offer(table)
    assert box.names == ("one", "two", "other") and list(table) == ["one", "two"]
    with pytest.raises(TypeError, match="two tools are called 'one'"):
        box.offer(table)


@dataclass
class Numbers:
    mean: float
    rest: tuple[float, ...]
    size: int


class Model(BaseModel):
    by_name: dict[str, float]


WORDS = [f"word {number}" for number in range(9)]


@pytest.mark.parametrize(("answer", "value"), [
    (Numbers(math.nan, (math.inf, -math.inf, 1.5), 1 << 1023), {"mean": "NaN", "rest": ["Infinity", "-Infinity", 1.5]}),
    (Model(by_name={"a": float("nan")}), {"by_name": {"a": "NaN"}}),
    ({"deep": [[{"x": float("inf")}]]}, {"deep": [[{"x": "Infinity"}]]}),
    ([Decimal("NaN"), 0.1], ["NaN", 0.1]),
    ([np.longdouble(0.5), np.array([np.longdouble("inf")])], [0.5, ["Infinity"]]),
    (float("nan"), "NaN"),
    (float("-inf"), "-Infinity"),
    ({"a": 1}.keys(), ["a"]), ({1: "a"}.values(), ["a"]), (range(1), [0]), (map(str, ["a"]), ["a"]),
    (zip("a", "b", strict=True), [["a", "b"]]),
    ({"words": {*reversed(WORDS)}, "numbers": frozenset({10, 9.5, -1})}, {"words": WORDS, "numbers": [-1, 9.5, 10]}),
])  # fmt: skip
async def test_what_json_has_no_form_for_is_a_text_or_a_list_whose_order_is_the_same_everywhere(answer: Any, value: Any) -> None:
    async def f() -> Any:
        return answer

    result = await Toolbox([f]).call(ToolCall("f", {}, id="1"))
    if isinstance(value, str):
        assert (result.content, result.value) == (value, value)
        return
    found = strict(result.content)
    assert found == result.value and {**found, **value} == found if isinstance(value, dict) else found == value
    assert "size" not in found or found["size"] == "an integer of about 308 digits"
