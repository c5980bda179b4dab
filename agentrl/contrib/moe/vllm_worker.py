"""Record the experts of each token in vLLM's worker processes, for router replay.

vLLM 0.32's option for this (`enable_return_routed_experts`) needs its second model runner, which cannot return the log
probabilities of truncated sampling (logprobs.py). Only its capturer is used here, which writes the choices of a step to a
buffer, also in CUDA graphs. The requests and tokens of the step are then read from the runner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm_capturer
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from agentrl.contrib.moe.routers import Computed, ExpertLog
from agentrl.data.expert_routing import narrow
from agentrl.engines.vllm.replica_actor import EXPERTS_KEY
from agentrl.engines.vllm.vllm_worker import WeightReceiver

Plain = tuple[bytes, list[int], str]


class _Watched:
    """Model runner whose steps are recorded. `group`: KV cache group whose blocks locate the tokens."""

    def __init__(self, runner: Any, kv_cache_config: Any) -> None:
        full = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in kv_cache_config.kv_cache_groups]
        if True not in full:
            raise ValueError("rollout.router_replay: no layer of this model keeps all tokens in its KV cache; set it to false")
        self._group = full.index(True)
        self._block = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        model = runner.get_model()
        self._capturer = vllm_capturer.RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        vllm_capturer.bind_routed_experts_capturer(model, self._capturer)
        self._layers = sorted({module.layer_id for module in model.modules() if isinstance(module, MoERunner)})
        # vLLM's own is uint8 up to 256 experts, which leaves no number for "none".
        self._kind = np.uint8 if narrow(runner.model_config.get_num_experts()) == torch.uint8 else np.int16
        self.log = ExpertLog(kv_cache_config.num_blocks * self._block)
        self._runner, self.step = runner, runner.execute_model
        self._copied: tuple[list[Computed], torch.Tensor, Any] | None = None
        self.first = get_tp_group().is_first_rank  # all ranks make the same choices
        if self.first:
            runner.execute_model = self.execute_model

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        self.log.end(sorted(scheduler_output.finished_req_ids))
        out = self.step(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            # Requests in the order of their tokens in the step
            batch, step = self._runner.input_batch, []
            for row, name in enumerate(batch.req_ids):
                if name not in scheduler_output.num_scheduled_tokens:
                    continue
                state, start = self._runner.requests[name], int(batch.num_computed_tokens_cpu[row])
                stop = start + scheduler_output.num_scheduled_tokens[name]
                blocks = np.asarray(state.block_ids[self._group][: -(-stop // self._block)], dtype=np.int64)
                slots = (blocks[:, None] * self._block + np.arange(self._block)).reshape(-1)[:stop]
                asked = bool((getattr(state.sampling_params, "extra_args", None) or {}).get(EXPERTS_KEY))
                step.append(Computed(name, start, scheduler_output.num_scheduled_tokens[name], slots, asked))
            # Copy without waiting, which would block the host until the step is computed. The next step runs after the copy.
            rows, done = self._capturer.snapshot_routing_data(sum(part.count for part in step)), None
            if rows.device.type == "cuda":
                host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
                host.copy_(rows, non_blocking=True)
                rows, done = host, torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
            self._copied = (step, rows, done)
        return out

    def settle(self) -> None:
        """Add the last step to the log once its copy is complete."""
        if self._copied is None:
            return
        step, rows, done = self._copied
        self._copied = None
        if done is not None:
            done.synchronize()
        self.log.add(step, rows.numpy()[:, self._layers].astype(self._kind))


class ExpertReceiver(WeightReceiver):
    """Mixin of vLLM's worker in place of WeightReceiver."""

    def agentrl_experts(self, request: str, start: int, stop: int) -> Plain | None:
        """Return a request's choices as bytes, shape and type; None if this worker does not know them."""
        watched: _Watched = self.model_runner.agentrl_watched
        if not watched.first:
            return None
        watched.settle()
        rows = watched.log.take(request, start, stop)
        return None if rows is None else (rows.tobytes(), list(rows.shape), str(rows.dtype))


_initialize = GPUModelRunner.initialize_kv_cache


def initialize_kv_cache(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Initialize vLLM's KV cache, then watch the runner. This is the only hook in a worker before vLLM captures CUDA graphs,
    which replay the layers as captured."""
    out = _initialize(runner, kv_cache_config, *args, **kwargs)
    if hasattr(runner, "agentrl_watched"):  # vLLM first makes a small cache, to measure the memory of graphs
        runner.execute_model = runner.agentrl_watched.step
    runner.agentrl_watched = _Watched(runner, kv_cache_config)
    return out


GPUModelRunner.initialize_kv_cache = initialize_kv_cache  # only vLLM's workers import this module, for ExpertReceiver
