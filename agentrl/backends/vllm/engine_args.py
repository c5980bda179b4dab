"""The section `vllm.args`: any argument of the installed vLLM's AsyncEngineArgs, checked before a replica is started."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentrl.errors import ConfigError, hinted

ELSEWHERE = {
    "model": "model.path",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "max_model_len": "vllm.max_model_len",
    "tensor_parallel_size": "vllm.tensor_parallel",
    "pipeline_parallel_size": "vllm.tensor_parallel",
    "data_parallel_size": "vllm.replicas",
    "kv_cache_memory_bytes": "vllm.kv_cache_mib",
    "enforce_eager": "vllm.enforce_eager",
    "max_num_seqs": "vllm.max_num_seqs",
    "max_num_batched_tokens": "vllm.max_num_batched_tokens",
    "enable_sleep_mode": "rollout.colocate",
    "weight_transfer_config": "weights.route",
    "enable_lora": "weights.lora",
    "max_loras": "weights.lora",
    "max_lora_rank": "model.lora.rank",
}
"""Arguments that another key of the config sets."""
FIXED = {
    "worker_extension_cls": "weights are received through it",
    "logits_processors": "they make the log probabilities exact",
    "logprobs_mode": "it makes the log probabilities exact",
    "skip_tokenizer_init": "an engine here gets and gives token ids",
    "distributed_executor_backend": "it follows from vllm.tensor_parallel",
    "disable_log_stats": "the run's own metrics count the engine",
}
"""Arguments that cannot be chosen, each with the reason."""


def check_args(args: Mapping[str, Any], cuda: bool) -> None:
    """Raise ConfigError for a name that the installed vLLM does not have, a value of another type than it declares, and an
    argument that is not for `vllm.args`. Imports vLLM, which takes seconds, unless `args` is empty."""
    for name in args:
        if name in ELSEWHERE:
            raise ConfigError(f"vllm.args.{name}: set {ELSEWHERE[name]} instead")
        if name in FIXED:
            raise ConfigError(f"vllm.args.{name} cannot be set: {FIXED[name]}")
        if name == "enable_chunked_prefill" and not cuda:
            raise ConfigError("vllm.args.enable_chunked_prefill: vLLM's CPU build crashes with it if requests are seeded")
    if not args or importlib.util.find_spec("vllm") is None:  # if a run is only planned, vLLM may be missing
        return
    from vllm.engine.arg_utils import AsyncEngineArgs

    declared = {entry.name: entry.type for entry in dataclasses.fields(AsyncEngineArgs)}
    with contextlib.suppress(NameError):  # of a hint that is defined for type checkers only: then those in quotes are not checked
        declared |= typing.get_type_hints(AsyncEngineArgs)
    for name, value in args.items():
        if name not in declared:
            raise ConfigError(f"vllm.args.{name}: vLLM {_version()} has no such argument{hinted(name, declared)}")
        _check_type(name, value, declared[name])
        if name == "gpu_memory_utilization" and not 0 < value <= 1:
            raise ConfigError(f"vllm.args.{name} = {value:g}: a fraction of a GPU's memory is expected, above 0 and at most 1")


def _check_type(name: str, value: Any, hint: Any) -> None:
    if not _plain(hint):
        return  # vLLM builds a config of its own from it, and says itself what is wrong there
    try:
        TypeAdapter(hint, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as problem:
        wanted = getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint).replace("typing.", "")
        reason = "; ".join(dict.fromkeys(error["msg"] for error in problem.errors()))
        raise ConfigError(f"vllm.args.{name} = {value!r}: vLLM expects {wanted}: {reason}") from None


def _plain(hint: Any) -> bool:
    """Whether values of this type are written as such in a config."""
    if hint in (bool, int, float, str, dict, list, Any, type(None)) or typing.get_origin(hint) is typing.Literal:
        return True
    parts = typing.get_args(hint)
    return bool(parts) and typing.get_origin(hint) is not type and all(_plain(part) for part in parts)


def _version() -> str:
    import vllm

    return str(vllm.__version__)
