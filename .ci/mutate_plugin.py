"""Pytest plugin for mutation runs: cheap files first, and a budget of test seconds per mutant.

In the run in which mutmut records which test calls which function, it measures the cost of each test with its
fixtures, and continues after a failed test: a test that fails without a mutant cannot kill one, so the costs file lists it
and later runs skip it. Under a mutant it orders the selected tests by the cost of their file, skips those beyond
MUTATE_BUDGET seconds, and limits each to a multiple of its usual time, so that an endless loop ends soon.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

COSTS = Path(os.environ.get("MUTATE_COSTS", "test-costs.json"))
_spent: dict[str, float] = defaultdict(float)
_red: set[str] = set()


def _in_stats() -> bool:
    return os.environ.get("MUTANT_UNDER_TEST") == "stats"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Treat errors during collection like failed tests, although mutmut passes -x."""
    if _in_stats() or config.option.collectonly:
        config.option.maxfail = 0
        config.option.continue_on_collection_errors = True


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Hide mutmut's copies of methods from dispatch tables, which must name every public method. This must happen before
    any conftest is loaded, because those import workers."""
    from agentrl.cluster import worker

    methods = worker.public_methods
    worker.public_methods = lambda cls: {  # type: ignore[assignment]
        name: method for name, method in methods(cls).items() if "__mutmut_" not in name
    }


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _in_stats():
        _spent[report.nodeid] += report.duration
        if report.failed:
            _red.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _spent and _in_stats():
        known = json.loads(COSTS.read_text()) if COSTS.exists() else {}
        COSTS.write_text(json.dumps({**known, **_spent, **dict.fromkeys(_red)}))
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED and (_in_stats() or session.config.option.collectonly):
        session.exitstatus = pytest.ExitCode.OK


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if _in_stats() and report.failed:
        _red.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mutant = os.environ.get("MUTANT_UNDER_TEST", "")
    if config.option.collectonly or mutant in ("stats", "fail", "mutant_generation") or not COSTS.exists():
        return
    known: dict[str, float | None] = json.loads(COSTS.read_text())
    red = {nodeid for nodeid, cost in known.items() if cost is None}
    costs = {nodeid: cost for nodeid, cost in known.items() if cost is not None}
    # The run without a mutant only shows that tests can run, so one is enough; the statistics run has run each of them.
    budget = float(os.environ.get("MUTATE_BUDGET", "30")) if mutant else 0.0
    of_file: dict[str, float] = defaultdict(float)
    for item in items:
        of_file[item.nodeid.split("::")[0]] += costs.get(item.nodeid, 0.0)
    order = sorted(items, key=lambda item: (of_file[item.nodeid.split("::")[0]], item.nodeid.split("::")[0]))
    kept: list[pytest.Item] = []
    spent = 0.0
    for item in order:
        if item.nodeid in red:
            continue
        cost = costs.get(item.nodeid, 0.0)
        if kept and spent + cost > budget:
            continue
        spent += cost
        item.add_marker(pytest.mark.timeout(10 + 5 * cost))
        kept.append(item)
    chosen = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept
