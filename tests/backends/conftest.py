import pytest
from engine_models import build_model, load


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(model_folder):
    """The plain transformers model of `model_folder`; tests that change its weights restore them."""
    return load(model_folder)
