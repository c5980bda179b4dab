"""Mistral Nemo on its published vocabulary: every prompt has the ids of Mistral's own encoder (`mistral-common`, with vLLM).

Two things the published template does otherwise than that encoder, so the episodes have neither: it writes the text of a
tool unquoted, and the list of tools before every user message that says what the last one says.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Message, ToolCall
from agentrl.render.template import TemplateRenderer
from tests.conftest import proof
from tests.render.real_templates import REAL
from tests.render.render_conversations import as_dicts

TEMPLATE = next(real for real in REAL if real.file == "mistral_v3_tekken").path
if not TEMPLATE.is_file():
    pytest.skip(f"no chat template {TEMPLATE}: python .ci/templates.py fetches it", allow_module_level=True)
pytest.importorskip("mistral_common", reason="mistral-common is not installed (vLLM brings it)")

TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {
        "type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}, "required": ["key"]}}}
    for name in ("get", "put")
]  # fmt: skip


@pytest.fixture(scope="module")
def made():
    import mistral_common
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    from transformers.integrations.mistral import convert_tekken_tokenizer

    tokenizer = convert_tekken_tokenizer(str(Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"))
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return TemplateRenderer(tokenizer), MistralTokenizer.v3(is_tekken=True)


def theirs(encoder, messages, tools):
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    rows = as_dicts(messages)
    for call in (call["function"] for row in rows for call in row.get("tool_calls", [])):
        call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    return encoder.encode_chat_completion(ChatCompletionRequest(messages=rows, tools=tools or None)).tokens


text = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=12).filter(lambda item: "[" not in item)


@st.composite
def episodes(draw):
    messages, rounds = [Message("user", draw(text))], []
    for number in range(draw(st.integers(1, 3))):
        ids = [f"call{number}{i}abc"[:9] for i in range(draw(st.integers(0, 2)))]
        names = st.sampled_from(["get", "put"])
        calls = tuple(ToolCall(draw(names), {"key": draw(text), "n": draw(st.integers(0, 99))}, id=i) for i in ids)
        turn = Message("assistant", "" if calls else draw(text), calls)
        answers = [Message("tool", draw(st.integers(1, 99).map(str)), tool_call_id=c.id, name=c.name) for c in calls] or [
            # Another text than before: the template compares messages by what they say.
            Message("user", f"{number}. {draw(text)}")
        ]
        rounds.append((turn, answers))
    return messages, rounds, draw(st.sampled_from([[], TOOLS]))


@proof
@settings(max_examples=100, deadline=None, database=None)
@given(episodes())
def test_every_prompt_has_the_ids_of_mistral_s_encoder(made, episode):
    renderer, encoder = made
    messages, rounds, tools = episode
    renderer, begun = renderer.with_tools(tools), len(messages)
    ids = renderer.start(messages, tools)
    assert ids == theirs(encoder, messages, tools)
    for turn, answers in rounds:
        sampled = renderer.assistant(turn)
        assert [(c.name, c.arguments, c.id) for c in renderer.parse(sampled, "stop").tool_calls] == [
            (c.name, c.arguments, c.id) for c in turn.tool_calls
        ]
        kept = renderer.keeps(turn, answers, messages, begun)
        messages = [*messages, turn, *answers]
        if kept:
            ids = ids + sampled + renderer.extend("stop", answers, sampled[-1])
        else:
            ids, begun = renderer.start(messages, tools), len(messages)
        assert ids == theirs(encoder, messages, tools)
