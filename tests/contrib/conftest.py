from tests.engines.conftest import model, model_folder, tokenizer  # noqa: F401 - fixtures of engines' tests
