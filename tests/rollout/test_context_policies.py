"""Conversations that outgrow their context: what the model saw, token by token, and each sampled token once."""

import asyncio
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from agentrl.config import Choice, TrainConfig
from agentrl.config.schema import InitModelConfig
from agentrl.data.rows import collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import StopReason, Trajectory
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.env import Message, Task, ToolCall, ToolEnv, tool
from agentrl.render.base import Renderer
from agentrl.render.chatml import ChatML
from agentrl.reward import compile_spec
from agentrl.rollout.context import ASK, HEAD, Compact, KeepRecent, Moment, Stop, Truncate, make_context_policy
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.run.assembly import Inputs, model_length
from agentrl.run.engine_choice import EngineChoice
from agentrl.trainer.pretrained import init_model, packaged_tokenizer
from tests.rollout.conftest import FaultyEngine

TURNS = {"agentrl_reward": 1, "name": "n", "root": {"use": "cost.turns", "id": "n", "args": {"max": 100}}}
TOKENIZER = packaged_tokenizer(4096)


async def unasked(instruction: Message, tokens: int) -> str | None:
    raise AssertionError("nothing is summarized")


class Endless(ToolEnv):
    """Reads as many words as it is asked for; answers every text; never ends by itself."""

    id = "tests/Endless-v0"

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"{split}/{rng_seed}", rng_seed, split)

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", "read."), Message("user", "read everything, then say what it was about")]

    async def user_reply(self, message: Message) -> list[Message] | None:
        return [Message("user", "go on")]

    @tool
    async def read(self, n: int) -> str:
        """n words"""
        return " ".join(f"w{i}" for i in range(n))


class Forgetful(ChatML):
    """A template that never shows a finished turn as it was sampled."""

    def keeps(self, message: Message, following: Sequence[Message], earlier: Sequence[Message] = (), begun: int = 0) -> bool:
        return False


class Improviser(FaultyEngine):
    """Samples random turns (calls, text, cut-off text) and keeps every call with its answer."""

    def __init__(self, renderer: Renderer, seed: int, words: int = 12) -> None:
        super().__init__(renderer.stop_token_ids[0])
        self.renderer, self.rng, self.words = renderer, random.Random(seed), words
        self.calls: list[tuple[list[int], list[int]]] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        await asyncio.sleep(0)
        turn = Message("assistant", " ".join(f"a{self.rng.randrange(99)}" for _ in range(self.rng.randint(0, 6))))
        if self.rng.random() < 0.7:
            turn = Message("assistant", tool_calls=(ToolCall("read", {"n": self.rng.randint(0, self.words)}),))
        ids = self.renderer.assistant(turn)[: sampling.max_tokens]
        self.calls.append((list(token_ids), ids))
        finish = "stop" if ids and ids[-1] == self.stop else "length"
        return Generation(ids, [-0.5] * len(ids), [0] * len(ids), finish)  # type: ignore[arg-type]


def play(
    renderer: Renderer, context: Any, *, seed: int = 0, turns: int = 40, room: int = 400, budget: int = 20_000, words: int = 12,
    writer: Policy | None = None,
) -> tuple[Trajectory, Improviser]:  # fmt: skip
    engine = Improviser(renderer, seed, words)
    policy, limits = Policy(engine, renderer, context=context, writer=writer), Limits(turns, 24, budget, 10.0, 60.0, room)
    spec = EpisodeSpec(1, "train", 0, 0, "k")
    return asyncio.run(run_episode(Endless(), policy, spec, limits, compile_spec(TURNS))), engine


def full(messages: list[Message], tokens: int = 101, ask: Any = unasked, opening: int = 1) -> Moment:
    """A context of 120 tokens of which so many are used, before a turn of 20: one of 101 is too full."""
    return Moment(messages, opening, 1, tokens, turn_tokens=20, context=120, ask=ask)


def texts(messages: list[Message] | None) -> list[str] | None:
    return None if messages is None else [message.content for message in messages]


def replayed(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """What the ledgers say the engine was asked and answered: (all before a sampled run, the run), in order."""
    found = []
    for ledger in trajectory.ledgers:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], ledger.sampled.astype(int), [0]])))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            ids = ledger.token_ids.tolist()
            found.append((ids[:start], ids[start:stop]))
    return found


POLICIES = st.one_of(
    st.just(Stop()),
    st.builds(Truncate, tokens=st.one_of(st.none(), st.integers(60, 400)), keep=st.integers(0, 3)),
    st.builds(KeepRecent, tokens=st.one_of(st.none(), st.integers(60, 400)), turns=st.integers(1, 3)),
    st.builds(Compact, tokens=st.one_of(st.none(), st.integers(60, 600)), keep=st.integers(0, 3),
              summary_tokens=st.integers(1, 40), prompt=st.sampled_from(["sum up", ASK])),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(POLICIES, st.booleans(), st.integers(0, 2**30), st.integers(100, 1200), st.integers(100, 6000), st.integers(0, 150))
def test_the_ledgers_are_the_engine_calls_and_every_sampled_token_is_trained_once(
    policy: Any, forgetful: bool, seed: int, room: int, budget: int, words: int
) -> None:
    renderer = (Forgetful if forgetful else ChatML)(TOKENIZER)
    trajectory, engine = play(renderer, policy, seed=seed, room=room, budget=budget, words=words)
    assert replayed(trajectory) == [(prompt, ids) for prompt, ids in engine.calls if ids]
    assert all(len(prompt) + len(ids) <= room for prompt, ids in engine.calls)
    assert trajectory.tokens <= budget
    # Nothing lies in a ledger that the model did not see, and every ledger taught something.
    assert all(ledger.sampled[-1] for ledger in trajectory.ledgers)
    batch = collate([trajectory])
    assert int(batch["sampled"].values().sum()) == sum(len(ids) for _, ids in engine.calls)
    assert float(batch["rewards"].values().sum()) == pytest.approx(trajectory.reward)
    # The record is the environment's: a summary is not a turn of it, and no message is lost or changed.
    assert [turn.index for turn in trajectory.turns] == list(range(len(trajectory.turns)))
    spoken = [message for message in trajectory.messages if message.role == "assistant"]
    assert spoken == [turn.message for turn in trajectory.turns]
    for turn in trajectory.turns:
        ledger = trajectory.ledgers[turn.ledger]
        assert ledger.sampled[turn.end] and ledger.turns[turn.end] == turn.index
    if trajectory.stop not in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS):
        assert trajectory.stop is StopReason.CONTEXT_FULL


def test_stop_ends_where_the_context_is_full_and_the_others_go_on(renderer: Renderer) -> None:
    stopped, _ = play(renderer, Stop())
    assert stopped.stop is StopReason.CONTEXT_FULL and stopped.truncated and len(stopped.turns) < 20
    assert 400 - 80 < stopped.tokens <= 400, "an answer of at most 12 words had no room any more"
    for policy in (Truncate(), Compact(summary_tokens=16, prompt="sum up")):
        plain, _ = play(renderer, Stop(), words=60, turns=25, room=1200)
        assert plain.stop is StopReason.CONTEXT_FULL
        trajectory, _ = play(renderer, policy, words=60, turns=25, room=1200)
        assert trajectory.stop is StopReason.MAX_TURNS and len(trajectory.ledgers) > 1


def test_a_summary_is_sampled_in_the_old_ledger_and_context_in_the_new_one(renderer: Renderer) -> None:
    trajectory, engine = play(renderer, Compact(summary_tokens=16, prompt="sum up"), seed=4)
    old, new, first = *trajectory.ledgers[:2], trajectory.rewrites[0]
    text = first["added"][0]["content"]
    asked, answer = next((p, ids) for p, ids in engine.calls if "sum up" in TOKENIZER.decode(p))
    assert text == HEAD + renderer.parse(answer, "stop" if answer[-1] == engine.stop else "length").content
    assert old.ids() == asked + answer and old.sampled[len(asked) :].all()
    begins = int(np.flatnonzero(new.sampled)[0])
    assert text in TOKENIZER.decode(new.token_ids[:begins].tolist())
    # Its tokens count to the turn that it makes possible, not to the one before.
    assert old.turns[-1] == first["turn"] == trajectory.turns[first["turn"]].index
    # A later summary takes the place of this one.
    last = TOKENIZER.decode(trajectory.ledgers[-1].token_ids.tolist())
    assert last.count(HEAD.strip()) == 1 and len(trajectory.rewrites) > 1
    assert all("sum up" not in message.content for message in trajectory.messages)


def test_another_model_may_write_the_summary_and_then_nothing_of_it_is_trained(renderer: Renderer) -> None:
    scribe = Improviser(renderer, 9)
    trajectory, engine = play(renderer, Compact(summary_tokens=16, prompt="sum up"), seed=4, writer=Policy(scribe, renderer))
    assert scribe.calls and len(trajectory.rewrites) == len(scribe.calls)
    assert replayed(trajectory) == [(prompt, ids) for prompt, ids in engine.calls if ids]
    assert "sum up" in TOKENIZER.decode(scribe.calls[0][0])


def test_a_writer_that_fails_is_an_outage_and_no_reward(renderer: Renderer) -> None:
    broken = FaultyEngine(renderer.stop_token_ids[0], fail=1.0)
    trajectory, _ = play(renderer, Compact(summary_tokens=16, prompt="sum up"), writer=Policy(broken, renderer))
    assert trajectory.stop is StopReason.ENGINE_ERROR and trajectory.reward is None


def test_a_forgetful_template_does_not_undo_a_rewrite() -> None:
    """It starts again from what was shown last, not from the whole record."""
    renderer = Forgetful(TOKENIZER)
    trajectory, engine = play(renderer, KeepRecent(turns=2, tokens=150), turns=30, room=2000)
    assert trajectory.stop is StopReason.MAX_TURNS
    noted = [i for i, (prompt, _) in enumerate(engine.calls) if "earlier turns were left out" in TOKENIZER.decode(prompt)]
    assert noted and noted == list(range(noted[0], 30)), "a turn after the compaction saw everything again"


def test_the_last_turn_is_not_followed_by_a_summary(renderer: Renderer) -> None:
    trajectory, engine = play(renderer, Compact(tokens=50, summary_tokens=8, prompt="sum up", keep=0), turns=1)
    assert len(engine.calls) == 1 and trajectory.rewrites == []


async def test_below_the_threshold_nothing_is_rewritten() -> None:
    """20 tokens for the turn of 120; and for a summary 10, and 30 for the request of 30 characters: 60 are left."""
    messages = [Message("user", "x"), Message("assistant", "y"), Message("tool", "z" * 99)] * 3

    async def ask(instruction: Message, tokens: int) -> str:
        return "sum"

    rewritten = await Truncate(keep=1).rewrite(full(messages))
    assert [m.content for m in rewritten or [] if m.role == "tool"] == ["[99 characters left out]"] * 2 + ["z" * 99]
    compact = Compact(summary_tokens=10, prompt="p" * 30)
    assert (texts(await compact.rewrite(full(messages, 61, ask))) or [])[:2] == ["x", HEAD + "sum"]
    for policy, tokens, rewrites in (
        (Truncate(keep=1), 100, False),
        (Truncate(keep=1, tokens=200), 100, False),
        (Truncate(keep=1, tokens=119), 100, True),
        (KeepRecent(turns=1), 100, False),
        (KeepRecent(turns=1), 101, True),
        (Compact(summary_tokens=1, prompt="", tokens=121), 99, False),
        (compact, 60, False),
    ):
        assert (await policy.rewrite(full(messages, tokens, ask)) is not None) is rewrites, (policy, tokens)


def conversation(*said: str) -> list[Message]:
    """u...: the user's words, c...: a turn with a call, t...: its answer."""
    roles = {"u": "user", "c": "assistant", "t": "tool"}
    return [Message(roles[text[0]], text) for text in said]


async def test_truncate_lets_old_turns_go_once_their_output_is_gone() -> None:
    """Ten turns of 40 characters with answers of two: nothing is left to replace (a marker is longer), so the older five turns
    go, and of what the user said the request that the kept turns are about. The next time, half of what is there goes again."""
    turn = ["c" * 40, "t1"]
    messages = conversation("u task", *turn * 2, "u first", *turn, "u second", *turn * 7)
    first = await Truncate(keep=2).rewrite(full(messages)) or []
    assert texts(first) == ["u task", "[5 earlier turns were left out]", "u second", *turn * 5]
    second = await Truncate(keep=2).rewrite(full([*first, *conversation(*turn, "u third")]))
    # Six turns: three go; what the user says now stays in its place, and the request before it went with its turns.
    assert texts(second) == ["u task", "[8 earlier turns were left out]", *turn * 3, "u third"]
    # `keep` turns stay whatever happens, and a first turn that fills the context alone is left as it is.
    assert await Truncate(keep=2).rewrite(full(conversation("u task", *turn * 2))) is None
    assert await Truncate(keep=0).rewrite(full(conversation("u task", *turn))) is None
    # Output goes alone if that is a quarter of it all: 11 of 85 characters in six of eight turns are too few, 56 of 130 enough.
    for size, kept in ((35, 4), (80, 8)):
        found = await Truncate(keep=2).rewrite(full(conversation("u task", *["c" * 50, "t" * size] * 8)))
        assert found is not None and sum(message.role == "assistant" for message in found) == kept


async def test_keep_recent_keeps_the_opening_one_note_and_the_request_that_is_worked_on() -> None:
    turn, policy, task = ["c1", "t1"], KeepRecent(turns=2), "u task"
    first = await policy.rewrite(full(conversation(task, *turn, "u request", *turn * 3))) or []
    assert texts(first) == [task, "[2 earlier turns were left out]", "u request", *turn * 2]
    second = await policy.rewrite(full([*first, *conversation(*turn)])) or []
    assert texts(second) == [task, "[3 earlier turns were left out]", "u request", *turn * 2], "the count of the one note goes on"
    third = await policy.rewrite(full([*second, *conversation("u next", *turn)]))
    assert texts(third) == [task, "[4 earlier turns were left out]", *turn, "u next", *turn]
    assert await policy.rewrite(full(conversation(task, *turn * 2))) is None, "there is nothing older than the last turns"


@pytest.mark.parametrize("policy", [Compact(summary_tokens=1, prompt=""), KeepRecent(turns=1), Truncate(keep=1)], ids=str)
async def test_an_opening_stays_whatever_it_says(policy: Any) -> None:
    """It has an example with its call, and ends with words that a policy itself could have put there."""

    async def ask(instruction: Message, tokens: int) -> str:
        return "sum"

    for last in (HEAD + "a friend's", "[3 earlier turns were left out]"):
        opening, turn = [*conversation("u example", "c shown", "t" * 99), Message("user", last)], conversation("c1", "t1")
        found = await policy.rewrite(full([*opening, *turn * 3], 101, ask, 4)) or []
        again = await policy.rewrite(full([*found, *turn], 101, ask, 4)) or []
        assert found[:4] == again[:4] == opening and found[5:] == again[5:] == turn
        assert isinstance(policy, Compact) or [found[4].content[1], again[4].content[1]] == ["2", "3"]


def config(**rollout: Any) -> TrainConfig:
    return TrainConfig.model_validate({"env": {"id": "key_value"}, "rollout": rollout})


def test_the_config_chooses_the_policy_and_who_writes(renderer: Renderer) -> None:
    engine = FaultyEngine(renderer.stop_token_ids[0])
    plain = Inputs(config(), (), None, 0).policy(engine, renderer)
    assert isinstance(plain.context, Stop) and plain.writer is None
    args = {"name": "compact", "args": {"summary_tokens": 7}}
    own = Inputs(config(context=args), (), None, 0, temperature=0.5).policy(engine, renderer)
    assert own.context == Compact(summary_tokens=7) and own.writer is None and own.temperature == 0.5
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("an API model writes the summary through litellm, which is not installed")
    other = Inputs(config(context=args, summary_model="openai/scribe"), (), None, 0).policy(engine, renderer)
    assert other.writer is not None and other.writer.temperature == 0.0
    assert other.writer.engine._model == "openai/scribe" and other.engine is engine  # type: ignore[attr-defined]
    assert make_context_policy(Choice(name="truncate", args={"keep": 5})) == Truncate(keep=5)


# -- episodes of 200 turns on a real engine: every token that was sampled is the model's own -------

CONTEXT = 4096
Played = tuple[Path, dict[str, Trajectory]]
"""The model, and the episodes by name."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("model")
    # Random weights; a larger spread than a trained model starts from, so that a wrong cache would be seen.
    init_model(InitModelConfig(layers=1, hidden=32, mlp=32, heads=2, kv_heads=1, head_dim=16, context=CONTEXT,
                               init_std=0.3), folder, 0)  # fmt: skip
    contexts = {
        "whole": Stop(),
        "compact": Compact(tokens=500, summary_tokens=12, prompt="sum up"),
        "recent": KeepRecent(tokens=500, turns=5),
    }

    async def scenario() -> list[Trajectory]:
        engine, renderer = EmbeddedEngine(str(folder), max_slots=4), ChatML(packaged_tokenizer(CONTEXT))
        limits, scorer = Limits(200, 4, 50_000, 60.0, 300.0, CONTEXT), compile_spec(TURNS)
        await engine.start()
        try:
            return await asyncio.gather(*(
                run_episode(Endless(), Policy(engine, renderer, context=context),
                            EpisodeSpec(1, "train", len(key), 0, key), limits, scorer)
                for key, context in contexts.items()
            ))  # fmt: skip
        finally:
            await engine.close()

    return folder, dict(zip(contexts, asyncio.run(scenario()), strict=True))


@pytest.mark.parametrize("name", ["whole", "compact", "recent"])
def test_a_forward_pass_agrees_with_every_sampled_token(played: Played, name: str) -> None:
    folder, episodes = played
    assert episodes[name].stop is StopReason.MAX_TURNS and len(episodes[name].turns) == 200
    assert (len(episodes[name].ledgers) == 1) == (name == "whole") and sum(map(len, episodes[name].ledgers)) > 2000
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ledger in episodes[name].ledgers:
        assert off(model, ledger) < 1e-3
    last = episodes[name].ledgers[-1]
    ids = last.ids()
    ids[1] = (ids[1] + 7) % 300  # the control: one other token at the very start
    assert off(model, last, ids) > 1e-3


async def test_an_episode_budget_over_the_context_is_no_prompt_over_the_context(played: Played) -> None:
    folder = str(played[0])
    config = TrainConfig.model_validate({
        "env": {"id": "key_value"}, "vllm": {"max_model_len": 1000}, "rollout": {"max_episode_tokens": 50_000},
    })  # fmt: skip
    engine = EngineChoice(config, "embedded").make(folder)
    await engine.start()
    await engine.close()
    length = model_length(config.model, folder)
    assert [EngineChoice(config, name).maker().context(length) for name in ("embedded", "vllm")] == [CONTEXT, 1000]


@torch.inference_mode()
def off(model: torch.nn.Module, ledger: TokenLedger, ids: list[int] | None = None) -> float:
    tokens = torch.tensor([ids or ledger.ids()])
    found = torch.log_softmax(model(tokens, use_cache=False).logits[0, :-1].float(), -1)
    found = found.gather(1, tokens[0, 1:, None]).squeeze(1)
    sampled = torch.tensor(ledger.sampled)[1:]
    return float((found - torch.tensor(ledger.logprobs)[1:])[sampled].abs().max())
