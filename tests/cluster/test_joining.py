"""A cluster that cannot be joined is named in seconds; test_two_nodes.py asks a real head with a real token."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agentrl.cluster import ray_cluster
from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig
from agentrl.contrib.doctor.machine_checks import _reachable
from agentrl.utils.errors import ResourceError
from tests.conftest import proof


@pytest.fixture
def port() -> Iterator[tuple[socket.socket, str]]:
    stop_ray()  # of an earlier file of this process, which would be gone on with
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken, f"127.0.0.1:{taken.getsockname()[1]}"


FORM = r"^cluster.address = '{}': expected the head as .HOST:PORT.*or .auto"


@pytest.mark.parametrize(("address", "variable", "said"), [
    (
        "127.0.0.1:{port}",
        None,
        r"^cluster.address = '127.0.0.1:{port}': nothing answers there .*ray start --head --port={port};",
    ),
    ("127.0.0.1:1", "127.0.0.1:{port}", r"^cluster.address = '127.0.0.1:1': nothing answers"),
    (
        "",
        "127.0.0.1:{port}",
        r"^RAY_ADDRESS = '127.0.0.1:{port}' \(of the environment; unset it to run on this machine alone\): nothing answers",
    ),
    ("ray://127.0.0.1:{port}", None, "nothing answers there"),  # Ray itself takes half a minute
    ("auto", "127.0.0.1:{port}", r"^cluster.address = '[0-9.]+:{port}': nothing answers there"),  # as Ray finds it
    *((wrong, None, FORM.format(wrong)) for wrong in ("head", "10.0.0.1", "head:", "http://head:port")),
])  # fmt: skip
def test_an_address_at_which_no_head_can_be_is_refused_at_once(
    port: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch, address: str, variable: str | None, said: str
) -> None:
    number = port[1].rpartition(":")[2]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable.format(port=number))
    began = time.monotonic()
    with pytest.raises(ResourceError, match=said.format(port=number)):
        start_ray(ClusterConfig(address=address.format(port=number)))
    assert time.monotonic() - began < ray_cluster.REACH_S + 2  # Ray itself takes a minute


def test_what_listens_but_is_no_head_is_given_up(port: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch) -> None:
    port[0].listen()
    monkeypatch.setattr(ray_cluster, "ANSWER_S", 0.2)
    with pytest.raises(ResourceError, match=r"did not answer as a Ray head within 0\.2 s"):
        ray_cluster.check_join(port[1])


@pytest.mark.parametrize(("env", "said"), [
    ({}, "RAY_AUTH_MODE is not set, the token would come from ~/.ray/auth_token"),
    ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}, "RAY_AUTH_MODE is token, RAY_AUTH_TOKEN is set"),
    ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": "f"}, "RAY_AUTH_MODE is disabled, RAY_AUTH_TOKEN_PATH is set"),
])  # fmt: skip
def test_a_refused_token_says_where_it_came_from(
    port: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    port[0].listen()
    for key in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(key, raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(ray_cluster, "PROBE", "import sys; sys.exit('ray.exceptions.AuthenticationError: InvalidAuthToken')")
    with pytest.raises(ResourceError) as caught:
        ray_cluster.check_join(port[1])
    assert said in str(caught.value) and "x" not in str(caught.value).split("RAY_AUTH_TOKEN is set")[0].split()


def test_auto_without_a_cluster_says_how_to_plan_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    with pytest.raises(
        ResourceError, match=r"'auto': no Ray runs on this machine.*--address=HEAD:6379.*--dry-run --gpu-memory GIB --nodes 4x8"
    ):
        ray_cluster.check_join("auto")


# -- the token of a local Ray, which listens on every interface ------------------------------------


@pytest.mark.parametrize(("given", "made"), [
    ({}, True),
    ({"RAY_AUTH_MODE": "token"}, True),
    ({"RAY_AUTH_MODE": "disabled"}, False),
    ({"RAY_AUTH_TOKEN_PATH": "/x"}, False),
])  # fmt: skip
def test_a_token_is_made_unless_the_user_has_one_or_wants_none(
    given: dict[str, str], made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ray_cluster.create_token()
    token = os.environ.pop("RAY_AUTH_TOKEN", "")
    assert len(token) == (64 if made else 0)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    ray_cluster.create_token()
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"


def test_doctor_warns_of_open_ports_that_need_no_token() -> None:
    found = {(ports, token): _reachable(["0.0.0.0:1 gcs"] * ports, token) for ports in (0, 1) for token in (False, True)}
    assert {key: one.level for key, one in found.items() if one.level != "ok"} == {(1, False): "warn"}
    assert "0.0.0.0:1 gcs" in found[1, False].found and "firewall" in found[1, False].advice


JOIN = "import ray; ray.init(address='{}', logging_level=40, log_to_driver=False); print('JOINED')"


@proof
def test_who_has_no_token_does_not_come_in() -> None:
    ray_cluster.start_ray(ClusterConfig())
    try:
        import ray

        assert ray_cluster.asks_for_token()
        assert any("gcs_server" in port for port in ray_cluster.open_ports())
        address = ray.get_runtime_context().gcs_address
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        for env, joins in (({**plain, "HOME": "/nonexistent"}, False), ({**plain, "RAY_AUTH_MODE": "token",
                           "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]}, True)):  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-c", JOIN.format(address)], env=env, capture_output=True, text=True, timeout=120
            )
            assert ("JOINED" in done.stdout) is joins, done.stderr[-500:]
    finally:
        ray_cluster.stop_ray()


def test_the_connection_by_which_a_run_asked_for_nodes_is_the_run_s_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks before the run leaves the connection to it; one that was there before all is nobody's to close."""
    import ray

    joined: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(joined))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(ray, "shutdown", joined.clear)
    monkeypatch.setattr(ray_cluster, "check_join", lambda *words: None)
    monkeypatch.setattr(ray_cluster, "guard_network", lambda multi_node: None)
    monkeypatch.setattr(ray_cluster, "_init", lambda address, options: joined.append(str(address)))
    cluster = ClusterConfig(address="10.0.0.1:6379")
    ray_cluster.join_to_ask(cluster)
    assert joined == ["10.0.0.1:6379"]
    assert ray_cluster.start_ray(cluster) and not ray_cluster.start_ray(cluster), "the first run alone closes it"
    ray_cluster.stop_ray()
    assert not joined and ray_cluster.start_ray(cluster)
    ray_cluster.join_to_ask(cluster)  # of a connection that has its owner
    assert len(joined) == 1 and not ray_cluster.start_ray(cluster)
    ray_cluster.stop_asking()
    assert joined, "it has its owner"
    ray_cluster.stop_ray()
    ray_cluster.join_to_ask(cluster)
    ray_cluster.stop_asking()
    assert not joined, "no run went on with it"
