"""At which address other processes of the cluster reach this one, and through which network interface."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import MutableMapping

LOOPBACK_ADDRESS = "127.0.0.1"


def reachable_address() -> str:
    """This process's address for the other processes of the run: loopback if they are all on this machine, because it works
    even if the machine's own address does not route back (see guard.py); else the one under which Ray knows this node."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return LOOPBACK_ADDRESS
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK_ADDRESS if len(addresses) <= 1 else str(ray.util.get_node_ip_address())


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface that has an IPv4 address; None if none has it."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return str(name)
    return None


def pin_gloo(environ: MutableMapping[str, str] | None = None) -> None:
    """Make gloo listen on the interface of this node's address, if the user has named none.

    Left to itself it takes the address that the host name resolves to, and that is loopback on many machines: ranks on
    several nodes then wait for each other until they time out.
    """
    env = os.environ if environ is None else environ
    address = reachable_address()
    if env.get("GLOO_SOCKET_IFNAME") or address == LOOPBACK_ADDRESS:
        return
    interface = interface_of(address)
    if interface is not None:
        env["GLOO_SOCKET_IFNAME"] = interface
