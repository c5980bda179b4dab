"""Whole runs whose rollout workers live in the processes of real vLLM replicas: `make proofs`."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import proof
from tests.e2e.inside import config_of, episodes, execute, updates
from tests.engines.vllm_parts import skip_without_vllm

skip_without_vllm()
pytestmark = pytest.mark.timeout(500)
RUN = ("engine=vllm", "cluster.backend=ray", "vllm.kv_cache_mib=64", "vllm.max_model_len=1024", "algorithm.proximal=recompute")


def replicas() -> dict[int, float]:
    """The processes of replicas, with the time since when each is there."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith("ray::VllmActor"):
                found[process.pid] = process.create_time()
        except psutil.Error:  # it has just ended
            continue
    return found


def tokens(folder: Path, step: int) -> list[object]:
    return [[ledger.ids() for ledger in episode.ledgers] for episode in episodes(folder, step)]


@proof
def test_a_worker_in_the_replica_plays_the_driver_s_episodes(tmp_path: Path) -> None:
    """The same tokens, and log probabilities but for rounding, since other requests share a step."""
    short = (*RUN, "steps=2", "seed=3")
    alone = execute(config_of(tmp_path, "driver", *short))
    inside = execute(config_of(tmp_path, "inside", *short, "rollout.workers=1"))
    assert tokens(alone, 1) == tokens(inside, 1)
    for mine, other in zip(episodes(inside, 1), episodes(alone, 1), strict=True):
        assert (mine.seed, mine.reward, mine.stop) == (other.seed, other.reward, other.stop)
        for one, two in zip(mine.ledgers, other.ledgers, strict=True):
            assert np.abs(np.asarray(one.logprobs) - np.asarray(two.logprobs)).max() < 1e-4
    rows = updates(inside)
    assert [row["rollout/workers"] for row in rows] == [1.0, 1.0] and max(row["mismatch_max"] for row in rows) < 1e-3
    assert [row["rollout/worker_0/episodes"] for row in rows] == [16, 12]  # four more before the first, of the evaluation
    # no row of a trajectory file was written by the driver, and no process beside the replicas played
    assert {path.suffix for path in (inside / "trajectories").iterdir()} == {".jsonl"}


@proof
def test_a_killed_replica_loses_no_episode_and_its_successor_plays_on(tmp_path: Path) -> None:
    """What is sampled after the death has the probabilities of the newest weights."""
    config = config_of(tmp_path, "killed", *RUN, "steps=6", "vllm.replicas=2", "rollout.workers=2", "vllm.max_respawns=1")
    killed: list[int] = []

    def kill() -> None:
        folder = Path(config.out) / config.name
        while not (folder / "trajectories" / "step_000001.jsonl").exists():
            time.sleep(0.01)
        killed.append(min(replicas()))
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    run = execute(config)
    rows = updates(run)
    log = (run / "log.txt").read_text()
    assert f"(pid {killed[0]}) died" in log and "it is started again (1 of max_respawns = 1)" in log
    assert "its process ended" in log and "are played again elsewhere" in log
    assert len(rows) == 6 and rows[-1]["groups/failed"] == 0 == rows[-1]["unscored"]
    assert all(episode.reward is not None for step in range(1, 7) for episode in episodes(run, step))
    assert max(row["staleness_max"] for row in rows) == 0 and max(row["mismatch_max"] for row in rows) < 1e-3
    seeds = [episode.seed for step in range(1, 7) for episode in episodes(run, step)]
    assert len(set(seeds)) == len(seeds) == 6 * 12
    assert not replicas(), "a replica outlived its run"


@proof
def test_adapters_reach_the_workers_of_a_replica(tmp_path: Path) -> None:
    """The trainer's log probabilities, with the adapter, are those that workers sampled with; without it they are not."""
    lora = ('model.lora={rank=8, alpha=16, modules=["q_proj", "v_proj"]}', "weights.lora=adapter", "optim.lr=0.05")
    run = execute(config_of(tmp_path, "lora", *RUN, "steps=3", "rollout.workers=1", *lora))
    rows = updates(run)
    assert [row["rollout/workers"] for row in rows] == [1.0] * 3 and max(row["mismatch_max"] for row in rows) < 1e-3
    base = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).eval()
    ledger = episodes(run, 3)[0].ledgers[0]
    ids = torch.tensor(ledger.ids())
    with torch.inference_mode():
        found = base(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
    mask = np.asarray(ledger.sampled)[1:]
    assert np.abs(found - np.asarray(ledger.logprobs)[1:])[mask].max() > 1e-3
