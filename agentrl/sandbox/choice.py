"""`env.sandbox.provider = "auto"`: the strongest of this machine's own sandboxes that a probe finds to work."""

from __future__ import annotations

import logging
from functools import cache

from agentrl.config.schema import SandboxConfig
from agentrl.sandbox import bubblewrap

log = logging.getLogger(__name__)

AUTO = "auto"


def settled(config: SandboxConfig) -> SandboxConfig:
    """The config with a provider in place of "auto": bubblewrap where it works and keeps all that docs/sandboxes.md says of it,
    else the local one, which is refused where the kernel has too little for it. With arguments it is the local one, whose they
    are."""
    if config.provider != AUTO:
        return config
    return config.model_copy(update={"provider": "local" if config.args else preferred()})


@cache
def preferred() -> str:
    """Asked of the machine once a process, and said once in the log."""
    reason = bubblewrap.unavailable() or bubblewrap.lacking()
    if reason is None:
        log.info('sandboxes: "bubblewrap", which works here; env.sandbox.provider = "local" chooses the other one')
        return bubblewrap.BubblewrapProvider.name
    log.info('sandboxes: "local" (no bubblewrap: %s)', reason)
    return "local"
