"""Libraries that few tests want: every process of the suite imports every file of tests, and would pay for them."""

import importlib
from typing import Any


class Lazily:
    """A module that is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks each thing in a file of tests for `__test__`, and would import it
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


anthropic = Lazily("anthropic")
"""2 s of a core."""
openai = Lazily("openai")
"""1 s."""
