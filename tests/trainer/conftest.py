"""What files of this room share."""

import pytest
import torch

from tests.weights.conftest import ray_up

__all__ = ["ray_up"]


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
