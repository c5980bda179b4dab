"""Whole runs of families with other mixers than attention: the trainer computes what the engine samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.load import config_from
from agentrl.run.checks import check_config
from agentrl.run.driver import execute
from agentrl.run.folder import RunFolder
from agentrl.utils.errors import ModelError
from tests.e2e.inside import episodes
from tests.e2e.runs import SHORT, updates
from tests.trainer.family_models import build

STEPS = 2
RUN = f"""
    env.id=key_value cluster.backend=inline engine=embedded steps={STEPS} eval.tasks=2 trackers=[]
    rollout.groups=2 rollout.group_size=3 rollout.max_turns=4 rollout.max_turn_tokens=12 rollout.max_episode_tokens=500
    rollout.temperature=0.8 algorithm.proximal=recompute algorithm.entropy_bonus=0.01 optim.lr=1e-2 optim.micro_tokens=1000
    optim.prefix_sharing=on
""".split()
RUN.append(f"env.reward={SHORT}")
"""With a bonus: a gradient, whatever the rewards."""


@pytest.mark.parametrize(("family", "packing"), [("lfm2", "auto"), ("qwen3_next", "auto"), ("qwen3_next", "one_row")])
def test_two_updates_at_a_temperature(family: str, packing: str, tmp_path: Path) -> None:
    path = build(family, tmp_path / "model", sharpness=0.5)
    sharing = ["optim.prefix_sharing=off"] if packing == "one_row" else []
    keys = [f"out={tmp_path}", f"model.path={path}", "engine_args={cache=false}", f"model.packing={packing}", *sharing]
    config = config_from({}, [*RUN, *keys])
    check_config(config, capacity=True)
    folder = RunFolder.create(config)
    assert execute(config, folder, resumed=False) == 0
    said = f"packing: {'packed' if packing == 'auto' else 'one row a pass'}: "
    assert said in folder.log.read_text()
    assert len(updates(folder.path)) == STEPS
    for row in updates(folder.path):
        assert row["mismatch_max"] < 2e-5 and row["grad_norm"] > 1e-4
        assert (row["prefix_ratio"] > 1.1) == (packing == "auto")
    found = episodes(folder.path, STEPS)
    assert len(found) == 6
    assert {version for episode in found for ledger in episode.ledgers for version in ledger.versions} == {-1, 1}


def test_the_engine_with_its_cache_refuses_them(tmp_path: Path) -> None:
    path = build("lfm2", tmp_path / "model")
    config = config_from({}, [*RUN, f"out={tmp_path}", f"model.path={path}"])
    with pytest.raises(ModelError, match=r"layers are of the types conv.*cache = false"):
        execute(config, RunFolder.create(config), resumed=False)
