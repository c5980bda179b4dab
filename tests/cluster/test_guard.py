"""The network guard, also in a network namespace whose own address does not route back; the address that others come to."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster import machine
from agentrl.cluster.machine import _listeners, open_rendezvous
from tests.conftest import proof

NAMESPACE = """
set -e
ip link set lo up
ip link add inside type veth peer name outside
ip addr add 10.9.8.7/24 dev inside
ip link set inside up
ip link set outside up
ip route add default via 10.9.8.1
{break_it}
exec "$@"
"""
PROBE = "from agentrl.cluster.machine import *; print(own_address(), routes_back(own_address()), guard_network() or '')"
RUN = """
import os
from agentrl.cluster.launch import launch
from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig
from collective_worker import Adding
start_ray(ClusterConfig(), object_store_bytes=128 << 20)
import ray
with launch(Adding, world_size=2, num_cpus=0.5) as group:
    print("RESULT", ray.util.get_node_ip_address(), group.run_all(Adding.total, 1.0), os.environ["GLOO_SOCKET_IFNAME"])
stop_ray()
"""


def in_namespace(code: str, broken: bool, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run Python code in a network namespace of its own; skips, with the reason, if none can be made."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs the programs unshare and ip (iproute2)")
    trial = subprocess.run(
        ["unshare", "--net", "sh", "-c", NAMESPACE.format(break_it=""), "sh", "true"], capture_output=True, text=True
    )
    if trial.returncode != 0:
        pytest.skip(f"cannot make a network namespace with a veth pair: {trial.stderr.strip()} (needs root)")
    env = {key: value for key, value in os.environ.items() if key not in machine.LOOPBACK}
    env["PYTHONPATH"] = str(Path(__file__).parent)
    script = NAMESPACE.format(break_it="ip route del local 10.9.8.7 dev inside table local" if broken else "")
    command = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, "-c", code]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # Ray's processes too
        out, err = process.communicate()
        pytest.fail(f"no answer in {timeout} s: {err[-3000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_a_namespace_that_does_not_route_back_is_pinned_and_logged():
    assert in_namespace(PROBE, broken=False).stdout.split() == ["10.9.8.7", "True"]
    done = in_namespace(PROBE, broken=True)
    assert done.stdout.strip() == "10.9.8.7 False the address 10.9.8.7 does not route back to this machine"
    assert "pinned to loopback" in done.stderr and "GLOO_SOCKET_IFNAME=lo" in done.stderr


@proof
def test_a_run_works_in_that_namespace():
    done = in_namespace(RUN, broken=True, timeout=200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines == ["RESULT 127.0.0.2 [3.0, 3.0] lo"], done.stderr[-3000:]


def test_nothing_that_is_set_is_overridden(monkeypatch):
    monkeypatch.setattr(machine, "network_fault", lambda: "broken")
    for name in machine.LOOPBACK:
        monkeypatch.setenv(name, "")
    assert machine.guard_network(multi_node=True) is None and os.environ["NCCL_SOCKET_IFNAME"] == ""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert machine.guard_network() is None
    assert {name: os.environ[name] for name in machine.LOOPBACK if os.environ[name]} == {"NCCL_SOCKET_IFNAME": "eth7"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    assert machine.guard_network() == "broken" and machine.LOOPBACK.items() <= os.environ.items()


def test_an_address_that_is_not_ours_does_not_route_back():
    assert machine.routes_back("127.0.0.1") and not machine.routes_back("203.0.113.9", timeout=0.2)


# -- the address that others come to ---------------------------------------------------


def ray_of(nodes: list[tuple[str, bool]], own: str) -> Any:
    """A stand-in for ray: its nodes as (address, alive), and the address of this one."""
    listed = [{"NodeManagerAddress": where, "Alive": alive} for where, alive in nodes]
    util = SimpleNamespace(get_node_ip_address=lambda: own)
    return SimpleNamespace(is_initialized=lambda: bool(nodes), nodes=lambda: listed, util=util)


@pytest.mark.parametrize(("nodes", "told"), [
    ([], "127.0.0.1"),  # no Ray
    ([("10.0.0.1", True)], "127.0.0.1"),  # one machine: its own address need not route back
    ([("10.0.0.1", True), ("10.0.0.1", True)], "127.0.0.1"),  # two Ray nodes on it
    ([("10.0.0.1", True), ("10.0.0.2", False)], "127.0.0.1"),  # the other one is gone
    ([("10.0.0.1", True), ("10.0.0.2", True)], "10.0.0.1"),
])  # fmt: skip
def test_a_process_tells_its_nodes_address_if_there_are_others(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[str, bool]], told: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_of(nodes, "10.0.0.1"))
    assert machine.reachable_address() == told


def test_gloo_listens_on_the_interface_of_that_address_unless_the_user_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lo, eth7 = (SimpleNamespace(family=socket.AF_INET, address=at) for at in ("127.0.0.1", "10.0.0.1"))
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: {"lo": [lo], "eth7": [eth7], "eth9": [eth7]})
    monkeypatch.setitem(sys.modules, "ray", ray_of([("10.0.0.1", True), ("10.0.0.2", True)], "10.0.0.1"))
    for before, after in [("", "eth7"), ("ib0", "ib0")]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", before)
        machine.pin_gloo()
        assert os.environ["GLOO_SOCKET_IFNAME"] == after
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: {"lo": [lo]})  # no interface has it
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    machine.pin_gloo()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setitem(sys.modules, "ray", ray_of([("10.0.0.1", True)], "10.0.0.1"))
    machine.pin_gloo()
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
