"""What the tests of agents share: an environment, an engine that is a function of prompt and seed, agents, and a harness."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from agentrl.config.schema import AgentConfig
from agentrl.contrib.agents.episode import Harness
from agentrl.contrib.agents.protocols import Exchange
from agentrl.contrib.agents.record import Episode
from agentrl.contrib.agents.session import AgentSession, ServedPolicy
from agentrl.data.trajectory import Trajectory
from agentrl.env import Message, Task, ToolCall, ToolEnv, tool
from agentrl.env.users import ScriptedUser
from agentrl.render import make_renderer
from agentrl.reward import compile_spec
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import EngineError, EnvError, ToolError
from tests.lazily import openai
from tests.players import Still

STOCK = {"tea": "3", "rice": "1", "milk": "2"}
TOKENIZER = packaged_tokenizer(4096)
RENDERER = make_renderer(TOKENIZER)
LIMITS = Limits(4, 64, 2000, 30.0, 60.0, 2048)
# Whether the last word names the number of tea, and whether nothing was put.
NAMED: dict[str, Any] = {"use": "text.contains", "args": {"expect": {"$": "/task/gold/answer"}}}
NO_PUT = {"use": "calls.none", "args": {"names": ["put"]}}
SPEC = compile_spec({"agentrl_reward": 1, "name": "store", "root": {"op": "mean", "of": [NAMED, NO_PUT]}})


class Store(ToolEnv):
    """How much tea is there?"""

    id = "test/Store-v0"
    lines: Sequence[str] | None = None

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.put_down: list[tuple[str, str]] = []

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"store/{rng_seed}", rng_seed, split, {}, {"answer": "3"})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", "Answer."), Message("user", f"Task {task.seed}: how much tea?")]

    async def setup(self, task: Task) -> None:
        self.put_down = []
        if self.lines is not None:
            self.user = ScriptedUser(list(self.lines))

    def state(self) -> Any:
        return {"put": self.put_down}

    @tool(read_only=True)
    async def get(self, key: str) -> str:
        """the number of a thing"""
        if key not in STOCK:
            raise ToolError(f"there is no {key}")
        return STOCK[key]

    @tool(parallel=False)
    async def put(self, key: str, value: str) -> str:
        """set the number of a thing"""
        before = len(self.put_down)
        await asyncio.sleep(0.01)
        if len(self.put_down) != before:
            raise EnvError("two calls that write ran side by side")
        self.put_down.append((key, value))
        return "done"

    @tool
    async def leave(self) -> str:
        """end the episode"""
        self.finish()
        return "bye"

    @tool
    async def broken(self) -> str:
        """fails"""
        raise ValueError("out of order")

    @tool(timeout=0.05, on_timeout="stop", late="policy")
    async def think(self) -> str:
        """never ends"""
        await asyncio.sleep(60)
        return ""


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def says(text: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", text, tuple(calls))


class Dice(Still):
    """Answers with a turn drawn from prompt and seed alone. `slow`: seconds of the turn of a request's number, from 1; `fails`:
    from which request on."""

    def __init__(self, turns: Sequence[Message], *, slow: Any = lambda number: 0.0, fails: int | None = None) -> None:
        self.turns = [RENDERER.assistant(turn) for turn in turns]
        self.slow, self.fails, self.asked = slow, fails, list[tuple[list[int], Sampling, str]]()
        self.version, self.running = 0, 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        self.asked.append((list(token_ids), sampling, request_key))
        self.running += 1
        try:
            await asyncio.sleep(self.slow(len(self.asked)))
        finally:
            self.running -= 1
        if self.fails is not None and len(self.asked) > self.fails:
            raise EngineError("the replica went away")
        rng = random.Random(repr((list(token_ids), sampling.seed)))
        ids = rng.choice(self.turns)
        cut = ids[: sampling.max_tokens]
        logprobs = [-rng.random() for _ in cut]
        return Generation(cut, logprobs, [self.version] * len(cut), "stop" if cut == ids else "length")

    async def stats(self) -> EngineStats:
        return EngineStats(version=self.version)


class Script(Dice):
    """Answers with the given turns, one after the other."""

    def refusal(self, sampling: Sampling) -> str:
        return ""  # as an engine that knows its texts: no turn here has a stop string in it

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        await super().generate(token_ids, sampling, request_key)
        ids = self.turns.pop(0)
        return Generation(ids, [-0.5] * len(ids), [self.version] * len(ids), "stop")


def client_of(episode: Episode) -> Any:
    """An openai client; without the system's certificates, which take longer to read than an episode to play."""
    web = httpx.AsyncClient(verify=False, timeout=60)
    return openai.AsyncOpenAI(base_url=episode.openai_base_url, api_key=episode.api_key, max_retries=0, http_client=web)


async def plain_agent(episode: Episode) -> str:
    """An agent as anybody would write it on the openai client: the task's messages, the tools, until there is a last word."""
    tools = {schema["function"]["name"] for schema in episode.tools}
    async with client_of(episode) as client:
        messages: list[Any] = list(episode.messages)
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=episode.tools)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for item in message.tool_calls:
                assert item.function.name in tools
                content = await episode.call(item.function.name, json.loads(item.function.arguments))
                messages.append({"role": "tool", "tool_call_id": item.id, "content": content})


def exchange_of(body: Any) -> Exchange:
    """A request of a session that has one response, `before`, to continue."""
    session = AgentSession("s", ServedPolicy(Dice([]), RENDERER, Sampling(max_tokens=9)))
    session.kept = {"before": []}
    return Exchange(session, body, "policy")


def spec_of(member: int = 0, seed: int = 7, key: str = "") -> EpisodeSpec:
    return EpisodeSpec(5, "train", seed + member, member, key or f"g0.m{member}.a0")


def play(
    engine: Engine,
    agent: AgentConfig,
    *,
    program: Callable[[Episode], Any] | None = None,
    members: int = 1,
    env: Callable[[], ToolEnv] = Store,
    limits: Limits = LIMITS,
    **policy: Any,
) -> list[Trajectory]:
    """Episodes of one agent side by side. `program`: the async function, in place of the one that `agent` names."""

    async def body() -> list[Trajectory]:
        harness = Harness(agent, TOKENIZER.decode)
        if program is not None:
            harness._program._function = program  # type: ignore[union-attr]
        one = Policy(engine, RENDERER, **policy)
        try:
            plays = (harness.play(env(), one, spec_of(member), limits, SPEC, Watch()) for member in range(members))
            return await asyncio.wait_for(asyncio.gather(*plays), 60)
        finally:
            await harness.close()

    return asyncio.run(body())


def native(engine: Engine, *, members: int = 1, limits: Limits = LIMITS, **policy: Any) -> list[Trajectory]:
    """The same episodes by the built-in loop."""

    async def body() -> list[Trajectory]:
        one = Policy(engine, RENDERER, **policy)
        return await asyncio.gather(*(run_episode(Store(), one, spec_of(m), limits, SPEC) for m in range(members)))

    return asyncio.run(body())


FUNCTION = AgentConfig(python="tests.contrib.agents.parts:plain_agent")


def told(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    """An episode's turns without the ids of its calls, which both loops number in their own ways, and without times."""
    rows: list[tuple[Any, ...]] = []
    for turn in trajectory.turns:
        order = {item.id: place for place, item in enumerate(turn.message.tool_calls)}
        calls = [(item.name, item.arguments) for item in turn.message.tool_calls]
        results = [(order[r.call_id], r.name, r.content, r.value, r.error) for r in turn.results]
        rows.append((turn.index, turn.message.content, calls, results, turn.ledger, turn.end, turn.prompt_tokens,
                     turn.sampled_tokens, turn.finish, turn.reward))  # fmt: skip
    return rows


def conversation(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    return [(m.role, m.content, [(c.name, c.arguments) for c in m.tool_calls], m.name) for m in trajectory.messages]
