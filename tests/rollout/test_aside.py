"""Work on long texts happens in threads, so that other episodes go on: in one episode, whose loop ticks meanwhile."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentrl.config import RolloutConfig
from agentrl.contrib.users import RuleUser
from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, Trajectory, Turn
from agentrl.env import Tool, ToolEnv, tool
from agentrl.env.toolbox import MARK, Toolbox, estimate_tokens, fit
from agentrl.render import base as text
from agentrl.render import make_renderer
from agentrl.render.base import Codec, Renderer
from agentrl.reward import Context, Scorer, compile_spec
from agentrl.reward.leaves.answer import TextEquals
from agentrl.reward.leaves.state import StateMatch
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils import schemas
from agentrl.utils.schemas import within_seconds
from agentrl.utils.threads import LONG_TEXT, TooLongError, at_once, size_of
from tests.players import Script

LONG = 1_000_000
SHORT_TEXT, LONG_ONE = "x y " * 50, "word and " * (LONG_TEXT // 8)
TOKENIZER = packaged_tokenizer(LONG)
EQUALS: dict[str, Any] = {"use": "text.equals", "args": {"expect": "1"}}


def scorer_of(root: dict[str, Any]) -> Scorer:
    return compile_spec({"agentrl_reward": 1, "name": "x", "root": root}, context=Context())


class Noting(Renderer):
    """A renderer that notes which of its calls were made on the loop's thread."""

    def __init__(self) -> None:
        self.inner = make_renderer(TOKENIZER)
        self.stop_token_ids = self.inner.stop_token_ids
        self.on_loop: dict[str, bool] = {}
        self.loop = threading.get_ident()

    def note(self, name: str) -> None:
        self.on_loop[name] = threading.get_ident() == self.loop

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        self.note("start")
        return self.inner.start(messages, tools)

    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        self.note("extend")
        return self.inner.extend(finish, messages, last)

    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        self.note("parse")
        return self.inner.parse(token_ids, finish)

    def assistant(self, message: Message) -> list[int]:
        return self.inner.assistant(message)


class Long(ToolEnv):
    """`long` names what is long: the prompt, what a tool answers, the policy's turn, the state."""

    id = "test/Long-v0"

    def __init__(self, long: str, **base: Any) -> None:
        super().__init__(**base)
        self.long = long

    def text(self, part: str) -> str:
        return LONG_ONE if self.long == part else SHORT_TEXT

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task("t", rng_seed, split)

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", self.text("prompt"))]

    def state(self) -> Any:
        return {"rows": [self.text("state")] * 4}

    @tool(max_output=LONG)
    async def look(self) -> str:
        return self.text("answer")


async def play(env: Long, renderer: Noting, root: dict[str, Any] = EQUALS) -> Trajectory:
    said = [Message("assistant", env.text("turn"), (ToolCall("look", {}),)), Message("assistant", "1")]
    engine = Script([renderer.assistant(message) for message in said])
    policy, limits = Policy(engine, renderer), Limits.of(RolloutConfig(max_turn_tokens=LONG, max_episode_tokens=LONG), LONG)
    made = await run_episode(env, policy, EpisodeSpec(0, "train", 0, 0, "e"), limits, scorer_of(root))
    assert made.stop is StopReason.DONE, made.error
    return made


@pytest.mark.parametrize(
    ("long", "aside"), [("", set()), ("prompt", {"start"}), ("answer", {"extend"}), ("turn", {"first parse"}), ("state", set())]
)
async def test_an_episode_renders_and_parses_long_texts_in_threads_and_short_ones_at_once(long: str, aside: set[str]) -> None:
    renderer, seen = Noting(), dict[str, bool]()
    renderer.parse = lambda ids, finish, parse=renderer.parse: (  # type: ignore[method-assign,misc]
        parse(ids, finish),
        seen.setdefault("first parse", renderer.on_loop["parse"]),
    )[0]
    made = await play(Long(long), renderer)
    on_loop = {"start": renderer.on_loop["start"], "extend": renderer.on_loop["extend"], **seen}
    assert {name for name, there in on_loop.items() if not there} == aside
    assert len(made.ledgers) == 1 and made.reward == 1.0


def test_the_ids_and_the_text_of_a_long_text_are_the_tokenizers_own() -> None:
    """Encoded as a whole, against the same tokenizer's ids of its pieces: spaces part them in this tokenizer."""
    codec = Codec(TOKENIZER)
    words = random.Random(0).choices(["abc", "\u00e9", "\u4e2d", "12", "{}", "<", "x_y"], k=LONG_TEXT)
    text = " ".join(words) + " \ud800"  # half of a pair is no character: the tokenizer gets U+FFFD
    pieces = [codec.encode(word if place == 0 else f" {word}") for place, word in enumerate([*words, "\ufffd"])]
    assert codec.encode(text) == [i for piece in pieces for i in piece]
    assert codec.decode(codec.encode(text)) == text.replace("\ud800", "\ufffd")
    assert codec.encode(f"{text}<|im_end|>") != [*codec.encode(text), codec.added["<|im_end|>"]], "text is never a control token"


async def ticks_during(work: Callable[[], Awaitable[Any]]) -> tuple[int, Any]:
    """How often the loop came round during `work`."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    task = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    ticks = 0
    result = await work()
    task.cancel()
    return ticks, result


def test_the_tokenizer_lets_other_threads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 characters take some 100 ms. Counted in the call into the tokenizer alone, since around it others have theirs on
    any busy machine: if it kept the interpreter's lock, they had one at most on the way into it, and one on the way out."""
    encode, turns, meanwhile, over = text._encode, [0], list[int](), threading.Event()

    def counted(tokenizer: Tokenizer, piece: str) -> list[int]:
        before = turns[0]
        ids = encode(tokenizer, piece)
        meanwhile.append(turns[0] - before)
        return ids

    def others() -> None:
        while not over.wait(0.001):
            turns[0] += 1

    monkeypatch.setattr(text, "_encode", counted)
    thread = threading.Thread(target=others)
    thread.start()
    ids = make_renderer(TOKENIZER).start([Message("user", "word and " * 33_000)], [])
    over.set()
    thread.join()
    assert max(meanwhile) >= 8 and len(ids) > 33_000


async def test_an_answer_is_made_text_in_a_thread_if_it_is_long() -> None:
    where, loop = dict[str, bool](), threading.get_ident()

    def count(text: str) -> int:
        where["long" if len(text) > LONG_TEXT else "short"] = threading.get_ident() == loop
        return estimate_tokens(text)

    async def give(size: int) -> list[dict[str, str]]:
        return [{"row": SHORT_TEXT}] * size

    box = Toolbox([tool(max_output=LONG // 8)(give)], count_tokens=count)
    short, long = await box.call(ToolCall("give", {"size": 1})), await box.call(ToolCall("give", {"size": 1000}))
    assert short.content == json.dumps([{"row": SHORT_TEXT}]) and long.content == json.dumps([{"row": SHORT_TEXT}] * 1000)
    assert where == {"long": False}, "a text that fits in any case is not counted"


@pytest.mark.parametrize("size", [1, 4000])
async def test_arguments_are_checked_in_a_thread_if_they_are_long(size: int) -> None:
    seen, loop = list[bool](), threading.get_ident()

    async def take(rows: list[dict[str, int]]) -> int:
        return len(rows)

    made = tool(take)
    check = made.check
    made.__dict__["check"] = lambda arguments: (seen.append(threading.get_ident() == loop), check(arguments))[1]
    assert (await Toolbox([made]).call(ToolCall("take", {"rows": [{"a": 1}] * size}))).value == size and seen == [size == 1]


async def test_a_pattern_that_never_ends_is_answered_and_the_loop_goes_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """`re` took 0.1 s for 22 letters, twice that for each more, with the interpreter's lock: here it would be 10 years."""
    monkeypatch.setattr(schemas, "SCHEMA_S", 0.2)
    schema = {"type": "object", "properties": {"name": {"type": "string", "pattern": "^(a|aa)+$"}}, "required": ["name"]}
    box = Toolbox([Tool.from_schema("named", "", schema, lambda name: name)])
    ticks, result = await ticks_during(lambda: box.call(ToolCall("named", {"name": "a" * 60 + "!"})))
    assert result.error == "invalid_argument" and "took longer than 0.2 s on 61 characters" in result.content and ticks >= 8
    fine, wrong = await box.call(ToolCall("named", {"name": "aaa"})), await box.call(ToolCall("named", {"name": "b"}))
    assert fine.value == "aaa" and "does not match" in wrong.content


@pytest.mark.parametrize("numbers", [3, 1200])
def test_a_busy_machine_sends_no_check_against_a_schema_into_a_thread_but_much_to_check_does(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's late answer would make a run's last digits depend on the load of the machine."""
    monkeypatch.setattr(schemas, "SCHEMA_S", 0.08)
    where, best, loop = list[bool](), schemas.best_match, threading.get_ident()

    def stopped(errors: Any) -> Any:
        where.append(threading.get_ident() == loop)
        time.sleep(0.1)  # for so long the process gets no processor
        return best(errors)

    monkeypatch.setattr(schemas, "best_match", stopped)
    # another schema each, since checked ones are kept
    many = {"type": "array", "items": {"type": "integer"}, "maxItems": numbers}
    schema = {"type": "object", "properties": {"n": many}}
    box = Toolbox([Tool.from_schema("add", "", schema, lambda n: sum(n))])
    where.clear()  # the schema itself was checked
    call = ToolCall("add", {"n": [1] * numbers})
    assert asyncio.run(box.call(call)).value == numbers
    aside = [] if numbers == 3 else [False]
    assert where == [True, *aside]
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": schema}}]
    scorer = scorer_of({"use": "calls.schema"})
    played = Trajectory("x", Task("t", 0), turns=[Turn(0, Message("assistant", "", tool_calls=[call]))], tools=tools)
    where.clear()
    assert asyncio.run(scorer.ascore(played)).value == 1.0
    assert where == [True, True, *aside], "the schema itself, then the call"


def test_a_match_that_is_late_once_because_another_thread_computed_is_tried_again_on_the_loop() -> None:
    late = [True, False, *[True] * 5]

    def look(text: str, timeout: float) -> str:
        if late.pop(0):
            raise TimeoutError
        return text

    assert at_once(within_seconds, look, "a", 1.0) == "a"
    with pytest.raises(TooLongError):
        at_once(within_seconds, look, "a", 1.0)


def test_what_other_threads_compute_does_not_count_against_a_match() -> None:
    """The clock of `regex` is the process's: next to 16 busy threads a fine pattern had a sixteenth of its time."""
    limits: list[float] = []

    def look(text: str, timeout: float) -> str:
        limits.append(timeout)
        if len(limits) < 4:  # its clock ran out, and this thread had nothing of it
            raise TimeoutError
        return text

    assert within_seconds(look, "a", 0.01) == "a" and limits[0] == 0.01 and limits == sorted(limits)

    def slow(text: str, timeout: float) -> str:
        limits.append(timeout)
        until = time.thread_time() + timeout
        while time.thread_time() < until:
            pass
        raise TimeoutError

    limits.clear()
    with pytest.raises(TimeoutError):
        within_seconds(slow, "a", 0.01)
    assert limits == [0.01]


async def test_a_spec_with_a_pattern_that_never_ends_lets_the_loop_go_on() -> None:
    """First it is tried at once, for 5 ms; an episode whose text fits at once is scored on the loop."""
    scorer = scorer_of({"use": "format.regex", "args": {"pattern": "(a|aa)+$", "seconds": 0.3}})
    late, fine = (Trajectory("x", Task("t", 0), turns=[Turn(0, Message("assistant", "a" * 60 + end))]) for end in ("!", ""))
    ticks, score = await ticks_during(lambda: scorer.ascore(late))
    assert score.value is None and "took longer than 0.3 s" in json.dumps(score.evidence) and ticks >= 8
    assert (await scorer.ascore(fine)).value == 1.0


@pytest.mark.parametrize(("long", "aside"), [("", False), ("state", True), ("answer", False)])
async def test_a_long_episode_is_scored_in_a_thread(long: str, aside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """30,000 characters of texts and state together; the state here has 40,000 if it is long, an answer 10,000."""
    where: list[int] = []
    for leaf in (TextEquals, StateMatch):
        read = leaf.read
        monkeypatch.setattr(leaf, "read", lambda self, *a, read=read: (where.append(threading.get_ident()), read(self, *a))[1])
    renderer = Noting()
    await play(Long(long), renderer)
    assert [thread != renderer.loop for thread in where] == [aside] * len(where) and where


async def test_a_users_rule_that_never_ends_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.contrib.users.PATTERN_S", 0.2)
    user = RuleUser([("^(a|aa)+$", "letters"), ("!", "stop shouting")])
    ticks, answer = await ticks_during(lambda: user.reply([Message("assistant", "a" * 60 + "!")]))
    assert answer == "stop shouting" and ticks >= 8


def test_an_answer_is_cut_where_its_budget_ends_and_only_its_beginning_is_counted() -> None:
    """Against the definition: the longest beginning that fits with the mark; little more is counted."""

    def cut(text: str, keep: int) -> str:
        return text[:keep] + MARK.format(cut=len(text) - keep, total=len(text))

    rng, counted = random.Random(1), [0]

    def count(text: str) -> int:
        counted.append(len(text))
        return estimate_tokens(text)

    for _ in range(200):
        text, budget = "".join(rng.choices("ab\u00e9\u4e2d", k=rng.randrange(400))), rng.randrange(1, 60)
        fits = [keep for keep in range(len(text)) if estimate_tokens(cut(text, keep)) <= budget]
        wanted = text if estimate_tokens(text) <= budget else cut(text, max(fits, default=0))
        assert fit(text, budget, count) == wanted
    counted[:] = [0]
    assert fit("a" * LONG, 100, count) == cut("a" * LONG, 400 - len(MARK.format(cut=LONG - 400, total=LONG)))
    assert max(counted) <= 1600 + 60


def test_the_size_of_a_value_is_counted_no_further_than_needed() -> None:
    class Row:
        def __init__(self, text: str) -> None:
            self.text = text

    assert size_of("abc") == 3 and size_of(None) == size_of(1.5) == 4
    assert size_of({"key": ["abcd", 1]}) == 4 + 3 + 4 + 4 + 4  # object, key, list, text, number
    assert size_of([Row("abcd")]) == 4 + 4 + 4
    began = time.thread_time()
    assert LONG_TEXT <= size_of([0] * 10_000_000) <= LONG_TEXT + 4
    assert time.thread_time() - began < 1.0
