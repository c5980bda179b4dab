"""The environments of the shelf, for tests of each."""

from typing import Any

import pytest

from agentrl.env.catalog import list_envs


def shelf() -> list[Any]:
    """A parameter for each; of a benchmark whose source is not there it is skipped with that reason."""
    return [
        pytest.param(
            entry,
            marks=pytest.mark.skipif(entry.lacks_source(), reason=f"{entry.name}: no source of it here, see docs/benchmarks.md"),
            id=entry.name,
        )
        for entry in list_envs()
    ]
