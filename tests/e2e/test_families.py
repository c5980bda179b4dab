"""Whole runs of families with other mixers than attention: what the engine samples is what the trainer computes.

Their rows are packed. The embedded engine serves them without its cache, which would not hold their states.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.config.load import config_from
from agentrl.data.trajectory import Trajectory
from agentrl.run.checks import check_train
from agentrl.run.driver import execute
from agentrl.run.folder import RunFolder
from agentrl.utils.errors import ModelError
from tests.trainer.family_models import build

RUN = {
    "env": {"id": "key_value", "reward": str(Path(__file__).with_name("short.json"))},
    "cluster": {"backend": "inline"},
    "engine": "embedded",
    "rollout": {
        "groups": 2,
        "group_size": 3,
        "max_turns": 4,
        "max_turn_tokens": 12,
        "max_episode_tokens": 500,
        "temperature": 0.8,
    },
    "algorithm": {"proximal": "recompute", "entropy_bonus": 0.01},  # a gradient, whatever the rewards
    "optim": {"lr": 1e-2, "micro_tokens": 1000, "prefix_sharing": "on"},
    "steps": 2,
    "eval": {"tasks": 2},
    "trackers": [],
}


@pytest.mark.parametrize(("family", "packing"), [("lfm2", "auto"), ("qwen3_next", "auto"), ("qwen3_next", "one_row")])
def test_two_updates_at_a_temperature(family: str, packing: str, tmp_path: Path) -> None:
    path = build(family, tmp_path / "model", sharpness=0.5)
    sharing = ["optim.prefix_sharing=off"] if packing == "one_row" else []
    keys = [f"out={tmp_path}", "engine_args={cache=false}", f"model.packing={packing}", *sharing]
    config = config_from({**RUN, "model": {"path": path}}, keys)
    check_train(config)
    folder = RunFolder.create(config)
    assert execute(config, folder, resumed=False) == 0
    said = f"packing: {'packed' if packing == 'auto' else 'one row a pass'}: "
    assert said in folder.log.read_text()
    updates = [row for row in folder.read_metrics() if row["phase"] == "train"]
    assert len(updates) == 2
    for row in updates:
        assert row["mismatch_max"] < 2e-5 and row["grad_norm"] > 1e-4
        assert (row["prefix_ratio"] > 1.1) == (packing == "auto")
    lines = (folder.trajectories / "step_000002.jsonl").read_text().splitlines()
    episodes = [Trajectory.from_json(json.loads(line)) for line in lines]
    assert len(episodes) == 6
    assert {version for episode in episodes for ledger in episode.ledgers for version in ledger.versions} == {-1, 1}


def test_the_engine_with_its_cache_refuses_them(tmp_path: Path) -> None:
    path = build("lfm2", tmp_path / "model")
    config = config_from({**RUN, "model": {"path": path}}, [f"out={tmp_path}"])
    with pytest.raises(ModelError, match=r"layers are of the types conv.*cache = false"):
        execute(config, RunFolder.create(config), resumed=False)
