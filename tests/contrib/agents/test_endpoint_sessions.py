"""Each token that was sampled for an agent's requests is in exactly one ledger, behind its own prompt."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.contrib.agents.session import AgentSession, Ask, ServedPolicy, refusal_of
from agentrl.data.trajectory import Message, ToolCall
from agentrl.render import make_renderer
from agentrl.render.chatml import CHATML_TEMPLATE
from agentrl.rollout.engine import Generation, Sampling
from agentrl.utils.errors import EngineError, RenderError
from tests.conftest import PROOFS
from tests.players import Still
from tests.render.families import FAMILIES
from tests.render.render_conversations import TOOLS
from tests.render.render_tokenizers import CONTROL_TOKENS, build_tokenizer

RENDERER = make_renderer(build_tokenizer(CONTROL_TOKENS, CHATML_TEMPLATE))


class Held(Still):
    """Answers requests in any order. `given`, `gave`: what went in and out; `at_once`: keys under way, whenever one came."""

    def __init__(self):
        self.waiting, self.given, self.gave, self.keys, self.at_once = {}, {}, {}, {}, []

    async def generate(self, token_ids, sampling, request_key):
        number = len(self.given)
        self.given[number] = list(token_ids)
        self.waiting[number], self.keys[number] = asyncio.get_running_loop().create_future(), request_key
        self.at_once.append([self.keys[one] for one, waits in self.waiting.items() if not waits.done()])
        text = await self.waiting[number]
        if text is None:
            raise EngineError("out of order")
        ids = RENDERER.assistant(Message("assistant", text))
        # A version of its own for each call, by which its tokens are known again.
        found = Generation(ids, [-1.0] * len(ids), [number] * len(ids), "stop")
        self.gave[number] = found
        return found


@dataclass
class Agent:
    """One conversation as its client has it: what was said, and the request under way, if there is one."""

    said: list[Message] = field(default_factory=lambda: [Message("user", "q")])
    asked: asyncio.Task | None = None

    def hears(self, choice):
        """The client goes on from one of the answers, or gives up a request that failed."""
        if self.asked is not None and self.asked.done():
            if not self.asked.cancelled() and self.asked.exception() is None:
                answers = self.asked.result()
                self.said = [*self.said, answers[choice % len(answers)].message]
            self.asked = None


NUMBERS = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("ask"), NUMBERS, st.integers(1, 2), st.sampled_from("xy")),
    st.tuples(st.just("end"), NUMBERS, st.sampled_from(["a", "b", None]), NUMBERS),
    st.tuples(st.just("edit"), NUMBERS, NUMBERS, st.sampled_from("ab")),
    st.tuples(st.just("leave"), NUMBERS, NUMBERS, NUMBERS),
    st.tuples(st.just("copy"), NUMBERS, NUMBERS, NUMBERS),
)
# Two agents with one history are answered alike, side by side, and each goes on from there.
ALIKE = [
    ("ask", 0, 1, "x"), ("ask", 1, 1, "x"), ("end", 0, "a", 0), ("end", 0, "a", 0), ("ask", 0, 1, "x"), ("ask", 1, 1, "y"),
    ("end", 1, "b", 0), ("end", 0, "a", 0), ("ask", 1, 2, "y"), ("end", 0, "a", 0), ("end", 0, "a", 1), ("ask", 1, 1, "x"),
    ("end", 0, "b", 0),
]  # fmt: skip
# They have one ledger, and the one that asked last is answered first.
OVERTAKEN = [
    ("ask", 0, 1, "x"), ("end", 0, "a", 0), ("copy", 1, 0, 0), ("ask", 0, 1, "x"), ("ask", 1, 1, "x"), ("end", 1, "b", 0),
    ("end", 0, "a", 0), ("ask", 0, 1, "x"), ("ask", 1, 1, "x"),
]  # fmt: skip


@settings(max_examples=1000 if PROOFS else 40, deadline=None)
@example(steps=ALIKE)
@example(steps=OVERTAKEN)
@given(steps=st.lists(STEPS, max_size=24))
def test_each_sampled_token_is_in_exactly_one_ledger_behind_its_prompt(steps):
    engine, asked = asyncio.run(play(steps))
    session = asked["session"]
    recorded = Counter()
    for turn in session.turns:
        ledger = session.ledgers[turn.ledger]
        begin, end = turn.end + 1 - turn.sampled_tokens, turn.end + 1
        (call,) = set(ledger.versions[begin:end].tolist())
        assert ledger.ids()[begin:end] == engine.gave[call].token_ids and all(ledger.sampled[begin:end])
        assert ledger.ids()[:begin] == engine.given[call] and turn.prompt_tokens == begin
        assert set(ledger.turns[begin:end].tolist()) == {turn.index}
        recorded[call] += 1
    assert recorded == Counter(asked["answered"]), "the calls of requests that were answered, each once"
    trained = Counter(v for ledger in session.ledgers for v in ledger.versions[ledger.sampled].tolist())
    assert trained == {call: len(engine.gave[call].token_ids) for call in asked["answered"]}
    assert all(len(set(keys)) == len(keys) for keys in engine.at_once), "an engine knows requests by their keys"
    # What the policy is shown is the agent's own conversation, never another's that began alike.
    for call, said in asked["shown"].items():
        assert engine.given[call] == RENDERER.start(said, [])


async def play(steps):
    """Run the steps; afterwards all that is under way is answered."""
    engine = Held()
    session = AgentSession("s", ServedPolicy(engine, RENDERER, Sampling(max_tokens=64)))
    agents = [Agent() for _ in range(4)]
    shown, calls, given_up = {}, {}, set()

    async def settle():
        for _ in range(12):
            await asyncio.sleep(0)

    for kind, who, one, two in steps:
        agent = agents[who]
        if kind == "ask" and agent.asked is None:
            if agent.said[-1].role == "assistant":
                agent.said = [*agent.said, Message("user", two)]
            before = len(engine.given)
            agent.asked = session.begin(Ask(agent.said, choices=one))
            await settle()
            calls[agent.asked] = range(before, len(engine.given))
            shown.update(dict.fromkeys(calls[agent.asked], agent.said))
        elif kind == "end" and (open_ := [n for n, waits in engine.waiting.items() if not waits.done()]):
            engine.waiting[open_[who % len(open_)]].set_result(one)
        elif kind == "edit" and agent.asked is None and len(agent.said) > 1:
            at = one % len(agent.said)
            agent.said = [*agent.said[:at], Message(agent.said[at].role, two), *agent.said[at + 1 :]]
        elif kind == "leave" and agent.asked is not None and not agent.asked.done():
            agent.asked.cancel()
            given_up.add(agent.asked)
        elif kind == "copy" and agent.asked is None and agents[one].asked is None:
            agent.said = list(agents[one].said)
        await settle()
        for each in agents:
            each.hears(two if isinstance(two, int) else 0)
    for waits in engine.waiting.values():
        if not waits.done():
            waits.set_result("a")
    await asyncio.gather(*calls, return_exceptions=True)
    answered = [n for task, numbers in calls.items() if not task.cancelled() and task.exception() is None for n in numbers]
    return engine, {"session": session, "answered": answered, "shown": shown}


class Talking(Held):
    """Says something and makes a call, in each turn."""

    async def generate(self, token_ids, sampling, request_key):
        self.given[len(self.given)] = list(token_ids)
        call = MISTRAL.assistant(Message("assistant", "", (ToolCall("get", {"key": "a"}, id="abcdefghi"),)))
        ids = [*MISTRAL._text.codec.encode("I look."), *call]
        return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop")


MISTRAL = make_renderer(build_tokenizer(FAMILIES["mistral"][1], FAMILIES["mistral"][0], bos="<s>", eos="</s>"))


async def test_what_the_policy_said_next_to_a_call_is_no_refusal_when_an_agent_sends_it_back():
    """The template drops it, as wherever the model is used; what an agent makes up is refused."""
    session = AgentSession("s", ServedPolicy(Talking(), MISTRAL, Sampling(max_tokens=64)))
    said = [Message("user", "q")]
    (answer,) = await session.begin(Ask(said, TOOLS))
    assert answer.message.content == "I look." and [call.name for call in answer.message.tool_calls] == ["get"]
    made = [replace(call, raw="") for call in answer.message.tool_calls]
    back = replace(answer.message, tool_calls=tuple(made))
    result = Message("tool", "7", tool_call_id=made[0].id, name="get")
    await session.begin(Ask([*said, back, result], TOOLS))
    assert len(session.ledgers) == 2, "the second prompt is without the text"
    own = replace(back, tool_calls=(replace(made[0], id="own"),))
    with pytest.raises(RenderError, match=r"not show all of a message of role 'assistant' in its place: 'I look\.'"):
        await session.begin(Ask([*said, own, replace(result, tool_call_id="own")], TOOLS))


async def test_a_client_that_writes_numbers_anew_goes_on_in_the_same_ledger():
    """JavaScript sends 1.0 back as 1: the turn was rendered anew, in a second ledger. A call of another value is another call."""
    session = AgentSession("s", ServedPolicy(Pricing(), RENDERER, Sampling(max_tokens=64)))
    said = [Message("user", "q")]
    (answer,) = await session.begin(Ask(said, TOOLS))
    (call,) = answer.message.tool_calls
    assert call.arguments == {"key": [1.0, {"price": 2e3}]}
    for key, ledgers in (([1, {"price": 2000}], 1), ([True, {"price": 2000}], 2)):
        back = replace(answer.message, tool_calls=(replace(call, arguments={"key": key}),))
        await session.begin(Ask([*said, back, Message("tool", "7", tool_call_id=call.id, name="get")], TOOLS))
        assert len(session.ledgers) == ledgers


class Pricing(Still):
    async def generate(self, token_ids, sampling, request_key):
        ids = RENDERER.assistant(Message("assistant", "", (ToolCall("get", {"key": [1.0, {"price": 2e3}]}),)))
        return Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop")


def test_a_fault_of_the_endpoint_itself_is_in_the_log(caplog):
    assert refusal_of(KeyError("x")).status == 500
    assert [record.exc_info[0] for record in caplog.records] == [KeyError]
