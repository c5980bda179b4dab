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


FORM = r"^cluster.address = '{}': expected the head as .HOST:PORT.*or .auto"


@pytest.mark.parametrize(
    ("address", "variable", "said"),
    [
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
    ],
)
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
    assert time.monotonic() - began < joining.REACH_S + 2  # Ray itself takes a minute


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


def test_auto_without_a_cluster_says_how_to_plan_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    with pytest.raises(
        ResourceError, match=r"'auto': no Ray runs on this machine.*--address=HEAD:6379.*--dry-run --gpu-memory GIB --nodes 4x8"
    ):
        joining.check_join("auto")
