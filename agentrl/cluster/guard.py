"""Network guard: on a machine whose own address does not route back to itself, stay on loopback."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "AGENTRL_NODE_IP": "127.0.0.2",
}
"""Variables that are pinned if the user has set none of them. AGENTRL_NODE_IP is the address that `start_ray`
passes to Ray, which does not read one from the environment. It is 127.0.0.2, because Ray replaces 127.0.0.1 with
the very address that does not work; the whole of 127.0.0.0/8 is loopback."""


def own_address() -> str | None:
    """The address from which this machine would reach others; None if it has no route at all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))  # connecting UDP sends nothing; it only picks a route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def routes_back(address: str, timeout: float = 1.0) -> bool:
    """Whether a TCP connection to our own `address` arrives within `timeout` seconds."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        try:
            server.bind((address, 0))
            server.listen(1)
            # The kernel completes the handshake without an accept. The timeout is for firewalls that drop packets without a
            # word: they would hold up each start for minutes.
            with socket.create_connection(server.getsockname(), timeout=timeout):
                return True
        except OSError:
            return False


def network_fault() -> str | None:
    """Why this machine cannot reach itself at its own address; None if it can."""
    address = own_address()
    if address is None:
        return "this machine has no network route"
    return None if routes_back(address) else f"the address {address} does not route back to this machine"


def guard_network(environ: MutableMapping[str, str] | None = None, *, multi_node: bool = False) -> str | None:
    """Pin NCCL, Gloo, vLLM and Ray to loopback if this node cannot reach itself, and log a warning.

    Call before `import ray`. Does nothing on several nodes, or if the user has set any of the variables.
    Returns the reason if it pinned them, else None.
    """
    env = os.environ if environ is None else environ
    # Loopback would cut this node off from the others; and who has set one of the variables knows this network better.
    if multi_node or any(env.get(key) for key in LOOPBACK):
        return None
    fault = network_fault()
    if fault is None:
        return None
    env.update(LOOPBACK)
    log.warning("%s: pinned to loopback: %s", fault, ", ".join(f"{k}={v}" for k, v in LOOPBACK.items()))
    return fault
