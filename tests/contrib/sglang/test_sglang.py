"""The contract on the SGLang engine, with a stand-in of its server (tests/contrib/sglang/sglang_stand_in), or with a real one.

    AGENTRL_SGLANG=http://127.0.0.1:30000 python -m pytest tests/contrib/sglang/test_sglang.py

A real server serves `engine_models.build_model(FOLDER)`, in float32 and with room for 16384 tokens; it gets the weights of the
tests from this process. If it does not draw with seeds, the tests that need them are skipped.
"""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import httpx
import pytest
import pytest_asyncio

from agentrl.config.schema import SglangConfig
from agentrl.contrib.sglang.engine import SglangEngine
from agentrl.contrib.sglang.servers import SERVER
from tests.conftest import proof
from tests.contrib.sglang.sglang_stand_in.server import StandIn
from tests.engines.contract import EngineContract
from tests.engines.engine_models import parameters
from tests.publishing import publish

pytestmark = pytest.mark.asyncio(loop_scope="module")
REAL = os.environ.get("AGENTRL_SGLANG")
SEEDS = REAL is None or bool(httpx.get(REAL + SERVER).json()["enable_deterministic_inference"])
seeded = pytest.mark.skipif(not SEEDS, reason="the server does not draw with seeds (--enable-deterministic-inference)")


@pytest.fixture(scope="module")
def server(model_folder):
    with StandIn(model_folder) if REAL is None else nullcontext(SimpleNamespace(address=REAL, refused=[])) as server:
        yield server
        assert not server.refused


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(server, model_folder, tmp_path_factory):
    cfg = SglangConfig(servers=[server.address], seeds=SEEDS)
    engine = SglangEngine(model_folder, cfg, folder=str(tmp_path_factory.mktemp("shared")))
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(running, model):
    """The one engine of this module with the model's own weights."""
    version = (await running.stats()).version
    await publish(running, version + 1, parameters(model))
    return running


class TestSglang(EngineContract):
    both, tolerance, context = False, 1e-5 if REAL is None else 1e-3, 2042
    # The stand-in draws as the embedded engine does, whose draws have a test of their own.
    test_draws_follow_the_renormalized_kept_set = proof(EngineContract.test_draws_follow_the_renormalized_kept_set)
    # It waits for seconds.
    test_progress_counts_the_tokens_of_a_request = proof(EngineContract.test_progress_counts_the_tokens_of_a_request)
    test_a_stop_token_is_the_last_id = seeded(EngineContract.test_a_stop_token_is_the_last_id)
    test_a_seed_fixes_the_sample_whatever_else_runs = seeded(EngineContract.test_a_seed_fixes_the_sample_whatever_else_runs)
