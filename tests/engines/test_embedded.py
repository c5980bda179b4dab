import asyncio
import time

import pytest
import pytest_asyncio
import torch
from contract import EngineContract, off, prompt_of
from engine_models import build_model, changed, forward_logprobs, load, parameters

from agentrl.backends.embedded import EmbeddedEngine
from agentrl.errors import EngineError, ModelError, ResourceError
from agentrl.rollout.engine import Sampling

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def engine(model_folder):
    engine = EmbeddedEngine(model_folder, device="cpu", max_slots=96)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def tolerance():
    return 1e-5


@pytest.fixture
def context():
    return 2048


class TestEmbedded(EngineContract):
    pass
