"""The contract on the SGLang engine, with a stand-in of its server (tests/backends/sglang_stand_in)."""

import pytest
import pytest_asyncio
from contract import EngineContract
from engine_models import parameters

from agentrl.backends.sglang.engine import SglangEngine
from agentrl.config.schema import SglangConfig
from tests.backends.sglang_stand_in.server import StandIn
from tests.conftest import proof
from tests.publishing import publish

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def server(model_folder):
    with StandIn(model_folder) as server:
        yield server
        assert not server.refused


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(server, model_folder, tmp_path_factory):
    engine = SglangEngine(model_folder, SglangConfig(servers=[server.address]), folder=str(tmp_path_factory.mktemp("shared")))
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
    return 1e-5


@pytest.fixture
def context():
    return 2042


class TestSglang(EngineContract):
    # The stand-in draws as the embedded engine does, whose draws have a test of their own.
    test_draws_follow_the_renormalized_kept_set = proof(EngineContract.test_draws_follow_the_renormalized_kept_set)
