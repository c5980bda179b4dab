"""Sandboxes run the commands of a policy; `agentrl.env.sandbox` has the contract."""

from agentrl.contrib.sandboxes.sandbox_pool import (
    HeldSandbox,
    SandboxPool,
    close_pools,
    pool_of,
    provider_of,
    require,
    sandbox_config,
)
from agentrl.env.sandbox import (
    SANDBOXES,
    ExecResult,
    FileInfo,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
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
