"""Experts of the embedded engine are those of a plain forward pass, whatever was cached or done again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.schema import Choice
from agentrl.contrib.moe.routers import RouterWatch
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.render import make_renderer
from agentrl.reward import compile_spec
from agentrl.rollout.context import make_context_policy
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ModelError
from tests import moe
from tests.engines.engine_models import CHAT_REWARD, Chat
from tests.publishing import publish
from tests.tiny_families import build_family

FAMILY = "glm4_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return moe.build(FAMILY, tmp_path_factory.mktemp("moe"))


@pytest_asyncio.fixture
async def engine(folder: str) -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(folder, kv_cache_mib=64, step_tokens=16, router_replay=True)
    await made.start()
    yield made
    await made.close()


def chosen(model: Any, ids: list[int]) -> Any:
    """By a plain forward pass, each token's experts in ascending order: [tokens, 1, 2]."""
    watch = RouterWatch(model)
    with torch.inference_mode(), watch.watching():
        model(torch.tensor([ids]), use_cache=False)
    return np.sort(watch.experts(), axis=-1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, moe.VOCAB, length).tolist()


def right(model: Any, prompt: list[int], answer: Generation, start: int = 0) -> bool:
    """The experts of an answer, told from a place of the prompt on, are those of a plain pass."""
    assert answer.experts is not None and answer.experts.dtype == np.uint8
    return np.array_equal(np.sort(answer.experts, -1), chosen(model, [*prompt, *answer.token_ids])[start:-1])


async def ask(engine: EmbeddedEngine, prompt: list[int], start: int | None, key: str = "a", tokens: int = 6) -> Generation:
    return await engine.generate(prompt, Sampling(tokens, seed=len(prompt), experts_from=start), key)


async def test_turns_of_an_episode_and_a_prefix_of_another(engine: EmbeddedEngine) -> None:
    """A prompt in chunks; the next turn from its own cache; another episode from the first one's."""
    model, prompt = moe.model(FAMILY), prompt_of(40)
    first = await ask(engine, prompt, 0)
    ids = [*prompt, *first.token_ids]
    assert right(model, prompt, first)
    longer = [*ids, *prompt_of(5, 1)]
    assert right(model, longer, await ask(engine, longer, len(ids) - 1), len(ids) - 1)
    other = [*prompt[:32], *prompt_of(4, 2)]
    before = (await engine.stats()).cached_tokens
    third = await ask(engine, other, 0, "b")
    assert (await engine.stats()).cached_tokens - before >= 32 and right(model, other, third)
    rewritten = [*prompt[:20], *prompt_of(10, 5)]
    assert right(model, rewritten, await ask(engine, rewritten, 0)), "a rewritten history has its own"
    assert (await ask(engine, prompt, None, "c")).experts is None


async def test_tokens_keep_the_experts_that_they_were_computed_with_first(engine: EmbeddedEngine) -> None:
    """New weights in the middle of a turn, which is computed again: what was sampled before was sampled with the old choices."""
    old, new = moe.model(FAMILY), moe.model(FAMILY)
    new.load_state_dict(moe.shaken(new.state_dict(), seed=1))
    prompt = prompt_of(20)
    running = asyncio.ensure_future(ask(engine, prompt, 0, tokens=200))
    while (progress := engine.progress("a")) is None or progress < 10:
        await asyncio.sleep(0)
    await publish(engine, 1, new.state_dict())
    answer = await running
    before = answer.versions.count(0)
    ids = [*prompt, *answer.token_ids]
    assert 10 <= before < 200 and answer.experts is not None
    told, computed = np.sort(answer.experts, -1), 20 + before - 1  # the last token of the old weights was computed by the new
    assert np.array_equal(told[:computed], chosen(old, ids)[:computed])
    assert np.array_equal(told[computed:], chosen(new, ids)[computed:-1])
    assert not np.array_equal(chosen(old, ids)[:computed], chosen(new, ids)[:computed])


async def test_an_episode_with_a_rewritten_history_has_those_of_all_its_ledgers(tmp_path: Path) -> None:
    """Eight turns in several ledgers: prompts, answers and what the user says between them."""
    folder = build_family(tmp_path, "qwen3_moe", tie_word_embeddings=False)
    engine = EmbeddedEngine(folder, kv_cache_mib=64, router_replay=True)
    await engine.start()
    recent = make_context_policy(Choice(name="keep_recent", args={"tokens": 120, "turns": 1}))
    policy = Policy(engine, make_renderer(packaged_tokenizer(512)), context=recent, router_replay=True)
    limits, spec = Limits(8, 16, 4000, 60.0, 60.0, 400), EpisodeSpec(1, "train", 3, 0, key="a")
    episode = await run_episode(Chat(), policy, spec, limits, compile_spec(CHAT_REWARD))
    greedy = await run_episode(Chat(), policy.at(0.0), spec, limits, compile_spec(CHAT_REWARD))
    await engine.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(episode.ledgers) > 1 and len(episode.turns) == 8
    for ledger in episode.ledgers:
        assert ledger.experts is not None and ledger.sampled[-1]
        assert np.array_equal(np.sort(ledger.experts, -1), chosen(model, ledger.ids())[:-1])
    assert all(ledger.experts is None for ledger in greedy.ledgers), "nothing is trained on a baseline"


@pytest.mark.parametrize("cache", [True, False])
async def test_a_routers_bias_stays_while_the_engine_sleeps(folder: str, cache: bool) -> None:
    """Only parameters are freed and allocated again; then all weights come, the bias too."""
    engine = EmbeddedEngine(folder, kv_cache_mib=64, cache=cache)
    await engine.start()
    before = await ask(engine, prompt_of(20), None)
    await engine.pause()
    await engine.sleep()
    await publish(engine, 1, moe.model(FAMILY).state_dict())
    after = await ask(engine, prompt_of(20), None, "b")
    await engine.close()
    assert after.token_ids == before.token_ids and after.logprobs == pytest.approx(before.logprobs, abs=1e-5)


async def test_a_dense_model_has_none(model_folder: str) -> None:
    engine = EmbeddedEngine(model_folder, kv_cache_mib=64, router_replay=True)
    with pytest.raises(ModelError, match="no routers to replay"):
        await engine.start()
