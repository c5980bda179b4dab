import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import ModelConfig
from agentrl.data.trajectory import Message, ToolCall
from agentrl.engines.vllm.tool_parsers import vllm_parser
from agentrl.render.tagged_syntaxes import parse_qwen_xml
from agentrl.render.tool_calls import parse_tool_calls
from agentrl.run.assembly import renderer_of
from agentrl.utils.errors import ModelError, RenderError
from tests.engines.vllm_parts import skip_without_vllm
from tests.render import test_syntaxes as syntaxes
from tests.render.families import FAMILIES
from tests.render.render_conversations import TOOLS
from tests.render.render_tokenizers import build_tokenizer

skip_without_vllm()


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


KINDS = {
    "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"}, "s": {"type": "string"},
    "l": {"type": "array", "items": {"type": "integer"}}, "o": {"type": "object"}, "e": {"enum": ["low", 3]},
    "u": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "t": {"type": ["boolean", "string"]}, "free": {},
}  # fmt: skip
TYPED = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": KINDS}}}
texts = st.sampled_from(
    ["", "7", " 7", "-0", "7.0", "7.5", "1e3", "1_000", "1e999", "inf", "nan", "true", "False", "1", "0", "yes", "null",
     "NULL", "[1, 2]", '{"a": [1, null]}', "{'a': 1}", "[1e999]", "[NaN]", "3", "low", "\n", "\nx\n", '"quoted"']
)  # fmt: skip
plain_text = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<"), max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*KINDS, "undeclared"]), texts | plain_text, max_size=4))
def test_untyped_xml_is_read_as_vllm_reads_it(tokenizer, values):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    (theirs,) = vllm_parser("qwen3_coder", tokenizer, [TYPED])(text)[1]
    (ours,) = parse_qwen_xml(text, [TYPED])[1]
    assert json.dumps(ours.arguments, sort_keys=True) == json.dumps(theirs.arguments, sort_keys=True)


# The shape of a family whose call syntax is none of agentrl's own: calls and answers between control tokens.
KIMI_TOOLS = """{% for tool in tools or [] %}<|im_system|>{{ tool | tojson }}<|im_end|>{% endfor %}
{%- for m in messages %}
{%- if m.role in ['user', 'system'] %}{{ '<|im_user|>' + m.content + '<|im_end|><|im_assistant|>' }}
{%- elif m.role == 'assistant' %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}{{ '<|tool_call_begin|>functions.' + call.function.name + ':' + (loop.index0 | string) + '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) + '<|tool_call_end|>' }}{% endfor %}<|tool_calls_section_end|>
{%- endif %}{{ '<|im_end|>' }}
{%- else %}{{ '<|im_system|>' + m.content + '<|im_end|>' }}
{%- endif %}{% endfor %}"""  # noqa: E501
KIMI_TOKENS = [*(f"<|im_{part}|>" for part in ("system", "user", "assistant", "end")),
               *(f"<|tool_{part}|>" for part in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin",
                                                "call_end"))]  # fmt: skip


def test_a_family_that_agentrl_has_no_parser_for_works_by_name():
    tokenizer = build_tokenizer(KIMI_TOKENS, KIMI_TOOLS, eos="<|im_end|>")
    question = [Message("user", "q")]
    refused = (
        r"does not write tool calls in a syntax that agentrl can parse \(it ends a turn with '<\|im_end\|>', and writes a call"
    )
    with pytest.raises(RenderError, match=refused + r".*tool_call_argument_begin.*docs/templates\.md.*model\.tool_parser"):
        renderer_of(ModelConfig(), tokenizer).start(question, TOOLS)
    renderer = renderer_of(ModelConfig(tool_parser="vllm:kimi_k2"), tokenizer).with_tools(TOOLS)
    calls = (ToolCall("get", {"key": "</s> é"}, id="abcdefghi"), ToolCall("add", {"a": "1", "b": "2"}, id="abcdefghj"))
    turn = Message("assistant", "", calls)
    answers = [Message("tool", f"<|im_end|>{i}", tool_call_id=c.id, name=c.name) for i, c in enumerate(calls)]
    ids = renderer.start(question, TOOLS)
    before = ids.count(tokenizer.eos_token_id)
    ids = ids + renderer.assistant(turn) + renderer.extend("stop", answers)
    assert ids.count(tokenizer.eos_token_id) == before + 1 + len(answers)
    parsed = renderer.parse(renderer.assistant(turn), "stop").tool_calls
    assert [(call.name, call.arguments) for call in parsed] == [(call.name, call.arguments) for call in calls]


DEEPSEEK = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
# agentrl's name of a syntax: vLLM's, and the control tokens that its parser asks for.
SAME = {
    "llama_json": ("llama3_json", ["<|python_tag|>"]),
    "mistral": ("mistral", ["[TOOL_CALLS]", "[ARGS]"]),
    "glm": ("glm45", ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]),
    "deepseek": ("deepseek_v31", [f"<｜tool▁{part}｜>" for part in DEEPSEEK]),
    "deepseek_dsml": ("deepseek_v32", ["<｜DSML｜"]),
    "granite": ("granite", ["<|tool_call|>"]),
    "gemma": ("gemma4", ["<|tool_call>", "<tool_call|>", '<|"|>']),
    "function_gemma": ("functiongemma", ["<start_function_call>", "<end_function_call>", "<escape>"]),
    "lfm2": ("lfm2", ["<|tool_call_start|>", "<|tool_call_end|>"]),
    "olmo": ("olmo3", []),
    "pythonic": ("pythonic", []),
    "qwen_xml": ("qwen3_coder", ["<tool_call>", "</tool_call>"]),
    "hermes": ("hermes", ["<tool_call>", "</tool_call>"]),
}


@pytest.mark.parametrize("name", sorted(SAME))
def test_well_formed_calls_are_read_as_vllm_reads_them(name):
    theirs, tokens = SAME[name]
    parse = vllm_parser(theirs, build_tokenizer(["<|im_end|>", *tokens], None), syntaxes.TOOLS)

    # vLLM reads a number between FunctionGemma's quotes as one, and true and null within Gemma 4's lists as words.
    keys = {"gemma": "snb", "function_gemma": "s"}.get(name, "snblo")

    @settings(max_examples=12, deadline=None, database=None)
    @given(syntaxes.calls_of(syntaxes.word if name != "function_gemma" else st.text("xyz", min_size=1)))
    def compare(calls):
        calls = [(called, {key: value for key, value in arguments.items() if key in keys}) for called, arguments in calls]
        text = syntaxes.WRITE[name](calls)
        assert [(c.name, c.arguments) for c in parse(text)[1]] == [(c.name, c.arguments) for c in syntaxes.read(name, text)[1]]

    compare()


def test_a_parser_that_fails_is_refused_or_makes_a_malformed_call(tokenizer, monkeypatch, caplog):
    with pytest.raises(ModelError, match="'openai' does not fit"):
        vllm_parser("openai", tokenizer)
    parse, function = vllm_parser("hermes", tokenizer), SimpleNamespace(name="get", arguments='{"key": "a"} and more')
    answers = iter([SimpleNamespace(tools_called=True, tool_calls=[SimpleNamespace(function=function)], content="")])
    where = "vllm.tool_parsers.hermes_tool_parser.Hermes2ProToolParser.extract_tool_calls"
    monkeypatch.setattr(where, lambda *given: next(answers))  # then it raises
    for error in ("not valid JSON", *["vLLM's parser hermes failed: StopIteration"] * 2):
        _, (call,) = parse("a turn")
        assert call.arguments is None and call.error.startswith(error)
    assert [record.exc_info[0] for record in caplog.records] == [StopIteration]


def test_a_typed_syntax_by_vllm_sees_the_tools(tokenizer):
    template, tokens, bos, eos, *_ = FAMILIES["qwen3-coder"]
    renderer = renderer_of(ModelConfig(tool_parser="vllm:qwen3_coder"), build_tokenizer(tokens, template, bos=bos, eos=eos))
    turn = Message("assistant", "", (ToolCall("f", {"n": 7, "s": "7"}, id="abcdefghi"),))
    (call,) = renderer.with_tools([TYPED]).parse(renderer.assistant(turn), "stop").tool_calls
    assert call.arguments == {"n": 7, "s": "7"}
    with pytest.raises(ModelError, match="did you mean 'qwen3_coder'"):
        renderer_of(ModelConfig(tool_parser="vllm:qwen3_code"), tokenizer)


def test_a_kernel_of_experts_under_another_name_is_named(monkeypatch):
    """Else vLLM would read new weights in the files' layout as packed ones."""
    from agentrl.engines.vllm import vllm_worker

    for name in ("set_current_vllm_config", "finalize_layerwise_reload", "initialize_layerwise_reload"):
        monkeypatch.setattr(vllm_worker, name, lambda *given: nullcontext())
    layer, receiver = torch.nn.Linear(1, 1), vllm_worker.WeightReceiver()
    made: Any = type("Renamed", (vllm_worker.FusedMoEMethodBase,), {"__init__": lambda self: None})
    made.__abstractmethods__ = frozenset()
    layer.quant_method, receiver.vllm_config, receiver.model_config = made(), None, None
    monkeypatch.setattr(receiver, "_model", lambda: layer)
    with pytest.raises(AttributeError, match="moe_kernel"):
        receiver.agentrl_begin()
