"""Run vLLM's replica in the process of a run instead of a Ray actor, so that many short runs do not import vLLM thrice each.

The rest is as in any run: agentrl's engine, actor and worker extension, and vLLM's engine in a forked child process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


def prepare() -> None:
    """Import vLLM once for all children. Call it before any thread starts."""
    from agentrl.engines.vllm.options import environment

    os.environ.update({**environment(False), "VLLM_WORKER_MULTIPROC_METHOD": "fork"})
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401


class Local:
    """Substitute for the handle of a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)

        def stream(*args: Any) -> AsyncIterator[Any]:
            return _parts(method(*args))

        return SimpleNamespace(
            remote=lambda *args: asyncio.ensure_future(method(*args)), options=lambda **_: SimpleNamespace(remote=stream)
        )


async def _parts(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for part in results:
        future = asyncio.get_running_loop().create_future()
        future.set_result(part)
        yield future


@contextmanager
def in_process() -> Iterator[None]:
    """Start replicas inside the context in this process, without Ray."""
    from agentrl.engines.vllm import replicas
    from agentrl.engines.vllm import vllm_engine as engine
    from agentrl.engines.vllm import vllm_engine as weight_sync
    from agentrl.engines.vllm.replica_actor import VllmActor
    from agentrl.engines.vllm.replica_calls import RequestBatcher
    from agentrl.run import session

    ray = SimpleNamespace(is_initialized=lambda: True, kill=lambda actor: None, put=lambda data: data, ObjectRef=object)

    def spawn(self: Any, number: int, placed: Any = None) -> Any:
        actor = Local(VllmActor(self._options))
        return replicas.Replica(number, actor, RequestBatcher(actor))

    with (
        patch.object(engine, "ray", ray),
        patch.object(replicas, "ray", ray),
        patch.object(weight_sync, "ray", ray),
        patch.object(replicas.Replicas, "_spawn", spawn),
        patch.object(session, "needs_ray", lambda config: False),
    ):
        yield
