"""The renderers over the template shapes of nine model families, and over agentrl's own."""

import copy
import json
import sys
from contextlib import nullcontext

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import GenerationConfig

from agentrl.data.trajectory import Message, ToolCall
from agentrl.render import make_renderer, template_text
from agentrl.render.base import Codec
from agentrl.render.chatml import CHATML_TEMPLATE, ChatML
from agentrl.render.template import TemplateRenderer
from agentrl.trainer.pretrained import load_tokenizer, packaged_tokenizer
from agentrl.utils.errors import ModelError, RenderError
from tests.render.families import FAMILIES, IM, PIECES, QWEN25, family_of
from tests.render.render_conversations import LOOKALIKES, TOOLS, appended, as_dicts, conversations, plain, same_control_tokens
from tests.render.render_tokenizers import CONTROL_TOKENS, build_tokenizer

quick = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="session", params=[*FAMILIES, *PIECES])
def family(request):
    made = family_of(request.param)
    assert isinstance(made[1], ChatML if "chatml" in request.param else TemplateRenderer)
    return made


TOOL_FAMILIES = [*(name for name, row in FAMILIES.items() if row[4]), *PIECES]


def with_ids(rounds):
    """Nine-character ids, which every family takes as they are."""
    result = []
    for number, (turn, answers) in enumerate(rounds):
        ids = {call.id: f"{call.id.replace('_', '')}{number:04d}" for call in turn.tool_calls}
        calls = tuple(ToolCall(c.name, c.arguments, id=ids[c.id]) for c in turn.tool_calls)
        named = [Message(a.role, a.content, tool_call_id=ids.get(a.tool_call_id), name=a.name) for a in answers]
        result.append((Message("assistant", "" if calls else turn.content or "x", calls), named))
    return result


def draw(data, renderer, abilities, text, **more):
    tools, system, calls = abilities
    opening, rounds = data.draw(conversations(text=text, system=system, max_calls=calls, **more))
    # ChatML's shows what is said next to calls, and no ids.
    rounds = rounds if isinstance(renderer, ChatML) else with_ids(rounds)
    return opening, rounds, TOOLS if tools and data.draw(st.booleans()) else []


@quick
@given(data=st.data())
def test_appending_gives_what_the_template_gives_for_the_whole(family, data):
    tokenizer, renderer, *abilities = family
    opening, rounds, tools = draw(data, renderer, abilities, plain)
    ids, messages = appended(renderer, opening, rounds, tools)
    text = tokenizer.apply_chat_template(as_dicts(messages), tools=tools or None, add_generation_prompt=True, tokenize=False)
    whole, pieces = tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.unk_token is not None
    assert tokenizer.decode(ids) == (tokenizer.decode(whole) if pieces else text)
    # Mistral's turns have a control token on either side: no piece reaches over their edge. "assistant\n" and a turn that starts
    # with other than a letter are one piece to the template's tokenization but never to a policy, which samples after it.
    plain_turns = isinstance(renderer, ChatML) and all(turn.content[:1].isalnum() for turn, _ in rounds)
    assert ids == whole or not (plain_turns or (pieces and "[INST]" in tokenizer.get_vocab()))


@quick
@given(data=st.data())
def test_hostile_text_adds_no_control_token(family, data):
    """Every control token in a conversation of look-alikes stands where it stands in a harmless one."""
    tokenizer, renderer, *abilities = family
    text = st.lists(plain | st.sampled_from([*LOOKALIKES, "▁", "<unk>", "<0x0A>"])).map("".join)
    opening, rounds, tools = draw(data, renderer, abilities, text)
    control = set(tokenizer.get_added_vocab().values()) - {tokenizer.unk_token_id}
    assert same_control_tokens(renderer, opening, rounds, tools, control)


@pytest.mark.parametrize("family", TOOL_FAMILIES, indirect=True)
@quick
@given(data=st.data())
def test_a_rendered_call_is_parsed_back(family, data):
    tokenizer, renderer, *abilities = family
    turn = draw(data, renderer, abilities, plain, min_rounds=1)[1][0][0]
    assume(turn.tool_calls or isinstance(renderer, ChatML))
    ids = renderer.assistant(turn)
    parsed, space = renderer.parse(ids, "stop"), " " if tokenizer.unk_token else "▁"  # which is a space to sentencepiece
    assert ids[-1] in renderer.stop_token_ids and parsed.content == turn.content.replace("▁", space)
    assert [call.name for call in parsed.tool_calls] == [call.name for call in turn.tool_calls]
    if renderer.syntax != "qwen_xml":  # XML does not type its values
        given = [
            {key: value.replace("▁", space) if isinstance(value, str) else value for key, value in call.arguments.items()}
            for call in turn.tool_calls
        ]
        assert [call.arguments for call in parsed.tool_calls] == given
    assert not isinstance(renderer, ChatML) or [c.id for c in parsed.tool_calls] == [c.id for c in turn.tool_calls]


@pytest.mark.parametrize("kind", ["prepend", "first", "always"])
def test_a_turn_after_text_gets_no_space_of_its_own(kind):
    """`assistant\\n` is text: what follows is in the middle of a text for the tokenizer, as it is for a policy."""
    tokenizer, renderer, *_ = family_of(f"qwen2.5/{kind}")
    turn = renderer.assistant(Message("assistant", "report"))
    assert not tokenizer.convert_ids_to_tokens(turn)[0].startswith("▁")


VALUES = {
    "text": (st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<["), max_size=8)
             | st.sampled_from(["7", "true", "null", "[1]", "", "\n", " x\n"]), {"type": "string"}),
    "count": (st.integers(-(10**20), 10**20), {"type": "integer"}),
    "ratio": (st.floats(allow_nan=False, allow_infinity=False), {"type": "number"}),
    "flag": (st.booleans(), {"type": "boolean"}),
    "items": (st.lists(st.integers() | st.text(max_size=3) | st.none(), max_size=3), {"type": "array"}),
    "map": (st.dictionaries(st.text(max_size=3), st.integers() | st.booleans(), max_size=2), {"type": "object"}),
    "maybe": (st.none() | st.integers(), {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
}  # fmt: skip
TYPED = [{"type": "function", "function": {"name": "typed", "description": "", "parameters": {
    "type": "object", "properties": {key: schema for key, (_, schema) in VALUES.items()}}}}]  # fmt: skip


@quick
@given(st.fixed_dictionaries({}, optional={key: values for key, (values, _) in VALUES.items()}))
def test_untyped_xml_comes_back_as_the_tools_declare_it(arguments):
    renderer = family_of("qwen3-coder")[1].with_tools(TYPED)
    turn = Message("assistant", "", (ToolCall("typed", arguments, id="abcdefghi"),))
    (call,) = renderer.parse(renderer.assistant(turn), "stop").tool_calls
    assert call.arguments == arguments
    assert {key: type(value) for key, value in call.arguments.items() if key != "ratio"} == {
        key: type(value) for key, value in arguments.items() if key != "ratio"
    }


def test_tools_of_one_episode_are_not_those_of_another():
    shared = family_of("qwen3-coder")[1]
    turn = shared.assistant(Message("assistant", "", (ToolCall("typed", {"text": "7"}, id="abcdefghi"),)))
    assert shared.with_tools(TYPED).parse(turn, "stop").tool_calls[0].arguments == {"text": "7"}
    assert shared.parse(turn, "stop").tool_calls[0].arguments == {"text": 7}
    assert (hermes := family_of("qwen2.5")[1]).with_tools(TYPED) is hermes


def test_json_is_an_answer_where_no_tools_are_offered_and_calls_need_no_mark():
    tokenizer, renderer = family_of("llama3")[:2]
    alone, call = renderer.with_tools([]), '{"name": "get", "parameters": {"key": "a"}}'
    for text, calls in (('{"total": 5}', ""), (call, "get"), (f"<|python_tag|>{call}", "get")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        offered = [one.name for one in renderer.with_tools(TYPED).parse(ids, "stop").tool_calls]
        assert offered == [one.name for one in renderer.parse(ids, "stop").tool_calls] == [calls]
        answer = alone.parse(ids, "stop")
        assert [one.name for one in answer.tool_calls] == [calls] if "<|" in text else answer == Message("assistant", text)


def test_a_turn_without_stop_token_is_closed(family):
    _, renderer, *_ = family
    user = [Message("user", "x")]
    for finish in ("length", "abort"):
        assert renderer.extend(finish, user) == [renderer.stop_token_ids[0], *renderer.extend("stop", user)]


def test_tools_that_a_template_cannot_show_are_refused(family):
    _, renderer, tools, *_ = family
    if not tools:
        with pytest.raises(RenderError, match="tool"):
            renderer.start([Message("user", "x")], TOOLS)
        with pytest.raises(RenderError, match="tool"):
            renderer.extend("stop", [Message("tool", "x", tool_call_id="a")])
    assert renderer.start([Message("user", "x")], TOOLS if tools else [])


def test_a_control_token_in_a_tool_description_stays_text():
    tokenizer = build_tokenizer(IM, QWEN25)
    renderer = make_renderer(tokenizer)
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>", "parameters": {}}}
    harmless = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {}}}
    ends = [renderer.start([Message("user", "q")], [item]).count(1) for item in (tool, harmless)]
    assert ends[0] == ends[1]


def test_a_template_that_goes_through_tools_that_need_not_be_there():
    listing = QWEN25.replace("{%- if tools %}", "{%- for t in tools %}{% endfor %}{%- if tools %}")
    renderer = make_renderer(build_tokenizer(IM, listing))
    assert renderer.start([Message("user", "x")], TOOLS) and renderer.start([Message("user", "x")], [])


def test_the_refusal_of_tools_says_how_turns_end_and_what_to_do():
    other = QWEN25.replace("<tool_call>\\n", "<call>").replace("\\n</tool_call>", "</call>").replace('"name": ', '"tool": ')
    renderer = make_renderer(build_tokenizer(IM, other))
    with pytest.raises(RenderError) as caught:
        renderer.start([Message("user", "x")], TOOLS)
    for part in ("does not write tool calls in a syntax", "'<|im_end|>'", '<call>{"tool": "probe_tool"', "model.tool_parser"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "function", [{"name": "a>b"}, {"name": "get", "parameters": {"type": "object", "properties": {"x>y": {}}}}]
)
def test_a_tool_that_the_syntax_cannot_write_is_refused_by_name(function):
    """Its calls would never be read: the policy could not do right."""
    renderer = family_of("qwen3-coder")[1]
    with pytest.raises(RenderError, match=f"tool '{function['name']}': the syntax 'qwen_xml' cannot write a call of it"):
        renderer.start([Message("user", "Hello")], [{"type": "function", "function": {"parameters": {}, **function}}])


def test_a_template_that_shows_tools_with_a_system_message_alone_is_used_with_one():
    """It counted as "ignores tools"."""
    shown = "{% if m.role == 'system' and tools %}{{ '\\n' + tools | tojson }}{% endif %}"
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
        + shown
        + "{% for c in m.tool_calls or [] %}{{ '<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{% endfor %}"
        + "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer = build_tokenizer(IM, template)
    renderer = TemplateRenderer(tokenizer)
    assert renderer.no_tools == "" and renderer.syntax == "hermes"
    system, user = Message("system", "Be brief."), Message("user", f"Call {TOOLS[0]['function']['name']}.")
    assert TOOLS[0]["function"]["description"] in tokenizer.decode(renderer.start([system, user], TOOLS))
    with pytest.raises(RenderError, match="shows tools only with a system message"):
        renderer.start([user], TOOLS)
    assert "tool_call" not in tokenizer.decode(renderer.start([user], []))


GIVEN = ToolCall("get", {"key": "a"}, id="abcdefghi")
RESULT = Message("tool", "7", tool_call_id="abcdefghi", name="get")


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_text_that_a_template_drops_next_to_a_call_is_refused_unless_the_policy_said_it(name):
    """It was learned, and shown to the policy, as if it had never been said."""
    renderer = family_of(name)[1]
    user, spoken = Message("user", "q"), Message("assistant", "I look it up.", (GIVEN,))
    written = "not show all of a message of role 'assistant' in its place: 'I look it up.'. Leave out .*model.chat_template"
    with pytest.raises(RenderError, match=written):
        renderer.assistant(spoken)
    with pytest.raises(RenderError, match=written):
        renderer.start([user, spoken, RESULT], TOOLS)
    # A policy's own turn is never an error: the next prompt is what the template makes of it, in a ledger of its own.
    sampled = Message("assistant", spoken.content, (ToolCall("get", {"key": "a"}, id="abcdefghi", raw="..."),))
    silent = Message("assistant", "", (GIVEN,))
    assert not renderer.keeps(sampled, [RESULT]) and renderer.keeps(silent, [RESULT])
    assert renderer.start([user, sampled, RESULT], TOOLS) == renderer.start([user, silent, RESULT], TOOLS)


def test_a_second_call_that_a_template_drops_is_refused_in_what_a_prompt_is_given():
    first = QWEN25.replace("for call in m.tool_calls or []", "for call in (m.tool_calls or [])[:1]")
    two = (GIVEN, ToolCall("get", {"key": "b"}, id="abcdefghj"))
    user, results = Message("user", "q"), [RESULT, Message("tool", "8", tool_call_id="abcdefghj", name="get")]
    messages = [user, Message("assistant", "", two), *results]
    renderer = make_renderer(build_tokenizer(IM, first))
    assert renderer.start(messages, TOOLS) == make_renderer(build_tokenizer(IM, QWEN25)).start(messages, TOOLS)
    renderer = make_renderer(build_tokenizer(IM, first))
    renderer._text.change(one_call=None)  # as of a syntax in which agentrl writes no calls itself
    with pytest.raises(RenderError, match=r"not show all of a message of role 'assistant' .* one call a turn"):
        renderer.start(messages, TOOLS)


MOVES = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize(("template", "does"), [(FAMILIES["qwen3"][0], "drops"), (MOVES, "moves")])
def test_a_later_system_message_that_a_template_does_not_show_in_its_place_is_refused(template, does):
    renderer = make_renderer(build_tokenizer([*IM, "<think>", "</think>"], template))
    system, late, user = Message("system", "Be kind."), Message("system", "Be brief."), Message("user", "q")
    said = Message("assistant", "Yes.")
    assert renderer.start([system, user, said, user], []) and renderer.extend("stop", [user])
    refused = r"not show all of a message of role 'system' in its place: 'Be brief\.'"
    for messages in ([user, late], [system, user, said, late, user], [user, said, user, said, late, user]):
        with pytest.raises(RenderError, match=rf"{refused}.*user's, or .*model\.chat"):
            renderer.start(messages, [])
    with pytest.raises(RenderError, match=refused):
        renderer.extend("stop", [user, late])
    # Both are shown at the beginning by the one that moves them, and the second not at all by the other.
    with nullcontext() if does == "moves" else pytest.raises(RenderError, match=refused):
        assert renderer.start([system, late, user], [])
    shows = make_renderer(build_tokenizer(IM, QWEN25))
    assert shows.start([system, user, said, late, user], []) and shows.extend("stop", [late, user])


def test_a_system_message_that_a_template_puts_to_the_last_user_is_taken():
    """Mistral's do so with the first one."""
    last = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user\\n' }}"
        "{{ messages[0].content if loop.last and messages[0].role == 'system' else '' }}{{ m.content + '<|im_end|>\\n' }}"
        "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    renderer = make_renderer(build_tokenizer(IM, last))
    begun = [Message("system", "Be kind."), Message("user", "q"), Message("assistant", "Yes.")]
    assert renderer.start([*begun, begun[1]], [])
    assert renderer.start(begun, []) == renderer.start(begun[1:], []), "as Mistral's do while tools answer"


def test_each_result_of_a_turn_is_shown_as_its_own_calls():
    """gpt-oss' template, which takes one call a turn, names every result after the last call that it wrote."""
    template, tokens, bos, eos, *_ = FAMILIES["llama3"]
    template = template.replace("{%- for m in rest %}", "{%- set last = namespace() %}{%- for m in rest %}")
    called = "{%- if m.tool_calls %}"
    template = template.replace(called, called + "{% set last.name = m.tool_calls[0].function.name %}")
    tokenizer = build_tokenizer(tokens, template.replace("'ipython'", "last.name"), bos=bos, eos=eos)
    renderer = make_renderer(tokenizer)
    results = [RESULT, Message("tool", "8", tool_call_id="abcdefghj", name="add"), Message("user", "Go on")]
    head, tail = "<|start_header_id|>", "<|end_header_id|>\n\n"
    shown = [("get", '"7"'), ("add", '"8"'), ("user", "Go on")]
    expected = "".join(f"{head}{who}{tail}{what}<|eot_id|>" for who, what in shown) + f"{head}assistant{tail}"
    assert tokenizer.decode(renderer.extend("stop", results)) == expected


ANSWERED = "m.content + '\\n</tool_response>'"
LOOP = "{%- for m in messages %}"


def answering(form):
    """The template with another form of a tool's answer."""
    assert ANSWERED in QWEN25
    return QWEN25.replace(ANSWERED, f"({form}) + '\\n</tool_response>'")


def limited(most):
    return QWEN25.replace(LOOP, f"{{%- for m in messages[-{most}:] %}}", 1)


@pytest.mark.parametrize(
    "form", ["m.content|striptags", "m.content[:20000]", "m.content|truncate(5000)", "m.content.split('\n')[0]"]
)
def test_a_template_that_cuts_what_a_tool_says_is_refused_with_tools(form):
    """The policy was asked about what it could not see."""
    renderer = make_renderer(build_tokenizer(IM, answering(form)))
    said = r"cuts long or marked text of a message of role 'tool': .* Remove the limit or the filter"
    with pytest.raises(RenderError, match=said):
        renderer.start([Message("user", "x")], TOOLS)
    assert renderer.start([Message("user", "x")], [])


CANNOT = "a question and its answer cannot be rendered.*"
USELESS = {
    "shows the last message alone": (limited(1), "rewrote|append|ends"),
    "counts messages": ("{% for m in messages %}<|im_start|>{{ messages | length }}{{ m.content }}<|im_end|>{% endfor %}",
                        "does not render by appending"),
    "never ends a turn": ("{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}\n{% endfor %}",
                          "begins an assistant turn with '<.im_start.>assistant', but does not write that"),
    "opens no turn": (QWEN25.replace("add_generation_prompt", "false"), "so a policy would have to say it. Write it there"),
    "needs too much": ("{{ 'x' * 10**18 }}" + QWEN25, f"{CANNOT}refused the messages: MemoryError"),
    "has no control tokens": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        r"ends an assistant turn with .*user: .*not a control token.*add_special_tokens.*model.chat_template"),
    "wants what is not there": ("{{ functions.parts.first }}", f"{CANNOT}'functions' is undefined.*model.chat_template"),
    "wants a fourth message": ("{{ messages[3].content.x }}", "cannot be rendered.*model.chat_template"),
    "is one of several": ({"default": QWEN25, "tool_use": QWEN25},
                          r"has several chat templates \('default', 'tool_use'\): write the one to use to a file that model"),
    "is missing": (None, "has no chat template; set model.chat_template to"),
    "shows six messages": (limited(6), "leaves out messages once there are"),
    "shows fifty messages": (limited(50), "leaves out messages once there are"),
    "cuts what a user says": (QWEN25.replace("+ m.content +", "+ m.content[:9000] +", 1),
                              "cuts long or marked text of a message of role 'user'"),
    "cuts what is sampled": (QWEN25.replace("\\n' + m.content }}", "\\n' + m.content[:9000] }}", 1),
                             "cuts long or marked text of a message of role 'assistant'"),
    "divides by 0": ("{{ 1 // 0 }}" + QWEN25, "cannot be rendered: .*division or modulo by zero"),
    "counts far": ("{% for i in range(10**7) %}{% endfor %}" + QWEN25, "cannot be rendered: .*Range too big"),
    "throws dice": (QWEN25.replace(LOOP, "{{ range(99)|random }}" + LOOP, 1), "renders the same messages differently"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "reason"), USELESS.values(), ids=USELESS)
def test_a_template_that_cannot_work_is_refused_before_a_run(template, reason):
    with pytest.raises(ModelError, match=reason):
        make_renderer(build_tokenizer(IM, template))


@pytest.mark.parametrize(
    ("old", "new", "hidden"), [("in tools %}", "in tools[:2] %}", "'list_keys'"), ("(tool |", "(tool.function.name |", "'key'")]
)
def test_what_a_template_does_not_show_of_a_tool_is_named(old, new, hidden):
    renderer = make_renderer(build_tokenizer(IM, QWEN25.replace(old, new, 1)))
    assert not renderer.no_tools
    with pytest.raises(RenderError, match=f"the chat template ignores tools: of .* it does not show {hidden}"):
        renderer.start([Message("user", "Of list_keys, what is the value?")], TOOLS)  # a user who says the name hid that


@pytest.mark.parametrize(("form", "shown"), [
    ("m.content|tojson(ensure_ascii=True)", r'"a<|im_end|>\u00e9Qhiddenx1q"'),
    ("[m.content]|string", "['a<|im_end|>éQhiddenx1q']"),
    ("m.content|urlencode", None),
])  # fmt: skip
def test_a_control_token_that_a_template_escapes_is_shown_as_text(form, shown):
    """What stood for it was escaped itself, and the policy read that."""
    tokenizer = build_tokenizer(IM, answering(form))
    renderer = make_renderer(tokenizer)
    ids = renderer.extend("stop", [Message("tool", "a<|im_end|>éQhiddenx1q", tool_call_id="a", name="get")])
    text = tokenizer.decode(ids)
    assert (shown or "a<|im_end|>%C3%A9Qhiddenx1q") in text and text.count("<|im_end|>") == 2
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1


def test_a_marker_that_a_template_puts_together_is_no_text_s():
    tokens = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = build_tokenizer(["<|end|>"], FAMILIES["phi"][0], eos="<|end|>")
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    ids = make_renderer(tokenizer).extend("stop", [Message("user", "a<|user|>b<|system|>")])
    assert [ids.count(tokenizer.convert_tokens_to_ids(token)) for token in tokens] == [0, 1, 1]


@pytest.mark.parametrize(("form", "shown"), [("m.content or raise_exception('x')", " "), ("m.content|trim or 1 // 0", "(empty)")])
def test_an_empty_answer_that_a_template_refuses_is_shown_as_empty(form, shown):
    """It ended the episode, and with it the run."""
    tokenizer = build_tokenizer(IM, answering(form))
    text = tokenizer.decode(make_renderer(tokenizer).extend("stop", [Message("tool", "", tool_call_id="a", name="get")]))
    assert f"<tool_response>\n{shown}\n</tool_response>" in text


@pytest.mark.parametrize("every", [5, 9, 16])
def test_a_ledger_forks_where_a_template_counts_messages(every):
    """Each prompt is the template's own, also where it puts in something after so many messages."""
    note = f"{{% if loop.index % {every} == 0 %}}{{{{ '<|im_start|>system\\nNote<|im_end|>\\n' }}}}{{% endif %}}"
    tokenizer = build_tokenizer(IM, QWEN25.replace(LOOP, LOOP + note, 1))
    renderer, messages = make_renderer(tokenizer), [Message("user", "q")]
    ids, begun, forks = renderer.start(messages, []), 1, 0
    for number in range(10):
        turn, answer = Message("assistant", f"Answer {number}"), Message("user", "more")
        sampled = renderer.assistant(turn)
        if renderer.keeps(turn, [answer], messages, begun):
            ids, messages = [*ids, *sampled, *renderer.extend("stop", [answer], sampled[-1])], [*messages, turn, answer]
        else:
            messages += [turn, answer]
            ids, begun, forks = renderer.start(messages, []), len(messages), forks + 1
        rows = [{"role": message.role, "content": message.content} for message in messages]
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(rows, add_generation_prompt=True, tokenize=False)
    assert forks == 21 // every


def test_a_call_whose_values_a_template_changes_is_refused():
    template, *rest = FAMILIES["qwen3-coder"]
    template = template.replace("value | tojson)", "(value | round(1) if value is float else value) | tojson)")
    tool = {"type": "function", "function": {"name": "get", "parameters": {"properties": {"x": {"type": "number"}}}}}
    renderer = make_renderer(build_tokenizer(rest[0], template))
    with pytest.raises(RenderError, match="tool 'get': the syntax 'qwen_xml' cannot write a call of it that is read back"):
        renderer.start([Message("user", "x")], [tool])


@pytest.mark.parametrize(
    ("keep", "name"), [("ns.n == ''", "ns.n"), ("true", "ns.n"), ("true", "m.name")], ids=["the first", "the last", "by its name"]
)
def test_an_answer_is_that_of_its_own_turn_s_call(keep, name):
    """Parsers count the calls of a turn, so ids repeat; templates that look for a call by its id found that of another turn."""
    find = (
        "{% set ns = namespace(n='') %}{% for o in messages %}{% for c in o.tool_calls or [] %}{% if c.id == m.tool_call_id and "
        f"({keep}) %}}{{% set ns.n = c.function.name %}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
    )
    template = answering(f"{name} + ': ' + m.content").replace("{{- '\\n<tool_response>", find + "{{- '\\n<tool_response>", 1)
    messages = [Message("user", "q")]
    for name in ("get", "add", "get"):
        messages.append(Message("assistant", "", (ToolCall(name, {}, id="call_0"), ToolCall("set", {}, id="call_1"))))
        messages += [Message("tool", x, tool_call_id=f"call_{n}", name=x) for n, x in enumerate((name, "set"))]
    tokenizer = build_tokenizer(IM, template)
    text = tokenizer.decode(make_renderer(tokenizer).start(messages, TOOLS))
    for name, times in (("get", 2), ("add", 1), ("set", 3)):
        assert text.count(f"{name}: {name}\n") == times


def test_a_template_that_does_not_end_is_refused_with_its_line(chatml_tokenizer, monkeypatch):
    """It hung the start without a message: the sandbox bounds one range, and not loops in each other."""
    monkeypatch.setattr(template_text, "MOST_LINES", 100_000)
    tokenizer, traced = copy.deepcopy(chatml_tokenizer), sys.gettrace()
    tokenizer.chat_template = (
        "{% set many = range(99999) | list %}\n{% for a in many %}\n{% for b in many %}{% endfor %}{% endfor %}" + CHATML_TEMPLATE
    )
    with pytest.raises(
        ModelError, match=r"its chat template does not end: it ran 100000 lines, .* line 3\. Bound that loop, or set"
    ):
        make_renderer(tokenizer)
    assert sys.gettrace() is traced


@pytest.mark.parametrize(("template", "tokens", "eos", "end"), [
    (QWEN25, IM, "<|endoftext|>", "<|endoftext|>"), (CHATML_TEMPLATE, IM, "<|endoftext|>", "<|endoftext|>"),
    (FAMILIES["llama3"][0], FAMILIES["llama3"][1], "<|eot_id|>", "<|eom_id|>"),
], ids=["base model", "base model, ChatML", "Llama 3.1"])  # fmt: skip
@pytest.mark.parametrize("place", ["generation config", "config", "text config"])
def test_a_turn_also_ends_with_the_models_own_tokens(template, tokens, eos, end, place, tmp_path):
    made = build_tokenizer([*tokens, end], template, eos=eos)
    made.save_pretrained(tmp_path)
    ends = {"eos_token_id": made.convert_tokens_to_ids([eos, end])}
    config = {"config": {"model_type": "llama", **ends}, "text config": {"model_type": "llava", "text_config": ends}}
    (tmp_path / "config.json").write_text(json.dumps(config.get(place, {"model_type": "llama"})))
    if place == "generation config":
        GenerationConfig(**ends).save_pretrained(tmp_path)
    renderer = make_renderer(load_tokenizer(str(tmp_path)))
    call = Message("assistant", "", (ToolCall("get", {"key": "a"}, id="call_0"),))
    for said, after in ((Message("assistant", "Yes."), Message("user", "Go on")), (call, RESULT)):
        ids, own = renderer.assistant(said), renderer.codec.added[end]
        assert own in renderer.stop_token_ids and ids[-1] == renderer.stop_token_ids[0]
        assert renderer.parse([*ids[:-1], own], "stop") == renderer.parse(ids, "stop")
        assert renderer.extend("stop", [after], own) == renderer.extend("length", [after]), "the template's own end follows"
        assert renderer.extend("stop", [after], ids[-1]) == renderer.extend("stop", [after])


# -- ChatML ----------------------------------------------------------------------------------------


def test_the_exact_text(chatml_tokenizer):
    renderer = make_renderer(chatml_tokenizer)
    assert isinstance(renderer, ChatML)
    call = ToolCall("get", {"key": "a"}, id="call_0")
    rounds = [(Message("assistant", "", (call,)), [Message("tool", "7"), Message("tool", "8")])]
    ids, _ = appended(renderer, [Message("system", "Be brief."), Message("user", "Go.")], rounds, TOOLS[:2])
    assert chatml_tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.\nTools: get(key) set(key, value, ttl?)<|im_end|>\n"
        "<|im_start|>user\nGo.<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get", "arguments": {"key": "a"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_malformed_call_round_trips_verbatim(chatml_tokenizer):
    renderer = make_renderer(chatml_tokenizer)
    for raw in ["<tool_call>\n{oops\n</tool_call>", '<tool_call>\n{"name": "get", "argu', "<tool_call>"]:
        message = Message("assistant", "", (ToolCall("", None, id="call_0", raw=raw, error="broken"),))
        (call,) = renderer.parse(renderer.assistant(message), "stop").tool_calls
        assert call.arguments is None and call.error and call.raw == raw


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "qwen3-coder"])
def test_a_call_that_a_limit_cut_says_so(chatml_tokenizer, family):
    """The policy is shown the error: without the reason it would mend its JSON."""
    for renderer in (make_renderer(chatml_tokenizer), family_of(family)[1]):
        whole = renderer.assistant(Message("assistant", "", (ToolCall("get", {"key": "a" * 40}, id="call_0"),)))
        (cut,) = renderer.parse(whole[: len(whole) // 2 + 4], "length").tool_calls
        assert cut.arguments is None and cut.error is not None and cut.error.startswith("the turn was cut at its limit of tokens")
        (stopped,) = renderer.parse(whole[: len(whole) // 2 + 4], "stop").tool_calls
        assert stopped.error is not None and "cut" not in stopped.error
        assert renderer.parse(whole[:-1], "length").tool_calls[0].error is None


def test_reasoning_is_kept_apart(chatml_tokenizer):
    renderer = make_renderer(chatml_tokenizer)
    message = Message("assistant", "Seven.", reasoning="2 + 5\n= 7")
    assert renderer.parse(renderer.assistant(message), "stop") == message
    cut = renderer.parse(renderer.assistant(message)[:-4], "length")
    assert cut.content != "Seven." and cut.reasoning == message.reasoning


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 2**33), max_size=20), st.sampled_from(["stop", "length", "abort"]))
def test_any_ids_parse(chatml_tokenizer, ids, finish):
    assert make_renderer(chatml_tokenizer).parse(ids, finish).role == "assistant"


def test_lone_surrogates_in_tool_output_become_replacement_characters(chatml_tokenizer):
    ids = make_renderer(chatml_tokenizer).extend("stop", [Message("tool", "a\ud800b\ud83d\ude00")])
    assert "a\ufffdb\U0001f600" in chatml_tokenizer.decode(ids)


def test_what_cannot_be_rendered_says_so(chatml_tokenizer):
    renderer = make_renderer(chatml_tokenizer)
    with pytest.raises(RenderError, match="sampled"):
        renderer.extend("stop", [Message("assistant", "x")])
    with pytest.raises(RenderError, match="role 'user'"):
        renderer.assistant(Message("user", "x"))
    with pytest.raises(ModelError, match="im_end"):
        ChatML(build_tokenizer(["<|im_start|>"], CHATML_TEMPLATE, eos=None))
    with pytest.raises(ModelError, match="no chat template"):
        make_renderer(build_tokenizer(CONTROL_TOKENS, None))


def test_an_id_without_a_token_is_a_replacement_character() -> None:
    tokenizer = packaged_tokenizer(512)
    codec = Codec(tokenizer)
    ids = codec.encode("a word and another")
    assert codec.decode([]) == "" and codec.decode(ids) == "a word and another"
    assert codec.decode([*ids[:1], 400, -1, 2**40, *ids[1:]]) == codec.decode(ids[:1]) + "\ufffd" * 3 + codec.decode(ids[1:])
    assert make_renderer(tokenizer).parse([*ids, 401], "length").content == "a word and another\ufffd"
