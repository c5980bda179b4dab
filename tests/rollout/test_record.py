"""Recording and replaying what goes wrong: faults of tools and engine, clocks, rewritten histories, gold replays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.data.trajectory import Message, ToolCall
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import Context, Scorer, compile_spec
from agentrl.rollout.context import KeepRecent
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.episode import Limits, Policy
from agentrl.rollout.replay import Recorder, Replayer
from agentrl.rollout.tape import EpisodeIO, Recorded
from agentrl.utils.errors import ReplayError
from tests.players import run_tasks
from tests.rollout.conftest import FaultyEngine

ENV = '''
"""Talks for a few turns; in some tasks something breaks."""
import asyncio

from agentrl.env import Message, Task, ToolEnv
from agentrl.utils.errors import ToolTimeoutError
from agentrl.env import tool

BUMP = {"name": "bump", "arguments": {}}


class Rough(ToolEnv):
    id = "test/Rough-v0"
    summary = "rough"

    def make_task(self, rng_seed, split):
        return Task(f"rough/{split}/{rng_seed}", rng_seed, split, {}, {"calls": [BUMP], "rounds": [[], [], [], [BUMP]]})

    def prompt(self, task):
        return [Message("system", "talk"), Message("user", "begin")]

    async def setup(self, task):
        if task.seed == 4:
            raise OSError("no room")
        self.said = 0
        self.bumped = 0

    @tool(inline=True)
    def bump(self) -> int:
        """count"""
        self.bumped += 1
        return self.bumped

    async def user_reply(self, message):
        self.said += 1
        if self.task.seed == 1 and self.said == 2:
            raise KeyError("lost")
        if self.task.seed == 2 and self.said == 2:
            raise ToolTimeoutError("tool clock: no answer within 1 s")
        if self.task.seed == 3 and self.said == 2:
            await asyncio.sleep(60)
        return [Message("user", f"go on {self.said}")] if self.said < 5 else None

    def state(self):
        return {"bumped": self.bumped}
'''
SPEC = {
    "agentrl_reward": 1,
    "name": "rough",
    "root": {
        "op": "mean",
        "of": [
            {"use": "state.match", "args": {"replay": {"$": "/task/gold/calls"}}},
            {"use": "state.match", "args": {"replay": {"$": "/task/gold/rounds"}}, "scope": "round", "reduce": "mean"},
            {"use": "cost.seconds", "args": {"max": 1.0}},
            {"use": "cost.turns", "args": {"max": 8}},
        ],
    },
}
LIMITS = Limits(max_turns=4, max_turn_tokens=16, max_episode_tokens=2000, turn_timeout=20.0, episode_timeout=2.0, context=4000)
PAIRS = [(task, member) for task in range(6) for member in range(2)]


def scorer(env: EnvRef, io: EpisodeIO) -> Scorer:
    return compile_spec(SPEC, context=io.scoring(Context(replay_env=lambda task: env.build())))


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvRef:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envs" / "rough").mkdir(parents=True)
    (tmp_path / "envs" / "rough" / "env.py").write_text(ENV)
    return EnvRef("rough")


async def test_faults_clocks_and_rewritten_histories_replay_equal(env: EnvRef, renderer: Renderer, tmp_path: Path) -> None:
    engine = FaultyEngine(renderer.stop_token_ids[0], fail=0.1, seed=3)
    recorder = Recorder(tmp_path / "calls.jsonl")
    policy = Policy(recorder.engine(lambda: engine), renderer, context=KeepRecent(turns=1, tokens=12))
    live = await run_tasks(env, policy, scorer(env, recorder), LIMITS, PAIRS, seed=1, max_episodes=4, io=recorder)
    recorder.close()
    stops = {trajectory.stop.value for trajectory in live}
    assert stops == {"max_turns", "env_error", "tool_timeout", "episode_timeout", "engine_error"}
    assert any(len(trajectory.ledgers) > 1 for trajectory in live)
    assert any(trajectory.reward for trajectory in live)

    shutil.rmtree(tmp_path / "envs")
    record = Recorded.read(tmp_path / "calls.jsonl")
    io = Replayer(record)
    gone = EnvRef("rough")
    policy = replace(policy, engine=io.engine())

    async def replay(changed: Policy = policy, limits: Limits = LIMITS, seed: int = 1) -> list[Any]:
        fresh = Replayer(record)
        there = replace(changed, engine=fresh.engine())
        return await run_tasks(gone, there, scorer(gone, fresh), limits, PAIRS, seed=seed, max_episodes=4, io=fresh)

    again = await replay()
    assert [json.dumps(t.to_json()) for t in again] == [json.dumps(t.to_json()) for t in live]
    place = r"episode heldout\d\.m\d, engine call 0: at /sampling/temperature expected 1.0, got 0.5"
    with pytest.raises(ReplayError, match=place):
        await replay(policy.at(0.5))
    with pytest.raises(ReplayError, match="engine call 0: at /sampling/seed"):
        await replay(seed=2)
    with pytest.raises(ReplayError, match="done call 0: at /reward expected"):
        await replay(limits=replace(LIMITS, max_turns=3))


class Looking(FaultyEngine):
    """Looks first, whatever it is asked."""

    asked: set[str]
    look: list[int]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        if request_key in self.asked:
            return await super().generate(token_ids, sampling, request_key)
        self.asked.add(request_key)
        return Generation(self.look, [-1.0] * len(self.look), [self.version] * len(self.look), "stop")


async def test_answers_with_images_replay_equal(renderer: Renderer, tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    engine = Looking(renderer.stop_token_ids[0])
    engine.asked, engine.look = set(), renderer.assistant(Message("assistant", tool_calls=(ToolCall("look", {}),)))
    there, pairs = EnvRef("color_square"), [(0, 0), (1, 0)]
    spec = json.loads(Path("rewards/color_square.json").read_text())
    recorder = Recorder(tmp_path / "calls.jsonl")
    policy = Policy(recorder.engine(lambda: engine), renderer)
    context = Context(replay_env=lambda task: there.build())
    judged = compile_spec(spec, context=recorder.scoring(context))
    live = await run_tasks(there, policy, judged, LIMITS, pairs, seed=1, max_episodes=2, io=recorder)
    recorder.close()
    pictures = [result.images[0].sha256 for t in live for turn in t.turns for result in turn.results if result.images]
    assert len(pictures) == 2 == len(set(pictures)), "each task has a picture of its own"
    io = Replayer(Recorded.read(tmp_path / "calls.jsonl"))
    judged = compile_spec(spec, context=io.scoring(context))
    again = await run_tasks(there, replace(policy, engine=io.engine()), judged, LIMITS, pairs, seed=1, max_episodes=2, io=io)
    assert [json.dumps(t.to_json()) for t in again] == [json.dumps(t.to_json()) for t in live]
    assert [r.images[0].sha256 for t in again for turn in t.turns for r in turn.results if r.images] == pictures
