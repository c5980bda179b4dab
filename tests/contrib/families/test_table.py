"""docs/families.json has what the probe finds, for every causal language model of transformers."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.trainer.families import TOLERANCE
from tests.conftest import PROOFS

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "docs" / "families.json"
SOME = ("deepseek_v3", "gpt_oss", "lfm2", "llama", "mistral")


@pytest.fixture(scope="module")
def table() -> ModuleType:
    # Under a name of its own: tests/render has a `families` too, which a run of the whole suite may have imported.
    sys.path.insert(0, str(ROOT / ".ci"))
    spec = spec_from_file_location("ci_families", ROOT / ".ci" / "families.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_family_of_transformers_has_a_row(table: ModuleType) -> None:
    record = json.loads(RECORD.read_text())
    assert list(record) == list(table.families())
    assert all(entry["mode"] == "packed" or entry["why"] for entry in record.values())


@pytest.mark.parametrize("family", [*json.loads(RECORD.read_text())] if PROOFS else SOME)
def test_a_row_is_what_the_probe_finds(table: ModuleType, family: str) -> None:
    """Its mode and its reason; and errors of the same size, which rounding decides."""
    found, recorded = table.in_time(lambda: table.measured(family)), json.loads(RECORD.read_text())[family]
    assert found["mode"] == recorded["mode"], found
    for key in ("packed", "shared", "one_row"):
        one, other = (entry.get(key, "") for entry in (found, recorded))
        try:
            assert (float(one) > TOLERANCE) == (float(other) > TOLERANCE)
        except ValueError:
            assert one == other
