"""Weights of several FSDP2 ranks, published where the ranks have them: nothing is gathered, and training does not notice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.engines.weights import host_routes as joined
from agentrl.engines.weights import host_routes as shared
from agentrl.engines.weights.host_routes import RowShard, join
from agentrl.utils.errors import ConfigError
from tests.e2e.runs import run_script

COUNTS = [3, 2] if os.environ.get("AGENTRL_PROOFS") else [3]
"""Of three ranks the last has fewer rows than the others."""


@pytest.fixture(scope="module")
def found(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    out = tmp_path_factory.mktemp("joined")
    script, train = Path(__file__).with_name("joined_ranks.py"), Path(__file__).parents[1] / "trainer"
    run_script(script, str(out), tiny, *map(str, COUNTS), paths=[train], timeout=400)
    return {count: json.loads((out / f"{count}.json").read_text()) for count in COUNTS}


@pytest.mark.parametrize("ranks", COUNTS)
def test_an_engine_reads_the_ranks_rows_as_whole_tensors(found: dict[int, dict[str, Any]], ranks: int) -> None:
    """Twice, with updates between: to the bit what DTensor gathers; every tensor lent, no layer gathered (the script counts)."""
    for publish in found[ranks]["publishes"]:
        assert publish["equal"] and publish["lent"] and publish["buckets"] > 2 and publish["names"] > 10, publish
        assert len(publish["mapped"]) == 3 and not any(publish["mapped"])  # two slots, the weights; no file has a name


@pytest.mark.parametrize("ranks", COUNTS)
def test_ranks_train_on_as_before(found: dict[int, dict[str, Any]], ranks: int) -> None:
    """Losses and weights of the same ranks without a route, to the bit; a checkpoint has no byte more, and a resume from it, or
    into the shared memory, goes on alike."""
    mine, control = found[ranks]["losses"]
    assert mine == control and len(mine) == 2 and found[ranks]["same"]
    before, after = found[ranks]["sizes"]
    assert abs(after - before) < 0.02 * before
    resumed, loaded, unbroken = found[ranks]["again"]
    assert resumed == loaded == unbroken


def test_ranks_that_do_not_share_memory_are_all_refused(found: dict[int, dict[str, Any]]) -> None:
    """Rank 0 hears of the last rank's trouble, and nothing was moved: the publishes above came after it."""
    assert all(each["refused"] == "weights.route = in_place: another machine" for each in found.values())


def of(rows: torch.Tensor) -> RowShard:
    return RowShard("w", tuple(rows.shape), rows.reshape(-1), lambda memory: None)


def test_no_room_is_said_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = set(shared.FOLDER.glob("agentrl-weights-*"))
    monkeypatch.setattr(joined, "_places", lambda shards, count: ([64], 1 << 50))
    with pytest.raises(ConfigError, match=r"in_place: no room in /dev/shm for 1073741824 MiB of weights"):
        join([of(torch.zeros(4, 2))], 0, 1)
    assert not set(shared.FOLDER.glob("agentrl-weights-*")) - before
    monkeypatch.setattr(shared, "FOLDER", tmp_path / "none")
    with pytest.raises(ConfigError, match="this machine has no"):
        join([of(torch.zeros(4, 2))], 0, 1)


def test_a_file_of_another_machine_is_known(tmp_path: Path) -> None:
    file = tmp_path / "segment"
    assert "do not share memory (several machines?)" in joined._unlike(str(file), "00", 100)
    file.write_bytes(b"x" * 100)
    assert "another file" in joined._unlike(str(file), "00" * 64, 100)
    assert joined._unlike(str(file), (b"x" * 64).hex(), 100) == ""


def test_tensors_lie_at_multiples_of_64_bytes_with_room_for_every_ranks_padding() -> None:
    shards = [of(torch.zeros(5, 3)), of(torch.zeros(1)), of(torch.zeros(16))]  # padded: 60, 4 and 64 bytes a rank
    assert joined._places(shards, 3) == ([64, 256, 320], 512)
