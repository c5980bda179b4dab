"""A temperature that falls over the updates: from the config to engine requests, every policy of an update, and a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl.rollout.player import LocalPlayer
from tests.e2e.inside import config_of, execute, numbers, updates

pytestmark = pytest.mark.timeout(240)

FALLING = [
    "rollout.temperature=[[0, 1.3], [3, 0.7]]",
    "steps=5",
    "model.init.init_std=0.4",  # logits so far apart that another temperature is another policy
    'algorithm.proximal="recompute"',
    "algorithm.kl.coef=0.01",
    "algorithm.minibatch=64",
    "eval.every=2",
    "eval.temperature=0.5",
    "checkpoint.every=1",
    "checkpoint.keep=9",
]
SPOKEN = pytest.approx([1.3, 1.1, 0.9, 0.7, 0.7])


def test_each_update_is_sampled_and_computed_at_its_temperature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine and trainer agree to 1e-4 at each update's temperature; a resumed run has the same rows."""
    seen: list[tuple[str, float | None]] = []
    play = LocalPlayer.play

    def watched(self: LocalPlayer, job: Any, watch: Any) -> Any:
        seen.append((job.spec.split, job.temperature))
        return play(self, job, watch)

    monkeypatch.setattr(LocalPlayer, "play", watched)
    run = execute(config_of(tmp_path, "falling", *FALLING))
    rows = updates(run)
    assert [row["temperature"] for row in rows] == SPOKEN
    for row in rows:
        assert row["mismatch_max"] < 1e-4 and row["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["kl_reference"] == pytest.approx(0.0, abs=1e-7)
    trained = list(dict.fromkeys(heat for split, heat in seen if split == "train"))
    assert trained == pytest.approx([1.3, 1.1, 0.9, 0.7])
    assert {heat for split, heat in seen if split == "heldout"} == {0.5}
    whole = numbers(run)
    for step in (3, 4, 5):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    assert numbers(execute(config_of(tmp_path, "falling", *FALLING), resumed=True)) == whole
