import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Message, ToolCall
from agentrl.render import make_renderer
from agentrl.render.base import Codec
from agentrl.render.chatml import CHATML_TEMPLATE, ChatML
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ModelError, RenderError
from tests.render.families import family_of
from tests.render.render_conversations import TOOLS, appended
from tests.render.render_tokenizers import CONTROL_TOKENS, build_tokenizer

quick = settings(max_examples=60, deadline=None)


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


@quick
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
