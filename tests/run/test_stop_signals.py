"""Signals that ask a run to stop, sent to real processes: it ends soon, with 130, and names the newest checkpoint."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import proof
from tests.e2e.test_endings import CONFIG, MARK

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")]
COMMAND = [sys.executable, "-c", "import sys; from agentrl.cli.main import main; sys.exit(main())"]
FAST = [
    "cluster.backend=ray", "steps=400", "checkpoint.every=1", "cluster.max_restarts=2", "engine=embedded",
    "rollout.max_staleness=1",
]  # fmt: skip

SLOW = """
import importlib.util, sys, time
def slow(*_, **__):
    open("starts", "w").write("x")
    time.sleep(120)
class Slow:
    def find_spec(name, path=None, target=None):
        if name != "agentrl.cluster.ray_cluster":
            return None
        sys.meta_path.remove(Slow)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module._init = slow
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Slow)
"""
"""A Ray that does not come up, as on a machine that has too much to do."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stop-", dir="/tmp", ignore_cleanup_errors=True) as name:  # sockets have short paths
        (Path(name) / "config.toml").write_text(CONFIG)
        short = Path(__file__).parents[1] / "e2e" / "short.json"
        (Path(name) / "short.json").write_text(short.read_text())
        (Path(name) / "tmp").mkdir()
        yield Path(name)


class Run:
    """`agentrl` as a shell starts it, and all processes that come of it."""

    def __init__(self, folder: Path, *words: str, before: tuple[str, ...] = ()) -> None:
        self.folder = folder
        hidden = ("RAY_ADDRESS", "AGENTRL_PATH")
        env = {key: value for key, value in os.environ.items() if key not in hidden}
        env |= {MARK: str(folder), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
        self.file = (folder / "said").open("w")
        words = ("env", "--default-signal=HUP", *before, *COMMAND, *words)  # a suite under nohup ignores it, and so would the run
        self.process = subprocess.Popen(words, cwd=folder, env=env, stdout=self.file, stderr=self.file, start_new_session=True)

    def all(self) -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if one.environ().get(MARK) == str(self.folder) and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def until(self, text: str, file: str = "said", times: int = 1) -> None:
        limit = time.monotonic() + 240
        while not (self.folder / file).exists() or (self.folder / file).read_text().count(text) < times:
            assert time.monotonic() < limit and self.process.poll() is None, self.said()
            time.sleep(0.05)

    def ended(self, within: float) -> int:
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over within {within} s: {self.said()}") from None
        finally:
            for one in (self.process, *self.all()):
                with suppress(psutil.Error, ProcessLookupError):
                    one.kill()
            self.process.wait()
            self.file.close()


@pytest.mark.parametrize("name", ["TERM", *(pytest.param(name, marks=proof) for name in ("USR1", "HUP"))])
def test_a_signal_to_all_processes_of_a_job_stops_the_run_with_its_newest_checkpoint(folder: Path, name: str) -> None:
    """systemd and Kubernetes send SIGTERM to all, Slurm its warning; Ray's processes end of it, or must not know it."""
    run = Run(folder, "train", "config.toml", *FAST)
    run.until('"phase": "train"', "runs/run/metrics.jsonl", times=3)
    for one in run.all():
        with suppress(psutil.Error):
            one.send_signal(getattr(signal, f"SIG{name}"))
    assert run.ended(60) == 130
    said = run.said()
    summary = json.loads((folder / "runs/run/summary.json").read_text())
    newest = max((folder / "runs/run/checkpoints").glob("step_*")).name
    assert (summary["status"], summary["restarts"]) == ("interrupted", 0), said
    assert f"checkpoints/{newest}" in said and "restarting" not in said and "Traceback" not in said
    rows = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    done = max(row["step"] for row in rows if row["phase"] == "train")
    # TERM ends the actors too: of the last two steps one checkpoint may be under way, and the other has not begun.
    assert int(newest.removeprefix("step_")) >= (done - 2 if name == "TERM" else done)


@proof
def test_a_run_under_nohup_does_not_stop_for_the_terminal(folder: Path) -> None:
    run = Run(folder, "train", "config.toml", *FAST, "cluster.backend=inline", "steps=4", before=("nohup",))
    run.until("[", "said")
    time.sleep(2)
    os.kill(run.process.pid, signal.SIGHUP)
    for one in psutil.Process(run.process.pid).children():
        one.send_signal(signal.SIGHUP)
    assert run.ended(240) == 0, run.said()


TRAIN = ("train", "config.toml", *FAST)
EVAL = ("eval", "key_value", "--model", "model", "rollout.workers=1", "cluster.backend=ray")


@pytest.mark.parametrize(("words", "name"), [
    (TRAIN, "INT"),
    pytest.param(EVAL, "USR1", marks=proof),
    pytest.param(TRAIN, "USR1", marks=proof),
    pytest.param(EVAL, "INT", marks=proof),
])  # fmt: skip
def test_a_signal_while_ray_starts_is_answered_at_once(
    folder: Path, words: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of Ray blocks the event loop: for as long, the signal was not seen."""
    if words[0] == "eval":
        from agentrl.config.schema import InitModelConfig
        from agentrl.trainer.pretrained import init_model

        init_model(InitModelConfig(layers=1, hidden=32, mlp=32, heads=1, kv_heads=1, head_dim=32), folder / "model", 0)
        words = (*words, "--out", "out", "engine=embedded", "-n", "4")
    (folder / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    run = Run(folder, *words)
    run.until("x", "starts")
    began = time.monotonic()
    os.kill(run.process.pid, getattr(signal, f"SIG{name}"))
    run.until("interrupted")
    assert time.monotonic() - began < 10
    assert run.ended(30) == 130
    assert "Traceback" not in run.said()


def test_a_signal_before_the_run_begins_is_an_interruption_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sitecustomize.py").write_text(
        "import sys\nif 'train' in sys.orig_argv:\n"
        "    import agentrl.cli.train as train\n"
        "    def slow(*_, **__):\n        import time\n        open('starts', 'w').write('x'); time.sleep(60)\n"
        "    train.TrainCommand.begin = slow\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    run = Run(folder, "train", "config.toml")
    run.until("x", "starts")
    os.kill(run.process.pid, signal.SIGUSR1)
    assert run.ended(30) == 130
    assert run.said() == "agentrl: interrupted\n"
