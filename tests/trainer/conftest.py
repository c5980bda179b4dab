"""What tests of several ranks share."""

from collections.abc import Iterator

import pytest

from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig


@pytest.fixture(scope="module")
def ray_up() -> Iterator[None]:
    """A Ray on this machine, for the tests of one file."""
    start_ray(ClusterConfig())
    yield
    stop_ray()
