"""One driver a run folder: a second one is refused by the first one's name, and a killed one keeps nobody out."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.config import TrainConfig
from agentrl.run.config_file import open_folder
from agentrl.run.driver import execute
from agentrl.run.folder import LOCK, RunFolder, lock_folder
from agentrl.utils.errors import ConfigError

HOLDS = """
import sys, time
from pathlib import Path
from agentrl.run.folder import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def other_driver(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig.model_validate({
        "name": "one", "out": str(tmp_path), "env": {"id": "key_value"}, "model": {"init": {}}, "engine": "embedded",
        "cluster": {"backend": "inline"},
    })  # fmt: skip


def test_a_second_driver_is_refused_and_touches_nothing(config: TrainConfig, tmp_path: Path) -> None:
    folder = RunFolder.create(config)
    folder.write_summary({"status": "of before"})
    half_written = folder.checkpoints / ".writing_step_000002"
    half_written.mkdir(parents=True)
    with other_driver(folder.path) as first:
        says = rf"{folder.path}: process {first.pid} on \S+ has been writing this run since \d{{4}}-.*kill {first.pid}"
        with pytest.raises(ConfigError, match=says):
            execute(config, folder, resumed=True)
        with pytest.raises(ConfigError, match=says):
            open_folder(config, overwrite=True)
    assert json.loads(folder.summary.read_text()) == {"status": "of before"}
    assert half_written.is_dir() and folder.config.is_file() and not folder.log.exists()


def test_a_process_without_a_command_line_holds_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    with (
        lock_folder(tmp_path),
        pytest.raises(ConfigError, match=r"has been writing this run since .* \(Python\)"),
        lock_folder(tmp_path),
    ):
        pass


def test_a_killed_driver_keeps_nobody_out_and_a_live_one_keeps_out_its_own_process_too(
    config: TrainConfig, tmp_path: Path
) -> None:
    folder = RunFolder.create(config)
    with other_driver(folder.path) as first:
        first.kill()
        first.wait()
        assert json.loads((folder.path / LOCK).read_text())["pid"] == first.pid
        with lock_folder(folder.path), pytest.raises(ConfigError, match="has been writing this run"), lock_folder(folder.path):
            pass
    again = open_folder(config, overwrite=True)
    assert again.config.is_file() and not (again.path / LOCK).exists()
