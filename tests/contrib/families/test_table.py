"""docs/families.json has what the probe finds, for every causal language model of transformers."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.trainer.families import TOLERANCE
from agentrl.utils.search_path import load_module
from tests.conftest import PROOFS

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "docs" / "families.json"
SOME = ("deepseek_v3", "gpt_oss", "lfm2", "llama", "mistral")


@pytest.fixture(scope="module")
def table() -> ModuleType:
    sys.path.insert(0, str(ROOT / ".ci"))
    return load_module(ROOT / ".ci" / "families.py")


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
