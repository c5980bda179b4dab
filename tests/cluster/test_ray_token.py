"""Who connects to a local Ray needs its token. Ray listens on every interface."""

import os
import subprocess
import sys

import pytest

from agentrl.cluster import ray_cluster as runtime
from agentrl.cluster.doctor import _reachable
from agentrl.config.schema import ClusterConfig
from tests.conftest import proof


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({}, True),
        ({"RAY_AUTH_MODE": "token"}, True),
        ({"RAY_AUTH_MODE": "disabled"}, False),
        ({"RAY_AUTH_TOKEN_PATH": "/x"}, False),
    ],
)
def test_a_token_is_made_unless_the_user_has_one_or_wants_none(
    given: dict[str, str], made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    runtime.own_token()
    token = os.environ.pop("RAY_AUTH_TOKEN", "")
    assert len(token) == (64 if made else 0)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    runtime.own_token()
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"


def test_doctor_warns_of_open_ports_that_need_no_token() -> None:
    found = {(ports, token): _reachable(["0.0.0.0:1 gcs"] * ports, token) for ports in (0, 1) for token in (False, True)}
    assert {key: one.level for key, one in found.items() if one.level != "ok"} == {(1, False): "warn"}
    assert "0.0.0.0:1 gcs" in found[1, False].found and "firewall" in found[1, False].advice


JOIN = "import ray; ray.init(address='{}', logging_level=40, log_to_driver=False); print('JOINED')"


@proof
def test_who_has_no_token_does_not_come_in() -> None:
    runtime.start_ray(ClusterConfig())
    try:
        import ray

        assert runtime.asks_for_token()
        assert any("gcs_server" in port for port in runtime.open_ports())
        address = ray.get_runtime_context().gcs_address
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        for env, joins in (({**plain, "HOME": "/nonexistent"}, False), ({**plain, "RAY_AUTH_MODE": "token",
                           "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]}, True)):  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-c", JOIN.format(address)], env=env, capture_output=True, text=True, timeout=120
            )
            assert ("JOINED" in done.stdout) is joins, done.stderr[-500:]
    finally:
        runtime.stop_ray()


def test_the_connection_by_which_a_run_asked_for_nodes_is_the_run_s_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks before the run leaves the connection to it; one that was there before all is nobody's to close."""
    import ray

    joined: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(joined))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(ray, "shutdown", joined.clear)
    monkeypatch.setattr(runtime, "check_join", lambda *words: None)
    monkeypatch.setattr(runtime, "guard_network", lambda multi_node: None)
    monkeypatch.setattr(runtime, "_init", lambda address, options: joined.append(str(address)))
    cluster = ClusterConfig(address="10.0.0.1:6379")
    runtime.join_to_ask(cluster)
    assert joined == ["10.0.0.1:6379"]
    assert runtime.start_ray(cluster) and not runtime.start_ray(cluster), "the first run alone closes it"
    runtime.stop_ray()
    assert not joined and runtime.start_ray(cluster)
    runtime.join_to_ask(cluster)  # of a connection that has its owner
    assert len(joined) == 1 and not runtime.start_ray(cluster)
    runtime.stop_asking()
    assert joined, "it has its owner"
    runtime.stop_ray()
    runtime.join_to_ask(cluster)
    runtime.stop_asking()
    assert not joined, "no run went on with it"
