"""The experts that vLLM tells: those of a plain forward pass over the same ids, through prefix caches, batches and a publish."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from agentrl.config.schema import VllmConfig
from agentrl.engines.vllm.vllm_engine import VllmEngine
from agentrl.engines.weights.parameters import Saving
from agentrl.rollout.engine import Generation, Sampling
from tests import moe
from tests.conftest import proof
from tests.contrib.moe.test_embedded import chosen, prompt_of, right
from tests.engines.vllm_parts import SLOW_START, skip_without_vllm
from tests.publishing import publish

pytestmark = [SLOW_START, pytest.mark.slow, pytest.mark.asyncio, proof]

skip_without_vllm()


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_moe", 1), ("glm4_moe", 1), ("granitemoe", 2)])
async def test_experts_are_those_of_a_plain_pass(family: str, ranks: int, tmp_path: Path) -> None:
    """Layers without a router among them (GLM-4-MoE's first), and two tensor-parallel ranks."""
    cfg = VllmConfig(kv_cache_mib=64, max_model_len=512, max_respawns=0, tensor_parallel=ranks)
    engine = VllmEngine(moe.build(family, tmp_path), cfg, router_replay=True)
    await engine.start()
    old, new = moe.model(family), moe.model(family)
    new.load_state_dict(moe.shaken(new.state_dict(), seed=1))

    async def ask(prompt: list[int], start: int | None, key: str = "a", tokens: int = 6) -> Generation:
        return await engine.generate(prompt, Sampling(tokens, seed=len(prompt), experts_from=start), key)

    try:
        prompt = prompt_of(70)
        first = await ask(prompt, 0)
        assert right(old, prompt, first)
        longer = [*prompt, *first.token_ids, *prompt_of(5, 1)]
        assert right(old, longer, await ask(longer, 75), 75), "the next turn, from its cache"
        other = [*prompt[:64], *prompt_of(4, 2)]
        assert right(old, other, await ask(other, 0, "b")), "two blocks of another episode's cache"
        prompts = [prompt_of(20 + number, number) for number in range(12)]
        answers = await asyncio.gather(*(ask(each, 0, f"c{number}", 20) for number, each in enumerate(prompts)))
        assert all(right(old, each, answer) for each, answer in zip(prompts, answers, strict=True)), "batched"
        assert (await ask(prompt, None)).experts is None

        done = (await engine.stats()).sampled_tokens
        running = asyncio.ensure_future(ask(prompt_of(20, 9), 0, "d", 400))
        while (await engine.stats()).sampled_tokens < done + 10:
            await asyncio.sleep(0)
        await engine.pause()
        await publish(engine, 1, dict(Saving(new).tensors(iter(new.state_dict().items()))))
        answer = await running
        ids, before = [*prompt_of(20, 9), *answer.token_ids], answer.versions.count(0)
        told, computed = np.sort(answer.experts, -1), 20 + before - 1
        assert 10 <= before < 400
        assert np.array_equal(told[:computed], chosen(old, ids)[:computed]), "as they were computed first"
        assert np.array_equal(told[computed:], chosen(new, ids)[computed:-1])
    finally:
        await engine.close()
