"""200 calls (50 in `make test`) in 4,096 tokens under each context policy, by a second computation."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.config.schema import ToolsConfig
from agentrl.data.rows import collate
from agentrl.data.trajectory import StopReason, Trajectory, reward_spots
from agentrl.env import Message, Task, ToolCall, ToolEnv, tool
from agentrl.env.catalog import EnvRef, add_tool_set, find_reward
from agentrl.render.base import Renderer
from agentrl.render.tool_calls import render_tool_calls
from agentrl.reward import compile_spec, load_spec
from agentrl.rollout.context import HEAD, Compact, ContextPolicy, KeepRecent, Moment, Stop, Truncate
from agentrl.rollout.deadlines import CutError
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import CallbackError
from tests.conftest import PROOFS
from tests.players import Still

CONTEXT, TURN = 4096, 96
CALLS, REQUESTS = (200, [40, 56]) if PROOFS else (50, [10, 14])
TOKENIZER = packaged_tokenizer(CONTEXT)
SUM_UP = "sum up"
Say = Callable[[str], Message]


class Seeing(Still):
    """Says what `say` makes of the text of the prompt, token by token."""

    def __init__(self, say: Say, stop: int) -> None:
        self.say, self.stop = say, stop
        self.prompts: list[str] = []
        self.lengths: list[int] = []
        self.said: list[list[int]] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        self.prompts.append(TOKENIZER.decode(list(token_ids)))
        self.lengths.append(len(token_ids))
        turn = self.say(self.prompts[-1])
        ids = [*TOKENIZER.encode(turn.content or render_tool_calls(turn.tool_calls), add_special_tokens=False), self.stop]
        self.said.append(ids)
        return Generation(ids, [-0.5] * len(ids), [0] * len(ids), "stop")


async def played(
    env: ToolEnv, say: Say, renderer: Renderer, context: ContextPolicy, spec: dict[str, Any], room: int, turns: int
) -> tuple[Trajectory, Seeing]:
    engine = Seeing(say, renderer.stop_token_ids[0])
    limits = Limits(turns, TURN, 400_000, 60.0, 300.0, room)
    policy = Policy(engine, renderer, context=context)
    return await run_episode(env, policy, EpisodeSpec(1, "train", 0, 0, "k"), limits, compile_spec(spec)), engine


# -- what is kept, worked out again ---------------------------------------------------------------------


def turns_of(shown: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(shown) if message.role == "assistant"]


def without_old_output(shown: list[Message], summary: str) -> list[Message]:
    """Markers before the last four turns; the older half of the turns goes too, if that saves less than a quarter."""
    turns = turns_of(shown)
    marked = [replace(m, content=f"[{len(m.content)} characters left out]") for m in shown[: turns[-4]]]
    short = [new if m.role == "tool" and len(new.content) < len(m.content) else m
             for m, new in zip(shown[: turns[-4]], marked, strict=True)] + shown[turns[-4] :]  # fmt: skip
    here, then = (sum(map(characters, messages[turns[0] :])) for messages in (shown, short))
    return last_turns(short, max(4, len(turns) // 2)) if here - then < here / 4 else short


def characters(message: Message) -> int:
    written = "".join(f"{call.name}{call.raw}" for call in message.tool_calls)
    return len(message.content + written)


def last_six(shown: list[Message], summary: str) -> list[Message]:
    return last_turns(shown, 6)


def last_turns(shown: list[Message], count: int) -> list[Message]:
    """System and first request, the note, the request that the kept turns begin in the middle of if none comes in them."""
    cut = turns_of(shown)[-count]
    found = re.fullmatch(r"\[(\d+) earlier turns were left out\]", shown[2].content)
    gone = len(turns_of(shown)) - count + (int(found[1]) if found else 0)
    said = [m for m in shown[3 if found else 2 : cut] if m.role == "user"]
    request = [] if any(m.role == "user" for m in shown[cut:]) else said[-1:]
    return [*shown[:2], Message("user", f"[{gone} earlier turns were left out]"), *request, *shown[cut:]]


def summed_up(shown: list[Message], summary: str) -> list[Message]:
    first, last = turns_of(shown)[0], turns_of(shown)[-2]
    opening = [m for m in shown[:first] if not m.content.startswith(HEAD)]
    return [*opening, Message("user", HEAD + summary), *shown[last:]]


@pytest.mark.parametrize(("context", "kept", "reserve", "room"), [
    (Truncate(keep=4), without_old_output, 0, CONTEXT if PROOFS else 3200), (KeepRecent(turns=6), last_six, 0, CONTEXT),
    (Compact(summary_tokens=40, prompt=SUM_UP, keep=2), summed_up, 40 + len(SUM_UP), CONTEXT),
], ids=["truncate", "keep_recent", "compact"])  # fmt: skip
async def test_gold_that_outgrows_the_context_many_times(
    context: ContextPolicy, kept: Callable[[list[Message], str], list[Message]], reserve: int, room: int, renderer: Renderer
) -> None:
    params = {"calls": CALLS, "requests": REQUESTS, "apps": ["calendar"], "offered": 0, "withheld": 0.0, "recalls": 0.2}
    ref = EnvRef("workspace", params, tools=ToolsConfig(sets=["notes"]))
    env = ref.build()
    gold = env.gold_turns(env.make_task(1, "train"))
    left = iter(gold)
    summaries: list[str] = []

    def say(prompt: str) -> Message:
        if SUM_UP in prompt.rpartition("user")[2]:
            summaries.append(f"part {len(summaries) + 1} is done")
            return Message("assistant", summaries[-1])
        return next(left)

    trajectory, engine = await played(env, say, renderer, context, load_spec(ref.default_reward() or ""), room, 400)
    assert trajectory.stop is StopReason.DONE and trajectory.reward == 1.0
    assert sum(len(turn.message.tool_calls) for turn in trajectory.turns) == CALLS and max(engine.lengths) < room

    # The prompt of every turn, from the record and the rule of the policy alone.
    schemas, at, shown, rewrites = trajectory.tools, 0, list[Message](), 0
    spoken = turns_of(trajectory.messages)
    asked = [prompt for prompt in engine.prompts if SUM_UP not in prompt.rpartition("user")[2]]
    assert len(asked) == len(gold) == len(spoken)
    for number, place in enumerate(spoken):
        shown += trajectory.messages[at:place]
        ids = renderer.start(shown, schemas)
        if number and len(ids) + TURN + reserve > room:
            shown = kept(shown, summaries[rewrites] if summaries else "")
            ids, rewrites = renderer.start(shown, schemas), rewrites + 1
        assert TOKENIZER.decode(ids) == asked[number], f"turn {number}"
        shown.append(trajectory.messages[place])
        at = place + 1
    assert rewrites == len(trajectory.rewrites) >= (4 if PROOFS and room == CONTEXT else 1) and len(summaries) in (0, rewrites)

    # One ledger for each rewrite and one before; every sampled token is trained once, the reward is there once.
    assert len(trajectory.ledgers) == rewrites + 1 and all(len(ledger) <= room for ledger in trajectory.ledgers)
    sampled = np.concatenate([ledger.token_ids[ledger.sampled] for ledger in trajectory.ledgers])
    assert sampled.tolist() == [token for ids in engine.said for token in ids]
    batch = collate([trajectory])
    assert batch.batch_size[0] == rewrites + 1 and int(batch["sampled"].values().sum()) == len(sampled)
    assert float(batch["rewards"].values().sum()) == 1.0

    # With credit by turns: an equal share of a half at the last token of each turn that made a change, in whichever ledger that
    # is, and the other half at the end.
    score = compile_spec(load_spec(find_reward("workspace_turns"))).score(trajectory)
    writes = [(call["name"], call["arguments"]) for call in trajectory.task.gold["writes"]]
    calls = [(t, (c.name, c.arguments)) for t in trajectory.turns for c in t.message.tool_calls]
    paid = {(turn.ledger, turn.end): 0.5 / len(writes) for turn, call in calls if call in writes}
    last, spots = trajectory.turns[-1], reward_spots(trajectory, score.terminal, score.turns)
    assert {spot[:2]: spot[2] for spot in spots} == pytest.approx(paid | {(last.ledger, last.end): 0.5})
    assert len({ledger for ledger, _ in paid}) > 1


class Broken(ContextPolicy):
    problem: Exception = KeyError("x")

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        raise self.problem


async def test_what_a_context_policy_raises_names_it(renderer: Renderer) -> None:
    ref = EnvRef("key_value")
    env = ref.build()
    left = iter(env.gold_turns(env.make_task(1, "train")))
    with pytest.raises(CallbackError, match=rf"rollout.context Broken: rewrite raised KeyError: 'x' \({__file__}:\d"):
        await played(env, lambda prompt: next(left), renderer, Broken(), load_spec(ref.default_reward() or ""), CONTEXT, 9)
    late = Broken()
    late.problem = CutError(StopReason.ENGINE_TIMEOUT, "late")  # of its summary: the end of the episode, as of a turn
    left = iter(env.gold_turns(env.make_task(1, "train")))
    cut, _ = await played(env, lambda prompt: next(left), renderer, late, load_spec(ref.default_reward() or ""), CONTEXT, 9)
    assert cut.stop == StopReason.ENGINE_TIMEOUT and cut.reward is None


# -- what is still known --------------------------------------------------------------------------------


class Vault(ToolEnv):
    """The first call tells a code, many others nothing of use; the answer is the code."""

    id = "tests/Vault-v0"
    calls = 70

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        add_tool_set(self, "notes")

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"{split}/{rng_seed}", rng_seed, split, {"code": 7040 + rng_seed}, {"answer": str(7040 + rng_seed)})

    def prompt(self, task: Task) -> list[Message]:
        asked = f"Open {self.calls} doors, then say the code of the first."
        return [Message("system", "open the doors."), Message("user", asked)]

    @tool(read_only=True)
    async def door(self, n: int) -> str:
        """what is behind a door"""
        first = f"code={self.task.data['code']}; " if n == 0 else ""
        return first + f"a long corridor with the lamps of door {n} and nothing else in it"


ANSWER = {"agentrl_reward": 1, "name": "a", "root": {"use": "text.equals", "args": {"expect": {"$": "/task/gold/answer"}}}}


POLICIES = {
    "stop": Stop(),
    "truncate": Truncate(keep=2),
    "keep_recent": KeepRecent(turns=4),
    "compact": Compact(summary_tokens=30, prompt=SUM_UP, keep=1),
}


@pytest.mark.parametrize(("policy", "notes", "reward", "stop"), [
    ("stop", True, 0.0, StopReason.CONTEXT_FULL),
    ("truncate", False, 0.0, StopReason.DONE),
    ("truncate", True, 1.0, StopReason.DONE),
    ("keep_recent", False, 0.0, StopReason.DONE),
    ("keep_recent", True, 1.0, StopReason.DONE),
    # The writer of the summaries puts the code into each of them.
    ("compact", False, 1.0, StopReason.DONE),
    ("compact", True, 1.0, StopReason.DONE),
])  # fmt: skip
async def test_what_the_context_no_longer_holds_is_known_from_notes_or_a_summary(
    policy: str, notes: bool, reward: float, stop: StopReason, renderer: Renderer
) -> None:
    env, turn = Vault(scorer=None), iter(range(1000))

    def call(name: str, **arguments: Any) -> Message:
        return Message("assistant", tool_calls=(ToolCall(name, arguments),))

    def say(prompt: str) -> Message:
        seen = re.findall(r"code=(\d+)", prompt)
        if SUM_UP in prompt.rpartition("user")[2]:
            return Message("assistant", f"code={seen[0]}" if seen else "nothing")
        now = next(turn)
        if notes and now == 1:
            return call("write_note", title="code", text=f"code={seen[0]}")
        done = now - (1 if notes and now > 1 else 0)
        if done < Vault.calls:
            return call("door", n=done)
        if notes and done == Vault.calls:
            return call("read_notes", title="code")
        return Message("assistant", seen[-1] if seen else "I do not know")

    trajectory, engine = await played(env, say, renderer, POLICIES[policy], ANSWER, 1500, 100)
    assert (trajectory.stop, trajectory.reward) == (stop, reward), trajectory.messages[-1]
    if policy != "stop":
        assert trajectory.rewrites and (notes or policy == "compact" or "code=" not in engine.prompts[-1])
