"""At which address the others are told to come: never loopback once the cluster has two machines."""

import logging
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster import machine as address
from agentrl.cluster.machine import _listeners, open_rendezvous


def ray_of(nodes: list[tuple[str, bool]], own: str) -> Any:
    """A stand-in for ray: its nodes as (address, alive), and the address of this one."""
    listed = [{"NodeManagerAddress": where, "Alive": alive} for where, alive in nodes]
    util = SimpleNamespace(get_node_ip_address=lambda: own)
    return SimpleNamespace(is_initialized=lambda: bool(nodes), nodes=lambda: listed, util=util)


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([], "127.0.0.1"),  # no Ray
        ([("10.0.0.1", True)], "127.0.0.1"),  # one machine: its own address need not route back
        ([("10.0.0.1", True), ("10.0.0.1", True)], "127.0.0.1"),  # two Ray nodes on it
        ([("10.0.0.1", True), ("10.0.0.2", False)], "127.0.0.1"),  # the other one is gone
        ([("10.0.0.1", True), ("10.0.0.2", True)], "10.0.0.1"),
    ],
)
def test_a_process_tells_its_nodes_address_if_there_are_others(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[str, bool]], told: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_of(nodes, "10.0.0.1"))
    assert address.reachable_address() == told


def test_gloo_listens_on_the_interface_of_that_address_unless_the_user_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lo, eth7 = (SimpleNamespace(family=socket.AF_INET, address=at) for at in ("127.0.0.1", "10.0.0.1"))
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: {"lo": [lo], "eth7": [eth7], "eth9": [eth7]})
    monkeypatch.setitem(sys.modules, "ray", ray_of([("10.0.0.1", True), ("10.0.0.2", True)], "10.0.0.1"))
    for before, after in [("", "eth7"), ("ib0", "ib0")]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", before)
        address.pin_gloo()
        assert os.environ["GLOO_SOCKET_IFNAME"] == after
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: {"lo": [lo]})  # no interface has it
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    address.pin_gloo()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setitem(sys.modules, "ray", ray_of([("10.0.0.1", True)], "10.0.0.1"))
    address.pin_gloo()
    assert os.environ["GLOO_SOCKET_IFNAME"] == ""


@pytest.mark.parametrize(("host", "bound", "warned"), [("127.0.0.1", "127.0.0.1", False), ("192.0.2.1", "0.0.0.0", True)])
def test_it_listens_at_the_announced_address_alone_if_that_is_its_own(
    host: str, bound: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        place = open_rendezvous(host)
    with socket.socket(fileno=_listeners.pop(place).detach()) as found:
        assert found.getsockname() == (bound, place.port) and place.host == host
    assert any("listens on all interfaces" in row.message for row in caplog.records) is warned
