"""A local Ray for a module of tests, whose workers can import the modules next to this file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    from agentrl.cluster.ray_cluster import start_ray, stop_ray
    from agentrl.config.schema import ClusterConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        stop_ray()  # another test's Ray could not import the modules next to this file
        start_ray(ClusterConfig(), object_store_bytes=256 << 20)
        yield
        stop_ray()
