"""What files of this room share."""

from collections.abc import Iterator

import pytest
import torch

from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig


@pytest.fixture(scope="module")
def ray_up() -> Iterator[None]:
    """A Ray on this machine, for the tests of one file."""
    start_ray(ClusterConfig())
    yield
    stop_ray()


@pytest.fixture(scope="module")
def classifier(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a sequence classifier with one label."""
    from transformers import AutoModelForSequenceClassification

    folder = str(tmp_path_factory.mktemp("models") / "judge")
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder
