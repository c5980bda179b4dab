"""Two Ray nodes on one machine, behind a token: who may join, pools per node, the shelf, a run."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import proof

PROGRAM = """
import json, os, pickle, time
from pathlib import Path
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "sesame-of-the-head"}
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 128 << 20})
cluster.add_node(num_cpus=2, object_store_memory=128 << 20)

from cluster_batches import ragged_batch
from cluster_workers import Plain, Summing
from agentrl.env.catalog import EnvRef
from agentrl.cluster.ray_cluster import check_join
from agentrl.cluster.placement import Pools
from agentrl.cluster.placement import cluster_nodes
from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.utils.errors import ResourceError

def config(**pool):
    return ClusterConfig(address=cluster.address, startup_timeout=90.0, pools={"train": PoolConfig(**pool)},
                         roles={"actor": "train", "reference": "train"})

out = {}
for key, given in {"wrong": {"RAY_AUTH_TOKEN": "another"}, "none": {"RAY_AUTH_MODE": "disabled"}}.items():
    before = {name: os.environ[name] for name in given}
    os.environ.update(given)
    began = time.monotonic()
    try:
        check_join(cluster.address)
    except ResourceError as error:
        out[key] = [str(error), time.monotonic() - began]
    os.environ.update(before)
start_ray(config())
out["nodes"] = len(cluster_nodes())
try:
    Pools(config(per_node=4), ["actor"])
except ResourceError as error:
    out["refused"] = str(error)
pools = Pools(config(nodes=2), ["actor", "reference"])
actor, reference = pools.launch("actor", Summing, {"dp": 1, "tp": 2}), pools.launch("reference", Plain)
out["spread"] = len({node for _, _, node, _ in actor.backend.hosts.nodes})
out["sum"] = actor.run_all(Summing.total, 1.0)
out["order"] = reference.run(Plain.double, ragged_batch([3, 0, 5]))["id"].tolist()
out["pids"] = len(set(reference.run_all(Plain.pid)))
out["shelf"] = reference.run(Plain.read, "rewards/mine.json")
ref = pickle.loads(pickle.dumps(EnvRef("hello", {"word": "hi"})))
assert ref.source == str(Path("envs/hello/env.py").resolve())
Path("envs/hello/env.py").write_text("raise OSError('the driver\'s file, as another machine would not have it')")
out["built"] = reference.run_all(Plain.built, ref)
Path("envs").rename("elsewhere")
out["gone"] = reference.run_all(Plain.built, EnvRef("hello", source=ref.source))
out["where"] = reference.run(Plain.where, 1)
out["shared"] = reference.backend.hosts is actor.backend.hosts
reference.close(); actor.close(); pools.close()
Pools(config(nodes=2, per_node=2), ["actor"]).close()  # every place was given back
stop_ray()
cluster.shutdown()
print("RESULT " + json.dumps(out))
"""

ENVIRONMENT = """
from agentrl.env import Message, Task, ToolEnv

class Hello(ToolEnv):
    id = "My/Hello-v0"

    def __init__(self, *, word="hello", **base):
        super().__init__(**base)
        self.word = word

    def make_task(self, rng_seed, split):
        return Task(f"{split}/{rng_seed}", rng_seed, split)

    def prompt(self, task):
        return [Message("user", self.word)]
"""


@proof
def test_two_ray_nodes_on_one_machine(tmp_path: Path):
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "mine.json").write_text("a spec")
    (tmp_path / "envs" / "hello").mkdir(parents=True)
    (tmp_path / "envs" / "hello" / "env.py").write_text(ENVIRONMENT)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    import json

    out = json.loads(lines[0].removeprefix("RESULT "))
    for key, told in {"wrong": "RAY_AUTH_MODE is token, RAY_AUTH_TOKEN is set", "none": "RAY_AUTH_MODE is disabled"}.items():
        text, seconds = out[key]
        assert "the cluster asks for a token" in text and told in text and "~/.ray/auth_token" in text and seconds < 15
    assert out["nodes"] == 2 and out["spread"] == 2 and out["pids"] == 2 and out["shared"]
    assert "do not fit the cluster" in out["refused"] and "pool train" in out["refused"]
    assert out["sum"] == [3.0, 3.0] and out["order"] == [0, 1, 2] and out["where"] == [0, 2, 1]
    assert out["shelf"] == "a spec"
    for (word, file), expected in zip(out["built"] + out["gone"], ["hi", "hi", "hello", "hello"], strict=True):
        assert word == expected and file.endswith("envs/hello/env.py") and not file.startswith(str(tmp_path))
