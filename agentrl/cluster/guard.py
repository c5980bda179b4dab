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
    "RAY_NODE_IP_ADDRESS": "127.0.0.1",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""What is pinned, each only where the user has not set any of them."""


def own_address() -> str | None:
    """The address this machine would use towards others; None where it has no route at all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))  # UDP connect sends nothing; it only picks a route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def routes_back(address: str, timeout: float = 1.0) -> bool:
    """Whether a TCP connection to our own `address` arrives."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        try:
            server.bind((address, 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=timeout):
                return True
        except OSError:
            return False


def guard_network(environ: MutableMapping[str, str] | None = None, *, multi_node: bool = False) -> str | None:
    """Pin NCCL, Gloo and Ray to loopback where this node's address does not route back to itself.

    Call before `import ray`. Does nothing on several nodes or where the user has set any of the variables.
    Returns the reason where it pinned, else None.
    """
    env = os.environ if environ is None else environ
    if multi_node or any(env.get(key) for key in LOOPBACK):
        return None
    address = own_address()
    if address is not None and routes_back(address):
        return None
    reason = (
        f"the address {address} does not route back to this machine"
        if address
        else "this machine has no network route"
    )
    env.update(LOOPBACK)
    log.warning("%s: pinned to loopback: %s", reason, ", ".join(f"{k}={v}" for k, v in LOOPBACK.items()))
    return reason
