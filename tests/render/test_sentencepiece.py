"""The generic renderer over tokenizers in the manner of sentencepiece: spaces as letters, a space put before a
text, bytes for unknown characters, control tokens inside the model's own vocabulary."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Message, ToolCall
from agentrl.render import make_renderer
from tests.render.families import FAMILIES
from tests.render.render_conversations import LOOKALIKES, TOOLS, appended, as_dicts, conversations, plain, same_control_tokens
from tests.render.render_tokenizers import SENTENCEPIECE, build_sentencepiece
from tests.render.test_template import with_ids

quick = settings(max_examples=15, deadline=None)
CASES = [*((kind, "mistral") for kind in SENTENCEPIECE), ("first", "qwen2.5"), ("prepend", "llama3")]
hostile = st.lists(plain | st.sampled_from([*LOOKALIKES, "▁", "<unk>", "<0x0A>"]), max_size=4).map("".join)


@cache
def made(kind, family):
    template, tokens, bos, eos, *abilities = FAMILIES[family]
    tokenizer = build_sentencepiece(kind, tokens, template, bos=bos, eos=eos)
    return tokenizer, make_renderer(tokenizer), *abilities


def draw(data, abilities, text):
    _, system, calls = abilities
    opening, rounds = data.draw(conversations(text=text, system=system, max_calls=calls))
    return opening, with_ids(rounds), data.draw(st.sampled_from([[], TOOLS]))


@pytest.mark.parametrize(("kind", "family"), CASES)
@quick
@given(data=st.data())
def test_appending_gives_the_ids_of_the_whole(kind, family, data):
    tokenizer, renderer, *abilities = made(kind, family)
    opening, rounds, tools = draw(data, abilities, plain)
    ids, messages = appended(renderer, opening, rounds, tools)
    whole = tokenizer.apply_chat_template(as_dicts(messages), tools=tools or None, add_generation_prompt=True, return_dict=False)
    if family == "mistral":  # a control token on either side of each turn: no piece reaches over its edge
        assert ids == whole
    assert tokenizer.decode(ids) == tokenizer.decode(whole)


@pytest.mark.parametrize(("kind", "family"), CASES)
@quick
@given(data=st.data())
def test_hostile_text_adds_no_control_token(kind, family, data):
    tokenizer, renderer, *abilities = made(kind, family)
    opening, rounds, tools = draw(data, abilities, hostile)
    control = set(tokenizer.get_added_vocab().values()) - {tokenizer.unk_token_id}
    assert same_control_tokens(renderer, opening, rounds, tools, control)


@pytest.mark.parametrize(("kind", "family"), CASES)
@quick
@given(data=st.data())
def test_a_rendered_call_is_parsed_back(kind, family, data):
    _, renderer, *_ = made(kind, family)
    arguments = data.draw(st.dictionaries(st.sampled_from(["key", "a"]), plain | st.integers() | st.none(), max_size=2))
    turn = Message("assistant", "", (ToolCall("get", arguments, id="abcdefghi"),))
    (call,) = renderer.parse(renderer.assistant(turn), "stop").tool_calls
    assert call.name == "get"
    assert call.arguments == {key: v.replace("▁", " ") if isinstance(v, str) else v for key, v in arguments.items()}


def test_a_turn_after_text_gets_no_space_of_its_own():
    """`assistant\\n` is text: what follows is in the middle of a text for the tokenizer, as it is for a policy."""
    for kind in ("prepend", "first", "always"):
        tokenizer, renderer, *_ = made(kind, "qwen2.5")
        turn = renderer.assistant(Message("assistant", "report"))
        assert not tokenizer.convert_ids_to_tokens(turn)[0].startswith("▁"), kind
