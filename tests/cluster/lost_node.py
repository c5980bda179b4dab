"""A Ray cluster of two nodes on this machine, whole runs over both, and the second node killed:
`python -m tests.cluster.lost_node FOLDER`. What came of it is in FOLDER/out.json; test_ray_faults.py reads it.

A process of its own: it gives its Ray a token, which the Ray of another test would not know.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

RUN = "import sys; from tests.cluster.lost_node import driver; driver()"
VICTIM = "VICTIM_FILE"


def driver() -> None:
    """`agentrl`, which in the middle of its second update kills the node whose raylet's id is in a file, and takes that away."""
    from agentrl.cli.main import main
    from tests.cluster.strikes import arrange

    if os.environ.get(VICTIM):
        arrange("update", lambda: kill_node(Path(os.environ[VICTIM])))
    sys.exit(main())


def kill_node(file: Path) -> None:
    """SIGKILL to every process of a node, the raylet first; what they were takes the place of the raylet's id in `file`."""
    if not file.exists():
        return
    raylet = psutil.Process(int(file.read_text()))
    everyone = [raylet, *raylet.children(recursive=True)]
    lines = {one.pid: " ".join(one.cmdline())[:60] for one in everyone}
    for one in everyone:
        one.kill()
    file.with_suffix(".killed").write_text(json.dumps(lines))
    file.unlink()


class World:
    """The cluster, and commands that join it."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 128 << 20})
        self.add()

    def add(self) -> None:
        self.second = self.cluster.add_node(num_cpus=2, object_store_memory=128 << 20)

    def agentrl(self, *words: str, kills: bool = False) -> dict[str, Any]:
        """The exit code of `agentrl WORDS`, what it said, and the processes that it killed."""
        file = self.folder / "victim"
        file.with_suffix(".killed").unlink(missing_ok=True)
        if kills:
            file.write_text(str(self.second.all_processes["raylet"][0].process.pid))
        env = {**os.environ, "RAY_ADDRESS": self.cluster.address, VICTIM: str(file) if kills else ""}
        done = subprocess.run([sys.executable, "-c", RUN, *words], env=env, capture_output=True, text=True, timeout=400)
        killed = json.loads(file.with_suffix(".killed").read_text()) if kills and not file.exists() else {}
        if killed:
            self.cluster.remove_node(self.second, allow_graceful=False)
        return {"code": done.returncode, "said": done.stdout + done.stderr, "killed": killed}


def main(folder: Path) -> None:
    out: dict[str, Any] = {}
    world = World(folder)
    try:
        train = ["train", str(folder / "run.toml"), f"out={folder}"]
        out["whole"] = world.agentrl(*train, "name=whole")
        out["fits"] = world.agentrl(*train, "name=fits", kills=True)
        world.add()
        # A rank on each of two nodes, which then are no longer there.
        wide = ["cluster.pools={train={nodes=2}}", 'cluster.roles={actor="train"}']
        out["wide"] = world.agentrl(*train, "name=wide", *wide, kills=True)
        world.add()
        out["resumed"] = world.agentrl("train", "--resume", str(folder / "wide"))
    finally:
        (folder / "out.json").write_text(json.dumps(out))
        world.cluster.shutdown()


if __name__ == "__main__":
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-of-this-cluster", "OMP_NUM_THREADS": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main(Path(sys.argv[1]))
