"""The sandboxes' part of `agentrl doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.cluster.doctor import MACHINE_CHECKS, MachineFinding
from agentrl.contrib.sandboxes.local import WHAT_HELPS
from agentrl.contrib.sandboxes.sandbox_pool import preferred_provider, reach


@MACHINE_CHECKS.register("sandbox")
def check_sandbox() -> Iterator[MachineFinding]:
    """List the addresses that this machine's sandboxes reach. Environments refuse one that keeps less than docs/sandboxes.md
    says."""
    found = reach()
    if found.local is None or found.bubblewrap is None:
        yield MachineFinding("sandbox", "ok", f"{found.said()}; {preferred_provider()} is chosen")
    else:
        yield MachineFinding("sandbox", "warn", found.said(), f"environments that run code are refused: {WHAT_HELPS}")
