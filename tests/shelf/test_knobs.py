"""Parameters of the packaged environments: those out of range are refused by name, and teachers err now and then."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agentrl.env.catalog import make_env
from agentrl.utils.errors import ConfigError
from tests.shelf.conversation_probes import teacher_success

OUT_OF_RANGE: dict[str, list[tuple[dict[str, Any], str]]] = {
    "errands": [({"calls": 0}, ""), ({"calls": 51}, ""), ({"calls": [3, 2]}, ""), ({"lookups": 0.6, "cancels": 0.4}, "")],
    "python": [
        (params, "expected")
        for params in ({"level": 0}, {"level": [2, 1]}, {"level": 4}, {"cpu_s": 0}, {"wall_s": 0.5}, {"memory_mb": 10},
                       {"file_mb": 0})
    ],
    "function_calling": [
        (params, "expected")
        for params in ({"calls": 1}, {"calls": [5, 3]}, {"distractors": 13}, {"kinds": ["simple"]}, {"kinds": {}},
                       {"kinds": {"single": -1}}, {"splits_by": "x"}, {"bad_rows": "x"})
    ],
    "key_value": [
        ({"calls": 1}, "2..50"), ({"calls": [4, 2]}, "2..50"), ({"calls": 51}, "2..50"),
        ({"calls": 3, "set_share": 0.0}, "odd"), ({"set_share": 0.8, "list_share": 0.3}, "shares"),
        ({"max_value": 0}, "max_value"),
    ],
    "search": [
        ({"hops": 0}, "hops = 0"), ({"hops": [3, 2]}, "within 1..8"), ({"hops": 9}, "within 1..8"),
        ({"documents": 10}, "documents in 40..5000"), ({"results": 0}, "results in 1..20"), ({"back_share": 1.5}, "back_share"),
    ],
    "sql": [
        (params, "expected")
        for params in ({"level": 0}, {"level": 6}, {"level": [3, 2]}, {"rows": 10}, {"twins": 4}, {"result_rows": 1})
    ],
    "service_desk": [
        ({"goals": 5}, "goals = 5"), ({"goals": [2, 1]}, "within 1..4"), ({"forbidden": -0.1}, "forbidden = -0.1"),
        ({"pushy": 2}, "pushy = 2"), ({"forgetful": 1.01}, "forgetful"), ({"customers": 1}, "customers = 1"),
        ({"calls": 9}, "calls = 9"), ({"calls": [20, 201]}, "within 10..200"), ({"recalls": 0.5}, "set `calls`"),
        ({"calls": 20, "recalls": -1}, "recalls = -1"),
    ],
    "workspace": [
        ({"calls": 201, "requests": 30}, "calls = 201"), ({"calls": 0}, "calls = 0"), ({"requests": [3, 2]}, "requests = [3, 2]"),
        ({"requests": 61}, "within 1..60"), ({"recalls": 1.1}, "recalls = 1.1"),
        ({"apps": ["mail", "tv"]}, "apps = ['mail', 'tv']"), ({"apps": []}, "expected some of files, mail, calendar, contacts"),
        ({"calls": 2, "requests": 3}, "lower `requests`"),
        ({"calls": 60, "requests": 2}, "raise `requests`"), ({"questions": 0.6}, "questions = 0.6"),
        ({"missing": -1}, "missing = -1"), ({"withheld": 1.1}, "withheld = 1.1"), ({"distractors": 101}, "distractors = 101"),
        ({"offered": 41}, "offered = 41"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "params", "says"), [(name, *row) for name, rows in OUT_OF_RANGE.items() for row in rows])
def test_a_parameter_out_of_range_is_refused_by_name(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        make_env(name, **params)
    assert f"{name}: " in str(refused.value)


@pytest.mark.parametrize(
    ("name", "episodes", "low", "high"),
    [("workspace", 40, 0.2, 0.95), ("service_desk", 40, 0.2, 0.9), ("python", 10, 0.3, 0.99), ("search", 40, 0.3, 0.9),
     ("sql", 30, 0.3, 0.95), ("function_calling", 60, 0.4, 0.95)],
)  # fmt: skip
def test_the_teacher_errs_but_succeeds_often(name: str, episodes: int, low: float, high: float) -> None:
    given = {"python": {"level": 1}, "sql": {"show_schema": False}}.get(name, {})
    assert low < teacher_success(make_env(name, **given), episodes) < high
