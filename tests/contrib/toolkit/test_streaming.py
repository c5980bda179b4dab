"""What is told of a turn while it is sampled stays true, whatever comes next."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.contrib.toolkit.turns import ProseReader, SettledText, reader_of
from agentrl.render import make_renderer
from agentrl.render.base import Codec, Marks
from agentrl.render.chatml import CHATML_TEMPLATE
from agentrl.render.syntaxes import SYNTAXES
from agentrl.render.tool_calls import ForTools
from tests.conftest import PROOFS, examples
from tests.render.render_tokenizers import CONTROL_TOKENS, build_sentencepiece, build_tokenizer

TOKENIZERS = {
    "bytes": build_tokenizer(CONTROL_TOKENS, CHATML_TEMPLATE),
    **{kind: build_sentencepiece(kind, CONTROL_TOKENS, CHATML_TEMPLATE) for kind in ("prepend", "always", "never")},
}
CODECS = {name: Codec(tokenizer) for name, tokenizer in TOKENIZERS.items()}
TEXTS = st.lists(st.sampled_from(["<tool_call>", "<think>", "</think>", "a", " ", "\n", "é", "世", "👋", "<", "<tool", "{}"]))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=examples(200) if PROOFS else 25, deadline=None)
@given(ids=st.lists(st.integers(0, 341), max_size=24), text=TEXTS)
def test_pieces_of_text_together_are_the_text(name, ids, text):
    """Of random ids (parts of characters, bytes that are none) and of real text; of the latter nothing is left at its end."""
    codec = CODECS[name]
    for whole in (ids, codec.encode("".join(text))):
        reader, told = SettledText(codec), ""
        for count, number in enumerate(whole):
            told += reader.read([number])
            assert codec.decode(whole).startswith(told), (whole[: count + 1], told)
        if whole is not ids and not any(char in "é世👋" for char in text):
            assert told == codec.decode(whole)


class Characters:
    """A vocabulary with an id for every character."""

    def decode(self, ids):
        return "".join(map(chr, ids))

    def piece(self, number):
        return chr(number)


STREAMING = [name for name, syntax in SYNTAXES.items() if syntax.opens]


def test_which_syntaxes_tell_prose_before_the_turn_is_over():
    assert sorted(set(SYNTAXES) - set(STREAMING)) == ["deepseek", "harmony", "llama_json", "pythonic"]


@pytest.mark.parametrize("name", STREAMING)
@settings(max_examples=examples(300) if PROOFS else 30, deadline=None)
@given(data=st.data(), thinking=st.booleans())
def test_what_is_told_is_the_beginning_of_the_content(name, data, thinking):
    """For every syntax, cut anywhere: with reasoning, calls, broken calls, and what only looks like one."""
    (mark, *others), frame = SYNTAXES[name].opens, Marks("<think>", "</think>")
    words = ["<think>", "</think>", "a", "b c", " ", "\n", "{", '"name"', "[]", "</tool_call>", "<t"]
    pieces = [mark, *others, mark[:-1], mark[1:], *words]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=9)))
    parser = SYNTAXES[name].parser
    parse = parser.bind(()) if isinstance(parser, ForTools) else parser
    content, _ = parse(frame.split(frame.open + text if thinking else text)[1])
    reader, told = ProseReader(Characters(), (frame.open, frame.close), [mark, *others], thinking=thinking), ""
    for char in text:
        told += reader.read([ord(char)])
        assert content.startswith(told), (text, told, content)


@settings(max_examples=examples(300) if PROOFS else 30, deadline=None)
@given(text=TEXTS, step=st.integers(1, 4), stop=st.sampled_from(["", "a\n", "世", "<tool"]))
@example(text=["a", " ", "\n", "a"], step=1, stop="")
@example(text=["a", "</tool_call>", "a"], step=1, stop="")  # a malformed call, not a part of the content
def test_a_renderer_s_reader_tells_what_it_will_parse(text, step, stop):
    tokenizer = TOKENIZERS["bytes"]
    written = "".join(text)
    ids = CODECS["bytes"].encode(written)
    for renderer in (make_renderer(tokenizer), make_renderer(build(CHATML_TEMPLATE + " "))):
        content = renderer.parse(ids, "length").content
        content = content.partition(stop)[0] if stop else content
        reader, told = reader_of(renderer, [stop] if stop else []), ""
        for start in range(0, len(ids), step):
            told += reader.read(ids[start : start + step])
            assert content.startswith(told)


def build(template, made={}):  # noqa: B006 - one for all examples
    """The tokenizer with a template that is not recognized by its text, so that it gets the general renderer."""
    if template not in made:
        made[template] = build_tokenizer(CONTROL_TOKENS, template)
    return made[template]


def test_prose_comes_with_its_tokens_and_nothing_of_a_call():
    renderer = make_renderer(TOKENIZERS["bytes"])
    ids = renderer.assistant(renderer.parse(CODECS["bytes"].encode("Look: ä <b>"), "length"))
    told = [reader_told for reader in [reader_of(renderer)] for reader_told in (reader.read([number]) for number in ids)]
    assert "".join(told) == "Look: ä <b>" and sum(map(bool, told)) > 4
    reader = reader_of(renderer)
    call = TOKENIZERS["bytes"]('I see. \n<tool_call>\n{"name": "get"}')["input_ids"]
    assert "".join(reader.read([number]) for number in call) == "I see."
