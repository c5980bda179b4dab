"""The Ray backend: real processes, real failures."""

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from agentrl.cluster import group as groups
from agentrl.cluster import ray_group
from agentrl.cluster.launch import launch
from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.contrib.doctor import machine_checks as doctor
from agentrl.utils.errors import (
    CheckpointError,
    ConfigError,
    DispatchError,
    ModelError,
    ResourceError,
    StalledError,
    WorkerDiedError,
    WorkerError,
)
from tests.cluster.cluster_batches import ragged_batch
from tests.cluster.cluster_workers import Plain, Summing
from tests.cluster.mortal_workers import Mortal
from tests.cluster.test_strategies import SIZES, check_every_strategy
from tests.run.test_off_the_loop import beating

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def four(ray_cluster):
    with launch(Plain, world_size=4, num_cpus=0.1, name="four") as group:
        yield group


@pytest.fixture
def mortal(ray_cluster):
    with launch(Mortal, world_size=2, num_cpus=0.1, name="mortal") as group:
        yield group


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_ragged_batches_over_four_processes(four, rows):
    check_every_strategy(four, SIZES[rows])


def test_errors_come_back_once_with_worker_rank_method_and_traceback(four):
    with pytest.raises(WorkerError) as caught:
        four.run(Plain.fail)
    text = str(caught.value)
    assert text.startswith("group 'four': Plain.fail, rank 3: KeyError: 'a deep reason'")
    assert text.count("Traceback (most recent call last)") == 1 and "cluster_workers.py" in text
    with pytest.raises(ModelError, match=r"did you mean tiny\? \(group 'four': Plain.model_error, rank"):
        four.run(Plain.model_error)
    assert four.run(Plain.where, 1) == (0, 4, 1)  # an exception does not cost the workers


def test_shared_memory_is_never_written(four):
    batch = ragged_batch([300, 5, 70_000])
    assert (four.run(Plain.scribble, batch)["token_ids"].values() == -7).all()
    again = four.run(Plain.double, batch)
    assert torch.equal(again["token_ids"].values(), batch["token_ids"].values())


def test_large_arguments_and_batches_are_shipped_once_to_all(four):
    assert four.run_all(Plain.echo, torch.zeros(200_000)) == [200_000] * 4
    assert four.run_all(Plain.echo, ragged_batch([1, 2])) == [2] * 4


async def test_a_folder_that_the_processes_do_not_share_is_seen_before_a_run_and_after_a_save(four, tmp_path, monkeypatch):
    """A path below /proc/self/cwd is another folder in each process, as a path is on machines with disks of their own."""
    monkeypatch.setattr(groups, "PATIENCE", 0.3)
    for machine in ("here", "there"):
        (tmp_path / machine / "out").mkdir(parents=True)
    before = Path.cwd()
    assert await four.in_processes(os.chdir, str(tmp_path / "there")) == [None] * 4
    os.chdir(tmp_path / "here")
    try:
        own, same = Path("/proc/self/cwd/out"), tmp_path / "here" / "out"
        with pytest.raises(ConfigError, match=r"out: rank 0 of the group 'four', on .*does not see the file that this one wrote"):
            await groups.check_shared(four, own, "out")
        await groups.check_shared(four, same, "out")
        assert [*same.iterdir()] == [*(tmp_path / "there" / "out").iterdir()] == []  # no token stays
        (tmp_path / "there" / "out" / "part").write_text("12345")
        with pytest.raises(CheckpointError, match=r"the model: part \(1 of 1 files\), which rank 0 of the group 'four' has on"):
            await groups.check_arrived(four, own, "the model")
        (same / "part").write_text("123")  # half of it
        with pytest.raises(CheckpointError, match="set out to one that they mount at the same path"):
            await groups.check_arrived(four, own, "the model")
        (same / "part").write_text("12345")
        await groups.check_arrived(four, own, "the model")
        same.chmod(0o500)
        if os.geteuid() != 0:  # root writes everywhere
            with pytest.raises(ConfigError, match="cannot write there"):
                await groups.check_shared(four, same, "out")
    finally:
        same.chmod(0o700)
        os.chdir(before)
        await four.in_processes(os.chdir, str(before))


async def test_workers_get_one_thread_and_the_shelf_and_no_records_of_calls(four):
    """Ray's own records of calls and niceness of 15 would slow a start on a busy machine."""
    assert four.run(Plain.env, "OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS", "1")
    assert str(Path.cwd()) in four.run(Plain.env, "AGENTRL_PATH").split(os.pathsep)
    assert await four.in_processes(os.getpriority, os.PRIO_PROCESS, 0) == [os.getpriority(os.PRIO_PROCESS, 0)] * 4
    time.sleep(2.5)  # each process would send its records once a second
    assert ray.timeline() == []


def test_a_colocated_role_shares_processes_and_collectives_span_a_two_axis_mesh(four):
    with launch(Summing, world_size=4, on=four, mesh={"dp": 2, "tp": 2}) as guest:
        assert guest.run_all(Summing.total, 1.0) == [10.0] * 4
        # Three tokens each, of the first rank on the second axis.
        assert guest.run(Summing.gathered, ragged_batch([1, 2, 3]))["at"].tolist() in ([0, 0, 10], [10, 10, 0])
        with pytest.raises(DispatchError, match="hold a role of that name"):
            launch(Summing, world_size=4, on=four)
    assert four.run(Plain.where, 0) == (0, 4, 0)  # processes live while a role is left


def test_hung_workers_are_named(mortal):
    slow = launch(Mortal, world_size=2, on=mortal, call_timeout=1.0, name="slow")
    with pytest.raises(StalledError, match=r"Mortal.hang: no answer from ranks \[1\] within 1 s"):
        slow.run(Mortal.hang)
    slow.close()


async def test_a_rank_that_loses_its_peer_is_not_taken_for_the_cause(mortal):
    pids = mortal.run_all(Mortal.pid)
    with pytest.raises(WorkerDiedError, match=rf"group 'mortal': Mortal\.lose: worker process gone: rank 1 \(pid {pids[1]} on"):
        await mortal.arun(Mortal.lose)


def test_workers_that_do_not_fit_are_refused_and_none_is_left():
    with pytest.raises(
        ResourceError, match=r"group 'big': 0 of 1 workers started within 2 s .cluster.startup_timeout.; each asks for"
    ):
        launch(Plain, num_cpus=4096, startup_timeout=2.0, name="big")
    assert ray.is_initialized()


def test_doctor_checks_ray_and_the_pools_of_a_config(monkeypatch):
    from agentrl.cluster import ray_cluster as runtime

    stopped = []  # the tests share one Ray
    monkeypatch.setattr(runtime, "stop_ray", lambda: stopped.append(1))
    fit = list(doctor.check_ray(ClusterConfig(pools={"train": PoolConfig()})))
    assert [(f.check, f.level) for f in fit] == [("ray", "ok"), ("ports", "ok"), ("pools", "ok")] and stopped == [1]
    assert "gcs_server" in fit[1].found and "needs the token" in fit[1].found
    tight = list(doctor.check_ray(ClusterConfig(pools={"train": PoolConfig(per_node=999)})))
    assert tight[-1].level == "fail" and "pool train" in tight[-1].found


def test_a_column_is_put_once_for_all_calls_and_groups_until_the_driver_lets_go_of_it(four, monkeypatch):
    """Every call put the whole batch: with a reference, a critic and a recomputed proximal policy five times a step."""
    put, sizes = ray.put, []

    def counting(value, *args, **kwargs):
        arrays = [value] if isinstance(value, np.ndarray) else list(getattr(value, "ragged", {}).values())
        sizes.append(sum(array.nbytes for array in arrays))
        return put(value, *args, **kwargs)

    monkeypatch.setattr(ray_group.ray, "put", counting)
    batch = ragged_batch([70_000, 5, 60_000, 0, 90_000])
    tokens = 220_005
    before = len(ray_group.COLUMNS)
    assert four.run(Plain.count, batch)["rows"] == 5 / 4
    assert sum(sizes) == tokens * (8 + 2), "ids and half, once for four ranks"
    sizes.clear()
    with launch(Plain, world_size=2, num_cpus=0.1, name="pair") as pair:
        out = pair.run(Plain.double, batch)
    assert sum(sizes) == 0, "another group finds them"
    assert torch.equal(out["twice"].values(), batch["token_ids"].values() * 2) and out["name"][4] == "row4"
    more = batch.copy().update({"extra": batch["token_ids"] + 1, "row": torch.arange(5)})
    assert four.run(Plain.count, more)["rows"] == 5 / 4 and sum(sizes) == tokens * 8, "only what is new"
    sizes.clear()
    batch["token_ids"].values().add_(3)  # what was put is no longer what the driver has
    changed = four.run(Plain.double, batch)
    assert torch.equal(changed["twice"].values(), batch["token_ids"].values() * 2) and sum(sizes) == tokens * 8
    assert len(ray_group.COLUMNS) == before + 3
    del batch, more, changed, out
    gc.collect()
    assert len(ray_group.COLUMNS) == before, "what the driver let go of is freed"


async def test_the_loop_answers_while_a_batch_is_split_shipped_and_put_together_again(four, monkeypatch):
    async with beating() as pulse:
        for module, name in ((ray_group, "serialize"), (ray_group, "from_wire"), (groups, "restore_order")):
            monkeypatch.setattr(module, name, pulse.inside(getattr(module, name)))
        out = await four.arun(Plain.double, ragged_batch([3, 1, 4, 1, 5]))
    assert out["id"].tolist() == list(range(5)) and pulse.alive == [True] * 6


def test_a_dead_worker_is_named_by_the_call_that_it_died_in_and_by_every_later_one(mortal):
    pids = mortal.run_all(Mortal.pid)
    with pytest.raises(WorkerDiedError, match=rf"group 'mortal': Mortal.die: .*rank 1 \(pid {pids[1]} on"):
        mortal.run(Mortal.die)
    with pytest.raises(WorkerDiedError, match="rank 1"):
        mortal.run(Mortal.pid)
