"""Fixtures of engines' tests: a tokenizer and a small model."""

from tests.backends.conftest import model, model_folder, tokenizer

__all__ = ["model", "model_folder", "tokenizer"]
