"""What a replica's process is started with: environment and arguments of vLLM, by the device that it runs on."""

from __future__ import annotations

from typing import Any

from agentrl.config.schema import VllmConfig
from agentrl.errors import ConfigError
from agentrl.processor import PASSIVE, SAID

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # V2 cannot run a processor after the temperature (logprobs.py)
}
CPU_ENVIRONMENT = {
    **PASSIVE,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiling kernels on first use takes 9 to 15 s and gains nothing for a small model.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process belongs to the engine anyway; halves the start time
}
PROCESSORS = tuple(f"agentrl.backends.vllm.logprobs:{name}" for name in ("BeforeTemperature", "AfterTemperature"))
OWN = {
    # Token ids go in and come out. A tokenizer here could only bring text back, which nobody may tokenize again.
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
    # None of vLLM's own modes reports log softmax(z / T) under truncation; see logprobs.py for how this one does.
    "logprobs_mode": "processed_logits",
    "logits_processors": list(PROCESSORS),
    "worker_extension_cls": "agentrl.backends.vllm.worker.WeightReceiver",
    "disable_log_stats": True,
}
"""Arguments that the replica relies on, on any device."""
UNUSED_IDS = "agentrl_unused_ids"
"""Key of vLLM's `additional_config` under which a worker finds the ids that are never drawn."""
GRAMMAR, BEFORE = "agentrl_grammar", "agentrl_before"
"""In a request's extra arguments: the grammar of its turn (logprobs.py), and how many tokens of the turn are in its prompt."""
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def environment(cuda: bool, threads: int = 1) -> dict[str, str]:
    """The environment variables of a replica's process. `threads`: that compute in it on a CPU."""
    return ENVIRONMENT if cuda else {**ENVIRONMENT, **CPU_ENVIRONMENT, SAID: str(threads)}


def engine_options(
    cfg: VllmConfig,
    *,
    cuda: bool,
    dtype: str,
    lora_rank: int | None = None,
    sleeps: bool = False,
    router_replay: bool = False,
) -> dict[str, Any]:
    """The arguments for vLLM's AsyncEngineArgs, but for the model; what is left out has vLLM's own default.

    `cuda`: whether the replicas run on GPUs; `sleeps`: whether their memory must be such that it can be freed; `router_replay`:
    whether they note which experts tokens go to. Raises
    ConfigError for sizes that vLLM cannot run with there.
    """
    options: dict[str, Any] = {
        **OWN,
        "dtype": dtype,
        "tensor_parallel_size": cfg.tensor_parallel,
        "max_model_len": cfg.max_model_len,
        "enforce_eager": not cuda if cfg.enforce_eager is None else cfg.enforce_eager,
        # vLLM's own Ray executor does not support CPUs, and a single process needs no executor.
        "distributed_executor_backend": "mp" if cfg.tensor_parallel > 1 else "uni",
    }
    if cfg.kv_cache_mib is not None:
        options["kv_cache_memory_bytes"] = cfg.kv_cache_mib << 20
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if (value := getattr(cfg, name)) is not None:
            options[name] = value
    if not cuda:
        options |= _cpu_options(cfg)
    if sleeps:
        options["enable_sleep_mode"] = True
    if lora_rank is not None:
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _max_lora_rank(lora_rank)}
    if router_replay:
        options["worker_extension_cls"] = "agentrl.backends.vllm.experts.ExpertReceiver"
    return {**options, **cfg.args}


def _cpu_options(cfg: VllmConfig) -> dict[str, Any]:
    batched = cfg.max_num_batched_tokens or max(cfg.max_model_len, 4096)
    if batched < cfg.max_model_len:
        raise ConfigError(
            f"vllm.max_num_batched_tokens = {batched}: on a CPU a prompt is computed in one step, which must hold "
            f"vllm.max_model_len = {cfg.max_model_len} tokens: set it to at least that"
        )
    return {
        # With chunked prefill, vLLM rewinds a request's seeded generator after each chunk; CPU generators do not support
        # that, and the engine's process crashes.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": batched,
        # Only whole blocks are cached: the CPU default of 128 tokens would never give a short prompt a prefix hit.
        "block_size": 32,
    }


def _max_lora_rank(rank: int) -> int:
    """The smallest rank that vLLM has kernels for and that is at least `rank`. Raises ConfigError if there is none."""
    for supported in _LORA_RANKS:
        if rank <= supported:
            return supported
    raise ConfigError(f"model.lora.rank = {rank}: vLLM supports adapters up to rank {_LORA_RANKS[-1]}")
