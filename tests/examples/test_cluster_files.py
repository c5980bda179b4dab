"""The files that start Ray on a cluster, run with stand-ins for Slurm, ssh, Ray and agentrl; KubeRay's against what it names."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.waits import until

CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
STAND_IN = """#!/bin/bash
line="$(basename "$0")$(printf ' %q' "$@")"
printf '%s\n' "$line" >> "$LOG"  # in one write: the two ends of a pipe run at the same time
"""
STAND_INS = {
    "srun": "", "scontrol": '[ "$1" != show ] || printf "n1\\nn2\\n"', "timeout": "",
    "ray": '[ "$1" != get-auth-token ] || printf sesame', "ssh": "cat > /dev/null",
    "python": 'case "$*" in *secrets*) echo sesame;; *own_address*) echo 10.0.0.1;; esac',
    "agentrl": (
        'trap \'echo told >> "$LOG"; exit 130\' TERM; echo ready >> "$LOG"; '
        '[ -z "$SLOW" ] || { sleep 20 & wait; }; exit ${CODE:-0}'
    ),
}  # fmt: skip


class Shell:
    """A folder with stand-ins, each of which writes how it was called."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.log = folder / "log"
        self.log.touch()
        for name, does in STAND_INS.items():
            (folder / name).write_text(STAND_IN + does + "\n")
            (folder / name).chmod(0o755)
        path, run = f"{folder}:{os.environ['PATH']}", str(folder / "runs" / "mine")
        self.env = {**os.environ, "PATH": path, "VENV": str(folder), "LOG": str(self.log), "RUN": run, **env}

    def start(self, script: str, *args: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", str(CLUSTER / script), *args], env=self.env, start_new_session=True)

    def run(self, script: str, *args: str) -> int:
        return self.start(script, *args).wait(30)

    def calls(self, name: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.split(" ")[0] == name]


SLURM = {
    "SLURM_JOB_ID": "70001", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "64",
    "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip


def test_slurm_starts_a_ray_node_on_each_machine_and_goes_on_with_a_run_that_is_there(tmp_path: Path) -> None:
    shell = Shell(tmp_path, **SLURM)
    assert shell.run("slurm.sbatch", "my.toml", "steps=9") == 0
    folder = shell.env["RUN"]
    others, head = sorted(shell.calls("srun"))  # both are started in the background
    assert "--nodelist=n1 ray start --head --node-ip-address=10.0.0.1 --port=6380" in head and "--num-gpus=8" in head
    assert "--exclude=n1" in others and "--address=10.0.0.1:6380" in others.replace("\\", "")
    assert not any("sesame" in line for line in shell.calls("srun"))  # command lines are public
    out, name = os.path.split(folder.replace(" ", "\\ "))  # as the stand-in writes it
    assert shell.calls("agentrl") == [f"agentrl train my.toml out={out} name={name} cluster.address=10.0.0.1:6380 steps=9"]
    Path(folder).mkdir(parents=True)
    (Path(folder) / "config.toml").write_text("")
    assert shell.run("slurm.sbatch", "my.toml") == 0
    assert shell.calls("agentrl")[1] == f"agentrl train --resume {out}/{name} cluster.address=10.0.0.1:6380"
    assert len(shell.calls("scontrol")) == 2  # and not requeued


def test_slurm_tells_the_driver_of_the_end_and_queues_the_job_again(tmp_path: Path) -> None:
    shell = Shell(tmp_path, **SLURM, SLOW="1")
    job = shell.start("slurm.sbatch", "my.toml")
    assert until(lambda: shell.calls("ready"), 20)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 130
    assert shell.calls("told") and shell.calls("scontrol")[-1] == "scontrol requeue 70001"
    os.killpg(job.pid, signal.SIGKILL)  # the stand-in's sleep


@pytest.mark.parametrize("code", [0, 2])
def test_ssh_stops_ray_everywhere_however_the_run_ends_and_tells_no_token_on_a_command_line(tmp_path: Path, code: int) -> None:
    shell = Shell(tmp_path, HOSTS="b c", CODE=str(code))
    assert shell.run("ssh.sh", "my.toml") == code
    starts, stops = shell.calls("ssh")[:2], shell.calls("ssh")[2:]
    assert all("ray\\ start\\ --address=10.0.0.1:6379" in line for line in starts)
    assert [line.split(" ")[3] for line in starts + stops] == ["b", "c", "b", "c"] and all("stop" in line for line in stops)
    assert "sesame" not in shell.log.read_text() and shell.calls("ray")[-1] == "ray stop --force"
    assert len(shell.calls("agentrl")) == 1


def test_kuberay_gives_all_machines_the_shared_disk_and_shared_memory_and_resumes() -> None:
    yaml = pytest.importorskip("yaml")
    job: dict[str, Any] = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        [container] = pod["containers"]
        paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert paths == {"shared": "/shared", "shm": "/dev/shm"} and {each["name"] for each in pod["volumes"]} == set(paths)
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["image"] == groups[0]["template"]["spec"]["containers"][0]["image"]
    entry = job["spec"]["entrypoint"]
    assert "--resume /shared/runs/mine" in entry and "out=/shared/runs name=mine" in entry
    checked = subprocess.run(["bash", "-n"], input=entry, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
