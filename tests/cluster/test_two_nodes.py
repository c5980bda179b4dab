"""Two Ray nodes on one machine: pools per node, the shelf on the workers, a run over both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
from pathlib import Path
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 128 << 20})
cluster.add_node(num_cpus=2, object_store_memory=128 << 20)

from cluster_batches import ragged_batch
from cluster_workers import Plain, Summing
from agentrl.cluster.placement import cluster_nodes
from agentrl.cluster.roles import launch_roles
from agentrl.cluster.runtime import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.errors import ResourceError

def config(**pool):
    return ClusterConfig(address=cluster.address, startup_timeout=90.0, pools={"train": PoolConfig(**pool)},
                         roles={"actor": "train", "reference": "train"})

out = {}
start_ray(config())
out["nodes"] = len(cluster_nodes())
try:
    launch_roles(config(per_node=4), {"actor": Plain})
except ResourceError as error:
    out["refused"] = str(error)
groups = launch_roles(config(nodes=2), {"actor": Summing, "reference": Plain}, {"actor": {"dp": 1, "tp": 2}})
actor, reference = groups["actor"], groups["reference"]
out["spread"] = len({node for _, _, node in actor.backend.hosts.nodes})
out["sum"] = actor.run_all(Summing.total, 1.0)
out["order"] = reference.run(Plain.double, reference.put(ragged_batch([3, 0, 5])))["id"].tolist()
out["pids"] = len(set(reference.run_all(Plain.pid)))
out["shelf"] = reference.run(Plain.read, "rewards/mine.json")
reference.close(); actor.close()
again = launch_roles(config(nodes=2), {"actor": Plain})  # the place was given back
out["again"] = again["actor"].run(Plain.where, 1)
again["actor"].close()
stop_ray()
cluster.shutdown()
print("RESULT " + json.dumps(out))
"""


@pytest.mark.slow
def test_two_ray_nodes_on_one_machine(tmp_path: Path):
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "mine.json").write_text("a spec")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    import json

    out = json.loads(lines[0].removeprefix("RESULT "))
    assert out["nodes"] == 2 and out["spread"] == 2 and out["pids"] == 2
    assert "do not fit the cluster" in out["refused"] and "pool train" in out["refused"]
    assert out["sum"] == [3.0, 3.0] and out["order"] == [0, 1, 2] and out["again"] == [0, 2, 1]
    assert out["shelf"] == "a spec"
