"""A cluster that cannot be joined is named in seconds; test_two_nodes.py asks a real head with a real token."""

import socket
import time
from collections.abc import Iterator

import pytest

from agentrl.cluster import ray_cluster as joining
from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig
from agentrl.utils.errors import ResourceError


@pytest.fixture
def port() -> Iterator[tuple[socket.socket, str]]:
    stop_ray()  # of an earlier file of this process, which would be gone on with
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken, f"127.0.0.1:{taken.getsockname()[1]}"


def test_an_address_at_which_nothing_listens_is_refused_at_once(port: tuple[socket.socket, str]) -> None:
    began = time.monotonic()
    with pytest.raises(ResourceError, match=rf"cluster.address = '{port[1]}': nothing answers there .*ray start --head --port="):
        start_ray(ClusterConfig(address=port[1]))
    assert time.monotonic() - began < joining.REACH_S + 2  # Ray itself takes a minute


def test_an_address_of_the_environment_is_named_as_such(port: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", port[1])
    with pytest.raises(
        ResourceError,
        match=rf"^RAY_ADDRESS = '{port[1]}' \(of the environment; unset it to run on this machine alone\): nothing answers",
    ):
        start_ray(ClusterConfig())
    with pytest.raises(ResourceError, match=r"^cluster.address = '127.0.0.1:1': nothing answers"):
        start_ray(ClusterConfig(address="127.0.0.1:1"))


def test_what_listens_but_is_no_head_is_given_up(port: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch) -> None:
    port[0].listen()
    monkeypatch.setattr(joining, "ANSWER_S", 0.2)
    with pytest.raises(ResourceError, match=r"did not answer as a Ray head within 0\.2 s"):
        joining.check_join(port[1])


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "RAY_AUTH_MODE is not set, the token would come from ~/.ray/auth_token"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}, "RAY_AUTH_MODE is token, RAY_AUTH_TOKEN is set"),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": "f"}, "RAY_AUTH_MODE is disabled, RAY_AUTH_TOKEN_PATH is set"),
    ],
)
def test_a_refused_token_says_where_it_came_from(
    port: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    port[0].listen()
    for key in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(key, raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(joining, "PROBE", "import sys; sys.exit('ray.exceptions.AuthenticationError: InvalidAuthToken')")
    with pytest.raises(ResourceError) as caught:
        joining.check_join(port[1])
    assert said in str(caught.value) and "x" not in str(caught.value).split("RAY_AUTH_TOKEN is set")[0].split()


def test_auto_is_asked_at_the_address_that_ray_finds(port: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", port[1])  # which Ray prefers to a search for its processes
    with pytest.raises(ResourceError, match=rf"cluster.address = '[0-9.]+:{port[1].split(':')[1]}': nothing answers there"):
        joining.check_join("auto")


def test_auto_without_a_cluster_says_how_to_plan_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    with pytest.raises(
        ResourceError, match=r"'auto': no Ray runs on this machine.*--address=HEAD:6379.*--dry-run --gpu-memory GIB --nodes 4x8"
    ):
        joining.check_join("auto")


@pytest.mark.parametrize("address", ["head", "10.0.0.1", "head:", "http://head:port"])
def test_what_is_no_address_is_told_what_one_is(address: str) -> None:
    with pytest.raises(ResourceError, match=f"cluster.address = '{address}': expected the head as .HOST:PORT.*or .auto"):
        joining.check_join(address)


def test_a_client_server_that_is_not_there_is_refused_at_once(port: tuple[socket.socket, str]) -> None:
    with pytest.raises(ResourceError, match="nothing answers there"):  # Ray itself takes half a minute
        joining.check_join(f"ray://{port[1]}")
