"""Run the commands of a policy in sandboxes; `contract` defines the interface."""

from agentrl.contrib.sandboxes.contract import SANDBOXES, ExecResult, FileInfo, Sandbox, SandboxProvider, SandboxSpec
from agentrl.contrib.sandboxes.sandbox_pool import HeldSandbox, SandboxPool, pool_of, provider_of, require, sandbox_config

__all__ = [
    "SANDBOXES", "ExecResult", "FileInfo", "HeldSandbox", "Sandbox", "SandboxPool", "SandboxProvider", "SandboxSpec",
    "pool_of", "provider_of", "require", "sandbox_config",
]  # fmt: skip
