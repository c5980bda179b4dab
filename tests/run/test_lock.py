"""One driver of a folder: a second one is refused by the first one's name, and a killed one keeps nobody out."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from agentrl.cli.main import main
from agentrl.config import TrainConfig
from agentrl.run.config_file import open_folder
from agentrl.run.driver import execute
from agentrl.run.folder import LOCK, NameTakenError, RunFolder, lock_folder
from agentrl.run.provenance import _export_path
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
        says = rf"{folder.path}: process {first.pid} on \S+ has been writing there since \d{{4}}-.*kill {first.pid}"
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
        pytest.raises(ConfigError, match=r"has been writing there since .* \(Python\)"),
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
        with lock_folder(folder.path), pytest.raises(ConfigError, match="has been writing there"), lock_folder(folder.path):
            pass
    again = open_folder(config, overwrite=True)
    assert again.config.is_file() and not (again.path / LOCK).exists()


def test_of_two_runs_that_begin_at_once_one_is_refused_and_removes_nothing(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunFolder.create(config)
    monkeypatch.setattr("agentrl.run.folder.check_free", lambda *_: None)  # it looked before the first one was there
    with pytest.raises(NameTakenError, match="another run of that name has just begun"):
        RunFolder.create(config)
    assert first.config.is_file()


def test_an_overwrite_that_was_cut_short_can_be_repeated_also_of_a_linked_folder(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(config)
    folder.path.rename(tmp_path / "large disk")
    folder.path.symlink_to(tmp_path / "large disk")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
        open_folder(config, overwrite=True)
    assert open_folder(config, overwrite=True).trajectories.is_dir() and folder.path.is_symlink()


def test_two_evaluations_of_a_checkpoint_export_it_once(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Path]()

    def export(run: Path, out: Path, step: int) -> None:
        out.mkdir()
        made.append(out)
        time.sleep(0.2)
        (out / "config.json").write_text("{}")

    monkeypatch.setattr("agentrl.run.provenance.export_run", export)
    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(_export_path, [RunFolder(tmp_path)] * 2, [4, 4]))
    assert found == {tmp_path / "exports" / "step_000004"} and len(made) == 1


def test_a_second_evaluation_into_one_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each replaces the episodes of the other: the report was then of others than those in the file."""
    with lock_folder(tmp_path):
        assert main(["eval", "key_value", "--policy", "gold", "-n", "1", "--out", str(tmp_path)]) == 2
    assert "use another --out" in capsys.readouterr().err and not (tmp_path / "eval.json").exists()
