"""Runs of which one process is killed at a chosen moment: by the driver itself, where the moment is, so that none is missed.

Each is `agentrl train` in a session of its own, with a folder of temporary files, and as root a /dev/shm, that no other program
uses; what is left of it can so be told from what others have.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

from tests.waits import until

TAG = "OF_STRIKE"
GRACE_S = 10.0
"""Seconds after the end of a command in which what it started must have ended."""
CONFIG = """
steps = 3
engine = "embedded"
trajectories_every = 1
[env]
id = "key_value"
reward = "{reward}"
{model}[rollout]
groups = 2
group_size = 4
max_turns = 2
max_turn_tokens = 16
max_episode_tokens = 512
[optim]
lr = 1e-3
schedule = "constant"
[eval]
tasks = 2
every = 1
[checkpoint]
every = 1
[health]
lint = false
"""
SFT = ["sft.max_steps=20", "sft.min_steps=20", "sft.gate_every=20", "sft.batch=2", "sft.gate=0.0", "sft.gate_tasks=2"]


def _is_raylet(line: str) -> bool:
    return "/raylet/raylet " in line


VICTIMS: dict[str, Callable[[str], Any]] = {
    "driver": lambda line: True,
    "actor": lambda line: line.startswith("ray::Host"),
    "worker": lambda line: line.startswith("ray::RolloutWorker"),
    "replica": lambda line: line.startswith("ray::VllmActor"),
    "engine core": lambda line: line.startswith("VLLM::EngineCore"),
    "raylet": _is_raylet,
    "GCS": lambda line: "/gcs/gcs_server " in line,
    # The raylet's own line has the commands of its agents.
    "runtime env agent": lambda line: not _is_raylet(line) and re.search(r"RuntimeEnvAgent|/runtime_env/agent/main.py", line),
    "dashboard agent": lambda line: not _is_raylet(line) and re.search(r"DashboardAgent|/dashboard/agent.py", line),
}


def line_of(process: psutil.Process | int) -> str:
    """Its command line; "" if it has ended."""
    try:
        return " ".join((psutil.Process(process) if isinstance(process, int) else process).cmdline())
    except psutil.Error:
        return ""


def carrying(mark: bytes) -> list[int]:
    """The processes that were started with this `VARIABLE=VALUE` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def strike(victim: str, note: str) -> None:
    """SIGKILL, once, to the first such descendant of the driver, or to itself, and a note of it."""
    if Path(note).exists():
        return
    everyone = [psutil.Process()] if victim == "driver" else psutil.Process().children(recursive=True)
    found = [one for one in everyone if VICTIMS[victim](line_of(one))]
    found.sort(key=lambda one: one.pid)
    Path(note).write_text(json.dumps({"pid": found[0].pid if found else 0, "of": [line_of(one)[:80] for one in found]}))
    if found:
        found[0].kill()


def arrange(moment: str, act: Callable[[], None]) -> None:
    """Have `act` called once in this process, in the middle of the second update's `moment` (the second part of a warm start)."""
    from agentrl.cluster.ray_group import Hosts, RayBackend
    from agentrl.rollout.player import LocalPlayer
    from agentrl.rollout.workers.worker_pool import WorkerPool
    from agentrl.run import loop
    from agentrl.trainer.publish import Publisher

    seen: dict[str, int] = {}
    state = {"evaluating": False, "publishes": 0, "done": False}

    def come(name: str, number: int) -> None:
        seen[name] = seen.get(name, 0) + 1
        if name == moment and seen[name] >= number and not state["done"]:
            state["done"] = True
            act()

    if moment == "registration":  # Ray runs, and the driver is about to call it
        from ray._private import worker

        connect = worker.connect

        def connects(*words: Any, **named: Any) -> Any:
            come("registration", 1)
            return connect(*words, **named)

        worker.connect = connects

    submit, create, send, evaluate = RayBackend.submit, Hosts.create, Publisher.send, loop.evaluate_now

    def creates(self: Hosts, *rest: Any) -> None:
        come("start", 1)
        create(self, *rest)

    def submits(self: RayBackend, method: str, *rest: Any) -> Any:
        pending = submit(self, method, *rest)  # then: the call is under way
        if method == "sft_steps":
            come("warm start", 2)
        elif method == "update":
            come("update", 2)
        elif method == "begin_save":
            come("save", 2)
        elif method == "next_bucket" and state["publishes"] == 3:  # the start's and the first update's came before
            come("publish", 1)
        return pending

    async def sends(self: Publisher, *rest: Any) -> Any:
        state["publishes"] += 1
        return await send(self, *rest)

    async def evaluates(session: Any, run_log: Any, phase: str) -> Any:
        state["evaluating"] = phase == "eval"
        try:
            return await evaluate(session, run_log, phase)
        finally:
            state["evaluating"] = False

    def plays(play: Any) -> Any:
        @wraps(play)
        async def played(self: Any, job: Any, watch: Any) -> Any:
            come("episode", 5)
            if job.spec.split == "train":
                come("rollout", 11)  # of eight an update
            elif state["evaluating"]:
                come("evaluation", 2)
            return await play(self, job, watch)

        return played

    RayBackend.submit, Publisher.send = submits, sends  # type: ignore[method-assign]
    Hosts.create = creates  # type: ignore[method-assign]
    loop.evaluate_now = evaluates
    for player in (LocalPlayer, WorkerPool):
        player.play = plays(player.play)  # type: ignore[method-assign]


def command(words: list[str], place: str, moment: str | None, victim: str, env: dict[str, str]) -> None:
    """The body of the process: `agentrl WORDS`, with what it says in `place`/said.txt."""
    os.setsid()
    os.environ.update(env)
    tempfile.tempdir = None
    # As of a command of its own: here it would be that by which this process was started, whose locks have names that stay.
    multiprocessing.set_start_method("fork", force=True)
    if env.get("SHM"):
        import ctypes  # for an empty /dev/shm of this process and its children

        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "none", "/dev/shm"], check=True)
        Path(place, "shm").touch()
    out = os.open(Path(place) / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    from agentrl.cli.main import main

    if moment is not None:
        arrange(moment, lambda: strike(victim, str(Path(place) / "note.json")))
    try:
        sys.argv = ["agentrl", *words]
        sys.exit(main())
    finally:
        atexit._run_exitfuncs()


class Struck:
    """A command, begun; `place`: a folder of its own."""

    def __init__(self, words: list[str], place: Path, moment: str | None = None, victim: str = "") -> None:
        self.place, self.tag = place, f"{os.getpid()}-{place}-{time.monotonic_ns()}"
        self._temporary = tempfile.TemporaryDirectory(prefix="st-")  # short: Ray's sockets are in it
        place.mkdir(parents=True, exist_ok=True)
        (place / "said.txt").unlink(missing_ok=True)
        (place / "shm").unlink(missing_ok=True)
        folder = self._temporary.name
        private = os.geteuid() == 0 and sys.platform == "linux"
        env = {TAG: self.tag, "TMPDIR": folder, "RAY_TMPDIR": folder, "SHM": "1" if private else "", "OMP_NUM_THREADS": "1"}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.e2e.warm"])
        self.process = context.Process(target=command, args=(words, str(place), moment, victim, env))
        self.began = time.monotonic()
        self.process.start()
        self.pid = self.process.pid or 0
        self._shm: int | None = None
        while private and not (place / "shm").exists() and self.process.exitcode is None:
            time.sleep(0.01)
        with contextlib.suppress(OSError):
            self._shm = os.open(f"/proc/{self.pid}/root/dev/shm", os.O_RDONLY) if private else None

    def wait(self, timeout: float) -> int:
        """The exit code. Fails, with what it said, if it does not end."""
        self.process.join(timeout)
        code = self.process.exitcode
        self.seconds = time.monotonic() - self.began
        if code is None:
            said = self.said()
            self.end()
            raise AssertionError(f"it did not end within {timeout:g} s: {said[-3000:]}")
        return code

    def said(self) -> str:
        return (self.place / "said.txt").read_text()

    def note(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.place / "note.json").read_text())
        return found

    def family(self) -> Iterator[psutil.Process]:
        """Every process of it that there is."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and (
                    os.getsid(process.pid) == self.pid or process.environ().get(TAG) == self.tag
                ):
                    yield process

    def left(self) -> list[str]:
        """What is still there `GRACE_S` seconds after its end, or nothing as soon as nothing is."""
        until(lambda: not self._left(), GRACE_S)
        return self._left()

    def _left(self) -> list[str]:
        processes = [f"process {line_of(one)[:100]}" for one in self.family()]
        files = [str(path) for path in Path(self._temporary.name).rglob("*") if "/ray/" not in str(path) and path.name != "ray"]
        # By its descriptor: the processes that saw it are gone.
        shm = [] if self._shm is None else [f"/dev/shm/{name}" for name in os.listdir(self._shm)]  # noqa: PTH208
        return [*processes, *files, *shm]

    def end(self) -> None:
        """Nothing of it stays, whatever came of it."""
        for one in list(self.family()):
            with contextlib.suppress(psutil.Error):
                one.send_signal(signal.SIGKILL)
        self.process.join(10)
        if self._shm is not None:
            os.close(self._shm)
            self._shm = None
        self._temporary.cleanup()
