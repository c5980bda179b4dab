"""The contract on real vLLM without what 0.26 to 0.31 lack: it does not say which weights sampled a token (`make proofs`)."""

import os

import pytest
import pytest_asyncio

from tests.engines.contract import EngineContract
from tests.engines.engine_models import parameters
from tests.engines.vllm_parts import CONTEXT, running_vllm, skip_without_vllm
from tests.older_vllm import OlderVllm
from tests.publishing import publish

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

if not os.environ.get("AGENTRL_PROOFS"):
    pytest.skip("a minute beside test_vllm.py, which runs the same on vLLM as it is: make proofs", allow_module_level=True)
skip_without_vllm()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.engines.vllm.replicas.VllmActor", OlderVllm)
        async with running_vllm(model_folder) as engine:
            yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(running, model):
    await publish(running, (await running.stats()).version + 1, parameters(model))
    return running


@pytest.fixture
def tolerance():
    return 1e-3


@pytest.fixture
def context():
    return CONTEXT


class TestOlderVllm(EngineContract):
    pass
