"""Each layout of chat data, read: roles, calls, tools, what is trained, and what is refused by name."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from agentrl.contrib.offline.layouts import openai_chat, preference, sharegpt_chat
from agentrl.contrib.offline.prepare import render_chat
from agentrl.contrib.offline.text_calls import bracket_calls
from agentrl.render import make_renderer
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import BadRowError
from tests.render.families import FAMILIES, IM, QWEN3, QWEN3_CODER
from tests.render.render_tokenizers import build_tokenizer

ADD = {"name": "add", "description": "sum", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = [
    {"role": "user", "content": "one more than 0"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "x", "content": "1"},
    {"role": "assistant", "content": "It is 1", "weight": 0},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "thanks"},
]
HERMES = {
    "conversations": [
        {"from": "system", "value": f"You may call <tools>\n[{json.dumps(TOOLS[0])}]\n</tools> in <tool_call> tags."},
        {"from": "human", "value": "one more than 0"},
        {"from": "gpt", "value": "Adding.\n<tool_call>\n{'arguments': {'a': 1}, 'name': 'add'}\n</tool_call>"},
        {"from": "tool", "value": '<tool_response>\n{"sum": 1}\n</tool_response>'},
        {"from": "gpt", "value": "It is 1"},
    ]
}
TOOLACE = {
    "system": "You compose functions.\nHere is a list of functions in JSON format that you can invoke:\n"
    + json.dumps([{"name": "Add One", "description": "", "parameters": {"type": "dict", "properties": {"a": {"type": "int"}}}}])
    + ". \nShould you decide to return the function call(s), put it in the format of [func1(a=1)]",
    "conversations": [
        {"from": "user", "value": "one more than 0, and than 1"},
        {"from": "assistant", "value": '[Add One(a=0), Add One(a=1, note="a) b, c", deep={"x": [true, null]})]'},
        {"from": "tool", "value": '[{"name": "Add One", "results": {"sum": 1}}, {"name": "Add One", "results": {"sum": 2}}]'},
        {"from": "assistant", "value": "1 and 2"},
    ],
}


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    write_table(Table.from_pylist(rows), path)
    return path


def test_openai_messages_weights_and_the_end_of_a_row() -> None:
    chat = openai_chat({"messages": ASKED, "tools": TOOLS})
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert chat.trained == (False, True, False, False, False, True)
    assert chat.messages[1].tool_calls[0].arguments == {"a": 1} and chat.messages[2].name == "add"
    called = {**ASKED[1], "tool_calls": [{**CALL, "id": 7}]}  # an id that is a number
    found = openai_chat({"messages": [ASKED[0], called, {**ASKED[2], "tool_call_id": 7}, ASKED[5]], "tools": TOOLS})
    assert found.messages[1].tool_calls[0].id == found.messages[2].tool_call_id == "7"
    said: list[dict[str, Any]] = [{"role": "assistant" if n % 2 else "user", "content": str(n)} for n in range(6)]
    said[3]["weight"] = said[5]["weight"] = 0
    assert [message.content for message in openai_chat({"messages": said}).messages] == ["0", "1"]


def test_the_tokens_of_trained_messages_alone_are_sampled() -> None:
    tokenizer = packaged_tokenizer(512)
    [ledger] = render_chat(openai_chat({"messages": ASKED, "tools": TOOLS}), make_renderer(tokenizer))
    text = tokenizer.decode(ledger.token_ids[ledger.sampled].tolist())
    assert "add" in text and "yes" in text and "It is 1" not in text and "sure" not in text
    assert "It is 1" in tokenizer.decode(ledger.ids())


def test_hermes_calls_in_pythons_writing_and_its_system_message() -> None:
    chat = sharegpt_chat(HERMES)
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1].content == "Adding." and chat.messages[1].tool_calls[0].arguments == {"a": 1}
    assert chat.messages[2].content == '{"sum": 1}' and chat.tools[0]["function"]["name"] == "add"
    said = "<think>\nadd, then\n</think>\n<tool_call>\n{'arguments': {'a': 1}, 'name': 'add'}\n</tool_call>"
    message = sharegpt_chat({"conversations": [*HERMES["conversations"][:2], {"from": "gpt", "value": said}]}).messages[-1]
    assert (message.reasoning, message.content, message.tool_calls[0].name) == ("add, then", "", "add")


def test_toolace_calls_with_spaces_in_names_and_a_result_each() -> None:
    chat = sharegpt_chat(TOOLACE)
    assert chat.messages[0].content == "You compose functions."
    first, second = chat.messages[2].tool_calls
    assert (first.name, first.arguments) == ("Add One", {"a": 0})
    assert second.arguments == {"a": 1, "note": "a) b, c", "deep": {"x": [True, None]}}
    assert [json.loads(message.content) for message in chat.messages if message.role == "tool"] == [{"sum": 1}, {"sum": 2}]
    assert chat.tools[0]["function"]["parameters"]["properties"]["a"]["type"] == "integer"


def test_a_preference_in_both_layouts_trains_what_follows_the_prompt() -> None:
    said = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "hm"}, {"role": "user", "content": "so?"}]
    for row in (
        {"prompt": asked, "chosen": said[0], "rejected": said[1]},
        {"chosen": asked + said[0], "rejected": asked + said[1]},
        {"input": {"messages": asked}, "preferred_output": said[0], "non_preferred_output": said[1]},
    ):
        chosen, rejected = preference(row)
        assert chosen.trained == rejected.trained == (False, False, False, True)
        assert (chosen.messages[-1].content, rejected.messages[-1].content) == ("yes", "no")


def chat(**changed: Any) -> dict[str, Any]:
    return {"messages": ASKED, "tools": TOOLS, **changed}


@pytest.mark.parametrize(("row", "said"), [
    (chat(tools=[]), "'add', which is not in tools"),
    (chat(messages=[]), "expected a list of messages"),
    (chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role: expected one of"),
    (chat(messages=[{"role": "user", "content": "x"}]), "no assistant message to train on"),
    (chat(messages=[*ASKED[:3], {**ASKED[3], "weight": 0.5}]), "messages[3].weight: expected 0 or 1, got 0.5"),
    (chat(messages=[ASKED[0], ASKED[2], ASKED[5]]), "answers no call before it"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "only text can be trained on, got image_url"),
    (chat(messages=[ASKED[0], {"role": "assistant", "function_call": {"name": "add"}}]), "write it as tool_calls"),
    (
        chat(messages=[ASKED[0], {"role": "assistant", "tool_calls": [CALL, CALL]}], parallel_tool_calls=False),
        "2 calls at once, and parallel_tool_calls is false",
    ),
    (
        chat(messages=[ASKED[0], {**ASKED[1], "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}]),
        "messages[1].tool_calls[0].arguments: not JSON",
    ),
    (chat(messages=[{"role": ["user"], "content": "x"}]), "messages[0].role: expected one of"),
    (chat(messages=[*ASKED[:2], {**ASKED[2], "content": 0}, ASKED[5]]), "messages[2].content: only text"),
    (
        chat(messages=[ASKED[0], {**ASKED[5], "content": '<tool_call>{"name": "add", "arguments": {}}</tool_call>'}]),
        "messages[1].content: a <tool_call> as text",
    ),
    (chat(messages=[*ASKED[:2], {**ASKED[2], "tool_call_id": ["x"]}, ASKED[5]]), "messages[2].tool_call_id: expected text"),
    (
        chat(messages=[ASKED[0], {**ASKED[5], "reasoning": "a", "thinking": "b"}]),
        "messages[1]: reasoning and thinking differ",
    ),
    (chat(messages=[ASKED[0], {**ASKED[5], "content": " "}]), "messages[1]: an assistant's message without content"),
    (
        chat(messages=[ASKED[0], {**ASKED[1], "tool_calls": [{"function": {"name": "add", "arguments": {"a": date.min}}}]}]),
        "messages[1].tool_calls[0].arguments: expected an object of JSON values, got date",
    ),
])  # fmt: skip
def test_a_row_that_cannot_be_used_says_where_and_why(row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRowError) as problem:
        openai_chat(row)
    assert said in str(problem.value)


@pytest.mark.parametrize(
    "text",
    ["[f(1)]", "[f(a=__import__('os'))]", "[f(a=[1)]", "[f(a=1) g()]", "[f(a=b)]", "[f(a={1})]", "[f(**{'a': 1})]",
     "[f(a=1, a=2)]", "[f(a={[]: 1})]", "[f(a={**{}})]", "[f(a=b'x')]", "[f(a=1j)]"],
)  # fmt: skip
def test_calls_that_are_no_literals_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a call|key=value|neither JSON|do not close|twice"):
        bracket_calls(text)
    with pytest.raises(BadRowError, match="a list of calls: "):
        sharegpt_chat({**TOOLACE, "conversations": [{"from": "user", "value": "?"}, {"from": "assistant", "value": text}]})


def test_signs_pythons_and_jsons_words_and_escaped_quotes_are_read() -> None:
    text = r"""[f(a=-1, b=-2.5, c=None, d=none, e=True, f="it\"s, x", g='(', h=[-3, {'k': null}]), g()]"""
    wanted = {"a": -1, "b": -2.5, "c": None, "d": None, "e": True, "f": 'it"s, x', "g": "(", "h": [-3, {"k": None}]}
    assert bracket_calls(text) == [("f", wanted), ("g", {})]
    for plain in ("[f(a=1]", "[see (1)] it", "[1, 2]"):  # what does not end as a list of calls is text
        assert bracket_calls(plain) == []


@pytest.mark.parametrize("written", [
    "{'name': 'add', 'arguments': {'a': {1}}}", "{[]: 1}", "{**{'name': 'add'}}",
    "{'name': 'add', 'arguments': {'a': 1, 'a': 2}}", '{"name": "add", "arguments": {"a": 1, "a": 2}}',
])  # fmt: skip
def test_a_hermes_call_that_is_no_json_value_is_refused(written: str) -> None:
    said = [*HERMES["conversations"][:2], {"from": "gpt", "value": f"<tool_call>{written}</tool_call>"}]
    with pytest.raises(BadRowError, match="key 'a' is given twice" if "2" in written else "neither JSON nor a literal"):
        sharegpt_chat({"conversations": said})


def test_json_nested_too_deep_is_text_of_a_tool_or_a_bad_row() -> None:
    """The reader ended with a RecursionError, which is no fault of a row."""
    deep, (asked, called, _, *rest) = "[" * 3000, TOOLACE["conversations"]
    chat = sharegpt_chat({**TOOLACE, "conversations": [asked, called, {"from": "tool", "value": deep}, *rest]})
    assert deep in [message.content for message in chat.messages]
    with pytest.raises(BadRowError, match="the functions of the system message: not JSON"):
        sharegpt_chat({**TOOLACE, "system": '[{"name": ' + deep})


THOUGHT = [
    {"role": "user", "content": "one more than 0"},
    {"role": "assistant", "content": "1", "reasoning_content": "0 and 1"},
    {"role": "user", "content": "one more"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "1 and 1"},
    {"role": "tool", "tool_call_id": "x", "content": "2"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "sure"},
]


@pytest.mark.parametrize("context", [(), (0,), (1, 2)], ids=str)
def test_a_template_that_drops_reasoning_writes_a_row_each_time_the_user_speaks(context: tuple[int, ...]) -> None:
    """As the template writes the prompt of each turn; what is context and what is learned, turn by turn."""
    tokenizer = build_tokenizer([*IM, "<think>", "</think>"], QWEN3)
    answers = [n for n, message in enumerate(THOUGHT) if message["role"] == "assistant"]
    said = [{**message, "weight": 0} if n in [answers[c] for c in context] else message for n, message in enumerate(THOUGHT)]
    ledgers = render_chat(openai_chat({"messages": said, "tools": TOOLS}), make_renderer(tokenizer))
    calls = [{**CALL, "function": {"name": "add", "arguments": {"a": 1}}}]  # arguments as an object, as templates take them
    taken = [{**message, "tool_calls": calls} if "tool_calls" in message else message for message in THOUGHT]
    rows = [[0], [1, 2], [3]]  # the turns of each row: reasoning is kept while tools answer
    kept = [[turn for turn in row if turn not in context] for row in rows]
    assert [sorted({int(t) for t in ledger.turns[ledger.sampled]}) for ledger in ledgers] == [row for row in kept if row]
    for ledger, row in zip(ledgers, [row for row, left in zip(rows, kept, strict=True) if left], strict=True):
        prompt = tokenizer.apply_chat_template(
            [{k: v for k, v in message.items() if v is not None} for message in taken[: answers[row[0]]]],
            tools=TOOLS, add_generation_prompt=True, tokenize=False,
        )  # fmt: skip
        assert tokenizer.decode(ledger.ids()).startswith(prompt)
        learned = tokenizer.decode(ledger.token_ids[ledger.sampled].tolist())
        for turn, text in enumerate(("0 and 1", "1 and 1", ">\n\n2<", "sure")):
            assert (text.strip("<>\n") in learned) == (turn in row and turn not in context), (turn, text, learned)


def test_arguments_that_the_templates_syntax_cannot_tell_from_others_are_found_out() -> None:
    """As tags without types, "1" of a schema's integer is read as 1: the model would learn another call than the data says."""
    renderer = make_renderer(build_tokenizer(IM, QWEN3_CODER))
    for value, same in (("1", False), (1, True)):
        called = {**CALL, "function": {"name": "add", "arguments": {"a": value}}}
        found = openai_chat({"messages": [ASKED[0], {**ASKED[1], "tool_calls": [called]}], "tools": TOOLS})
        if same:
            assert len(render_chat(found, renderer)) == 1
        else:
            with pytest.raises(BadRowError, match=r"messages\[1\]: its calls change when the model's chat template"):
                render_chat(found, renderer)


def said(content: Any, **more: Any) -> Any:
    return openai_chat({"messages": [ASKED[0], {"role": "assistant", "content": content, **more}]}).messages[1]


def test_reasoning_that_only_ends_in_the_content_is_reasoning_and_none_is_dropped_for_another() -> None:
    """As models write it whose template opens the reasoning; the rest of what is said was learned with it as text."""
    for content in ("<think>\nso\n</think>\n\nyes", "so\n</think>\n\nyes"):
        for more in ({}, {"reasoning_content": "so"}):
            assert (said(content, **more).reasoning, said(content, **more).content.strip()) == ("so", "yes")
    parts = [{"type": "thinking", "thinking": "or so"}, {"type": "text", "text": "<think>so</think>yes"}]
    for content, more in (("<think>so</think>yes", {"reasoning_content": "or so"}), (parts, {})):
        with pytest.raises(BadRowError, match=r"\[1\]: the reasoning in its content and the one next to it differ\. Leave"):
            said(content, **more)
    ends = {"<think>so": ".content: a <think> that does not end", "<think>so</think>": ": .* without content and calls"}
    for content, fault in ends.items():
        with pytest.raises(BadRowError, match=rf"messages\[1\]{fault}"):
            said(content)
    code = "```\n</think>\n```"
    assert (said(code).reasoning, said(code).content) == (None, code)


def test_a_message_without_content_and_a_system_prompt_where_none_is_read_are_refused() -> None:
    for role in ("user", "system"):
        for empty in ({"role": role}, {"role": role, "content": None}):
            with pytest.raises(BadRowError, match=rf"messages\[0\]\.content: is missing, of a message of role '{role}'"):
                openai_chat({"messages": [empty, *ASKED[:1], ASKED[5]]})
    assert openai_chat({"messages": [{"role": "system", "content": ""}, ASKED[0], ASKED[5]]}).messages[0].content == ""
    pair = {"prompt": ASKED[:1], "chosen": [ASKED[5]], "rejected": [{**ASKED[5], "content": "no"}]}
    inner = {"input": {"messages": ASKED[:1]}, "preferred_output": [ASKED[5]], "non_preferred_output": pair["rejected"]}
    turns = {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "hi"}]}
    assert sharegpt_chat({**turns, "system": "Be brief."}).messages[0].content == "Be brief."
    beside = {**inner, "input": {**inner["input"], "tool": TOOLS}}
    for reader, odd in ((sharegpt_chat, {**turns, "Tools": TOOLS}), (preference, beside)):
        with pytest.raises(BadRowError, match="is not read, but looks like tools"):
            reader(odd)
    for read, row in ((openai_chat, {"messages": [ASKED[0], ASKED[5]]}), (preference, pair)):
        with pytest.raises(BadRowError, match="system: it is not read outside of messages"):
            read({**row, "system": "Be brief."})
        assert read({**row, "system": "", "num_tools": 0, "target_tools": ["name"]}) == read(row)
        # It was learned to do without them.
        for key, tools in (("Tools", TOOLS), ("available_tools", json.dumps(TOOLS)), ("tool_defs", TOOLS)):
            with pytest.raises(BadRowError, match=f"{key}: is not read, but looks like tools"):
                read({**row, key: tools})
    with pytest.raises(BadRowError, match="without content and calls"):  # to end a turn at once was learned
        sharegpt_chat({"conversations": [*turns["conversations"], {"from": "gpt", "value": ""}]})
    with pytest.raises(BadRowError, match="chosen and rejected answer different messages"):
        preference({"chosen": [ASKED[0], ASKED[5]], "rejected": [ASKED[4], ASKED[5]]})
    with pytest.raises(BadRowError, match="system: expected text, got list"):
        sharegpt_chat({**HERMES, "system": ["Be brief."]})


def test_a_row_is_refused_that_no_prompt_opens_or_that_the_template_does_not_show_all_of() -> None:
    template, tokens, bos, eos, *_ = FAMILIES["mistral"]
    mistral = make_renderer(build_tokenizer(tokens, template, bos=bos, eos=eos))
    qwen = make_renderer(build_tokenizer([*IM, "<think>", "</think>"], QWEN3))
    spoken = [{**message, "content": message["content"] or "I add."} for message in ASKED]
    warned = [*ASKED[:4], {"role": "system", "content": "Be brief."}, *ASKED[4:]]
    for messages, renderer, fault in (
        (spoken, mistral, r"messages\[1\]: .* not show all of a message of role 'assistant' in its place: 'I add.'. Leave out"),
        (warned, qwen, "not show all of a message of role 'system' in its place: 'Be brief.'"),
        (ASKED[5:6], qwen, "begins with an assistant message, without a prompt before it"),
    ):
        with pytest.raises(BadRowError, match=fault):
            render_chat(openai_chat({"messages": messages, "tools": TOOLS}), renderer)
    assert render_chat(openai_chat({"messages": ASKED, "tools": TOOLS}), mistral)
    assert render_chat(openai_chat({"messages": spoken, "tools": TOOLS}), qwen)


def test_a_developer_is_the_system_and_reasoning_is_kept_and_python_schemas_are_jsons() -> None:
    said = [{"role": "developer", "content": "be short"}, ASKED[0], {**ASKED[5], "reasoning_content": "as asked"}]
    schema = {"type": "dict", "properties": {"a": {"type": "float", "enum": None}, "type": {"type": "str"}}, "required": ["a"]}
    found = openai_chat({"messages": said, "tools": [{"name": "f", "arguments": schema}]})
    assert [message.role for message in found.messages] == ["system", "user", "assistant"]
    assert found.messages[2].reasoning == "as asked"
    properties = {"a": {"type": "number"}, "type": {"type": "string"}}
    assert found.tools[0]["function"]["parameters"] == {"type": "object", "properties": properties, "required": ["a"]}


def test_a_prompt_that_is_in_both_places_is_refused() -> None:
    """Else the prompt would be said twice."""
    said = [{"role": "assistant", "content": "no"}]
    for row in ({"chosen": [*ASKED[:1], ASKED[5]], "rejected": said}, {"chosen": ASKED[5:6], "rejected": [*ASKED[:1], *said]}):
        with pytest.raises(BadRowError, match="begins with the prompt"):
            preference({"prompt": ASKED[:1], **row})


def test_weights_and_tools_of_a_preference_are_those_of_its_messages() -> None:
    """In the layouts with and without a prompt: of the answers those of weight 0 are context."""
    chosen, rejected = [*ASKED[1:4], *ASKED[4:6]], [ASKED[1], ASKED[2], ASKED[5]]
    for row in (
        {"prompt": ASKED[:1], "chosen": chosen, "rejected": rejected, "tools": TOOLS},
        {"chosen": ASKED[:1] + chosen, "rejected": ASKED[:1] + rejected, "tools": TOOLS},
        {"input": {"messages": ASKED[:1], "tools": TOOLS}, "preferred_output": chosen, "non_preferred_output": rejected},
    ):
        one, two = preference(row)
        learned = [
            [m.content or m.tool_calls[0].name for m, t in zip(c.messages, c.trained, strict=True) if t] for c in (one, two)
        ]
        # What both begin with is the prompt, if none is named.
        assert learned == ([["yes"], ["yes"]] if "prompt" not in row and "input" not in row else [["add", "yes"], ["add", "yes"]])


def hermes(*said: tuple[str, str]) -> dict[str, Any]:
    turns = [{"from": who, "value": text} for who, text in said]
    return {"conversations": [HERMES["conversations"][0], {"from": "human", "value": "?"}, *turns], "tools": json.dumps(TOOLS)}


THOUGHTS = {
    "in the thought": "<think>perhaps <tool_call>{'name': 'add', 'arguments': {'a': 9}}</tool_call></think>",
    "in a thought that the template opened": "perhaps 9</think>",
    "in a scratch pad": "<scratch_pad>\n<tool_call>{'name': 'add', 'arguments': {'a': 9}}</tool_call>\n</scratch_pad>\n",
    "in the middle": "Well. <thinking><tool_call>{'name': 'add', 'arguments': {'a': 9}}</tool_call></thinking>",
}


@pytest.mark.parametrize("thought", THOUGHTS.values(), ids=THOUGHTS)
def test_a_call_that_is_only_thought_of_is_none(thought: str) -> None:
    made = "<tool_call>{'name': 'add', 'arguments': {'a': 1}}</tool_call>"
    message = sharegpt_chat(hermes(("gpt", thought + made))).messages[1]
    assert [call.arguments for call in message.tool_calls] == [{"a": 1}]
    assert "9" in str(message.reasoning) and "9" not in message.content
    message = sharegpt_chat(hermes(("gpt", made.replace("1", "'<think>x</think>'")))).messages[1]
    assert message.tool_calls[0].arguments == {"a": "<think>x</think>"} and message.reasoning is None, "text of an argument"


def test_results_of_both_text_layouts_are_ordered_by_the_names_that_they_have() -> None:
    called = "".join(f"<tool_call>{{'name': '{name}', 'arguments': {{}}}}</tool_call>" for name in ("add", "sub"))
    answers = "".join(
        f'<tool_response>{{"name": "{name}", "content": {n}}}</tool_response>' for name, n in (("sub", 2), ("add", 1))
    )
    row = hermes(("gpt", called), ("tool", answers), ("gpt", "so"))
    row["tools"] = json.dumps([{"name": "add"}, {"name": "sub"}])
    results = [{"name": "sub", "results": 2}, {"name": "add", "results": 1}]
    turns = [("user", "?"), ("assistant", "[add(), sub()]"), ("tool", json.dumps(results)), ("assistant", "so")]
    other = {"system": row["tools"], "conversations": [{"from": who, "value": text} for who, text in turns]}
    for chat in (sharegpt_chat(row), sharegpt_chat(other)):
        found = [message for message in chat.messages if message.role == "tool"]
        assert [one.name for one in found] == ["add", "sub"] and "1" in found[0].content and "2" in found[1].content


def test_what_other_peoples_rows_mean_is_kept_or_refused() -> None:
    thought = openai_chat({"messages": [ASKED[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfine"}]}).messages[1]
    assert (thought.content, thought.reasoning) == ("fine", "hm")
    for text in ("HTML has no <think> tag.", "To end it, write </think>. Then go on.", "```\n<reasoning>x</reasoning>\n```"):
        assert sharegpt_chat(hermes(("gpt", text))).messages[1].content == text
    call = "<tool_call>{'name': 'add', '%s': {'a': 9}}</tool_call>"
    assert sharegpt_chat(hermes(("gpt", call % "parameters"))).messages[1].tool_calls[0].arguments == {"a": 9}
    with pytest.raises(BadRowError, match="needs arguments"):
        sharegpt_chat(hermes(("gpt", call % "kwargs")))
    asked = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "hi"}]
    for system, kept in (
        ('Reply as [{"a": 1}].', 'Reply as [{"a": 1}].'),
        (f"Be Bob.\n\nCall <tools>{json.dumps(TOOLS)}</tools>", "Be Bob."),
    ):
        assert sharegpt_chat({"conversations": asked, "system": system, "tools": TOOLS}).messages[0].content == kept
    with pytest.raises(BadRowError, match="differs from the system message"):
        sharegpt_chat({"conversations": [{"from": "system", "value": "a"}, *asked], "system": "b"})
    both = "".join(f"<tool_call>{{'name': '{name}', 'arguments': {{}}}}</tool_call>" for name in ("add", "sub"))
    row = hermes(("gpt", both), ("tool", '<tool_response>{"name": "sub"}</tool_response>'), ("gpt", "so"))
    with pytest.raises(BadRowError, match="none of call 0"):
        sharegpt_chat({**row, "tools": json.dumps([{"name": "add"}, {"name": "sub"}])})
