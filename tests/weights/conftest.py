"""A Ray for the tests of one file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig


@pytest.fixture(scope="module")
def ray_up() -> Iterator[None]:
    """A Ray whose workers can import these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        stop_ray()
        start_ray(ClusterConfig())
        yield
        stop_ray()
