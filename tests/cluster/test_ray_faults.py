"""Whole runs on real Ray, one of whose processes is killed (SIGKILL) at a chosen moment: what comes of them, and what they leave.

Two rows are elsewhere. A second machine that is lost, with a replica of vLLM:
test_a_machine_that_joins_in_mid_run_samples_and_one_that_leaves_loses_nothing in test_two_machines.py. The driver, at random
moments of runs of three kinds: benchmarks/chaos.py.

docs/cluster.md has the table of what must happen. `make proofs` runs the matrix, `make test` what notices the death of a Ray.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from agentrl.cluster import ray_cluster
from agentrl.config.schema import ClusterConfig
from agentrl.utils.errors import ConfigError, EngineError, ResourceError, WorkerDiedError
from tests.cluster.strikes import CONFIG, SFT, VICTIMS, Struck, carrying, line_of
from tests.conftest import proof
from tests.e2e.runs import numbers, rows
from tests.engines.vllm_parts import skip_without_vllm
from tests.run.broken_off import assert_same
from tests.tiny_run import MODEL

pytestmark = pytest.mark.timeout(1800)
linux = pytest.mark.skipif(sys.platform != "linux", reason="a Ray is ended through /proc")
LIMIT = 800.0
"""Seconds for a command. It takes ten, but Ray starts slowly on a machine with other work."""
# With the cache the last digits depend on which requests share a step, and that on the workers' speed.
WORKERS = ["rollout.workers=2", "engine_args={cache=false}"]
VLLM = [
    "engine=vllm",
    "vllm.replicas=2",
    "vllm.kv_cache_mib=64",
    "vllm.max_model_len=512",
    "vllm.max_respawns=1",
    "model.init.head_dim=32",
]
MOMENTS = ("warm start", "rollout", "update", "publish", "evaluation", "save")
RAY = {"raylet": r"its raylet \(pid {pid}\)", "GCS": r"its GCS \(pid {pid}\)"}


# -- what notices it ---------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def test_a_vital_process_counts_as_gone_once_it_is_a_zombie(
    monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    vital = {"raylet": psutil.Process(sleeper.pid), "gcs_server": psutil.Process()}
    monkeypatch.setattr(ray_cluster, "_local_ray", SimpleNamespace(vital=vital))
    assert ray_cluster.lost_ray_processes() == ""
    sleeper.kill()
    while psutil.Process(sleeper.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert ray_cluster.lost_ray_processes() == f"its raylet (pid {sleeper.pid})"
    sleeper.wait()
    assert ray_cluster.lost_ray_processes() == f"its raylet (pid {sleeper.pid})"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to Ray; none is there."""
    done: list[str] = []
    monkeypatch.setattr(ray_cluster, "WORK_POLL_S", 0.02)
    monkeypatch.setattr(ray_cluster, "abandon_ray", lambda: done.append("abandoned"))
    monkeypatch.setattr(ray_cluster, "stop_ray", lambda: done.append("stopped"))
    return done


async def test_work_without_a_loss_is_as_it_is_alone(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(error: Exception = EngineError("its own")) -> None:
        raise error

    assert await ray_cluster.while_ray_lives(asyncio.sleep(0.05, "result")) == "result"
    with pytest.raises(EngineError, match="its own"):
        await ray_cluster.while_ray_lives(fails())
    monkeypatch.setattr(ray_cluster, "_local_ray", SimpleNamespace(vital={}))
    monkeypatch.setattr(ray_cluster, "RAY_EXIT_S", 0.2)
    for error, seconds in ((EngineError("its own"), 0.2), (ConfigError("a mistake"), 0.0)):
        began = time.monotonic()
        with pytest.raises(type(error)):
            await ray_cluster.while_ray_lives(fails(error))
        assert seconds <= time.monotonic() - began < seconds + 0.15
    inner: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            inner.append("ended")

    task = asyncio.create_task(ray_cluster.while_ray_lives(long()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inner == ["ended"] and ended == []


@pytest.mark.parametrize("how", ["goes on", "fails of it", "fails before it shows", "will not end"])
async def test_a_loss_ends_the_work_and_is_what_is_said(ended: list[str], monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    lost = ""
    monkeypatch.setattr(ray_cluster, "lost_ray_processes", lambda: lost)
    monkeypatch.setattr(ray_cluster, "END_S", 0.2)
    monkeypatch.setattr(ray_cluster, "_local_ray", SimpleNamespace(vital={}))

    def lose() -> None:
        nonlocal lost
        lost = "its GCS (pid 7)"

    async def work() -> None:
        if how == "fails before it shows":
            asyncio.get_running_loop().call_later(0.3, lose)
            raise EngineError("an actor is gone")
        lose()
        if how == "fails of it":
            raise WorkerDiedError("rank 0")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            await asyncio.sleep(1.0 if how == "will not end" else 0.0)
            raise

    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=re.escape("Ray has failed: its GCS (pid 7) on this machine has died")):
        await ray_cluster.while_ray_lives(work())
    assert time.monotonic() - began < 0.9
    # Ray first: what the work asks of it while it ends may never be answered.
    assert ended == (["abandoned", "stopped"] if how.startswith("fails") else ["abandoned", "cancelled", "stopped"])


def test_a_ray_that_starts_late_is_waited_for_and_one_whose_raylet_ended_is_not(
    monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    import ray._private.services as services

    asked: list[float] = []

    def get_node(*_: Any) -> str:
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise RuntimeError("not there")
        return "there"

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray_cluster, "POLL", 0.01)
    raylet = psutil.Process(sleeper.pid)
    monkeypatch.setattr(ray_cluster, "vitals", lambda since: {"raylet": raylet} if asked else {})
    with ray_cluster.wait_for_raylet(10.0):
        assert services.get_node("address", "node") == "there" and len(asked) == 3
    asked.clear()
    sleeper.kill()
    sleeper.wait()
    with ray_cluster.wait_for_raylet(10.0), pytest.raises(ray_cluster.RayletEndedError) as seen:
        services.get_node("address", "node")
    assert len(asked) == 1 and not seen.value.late
    asked.clear()
    monkeypatch.setattr(ray_cluster, "vitals", lambda since: {})
    with ray_cluster.wait_for_raylet(0.0), pytest.raises(RuntimeError, match="not there"):
        services.get_node("address", "node")
    assert services.get_node is get_node


@pytest.mark.parametrize(("ends", "late", "tries"), [(2, True, 3), (1, False, 2), (9, False, 2), (9, True, 4)])
def test_a_raylet_that_ended_is_started_again_within_the_limit_and_once_if_it_was_soon(
    monkeypatch: pytest.MonkeyPatch, ends: int, late: bool, tries: int
) -> None:
    begun: list[float] = []
    clock = [0.0]  # of its own: how long a start takes is not this machine's to say

    def start(*_: Any) -> None:
        begun.append(clock[0])
        clock[0] += 0.1
        if len(begun) <= ends:
            raise ResourceError("Ray does not start") from ray_cluster.RayletEndedError(late)

    monkeypatch.setattr(ray_cluster, "_start_once", start)
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with contextlib.nullcontext() if ends < tries else pytest.raises(ResourceError, match="Ray does not start"):
        ray_cluster._start_local(0.35, None)
    assert len(begun) == tries


def test_a_sigterm_while_ray_starts_is_for_who_started_it() -> None:
    """Ray's handler, which is there from the beginning of its start, would end this process with code 15."""
    ray_cluster.stop_ray()
    got, us = list[int](), psutil.Process()
    began, over = threading.Event(), threading.Event()

    def strike() -> None:
        while not over.is_set() and not any("gcs_server" in child.name() for child in us.children()):
            time.sleep(0.005)
        began.set()
        os.kill(us.pid, signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    striking = threading.Thread(target=strike)
    striking.start()
    try:
        ray_cluster.start_ray(ClusterConfig(), object_store_bytes=100 << 20)
        assert began.is_set() and got == [signal.SIGTERM]
        assert ray_cluster.is_connected() and ray_cluster.lost_ray_processes() == ""
    finally:
        over.set()
        striking.join()
        signal.signal(signal.SIGTERM, before)
        ray_cluster.stop_ray()


def _of_the_test(*_: object) -> None: ...


@pytest.fixture
def vital() -> Iterator[dict[str, psutil.Process]]:
    """The vital processes of a real Ray of this process."""
    ray_cluster.stop_ray()
    before = signal.signal(signal.SIGTERM, _of_the_test)
    ray_cluster.start_ray(ClusterConfig(), object_store_bytes=100 << 20)
    # Ray's would end its processes and then this one, in the middle of a step.
    assert signal.signal(signal.SIGTERM, before) is _of_the_test
    found = ray_cluster.vitals()
    assert found.keys() == {"raylet", "gcs_server"} and ray_cluster.lost_ray_processes() == ""
    yield found
    ray_cluster.stop_ray()


@linux
async def test_a_real_ray_that_loses_its_raylet_is_ended_whole(vital: dict[str, psutil.Process]) -> None:
    """And none is begun by what is still asked of it."""
    import ray

    assert ray_cluster._local_ray is not None
    mark, refused = ray_cluster._local_ray.mark, list[str]()
    everyone = family(vital, mark)

    async def work() -> None:
        vital["raylet"].kill()
        try:
            await asyncio.sleep(60)
        finally:
            try:
                ray.put(1)
            except Exception as problem:
                refused.append(str(problem))

    with pytest.raises(WorkerDiedError, match=rf"its raylet \(pid {vital['raylet'].pid}\) on this machine has died"):
        await ray_cluster.while_ray_lives(work())
    assert not ray.is_initialized() and len(refused) == 1
    assert carrying(mark) == []
    assert [one for one in everyone if not ray_cluster._has_ended(one)] == []


@linux
@proof
@pytest.mark.parametrize("agent", ["runtime env agent", "dashboard agent"])
async def test_work_that_fails_of_an_agents_death_is_told_of_the_raylet(vital: dict[str, psutil.Process], agent: str) -> None:
    """The raylet ends its actors some 30 ms before itself."""
    import ray

    actor = ray.remote(Counter).remote()
    ray.get(actor.total.remote())

    async def work() -> None:
        [one] = [process for process in vital["raylet"].children(recursive=True) if VICTIMS[agent](line_of(process))]
        one.kill()
        while True:  # not in a thread: the error is to come before anyone looks
            ray.get(actor.total.remote())

    with pytest.raises(WorkerDiedError, match=rf"Ray has failed: its raylet \(pid {vital['raylet'].pid}\)"):
        await ray_cluster.while_ray_lives(work())
    assert not ray.is_initialized()


@linux
@proof
@pytest.mark.parametrize("victim", ["runtime env agent", "dashboard agent", "raylet", "GCS"])
def test_a_ray_that_loses_a_process_while_it_starts_is_started_again(victim: str) -> None:
    ray_cluster.stop_ray()
    killed: list[int] = []

    def kill() -> None:
        while not killed:
            for one in psutil.Process().children(recursive=True):
                if VICTIMS[victim](line_of(one)) and not killed:
                    killed.append(one.pid)
                    one.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    began = time.monotonic()
    try:
        ray_cluster.start_ray(ClusterConfig(startup_timeout=300.0), object_store_bytes=100 << 20)
        assert killed and time.monotonic() - began < 250
        time.sleep(1)
        assert ray_cluster.lost_ray_processes() == "" and killed[0] not in [one.pid for one in ray_cluster.vitals().values()]
    finally:
        ray_cluster.stop_ray()


@linux
@proof
def test_a_ray_that_is_stopped_after_it_lost_its_gcs_leaves_no_agents(vital: dict[str, psutil.Process]) -> None:
    assert ray_cluster._local_ray is not None
    mark = ray_cluster._local_ray.mark
    everyone = family(vital, mark)
    vital["gcs_server"].kill()
    assert len(carrying(mark)) > 3
    ray_cluster.stop_ray()
    time.sleep(1)  # what was being forked shows
    assert carrying(mark) == []
    assert [one for one in everyone if not ray_cluster._has_ended(one)] == []


def family(vital: dict[str, psutil.Process], mark: bytes) -> list[psutil.Process]:
    """The vital processes and what the raylet has started, with their titles: each carries the mark."""
    until = time.monotonic() + 60
    while True:
        found = vital["raylet"].children(recursive=True)
        if sum(line_of(one).startswith(("ray::DashboardAgent", "ray::RuntimeEnvAgent")) for one in found) == 2:
            break
        assert time.monotonic() < until, found
        time.sleep(0.1)
    known = carrying(mark)
    assert [line_of(one) for one in found if one.is_running() and one.pid not in known] == []
    return [*vital.values(), *found]


# -- whole runs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("struck") / "run.toml"
    path.write_text(CONFIG.format(reward=Path(__file__).resolve().parents[1] / "e2e" / "short.json", model=MODEL))
    return path


def unbroken(config: Path, name: str, *more: str) -> Path:
    """The run that nothing happens to; without Ray, which changes no number."""
    place = config.parent / name
    if not place.exists():
        run = Struck(["train", str(config), f"out={place}", "name=run", "cluster.backend=inline", *more], place)
        try:
            assert run.wait(LIMIT) == 0, run.said()
        finally:
            run.end()
    return place / "run"


def ended_clean(run: Struck, code: int) -> str:
    """What it said, once it has ended with that code and left nothing."""
    try:
        found = run.wait(LIMIT)
        said = run.said()
        assert found == code, said[-3000:]
        assert "Traceback" not in said, said[-3000:]
        assert run.left() == []
        return said
    finally:
        run.end()


def struck(config: Path, place: Path, victim: str, moment: str, *more: str, code: int) -> tuple[str, int]:
    """What a run said of which `victim` was killed at `moment`, and the pid of that."""
    run = Struck(["train", str(config), f"out={place}", "name=run", *more], place, moment, victim)
    said = ended_clean(run, code)
    pid = run.note()["pid"]
    assert pid, f"there was no {victim}"
    return said, pid


def named(victim: str, pid: int, said: str) -> None:
    """Who died is in what was said."""
    patterns = {**RAY, "actor": r"group 'actor'.* worker process gone: rank 0 \(pid {pid} on"}
    pattern = patterns.get(victim, r"Ray has failed: its raylet").format(pid=pid)  # a raylet ends with an agent
    assert re.search(pattern, said.replace("\n", " ")), said[-3000:]


STARTING = "where it finds the GCS or the raylet of the Ray that it is starting gone; restarting from the newest checkpoint"


@proof
@pytest.mark.parametrize(("victim", "moment", "restarts", "why"), [
    *((victim, moment, {1}, None) for victim in ("actor", "raylet", "GCS") for moment in MOMENTS),
    ("actor", "start", {1, 2}, "group 'actor': a process died while building it"),  # while training processes are built
    ("raylet", "start", {1, 2}, ""),
    ("dashboard agent", "start", {1, 2}, ""),
    ("raylet", "registration", {1}, f"{STARTING} (1 of 2)"),  # Ray ends the driver while Ray starts
    ("runtime env agent", "rollout", {0, 1}, ""),  # a Ray that loses an agent is none, or goes on
    ("dashboard agent", "rollout", {0, 1}, ""),
])  # fmt: skip
def test_a_run_goes_on_from_its_newest_checkpoint_to_the_same_digits(
    config: Path, tmp_path: Path, victim: str, moment: str, restarts: set[int], why: str | None
) -> None:
    """`why`: in what is said; None: the process that died is named."""
    more = SFT if moment == "warm start" else []
    whole = unbroken(config, "warm" if more else "whole", *more)
    said, pid = struck(config, tmp_path, victim, moment, *more, code=0)
    if why is None:
        named(victim, pid, said)
    assert (why or "") in said.replace("\n", " "), said[-3000:]
    assert said.count("restarting from the newest checkpoint (") in restarts
    same(tmp_path / "run", whole)


@proof
@pytest.mark.parametrize(
    ("victim", "moment"),
    [("actor", "update"), ("raylet", "warm start"), ("raylet", "save"), ("GCS", "publish"), ("GCS", "evaluation")],
)
def test_without_restarts_it_ends_with_one_message_and_a_resume_makes_up_for_all(
    config: Path, tmp_path: Path, victim: str, moment: str
) -> None:
    more = SFT if moment == "warm start" else []
    whole = unbroken(config, "warm" if more else "whole", *more)
    said, pid = struck(config, tmp_path, victim, moment, *more, "cluster.max_restarts=0", code=1)
    named(victim, pid, said)
    last = said.strip().splitlines()[-1]
    assert last.startswith("agentrl: WorkerDiedError: ") and said.count("WorkerDiedError") == 1
    assert last.endswith(f"continue with: agentrl train --resume {tmp_path / 'run'}")
    ended_clean(Struck(["train", "--resume", str(tmp_path / "run")], tmp_path), 0)
    same(tmp_path / "run", whole)


@proof
@pytest.mark.parametrize("victim", ["raylet", "GCS"])
def test_an_evaluation_ends_with_one_message_and_the_same_command_plays_the_rest(
    config: Path, tmp_path: Path, victim: str
) -> None:
    words = ["eval", "--run", str(unbroken(config, "whole")), "-n", "12", "--out", str(tmp_path / "out")]
    words += ["cluster.backend=ray", *WORKERS]
    run = Struck([*words, "rollout.max_episodes=3"], tmp_path, "episode", victim)
    said = ended_clean(run, 1)
    named(victim, run.note()["pid"], said)
    assert said.count("; the same command runs the missing episodes") == 1, said
    there = (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()
    assert len(there) < 12
    ended_clean(Struck([*words, "rollout.max_episodes=3"], tmp_path), 0)
    after = (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()
    assert len(after) == 12 and set(there) <= set(after)


@proof
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint(config: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = Struck(["train", str(config), f"out={tmp_path}", "name=run", "steps=500", "checkpoint.every=400"], tmp_path)
    until = time.monotonic() + LIMIT
    while not (metrics := tmp_path / "run" / "metrics.jsonl").exists() or '"train"' not in metrics.read_text():
        assert time.monotonic() < until and run.process.exitcode is None, run.said()
        time.sleep(0.1)
    os.kill(run.pid, number)  # the driver's parent
    said = ended_clean(run, 130)
    assert "finishing the step and writing a checkpoint" in said
    assert said.splitlines()[-1] == f"interrupted. Continue with: agentrl train --resume {tmp_path / 'run'}"
    last = [row for row in rows(tmp_path / "run") if row["phase"] == "train"][-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:06d}" / "manifest.json").is_file()


@proof
@pytest.mark.parametrize("moment", ["rollout", "evaluation"])
def test_a_rollout_worker_is_replaced(config: Path, tmp_path: Path, moment: str) -> None:
    said, pid = struck(config, tmp_path, "worker", moment, *WORKERS, code=0)
    assert f"(pid {pid}) is gone" in said and "it is started again (1 of 8" in said
    assert "restarting" not in said
    whole = unbroken(config, "uncached", "engine_args={cache=false}")
    told = ("rollout/worker", "rollout/res", "rollout/ret")  # what the workers are told by
    found, expected = (
        [{key: value for key, value in row.items() if not key.startswith(told)} for row in numbers(one)]
        for one in (tmp_path / "run", whole)
    )
    assert found == expected
    final = "final/model.safetensors"
    assert (tmp_path / "run" / final).read_bytes() == (whole / final).read_bytes()
    once(tmp_path / "run")


@proof
@pytest.mark.parametrize(("victim", "moment"), [("replica", "rollout"), ("engine core", "rollout"), ("engine core", "publish")])
def test_a_replica_of_vllm_is_replaced(config: Path, tmp_path: Path, victim: str, moment: str) -> None:
    skip_without_vllm()
    struck(config, tmp_path, victim, moment, *VLLM, code=0)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(r"vLLM replica \d \(pid \d+\) died: .*it is started again \(1 of max_respawns = 1\)", log), log[-3000:]
    once(tmp_path / "run")
    assert all(row["unscored"] == 0 for row in rows(tmp_path / "run") if row["phase"] == "train")


@proof
def test_a_killed_driver_leaves_nothing_of_its_replicas(config: Path, tmp_path: Path) -> None:
    skip_without_vllm()
    struck(config, tmp_path, "driver", "rollout", *VLLM, code=-9)


def same(run: Path, whole: Path) -> None:
    once(run)
    found, expected = ([row for row in numbers(one) if row["phase"] in ("sft", "gate")] for one in (run, whole))
    assert found == expected
    assert_same(run, whole)


def once(run: Path) -> None:
    """No row is there twice, of three updates and what is before and after them."""
    found = Counter((row["phase"], row["step"]) for row in rows(run))
    assert set(found.values()) == {1}
    assert {("before", 0), ("train", 1), ("train", 2), ("train", 3), ("eval", 1), ("eval", 2), ("after", 3)} <= found.keys()


# -- a node of a joined cluster is lost, with a training process on it -----------------------------


ROOT = Path(__file__).resolve().parents[2]


@proof
def test_a_node_that_is_lost_with_a_training_process(tmp_path: Path) -> None:
    """The run goes on if what is left has room; else it ends, names what is missing, and goes on once that is there again."""
    config = CONFIG.format(reward=ROOT / "tests" / "e2e" / "short.json", model=MODEL)
    (tmp_path / "run.toml").write_text(f"{config}\n[cluster]\nactors = 2\nstartup_timeout = 120.0\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    command = [sys.executable, "-m", "tests.cluster.lost_node", str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    out = json.loads((tmp_path / "out.json").read_text())

    assert out["whole"]["code"] == 0, out["whole"]["said"]
    for name in ("fits", "wide"):
        [(pid, _)] = [(pid, line) for pid, line in out[name]["killed"].items() if line.startswith("ray::Host")]
        said = out[name]["said"].replace("\n", " ")
        assert re.search(rf"group 'actor'.* worker process gone: rank \d \(pid {pid} on ", said), said
        assert said.count("; restarting from the newest checkpoint (1 of 2)") == 1 and "Traceback" not in said, said
    assert out["fits"]["code"] == 0, out["fits"]["said"]
    assert_same(tmp_path / "fits", tmp_path / "whole")

    assert out["wide"]["code"] == 1, out["wide"]["said"]
    *_, pool, _, node, then = out["wide"]["said"].strip().splitlines()
    assert (
        "NoRoomLeftError: the remaining nodes have no room for the run: the pools do not fit the cluster" in out["wide"]["said"]
    )
    assert pool.split()[:3] == ["pool", "train", "2"] and node.startswith("node ")
    assert then == f"continue with: agentrl train --resume {tmp_path / 'wide'}"
    assert out["resumed"]["code"] == 0, out["resumed"]["said"]
    assert_same(tmp_path / "wide", tmp_path / "whole")
