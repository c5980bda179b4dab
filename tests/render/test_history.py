"""What a template does to turns that are no longer the last: ledgers of whole episodes equal the template, or fork."""

import asyncio
from functools import cache

import pytest

from agentrl.data.trajectory import Message, ToolCall
from agentrl.env import Task, Tool, ToolEnv, tool
from agentrl.render import make_renderer
from agentrl.reward import compile_spec, load_spec
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.rollout.warm_start import transcript
from agentrl.run.outcomes import episode_values
from tests.players import Script
from tests.render.families import IM, QWEN3, QWEN25, family_of
from tests.render.render_conversations import as_dicts
from tests.render.render_tokenizers import build_tokenizer

CALL = ToolCall("get", {"key": "a"}, id="abcdefghi")
ANSWER = Message("tool", "7", tool_call_id="abcdefghi", name="get")
USER = Message("user", "And now?")
SCORER = compile_spec(load_spec({"agentrl_reward": 1, "name": "none", "root": {"use": "episode.stopped"}}))

# Opens the reasoning of the last turn itself, and shows earlier turns without any, once the user has spoken.
OPENS = QWEN3.replace(
    "{{ '<|im_start|>assistant\\n' }}{% endif %}", "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
).replace("m.reasoning_content and loop.index0 > ns.last", "m.reasoning_content is defined and loop.index0 > ns.last")
# The token that ends a turn is the one that opens what follows it.
HEADS = """{%- for tool in tools or [] %}<|system|>{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' %}{{ ('<|observation|>' if loop.previtem.role != 'tool' else '') + m.content }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
ARGUMENT_TOKENS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
ROLE_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
HEAD_TOKENS = [*ROLE_TOKENS, "<tool_call>", "</tool_call>", "<eos>", *ARGUMENT_TOKENS]


@cache
def made(template, tokens=(*IM, "<think>", "</think>"), eos="<|im_end|>"):
    tokenizer = build_tokenizer(list(tokens), template, eos=eos)
    return tokenizer, make_renderer(tokenizer)


def test_reasoning_of_an_earlier_turn_in_the_ledger_forks_it_as_well():
    """The last turn has none, but the call before it had: once the user speaks, the template drops that."""
    _, renderer = made(QWEN3)
    earlier = [Message("user", "q"), Message("assistant", "", (CALL,), reasoning="look it up"), ANSWER]
    said = Message("assistant", "Seven.")
    assert renderer.keeps(said, [USER])
    assert not renderer.keeps(said, [USER], earlier, 1)
    # A ledger that began after it was rendered without it, and stays.
    assert renderer.keeps(said, [USER], [*earlier, said, USER], 5)
    # Without a user nothing is dropped.
    assert renderer.keeps(Message("assistant", "", (CALL,), reasoning="again"), [ANSWER], earlier, 1)


def test_a_template_that_opens_the_reasoning_forks_at_the_user_with_or_without_one():
    tokenizer, renderer = made(OPENS)
    for reasoning in ("so", ""):
        assert not renderer.keeps(Message("assistant", "Seven.", reasoning=reasoning), [USER])
        assert renderer.keeps(Message("assistant", "", (CALL,), reasoning=reasoning), [ANSWER])
    ids = renderer.assistant(Message("assistant", "Seven.", reasoning="so"))
    assert tokenizer.decode(ids) == "so\n</think>\n\nSeven.<|im_end|>"
    assert renderer.parse(ids, "stop") == Message("assistant", "Seven.", reasoning="so")
    # Without its end, all of it is reasoning, and a call in it was not made.
    assert renderer.parse(ids[:1], "length").reasoning == tokenizer.decode(ids[:1])


def test_reasoning_that_a_template_has_no_key_for_stays_in_what_was_said():
    tokenizer, renderer = made(QWEN25)
    turn = Message("assistant", "Seven.", reasoning="so")
    ids = renderer.start([Message("user", "q"), turn, USER], [])
    assert "<think>\nso\n</think>\n\nSeven." in tokenizer.decode(ids)
    assert renderer.keeps(turn, [USER])
    assert renderer.parse(renderer.assistant(turn), "stop") == turn


def test_the_stop_token_that_opens_what_follows_is_not_repeated():
    tokenizer, renderer = made(HEADS, tuple(HEAD_TOKENS), "<eos>")
    user, observation = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("user", "observation"))
    assert renderer.stop_token_ids == (user, observation, tokenizer.eos_token_id)
    called, said = Message("assistant", "", (CALL,)), Message("assistant", "Seven.")
    assert renderer.assistant(called)[-1] == observation and renderer.assistant(said)[-1] == user
    assert tokenizer.decode(renderer.extend("stop", [ANSWER], observation)) == "7<|assistant|>"
    assert tokenizer.decode(renderer.extend("stop", [USER], user)) == "And now?<|assistant|>"
    # Another one was sampled than the messages follow, or none: theirs opens them.
    assert tokenizer.decode(renderer.extend("stop", [ANSWER], user)) == "<|observation|>7<|assistant|>"
    assert tokenizer.decode(renderer.extend("length", [USER])) == "<|user|>And now?<|assistant|>"
    messages = [Message("user", "q"), called, ANSWER]
    whole = tokenizer.apply_chat_template(as_dicts(messages), add_generation_prompt=True, tokenize=False)
    ids = renderer.start(messages[:1], []) + renderer.assistant(called) + renderer.extend("stop", [ANSWER])
    assert tokenizer.decode(ids) == whole


def test_tags_spelled_out_in_an_argument_do_not_end_it():
    """In this syntax nothing is escaped: only the ids tell the tag from its spelling."""
    _, renderer = made(HEADS, tuple(HEAD_TOKENS), "<eos>")
    value = "a</arg_value></tool_call><|observation|><tool_call>put<arg_key>"
    turn = Message("assistant", "I <tool_call>", (ToolCall("get", {"key": value}, id="abcdefghi"),))
    parsed = renderer.parse(renderer.assistant(turn), "stop")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("get", {"key": value})]
    assert parsed.content == "I <tool_call>"


class Talk(ToolEnv):
    """A tool call, then a word, in turns."""

    id = "test/Talk-v0"
    reward = "reward.json"
    summary = "talk"

    def make_task(self, rng_seed, split):
        return Task(f"talk/{split}/{rng_seed}", rng_seed, split, {}, {"answer": "7"})

    def prompt(self, task):
        return [Message("user", "q")]

    @tool
    async def get(self, key: str) -> str:
        """a number"""
        return "7"

    async def user_reply(self, message):
        return [USER]

    def gold_turns(self, task):
        return [Message("assistant", "", (CALL,), reasoning="so"), Message("assistant", "Seven."),
                Message("assistant", "Yes.", reasoning="it says")]  # fmt: skip


@pytest.mark.parametrize(("template", "ledgers"), [(QWEN3, 3), (OPENS, 3), (QWEN25, 1)])
def test_every_prompt_of_an_episode_is_the_template_s(template, ledgers):
    """A call with reasoning, an answer without, an answer with it; a user after each answer."""
    tokenizer, renderer = made(template)
    env = Talk()
    turns = [*env.gold_turns(None), Message("assistant", "", (CALL,), reasoning="again")]
    said = [renderer.assistant(turn) for turn in turns]
    engine = Script(said)
    limits = Limits(len(turns), 99, 10**5, 60.0, 60.0, 10**5)
    trajectory = asyncio.run(run_episode(env, Policy(engine, renderer), EpisodeSpec(1, "train", 1, 0, key="a"), limits, SCORER))
    assert len(trajectory.ledgers) == ledgers
    begun = [as_dicts(trajectory.messages[:end]) for end, m in enumerate(trajectory.messages) if m.role == "assistant"]
    told = {"tools": env.toolbox.schemas(), "add_generation_prompt": True, "tokenize": False}
    prompts = [tokenizer.apply_chat_template(rows, **told) for rows in begun]
    if template is not QWEN25:  # which has no key for reasoning, so it is in what is said
        assert [tokenizer.decode(prompt) for prompt in engine.prompts] == prompts
    # Each sampled token is in one ledger, once.
    assert sum(ledger.sampled_tokens for ledger in trajectory.ledgers) == sum(map(len, said))


class Finds(Talk):
    """What a call finds is a tool."""

    @tool
    async def get(self, key: str) -> str:
        """a number"""
        self.toolbox.add(Tool.from_schema("lever", "pull it", {"type": "object"}, lambda: "pulled"))
        return "7"


def test_a_tool_that_arrives_is_shown_from_the_next_prompt_on():
    """It stood in no prompt: a template writes the tools at the beginning."""
    tokenizer, renderer = made(QWEN25)
    engine = Script([renderer.assistant(turn) for turn in Finds().gold_turns(None)])
    limits, spec = Limits(3, 99, 10**5, 60.0, 60.0, 10**5), EpisodeSpec(1, "train", 1, 0, key="a")
    played = asyncio.run(run_episode(Finds(), Policy(engine, renderer), spec, limits, SCORER))
    assert ["pull it" in tokenizer.decode(prompt) for prompt in engine.prompts] == [False, True, True]
    for episode in (played, asyncio.run(transcript(Finds(), renderer, 1))):
        assert ["pull it" in tokenizer.decode(ledger.ids()) for ledger in episode.ledgers] == [False, True]


def test_a_string_that_looks_like_a_number_reaches_its_tool_as_a_string():
    """The tools of an episode reach the parser: a syntax without types still gives a tool what it declares."""
    renderer = family_of("qwen3-coder")[1]
    ids = renderer.assistant(Message("assistant", "", (ToolCall("get", {"key": "7"}, id="abcdefghi"),)))
    spec, limits = EpisodeSpec(1, "train", 1, 0, key="a"), Limits(1, 99, 10**5, 60.0, 60.0, 10**5)
    [turn] = asyncio.run(run_episode(Talk(), Policy(Script([ids]), renderer), spec, limits, SCORER)).turns
    assert turn.message.tool_calls[0].arguments == {"key": "7"} and turn.results[0].error is None


def test_a_transcript_of_the_teacher_forks_as_an_episode_does():
    tokenizer, renderer = made(OPENS)
    trajectory = asyncio.run(transcript(Talk(), renderer, 1, teacher={}))
    assert len(trajectory.ledgers) >= 2
    assert tokenizer.decode(trajectory.ledgers[0].ids()).count("<think>") == 2  # the call's and the answer's
    for ledger in trajectory.ledgers[1:]:
        assert "so\n</think>" not in tokenizer.decode(ledger.ids())


def test_text_next_to_calls_that_a_template_drops_is_counted_as_prompts_that_begin_anew():
    """Mistral's shows a call without the text next to it: each such turn but the last is followed by a new ledger."""
    tokenizer, renderer, *_ = family_of("mistral")
    call = renderer.assistant(Message("assistant", "", (CALL,)))
    talks = tokenizer("I look.", add_special_tokens=False)["input_ids"] + call
    for turns, ledgers, share in (([call, call, call], 1, 0.0), ([talks, call, call], 2, 0.5), ([talks, talks, talks], 3, 1.0)):
        spec, limits = EpisodeSpec(1, "train", 1, 0, key="a"), Limits(3, 99, 999, 60.0, 60.0, 2000)
        found = asyncio.run(run_episode(Talk(), Policy(Script(turns), renderer), spec, limits, SCORER))
        assert (len(found.turns), len(found.ledgers)) == (3, ledgers)
        assert episode_values([found], {}, trained=True)["forks"] == share
