"""Sandboxes: where commands run that a policy wrote; see base.py."""

from agentrl.sandbox.base import (
    SANDBOXES,
    ExecResult,
    FileInfo,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
)
from agentrl.sandbox.sandbox_pool import (
    HeldSandbox,
    SandboxPool,
    close_pools,
    pool_of,
    provider_of,
    require,
    sandbox_config,
)

__all__ = [
    "SANDBOXES",
    "ExecResult",
    "FileInfo",
    "HeldSandbox",
    "Sandbox",
    "SandboxPool",
    "SandboxProvider",
    "SandboxSpec",
    "close_pools",
    "pool_of",
    "provider_of",
    "require",
    "sandbox_config",
]
