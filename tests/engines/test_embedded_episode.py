"""A whole episode on the embedded engine while the weights change three times under it."""

import asyncio
from functools import partial

import pytest

from agentrl.config.schema import InitModelConfig
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.render import make_renderer
from agentrl.reward import compile_spec
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.trainer.pretrained import init_model, packaged_tokenizer
from tests.engines.contract import until
from tests.engines.engine_models import CHAT_REWARD, Chat, changed, ledger_error, load, parameters
from tests.publishing import publish

pytestmark = pytest.mark.asyncio


async def _held_amid_a_turn(engine, tokens):
    """Hold the engine; whether it sampled so many tokens and is in a turn. If not, it goes on."""
    await engine.pause()
    stats = await engine.stats()
    if stats.sampled_tokens >= tokens and stats.running:
        return True
    await engine.resume()
    return False


async def test_an_episode_over_three_updates_says_which_weights_sampled_each_token(tmp_path):
    folder = str(init_model(InitModelConfig(layers=2, init_std=0.2), tmp_path / "model", seed=0))
    model = load(folder)
    weights = [parameters(model), *(changed(model, seed=seed) for seed in (1, 2, 3))]
    engine = EmbeddedEngine(folder, device="cpu")
    await engine.start()
    limits = Limits(10, 16, 4000, 60.0, 60.0, 4000)
    policy = Policy(engine, make_renderer(packaged_tokenizer(4096)))
    spec = EpisodeSpec(1, "train", 3, 0, key="a")
    episode = asyncio.ensure_future(run_episode(Chat(), policy, spec, limits, compile_spec(CHAT_REWARD)))
    for version in (1, 2, 3):
        await until(partial(_held_amid_a_turn, engine, 30 * version))
        await publish(engine, version, weights[version])
    trajectory = await asyncio.wait_for(episode, 60)
    await engine.close()
    (ledger,) = trajectory.ledgers
    versions = ledger.versions[ledger.sampled]
    assert set(versions.tolist()) == {0, 1, 2, 3} and (versions[1:] >= versions[:-1]).all()
    assert len(trajectory.turns) == 10 and trajectory.stop == "max_turns"
    crossed = [t for t in range(10) if len(set(ledger.versions[ledger.sampled & (ledger.turns == t)])) > 1]
    assert crossed, "no turn was being sampled at an update"
    assert ledger_error(model, weights, ledger) < 1e-4
    for shift in (1, 2, 3):  # controls: every token under a version that did not sample it
        assert ledger_error(model, weights, ledger, shift=shift) > 0.05
