"""Fixtures of engines' tests: a tokenizer and a small model."""

from tests.backends.conftest import model, model_folder, tokenizer  # noqa: F401
