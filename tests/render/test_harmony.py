"""gpt-oss against OpenAI's own harmony encoder (`oss-harmony`, which vLLM brings): equal prompts, turns that either reads."""

import datetime
import json

import pytest

from agentrl.data.trajectory import Message, ToolCall
from agentrl.render.syntaxes import harmony_parts
from agentrl.render.template import TemplateRenderer
from tests.render.real_templates import REAL, tokenizer_of

REAL_ONE = next(real for real in REAL if real.file == "gptoss")
if not REAL_ONE.path.is_file():
    pytest.skip(f"no chat template {REAL_ONE.path}: python .ci/templates.py fetches it", allow_module_level=True)
harmony = pytest.importorskip("openai_harmony", reason="oss-harmony is not installed (vLLM brings it)")
try:
    ENCODING = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
except Exception as problem:  # it downloads its vocabulary once
    pytest.skip(f"oss-harmony has no vocabulary here: {problem}", allow_module_level=True)

PARAMETERS = {
    "type": "object",
    "properties": {"key": {"type": "string", "description": "Which one."}, "n": {"type": "integer"}},
    "required": ["key"],
}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "Gets it.", "parameters": PARAMETERS}}]
CALL = ToolCall("get", {"key": 'é "<|end|>"', "n": 7}, id="call_0")


@pytest.fixture(scope="module")
def made():
    tokenizer = tokenizer_of(REAL_ONE)
    return tokenizer, TemplateRenderer(tokenizer)


def theirs(text):
    return ENCODING.parse_messages_from_completion_tokens(ENCODING.encode(text, allowed_special="all"), harmony.Role.ASSISTANT)


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_prompt_is_the_encoder_s(made, tools):
    tokenizer, renderer = made
    today = datetime.date.today().isoformat()
    system = harmony.SystemContent.new().with_conversation_start_date(today).with_reasoning_effort(harmony.ReasoningEffort.MEDIUM)
    developer = harmony.DeveloperContent.new().with_instructions("Be brief.")
    if tools:
        developer = developer.with_function_tools([harmony.ToolDescription.new("get", "Gets it.", parameters=PARAMETERS)])
    rows = [(harmony.Role.SYSTEM, system), (harmony.Role.DEVELOPER, developer), (harmony.Role.USER, "Hi")]
    conversation = harmony.Conversation.from_messages([harmony.Message.from_role_and_content(*row) for row in rows])
    ids = ENCODING.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT)
    ours = tokenizer.decode(renderer.start([Message("system", "Be brief."), Message("user", "Hi")], tools))
    if not tools:  # here template and encoder differ: an empty line after the instructions
        ours = ours.replace("Be brief.\n\n<|end|>", "Be brief.<|end|>")
    assert ours == ENCODING.decode(ids)


def test_the_encoder_reads_our_turns(made):
    tokenizer, renderer = made
    plain = CALL.arguments | {"key": 'é "x"'}
    called = Message("assistant", "", (ToolCall("get", plain, id="call_0"),), reasoning="hm")
    thought, call = theirs(tokenizer.decode(renderer.assistant(called)))
    assert (thought.channel, thought.content[0].text) == ("analysis", "hm")
    assert (call.channel, call.recipient, json.loads(call.content[0].text)) == ("commentary", "functions.get", plain)
    thought, final = theirs(tokenizer.decode(renderer.assistant(Message("assistant", "Seven.", reasoning="hm"))))
    assert (final.channel, final.recipient, final.content[0].text) == ("final", None, "Seven.")


def test_we_read_the_encoder_s_turns(made):
    tokenizer, renderer = made
    role = harmony.Role.ASSISTANT
    thought = harmony.Message.from_role_and_content(role, "hm").with_channel("analysis")
    call = harmony.Message.from_role_and_content(role, json.dumps({"key": "a", "n": 7})).with_channel("commentary")
    call = call.with_recipient("functions.get").with_content_type("<|constrain|>json")
    text = "".join(ENCODING.decode(ENCODING.render(item)) for item in (thought, call))
    sampled = text.removeprefix("<|start|>assistant")
    reasoning, said, (found,) = harmony_parts(sampled)
    assert (reasoning, said, found.name, found.arguments) == ("hm", "", "get", {"key": "a", "n": 7})
    ids = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    assert renderer.parse(ids, "stop").tool_calls[0].arguments == {"key": "a", "n": 7}
    assert ids[-1] in renderer.stop_token_ids
    # Cut before its end token the same call is not one.
    (cut,) = renderer.parse(ids[:-1], "length").tool_calls
    assert cut.arguments is None and "cut" in (cut.error or "")


def test_control_tokens_in_an_argument_end_no_message(made):
    _, renderer = made
    ids = renderer.assistant(Message("assistant", "", (CALL,), reasoning="a <|call|> b"))
    parsed = renderer.parse(ids, "stop")
    assert parsed.reasoning == "a <|call|> b"
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("get", CALL.arguments)]
