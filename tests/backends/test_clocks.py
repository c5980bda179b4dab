"""What engines tell of a request's time, and what an episode on a real engine makes of it."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_models import CHAT_REWARD, Chat
from test_endpoint import Scripted
from test_endpoint import renderer as renderer  # the fixtures

from agentrl.backends.api.engine import LiteLlmEngine
from agentrl.backends.embedded.engine import EmbeddedEngine
from agentrl.backends.endpoint.server import Endpoint
from agentrl.backends.vllm.pace import Pace, Paces
from agentrl.config.schema import ApiConfig, InitModelConfig
from agentrl.render import make_renderer
from agentrl.reward import compile_spec
from agentrl.rollout.course import EpisodeSpec, Limits, Policy
from agentrl.rollout.engine import Sampling, Underway
from agentrl.rollout.episode import run_episode
from agentrl.train.init_model import init_model
from agentrl.train.tokenizer import packaged_tokenizer
from agentrl.trajectory import Message

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A random model with the packaged tokenizer: it hardly ever ends a turn."""
    return str(init_model(InitModelConfig(layers=2, init_std=0.02), tmp_path_factory.mktemp("chatty") / "model", seed=0))


async def play(engine, members, *, turn_timeout, turn_tokens, during=None):
    """An episode of one turn for each member, all at once."""
    limits = Limits(1, turn_tokens, 4000, turn_timeout, 600.0, 4000)
    policy = Policy(engine, make_renderer(packaged_tokenizer(4096)))
    scorer = compile_spec(CHAT_REWARD)
    episodes = [
        asyncio.ensure_future(run_episode(Chat(), policy, EpisodeSpec(1, "train", m, m, f"m{m}"), limits, scorer))
        for m in range(members)
    ]
    if during is not None:
        await during()
    return await asyncio.gather(*episodes)


async def test_endless_thinking_on_a_real_engine_is_cut_and_scored(chatty):
    class Endless(EmbeddedEngine):
        async def generate(self, token_ids, sampling, request_key):
            return await super().generate(token_ids, replace(sampling, stop_token_ids=()), request_key)

    engine = Endless(chatty, device="cpu")
    await engine.start()
    (trajectory,) = await play(engine, 1, turn_timeout=0.5, turn_tokens=3500)
    stats = await engine.stats()
    await engine.close()
    assert trajectory.stop == "max_turn_time" and trajectory.reward is not None
    assert trajectory.cause["blame"] == "policy" and trajectory.cause["policy_s"] >= 0.5
    (ledger,) = trajectory.ledgers
    assert 5 < ledger.sampled_tokens < 3500
    assert int(ledger.sampled.sum()) == trajectory.turns[0].sampled_tokens == stats.sampled_tokens
    assert stats.running == stats.waiting == 0


async def test_queues_and_publishes_of_a_real_engine_are_no_time_of_a_turn(chatty):
    """Eight turns on one slot, each with twelve times what it needs alone, and a pause that is as long: by the wall clock
    those that wait are late."""
    engine = EmbeddedEngine(chatty, device="cpu", max_slots=1)
    await engine.start()
    await engine.generate([300, 301], Sampling(max_tokens=60, seed=1), "warm")
    alone = await engine.generate([300, 301], Sampling(max_tokens=60, seed=1), "alone")
    limit = 12 * alone.active_s

    async def publish():
        await asyncio.sleep(alone.active_s / 2)
        await engine.pause()
        await asyncio.sleep(limit)
        assert engine.progress("m7") == Underway(0.0, 0)
        await engine.resume()

    began = time.monotonic()
    trajectories = await play(engine, 8, turn_timeout=limit, turn_tokens=60, during=publish)
    took = time.monotonic() - began
    await engine.close()
    assert [t.stop.value for t in trajectories] == ["max_turns"] * 8
    assert took > limit
    assert sum(t.timings["engine_s"] > limit for t in trajectories) >= 5  # by the wall clock, most were late


async def test_an_api_models_queue_is_told_from_its_calls(renderer):
    answers = asyncio.Semaphore(0)

    class Held(Scripted):
        async def generate(self, *args):
            await answers.acquire()
            return await super().generate(*args)

    async with Endpoint(Held(renderer, [Message("assistant", "one"), Message("assistant", "two")]), renderer) as server:
        access = server.open("s")
        engine = LiteLlmEngine(
            "openai/policy", ApiConfig(base=access.openai_url, retries=0, concurrency=1), options={"api_key": access.key}
        )
        await engine.start()
        prompt = engine.renderer.start([Message("user", "q")], [])
        calls = [asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=8), key)) for key in "ab"]
        while not (first := engine.progress("a")) or not first.active_s:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert engine.progress("a").active_s >= 0.1 and engine.progress("b") == Underway(0.0, 0)
        answers.release()
        await calls[0]
        while not engine.progress("b").active_s:
            await asyncio.sleep(0.01)
        assert engine.progress("a") is None
        answers.release()
        await calls[1]
        await engine.close()


def state(name, tokens):
    return SimpleNamespace(
        external_req_id=name, is_prefilling=tokens == 0, detokenizer=SimpleNamespace(num_output_tokens=lambda: tokens)
    )


async def test_a_replica_counts_from_the_first_token_on_and_not_while_paused(monkeypatch):
    now, states = [100.0], [state("a", 0)]
    monkeypatch.setattr("agentrl.backends.vllm.pace.time.monotonic", lambda: now[0])
    pace = Pace(lambda: states)

    def later(seconds):
        now[0] += seconds
        return {name: (round(active, 6), tokens) for name, (active, tokens) in pace.told().items()}

    assert later(5) == {"a": (0, 0)}  # queued, or its prompt is computed
    states[:] = [state("a", 1), state("b", 0)]
    assert later(1) == {"a": (0, 1), "b": (0, 0)}
    assert later(2) == {"a": (2, 1), "b": (0, 0)}
    pace.pause(True)
    assert later(7) == {"a": (2, 1), "b": (0, 0)}
    pace.pause(False)
    assert later(0.5) == {"a": (2.5, 1), "b": (0, 0)}
    states[:] = [state("b", 3)]
    now[0] += 0.25
    assert pace.over("a") == 2.75


async def test_the_driver_asks_only_while_there_are_requests(monkeypatch):
    monkeypatch.setattr("agentrl.backends.vllm.pace.ASK", 0.01)
    asked = []

    async def ask():
        asked.append(1)
        return [{"r1": (1.5, 4)}, {"r2": (0.0, 0)}]

    paces = Paces(ask)
    assert paces.of("e") is None and not asked
    paces.begin("e", "r1")
    assert paces.of("e") == Underway(0.0, 0)
    async with asyncio.timeout(60):
        while paces.of("e") != Underway(1.5, 4):
            await asyncio.sleep(0.01)
    paces.begin("e", "r3")  # its replica died: the turn is sampled again elsewhere
    paces.end("e", "r1")
    assert paces.of("e") == Underway(0.0, 0)
    paces.end("e", "r3")
    await asyncio.sleep(0.05)
    before = len(asked)
    await asyncio.sleep(0.1)
    assert paces.of("e") is None and len(asked) == before
    await paces.close()
