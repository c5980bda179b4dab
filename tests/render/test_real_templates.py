"""The renderer over real chat templates (`.ci/templates.py`): a ledger holds what the template writes."""

import asyncio
import json
import os
from functools import cache
from typing import ClassVar

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Message, ToolCall
from agentrl.env import Task, ToolEnv, tool
from agentrl.render.template import TemplateRenderer
from agentrl.rollout.warm_start import transcript
from agentrl.utils.errors import RenderError
from tests.render.real_templates import OURS, REAL, ROOT, Real, tokenizer_of
from tests.render.render_conversations import as_dicts
from tests.render.report_templates import RECORD, found

PUBLIC = [real for real in REAL if real.path.is_file()]
HERE = [*PUBLIC, *OURS]
EXAMPLES = int(os.environ.get("AGENTRL_TEMPLATE_EXAMPLES") or 3)
quick = settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
by_template = pytest.mark.parametrize("real", HERE, ids=lambda real: f"{real.source}/{real.file}")
with_tools = pytest.mark.parametrize("real", [r for r in HERE if r.syntax], ids=lambda real: f"{real.source}/{real.file}")


def _tool(name, **properties):
    schemas = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schemas, "required": []}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters}}


TOOLS = [_tool("get", key="string"), _tool("add", a="integer", b="integer"),
         _tool("note", items="array", flag="boolean", map="object", text="string")]  # fmt: skip


@cache
def made(real: Real):
    tokenizer = tokenizer_of(real)
    return tokenizer, TemplateRenderer(tokenizer)


word = st.text("abcXYZ", min_size=1, max_size=5)
# No white space at the ends, which most templates trim.
texts = st.lists(word | st.sampled_from(["7", "é漢🙂", "it's", '"q"', "a\nb", "{x}", "[1]", "true", "\\n", "a: b, c"]),
                 min_size=1, max_size=3).map(" ".join)  # fmt: skip


@st.composite
def a_call(draw, real, number, text=texts):
    text = word if real.letters else text
    name = draw(st.sampled_from(["get", "add", "note"]))
    simple = st.integers(-999, 999)
    values = {
        "get": {"key": text},
        "add": {"a": simple, "b": simple},
        "note": {"items": st.lists(simple | word, max_size=2), "flag": st.booleans(), "text": text,
                 "map": st.dictionaries(word, simple | word, max_size=2)},
    }[name]  # fmt: skip
    # As a policy samples it: what it says next to it may be lost in a later prompt (DeepSeek V3 drops it after two calls).
    return ToolCall(name, draw(st.fixed_dictionaries({}, optional=values)), id=f"call{number:05d}", raw="<call>")


@st.composite
def a_turn(draw, real, number, tools, text=texts):
    most = (1 if real.one_call else 2) if tools else 0
    calls = tuple(draw(a_call(real, 2 * number + i, text)) for i in range(draw(st.integers(0, most))))
    content = "Well, " + draw(texts) if not calls or (real.talks and draw(st.booleans())) else ""
    reasoning = draw(texts) if real.reasoning else None
    return Message("assistant", content, calls, reasoning=reasoning)


@st.composite
def an_episode(draw, real):
    tools = TOOLS if real.syntax and draw(st.booleans()) else []
    opening = [Message("system", draw(texts))] if real.system and draw(st.booleans()) else []
    opening.append(Message("user", draw(texts)))
    rounds = []
    for number in range(draw(st.integers(1, 4))):
        turn = draw(a_turn(real, number, tools))
        answers = [Message("tool", draw(texts), tool_call_id=call.id, name=call.name) for call in turn.tool_calls]
        rounds.append((turn, answers or [Message("user", draw(texts))]))
    return tools, opening, rounds


def as_given(real, message):
    """A message in the form in which the template's own users give it."""
    [row] = as_dicts([message])
    for call in row.get("tool_calls", []) if real.texts else []:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    if row.pop("reasoning_content", None) is not None:
        if real.key == "chunk":
            said = [{"type": "text", "text": message.content}] if message.content else []
            row["content"] = [{"type": "thinking", "thinking": message.reasoning}, *said]
        elif real.key:
            row[real.key] = message.reasoning
    return row


@by_template
@quick
@given(data=st.data())
def test_every_prompt_of_an_episode_is_what_the_template_writes(real, data):
    """Prompts are made by appending, or begin anew if `keeps` says so: each must be the template's own, text and ids."""
    tokenizer, renderer = made(real)
    tools, opening, rounds = data.draw(an_episode(real))
    # Granite 3.x and the first LFM2 leave calls to the content.
    in_content = renderer._text.form.calls_in_content
    renderer = renderer.with_tools(tools)
    messages, begun = list(opening), len(opening)
    ids = renderer.start(messages, tools)
    given_rows = [as_given(real, message) for message in messages]
    for turn, answers in rounds:
        sampled = renderer.assistant(turn)
        parsed = renderer.parse(sampled, "stop")
        assert [(c.name, c.arguments) for c in parsed.tool_calls] == [(c.name, c.arguments) for c in turn.tool_calls]
        assert (parsed.content, parsed.reasoning or None) == (turn.content, turn.reasoning)
        if renderer.keeps(turn, answers, messages, begun):
            ids = ids + sampled + renderer.extend("stop", answers, sampled[-1])
            messages += [turn, *answers]
        else:
            messages += [turn, *answers]
            ids, begun = renderer.start(messages, tools), len(messages)
        given_rows += [as_given(real, message) for message in (turn, *answers)]
        if in_content and turn.tool_calls:
            row = given_rows[-len(answers) - 1]
            row["content"] += in_content.write(turn.tool_calls)
            del row["tool_calls"]
        whole = tokenizer.apply_chat_template(given_rows, tools=tools or None, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(ids) == whole
        assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


@by_template
def test_what_a_template_is_found_to_be(real):
    _, renderer = made(real)
    assert (renderer.syntax if not renderer.no_tools else "") == real.syntax
    if not real.syntax:
        with pytest.raises(RenderError, match=r"tool.*model\.tool_parser"):
            renderer.start([Message("user", "x")], TOOLS)
    thought = Message("assistant", "Yes.", reasoning="so")
    assert not real.reasoning or (real.reasoning == "always") == renderer.keeps(thought, [Message("user", "And?")])
    if real.syntax:
        called = Message("assistant", "", (ToolCall("get", {}, id="abcdefghi"),), reasoning="so" if real.reasoning else None)
        kept = renderer.keeps(called, [Message("tool", "7", tool_call_id="abcdefghi", name="get")])
        assert kept == (real.reasoning != "dropped" and not real.rewrites)


def test_the_record_says_what_is_found():
    rows = {(row["package"], row["template"]): row for row in json.loads(RECORD.read_text(encoding="utf-8"))}
    assert len(rows) == len(REAL)
    if not PUBLIC:
        pytest.skip(f"no chat templates in {ROOT}: python .ci/templates.py fetches them")
    for real in PUBLIC:
        row = found(real)
        assert rows[row["package"], row["template"]] == row


@with_tools
@quick
@given(data=st.data())
def test_control_tokens_spelled_in_an_argument_come_back_as_text(real, data):
    tokenizer, renderer = made(real)
    if real.letters:
        return
    control = sorted(renderer._text.control)
    hostile = st.lists(word | st.sampled_from(control), min_size=1, max_size=4).map("".join)
    turn = data.draw(a_turn(real, 0, TOOLS, hostile))
    sampled = renderer.assistant(turn)
    parsed = renderer.with_tools(TOOLS).parse(sampled, "stop")
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [(c.name, c.arguments) for c in turn.tool_calls]
    marks = {i for i in sampled if i in set(tokenizer.get_added_vocab().values())}
    assert renderer.stop_token_ids and marks <= set(tokenizer.get_added_vocab().values())
    assert sum(1 for i in sampled if i in renderer.stop_token_ids) == 1


@with_tools
@quick
@given(data=st.data())
def test_a_cut_or_random_turn_never_breaks_a_parser_and_can_be_gone_on_from(real, data):
    tokenizer, renderer = made(real)
    renderer = renderer.with_tools(TOOLS)
    sampled = renderer.assistant(data.draw(a_turn(real, 0, TOOLS)))
    cut = sampled[: data.draw(st.integers(0, len(sampled) - 1))]
    noise = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    for ids in (cut, cut + noise, noise):
        message = renderer.parse(ids, "length")
        for call in message.tool_calls:
            assert (call.arguments is None) == (call.error is not None) and call.raw
        answers = [Message("tool", "no", tool_call_id=call.id, name=call.name) for call in message.tool_calls]
        suffix = renderer.extend("length", answers or [Message("user", "More")])
        assert suffix[0] in renderer.stop_token_ids
        # A ledger that must fork is begun anew with the turn as a message, whatever it is.
        renderer.start([Message("user", "x"), message, *(answers or [Message("user", "More")])], TOOLS)


@by_template
def test_an_end_of_the_model_s_own_is_no_part_of_a_turn(real):
    tokenizer = tokenizer_of(real)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|own_end|>"]})
    tokenizer.model_ends = [tokenizer.convert_tokens_to_ids("<|own_end|>")]
    renderer, said = TemplateRenderer(tokenizer), Message("assistant", "Well, yes")
    ended = [*renderer.assistant(said)[:-1], *tokenizer.model_ends]
    assert ended[-1] in renderer.stop_token_ids and renderer.parse(ended, "stop").content == said.content
    after = [Message("user", "Go on")]
    assert renderer.extend("stop", after, ended[-1]) == renderer.extend("length", after)


@pytest.mark.parametrize("real", [r for r in HERE if r.hides_tools], ids=lambda real: f"{real.source}/{real.file}")
def test_a_template_that_shows_no_tools_is_refused_with_tools(real):
    renderer = TemplateRenderer(tokenizer_of(real, shown=False))
    with pytest.raises(RenderError, match=r"ignores tools.*for tools, set model\.chat_template"):
        renderer.start([Message("user", "x")], TOOLS)


GOOD = [ToolCall("get", {"key": "a"}, id="call_0", raw="<a>"), ToolCall("note", {"text": "b"}, id="call_1", raw="<b>")]
BROKEN = ToolCall("get", None, id="call_2", raw="<oops", error="x")
NAMELESS = ToolCall("", None, id="call_3", raw="<oops", error="x")


@with_tools
@pytest.mark.parametrize("content", ["", "I look."])
def test_answers_to_calls_of_any_kind_are_shown(real, content):
    """More calls than the template takes, calls that could not be parsed, and those without a name."""
    tokenizer, renderer = made(real)
    user = Message("user", "q")
    for calls in (GOOD, [GOOD[0], BROKEN], [BROKEN], [BROKEN, NAMELESS]):
        turn = Message("assistant", content, tuple(calls))
        answers = [Message("tool", f"4{i}2", tool_call_id=call.id, name=call.name) for i, call in enumerate(calls)]
        assert isinstance(renderer.keeps(turn, answers, [user], 1), bool)
        for ids in (renderer.extend("stop", answers), renderer.start([user, turn, *answers], TOOLS)):
            text = tokenizer.decode(ids)
            assert all(answer.content in text for answer in answers), (calls, text)


def refused(make):
    """The text of a prompt or turn, or None if it is refused for what the template does not show."""
    try:
        return make()
    except RenderError as problem:
        assert "the chat template" in str(problem)
        return None


@by_template
def test_nothing_that_a_prompt_is_given_is_lost_without_a_word(real):
    tokenizer, renderer = made(real)
    user, call = Message("user", "Quser"), ToolCall("get", {"key": "Qkey"}, id="abcdefghi")
    answer = Message("tool", "Qtold", tool_call_id="abcdefghi", name="get")
    system = [Message("system", f"Qsystem{number}") for number in range(2)]
    said = Message("assistant", "Qsaid", (call,) if real.syntax else (), reasoning="Qthought")
    following = [answer] if real.syntax else [Message("user", "Qagain")]
    for messages in (
        [user, system[0]],
        [*system, user],
        [system[0], user, said, *following, system[1]],
        [user, said, *following],
    ):
        text = refused(lambda: tokenizer.decode(renderer.start(messages, TOOLS if real.syntax else [])))  # noqa: B023
        assert text is None or all(message.content in text for message in messages), text
        assert text is None or messages[0].role == "system" or text.index("Quser") < text.index(messages[-1].content)
        added = refused(lambda: tokenizer.decode(renderer.extend("stop", messages[-1:])))  # noqa: B023
        assert added is None or messages[-1].content in added
    turn = refused(lambda: tokenizer.decode(renderer.assistant(said)))
    assert turn is None or ("Qsaid" in turn and "Qthought" in turn)
    assert turn is not None or real.one_call or real.syntax == "mistral"


class Both(ToolEnv):
    """Two calls in the first gold turn, and what they answer in the last."""

    id = "test/Both-v0"
    asked: ClassVar[list[str]] = []

    def make_task(self, rng_seed, split):
        return Task(f"both/{split}/{rng_seed}", rng_seed, split)

    def prompt(self, task):
        return [Message("user", "Get a and b.")]

    @tool
    async def get(self, key: str) -> str:
        """a value"""
        self.asked.append(key)
        return f"value of {key}"

    def gold_turns(self, task):
        calls = tuple(ToolCall("get", {"key": key}, id=f"call0000{key}") for key in "ab")
        return [Message("assistant", "", calls), Message("assistant", "Both of them.")]


@with_tools
def test_a_transcript_makes_every_call_of_the_teacher(real):
    """gpt-oss drops the second of two calls, so each gets a turn of its own; Llama takes one a turn."""
    Both.asked.clear()
    made_of = asyncio.run(transcript(Both(), made(real)[1], 1, teacher={}))
    assert Both.asked == ["a", "b"]
    assert [len(turn.message.tool_calls) for turn in made_of.turns] == ([1, 1, 0] if real.syntax == "harmony" else [2, 0])
    assert made_of.turns[-1].message.content == "Both of them."
    written = [made(real)[1].assistant(turn.message) for turn in made_of.turns]
    assert sum(ledger.sampled_tokens for ledger in made_of.ledgers) == sum(map(len, written))
