"""Whole runs on SGLang servers, which stand-ins replace (tests/contrib/sglang/sglang_stand_in)."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from agentrl.cli.main import main
from agentrl.trainer.pretrained import init_model
from tests.conftest import PROOFS, proof
from tests.contrib.sglang.sglang_stand_in.server import Settings, StandIn
from tests.e2e.inside import config_of, episodes, execute, logging_kept, updates

pytestmark = pytest.mark.timeout(240)
SERVER = Settings(context=4096)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    init = config_of(folder, "sizes", "model.init.layers=2").model.init
    assert init is not None
    return init_model(init, folder / "model", seed=0)


def overrides(model: Path, *servers: StandIn) -> list[str]:
    addresses = json.dumps([server.address for server in servers])
    return [f"model.path={model}", "engine=sglang", f"sglang.servers={addresses}", "rollout.temperature=0.7"]


def versions(folder: Path, step: int) -> set[int]:
    """Of the weights that sampled the tokens of an update's episodes."""
    ledgers = [ledger for episode in episodes(folder, step) for ledger in episode.ledgers]
    return {int(v) for ledger in ledgers for v in np.asarray(ledger.versions)[np.asarray(ledger.sampled)]}


def test_a_run_trains_on_two_servers(model: Path, tmp_path: Path) -> None:
    """At T = 0.7; `make proofs` resumes it after an evaluation gave the servers other weights."""
    with StandIn(str(model), SERVER) as one, StandIn(str(model), SERVER) as two:
        more = [*overrides(model, one, two), "checkpoint.every=1", "algorithm.minibatch=12"]
        folder = execute(config_of(tmp_path, "run", *more, "steps=2"))
        if PROOFS:
            served = overrides(model, one, two)[1:]
            assert main(["eval", "key_value", "--model", str(model), "-n", "2", "--out", f"{tmp_path}/eval", *served]) == 0
            execute(config_of(tmp_path, "run", *more, "steps=3"), resumed=True)
        assert one.posts("/generate") and two.posts("/generate") and not one.refused + two.refused
        loaded = [int(body["weight_version"].rsplit("-", 1)[1]) for body in one.posts("/update_weights_from_disk")]
    steps = [1, 2, 3] if PROOFS else [1, 2]
    rows = updates(folder)
    assert [row["step"] for row in rows] == steps
    for row in rows:
        assert row["mismatch_max"] < 1e-4, row
    assert max(row["grad_norm"] for row in rows[:2]) > 0.1
    assert [versions(folder, step) for step in steps] == [{step - 1} for step in steps]
    assert sorted(set(loaded)) == [0, *steps] and loaded[-1] == steps[-1]


@proof
def test_a_run_goes_on_when_a_server_dies(model: Path, tmp_path: Path) -> None:
    """One of two servers is killed in mid-update: no episode is lost or scored 0 for it."""
    with StandIn(str(model), SERVER) as one, StandIn(str(model), SERVER) as two, logging_kept():

        def kill() -> None:
            while len(one.posts("/generate")) < 10 and one._thread.is_alive():
                time.sleep(0.002)
            one.kill()

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        more = ["steps=4", "algorithm.minibatch=12", "rollout.max_staleness=1"]
        folder = execute(config_of(tmp_path, "run", *overrides(model, one, two), *more))
        killer.join(30)
        assert len(one.posts("/generate")) < len(two.posts("/generate"))
    rows = updates(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and max(row["staleness_max"] for row in rows) == 1
    assert all(row["mismatch_max"] < 1e-4 for row in rows if row["staleness_max"] == 0)
    for step in (1, 2, 3, 4):
        assert all(episode.error is None for episode in episodes(folder, step))
        assert versions(folder, step) <= {step - 1, step - 2}
