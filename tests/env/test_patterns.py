"""Sampled texts fit `pattern`, sampled numbers `multipleOf`."""

from __future__ import annotations

import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.patterns import Unsupported, sample_pattern
from agentrl.env.sample import sample_value

PATTERNS = [
    r"^[A-Z]{2}\d{4}$", r"^\d{4}-\d{2}-\d{2}$", r"^(red|green)-[a-f0-9]+$", r"^\S+@\w+\.(com|org)$", r"^[^/\\]+$",
    r"^#?\w{3,5}$", r"[0-9]+(\.[0-9]+)?", r"^.{3}$", r"^\D\W$", r"^a*b+?c?$", r"^$", r"^é+$",
]  # fmt: skip


@given(st.sampled_from(PATTERNS), st.integers(0, 2**32))
def test_made_texts_match(pattern: str, seed: int) -> None:
    assert re.search(pattern, sample_pattern(pattern, np.random.default_rng(seed)))


@given(st.integers(0, 2**32))
def test_pattern_and_lengths_together(seed: int) -> None:
    schema = {"type": "string", "pattern": "^[ab]*$", "minLength": 2, "maxLength": 4}
    jsonschema.validate(sample_value(schema, np.random.default_rng(seed), {}), schema)


@given(st.integers(0, 2**32), st.sampled_from([{"minimum": 3}, {"minimum": 1, "maximum": 40}, {"maximum": -7}, {}]))
def test_multiples(seed: int, bounds: dict[str, int]) -> None:
    schema = {"type": "integer", "multipleOf": 5, **bounds}
    jsonschema.validate(sample_value(schema, np.random.default_rng(seed), {}), schema)


@pytest.mark.parametrize("pattern", [r"^(?=a)b", r"^(a)\1$", r"^a\bc$"])
def test_what_it_cannot_make_it_says(pattern: str) -> None:
    with pytest.raises(Unsupported):
        sample_pattern(pattern, np.random.default_rng(0))
    assert isinstance(sample_value({"type": "string", "pattern": pattern}, np.random.default_rng(0), {}), str)
