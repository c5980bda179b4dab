"""Two machines as network and mount namespaces: whole runs from a config, in `make proofs`, as root."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)
HERE = Path(__file__).parent
WORLD = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]

REWARD = HERE.parent / "e2e" / "short.json"  # a model with random weights earns different rewards by it
CONFIG = f"""
base = "quickstart"
name = "two"
sft = false
steps = 2
env.reward = "{REWARD}"

[model]
init = {{ context = 512 }}

[rollout]
groups = 2
group_size = 2
max_turns = 3
max_turn_tokens = 16

[algorithm]
minibatch = 4

[eval]
tasks = 2
every = 0

[checkpoint]
every = 1
"""
VLLM = """
[vllm]
replicas = 1
max_model_len = 512
kv_cache_mib = 64
"""
SPLIT = (
    CONFIG
    + VLLM
    + """
[cluster]
startup_timeout = 120.0
pools.train = { cpus = 3.0 }    # only machine a has so many
pools.sample = { cpus = 1.0 }   # all that machine b has
roles = { actor = "train", rollout = "sample" }
"""
)
RANKS = (
    CONFIG
    + """
[cluster]
actors = 2
startup_timeout = 120.0
pools.train = { nodes = 2 }     # a rank on each machine
roles = { actor = "train" }
"""
)


def without() -> str:
    """Why this machine cannot pretend to be two; "" if it can."""
    if not os.environ.get("AGENTRL_PROOFS"):
        return "a proof: AGENTRL_PROOFS=1, or make proofs"
    if os.geteuid() != 0:
        return "only root can make namespaces"
    if str(Path(sys.prefix).resolve()).startswith("/tmp/"):
        return "the environment is in /tmp, which each of the two machines has for itself"
    try:
        script = "ip link add eth-a type veth peer name eth-b && mount -t tmpfs none /tmp"
        subprocess.run([*WORLD, "bash", "-ec", script], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as problem:
        return f"no namespaces here: {problem}"
    return ""


REASON = without()


def told(folder: Path, cpus: tuple[int, int], body: str) -> dict[str, Any]:
    """What `body` put into `out` on machine a; /mnt is `folder` on both machines."""
    program = folder / "program.py"
    program.write_text(PRELUDE + body + "\nPath('/mnt/out.json').write_text(json.dumps(out))\n")
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {**os.environ, "PYTHONPATH": path, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    env |= {"CPUS_A": str(cpus[0]), "CPUS_B": str(cpus[1])}
    command = [*WORLD, "bash", str(HERE / "two_machines.sh"), str(folder), sys.executable, "/mnt/program.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

out = {}


def nodes():
    code = "import ray; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout or 0)


deadline = time.monotonic() + 120
while nodes() < (1 if Path("/mnt/late").exists() else 2):
    assert time.monotonic() < deadline, [Path(f"/mnt/{name}/ray.log").read_text() for name in "ab"]


def command(*args):
    return [sys.executable, "-m", "agentrl.cli.main", "train", *args]


def train(*args):
    began = time.monotonic()
    done = subprocess.run(command(*args), capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


"""

SPLIT_RUN = """
run = "/mnt/shared/two"
going = subprocess.Popen(command("/mnt/split.toml", "engine=vllm", "out=/mnt/shared", "steps=30"))
deadline = time.monotonic() + 300
while not list(Path(run, "checkpoints").glob("step_000002/manifest.json")):
    assert going.poll() is None and time.monotonic() < deadline, going.poll()
    time.sleep(0.05)
going.send_signal(signal.SIGKILL)
going.wait()
out["killed"] = max(path.name for path in Path(run, "checkpoints").glob("step_*"))
steps = int(out["killed"][5:]) + 2
out["resumed"] = train("--resume", run, f"steps={steps}")[:2]
out["steps"] = [row["step"] for row in map(json.loads, Path(run, "metrics.jsonl").open()) if row["phase"] == "train"]
out["log"] = Path(run, "log.txt").read_text()
out["own disk"] = train("/mnt/split.toml", "engine=vllm", "out=/tmp/runs")
out["disk"] = train("/mnt/split.toml", "engine=vllm", "out=/mnt/shared", "name=disk", "weights.folder=/tmp")
"""

RANKS_RUN = """
out["shared"] = train("/mnt/ranks.toml", "engine=embedded", "out=/mnt/shared")[:2]
out["files"] = sorted(path.name for path in Path("/mnt/shared/two/checkpoints/step_000002/actor").iterdir())
out["own disk"] = train("/mnt/ranks.toml", "engine=embedded", "out=/tmp/runs")
out["left"] = [str(path) for path in Path("/tmp/runs/two").rglob(".agentrl-shared*")]
"""


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_the_trainer_on_one_machine_and_vllm_on_the_other(tmp_path: Path) -> None:
    """Weights go through the shared folder, a killed run goes on, the trained model loads; other folders are refused by name."""
    from transformers import AutoModelForCausalLM

    (tmp_path / "split.toml").write_text(SPLIT)
    out = told(tmp_path, (3, 1), SPLIT_RUN)
    code, text = out["resumed"]
    assert code == 0, text
    last = int(out["killed"][5:]) + 2
    assert out["steps"] == list(range(1, last + 1))
    assert "weights are sent by route disk" in out["log"] and "do not share memory" in out["log"]
    places = (tmp_path / "shared" / "two" / name for name in ("final", "model"))
    final, first = (AutoModelForCausalLM.from_pretrained(place).state_dict() for place in places)
    assert final.keys() == first.keys() and any((final[name] != first[name]).any() for name in final)
    code, text, seconds = out["own disk"]
    assert seconds < 120 and code == 1 and "/tmp/runs/two/model: not a folder on machine-b. All nodes must see the model" in text
    code, text, seconds = out["disk"]
    assert code == 2 and "weights.route = disk: the engine does not see the trainer's folder /tmp/" in text
    assert "set weights.folder to one that all machines share" in text and seconds < 200


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_rank_of_the_trainer_on_each_machine(tmp_path: Path) -> None:
    """They find each other though both host names are loopback; without a shared folder the run is refused as it starts."""
    (tmp_path / "ranks.toml").write_text(RANKS)
    out = told(tmp_path, (2, 2), RANKS_RUN)
    code, text = out["shared"]
    assert code == 0, text
    assert {"rng_0.pt", "rng_1.pt", "__0_0.distcp", "__1_0.distcp"} <= set(out["files"])
    code, text, seconds = out["own disk"]
    assert code == 2 and out["left"] == [] and "[train]" not in text and seconds < 90
    assert " of the group 'actor', on machine-b (10.77.0.2)" in text, text
    assert "on machine-a (10.77.0.1), do not share the folder /tmp/runs/two" in text
