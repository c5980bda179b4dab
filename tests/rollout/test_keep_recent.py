"""A rewritten history forks the ledger: every sampled token lies in exactly one, where it was sampled."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.data.trajectory import Message, StopReason
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.render.tool_calls import render_tool_calls
from agentrl.reward import compile_spec, load_spec
from agentrl.rollout.context import KeepRecent
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.trainer.pretrained import packaged_tokenizer


class ScriptedEngine(Engine):
    """Says given assistant turns, token by token; remembers the prompts it got."""

    def __init__(self, turns: Sequence[Message], stop: int) -> None:
        tokenizer = packaged_tokenizer(4096)
        texts = [turn.content or render_tool_calls(turn.tool_calls) for turn in turns]
        self.turns = [[*tokenizer.encode(text, add_special_tokens=False), stop] for text in texts]
        self.prompts: list[list[int]] = []

    async def start(self) -> None: ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        ids = self.turns[len(self.prompts)]
        self.prompts.append(list(token_ids))
        return Generation(ids, [-0.5] * len(ids), [0] * len(ids), "stop")

    async def abort(self, request_key: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None: ...


async def test_every_sampled_token_of_a_rewritten_episode_lies_where_its_turn_says() -> None:
    ref = EnvRef("key_value", {"calls": 10, "set_share": 0.0})
    env = ref.build()
    renderer = make_renderer(packaged_tokenizer(4096))
    gold = env.gold_turns(env.make_task(5, "train"))
    engine = ScriptedEngine(gold, renderer.stop_token_ids[0])
    limits = Limits(20, 64, 4000, 10.0, 60.0, 4000)
    policy = Policy(engine, renderer, context=KeepRecent(turns=2, tokens=200))
    scorer = compile_spec(load_spec(ref.default_reward() or ""))
    trajectory = await run_episode(env, policy, EpisodeSpec(5, "train", 0, 0, "k"), limits, scorer)
    assert trajectory.stop is StopReason.DONE and trajectory.reward == 1.0
    assert len(trajectory.ledgers) > 2
    # Every turn's tokens are marked as sampled once, in the ledger and at the place the turn names.
    assert trajectory.sampled_tokens == sum(map(len, engine.turns))
    for turn, ids, prompt in zip(trajectory.turns, engine.turns, engine.prompts, strict=True):
        ledger = trajectory.ledgers[turn.ledger]
        span = slice(turn.end + 1 - len(ids), turn.end + 1)
        assert ledger.token_ids[span].tolist() == ids and ledger.sampled[span].all()
        assert ledger.token_ids[: span.start].tolist() == prompt
    # A later ledger holds earlier turns as context only.
    assert not trajectory.ledgers[1].sampled[: len(engine.prompts[0])].any()


async def test_without_it_there_is_one_ledger() -> None:
    ref = EnvRef("key_value", {"calls": 4, "set_share": 0.0})
    env = ref.build()
    renderer = make_renderer(packaged_tokenizer(4096))
    engine = ScriptedEngine(env.gold_turns(env.make_task(5, "train")), renderer.stop_token_ids[0])
    scorer = compile_spec(load_spec(ref.default_reward() or ""))
    limits = Limits(20, 64, 4000, 10.0, 60.0, 4000)
    trajectory = await run_episode(env, Policy(engine, renderer), EpisodeSpec(5, "train", 0, 0, "k"), limits, scorer)
    assert len(trajectory.ledgers) == 1 and trajectory.reward == 1.0
