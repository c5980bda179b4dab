"""The run folder: nothing half-written, nothing overwritten, a rewind that forgets just enough, and one driver at a time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from unittest.mock import Mock

import pytest

from agentrl.cli.main import main
from agentrl.config import TrainConfig, load_config, to_toml
from agentrl.config.origin import read_origins
from agentrl.run.assembly import RunStart
from agentrl.run.checks import size_checks as capacity
from agentrl.run.config_file import open_folder
from agentrl.run.driver import execute
from agentrl.run.folder import LOCK, NameTakenError, RunFolder, lock_folder
from agentrl.run.provenance import _export_path
from agentrl.utils.errors import CatalogError, ConfigError, ResourceError
from agentrl.utils.files import atomic_write


def config(out: Path, **more: object) -> TrainConfig:
    return TrainConfig.model_validate({"name": "x", "out": str(out), "env": {"id": "key_value"}, **more})


def test_all_paths_are_absolute_and_the_config_keeps_what_was_typed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a cluster has another working folder: what it is told to write must not hang on its own."""
    folder = RunFolder.create(config(Path("runs")))
    monkeypatch.chdir("/")
    paths = [value for value in vars(folder).values() if isinstance(value, Path)]
    assert len(paths) > 10 and all(here / "runs" / "x" in (path, *path.parents) for path in paths)
    assert folder.config.is_file() and load_config(folder.config).out == "runs"


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        RunFolder.create(config(tmp_path / "file"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_rewind_forgets_rows_beyond_the_checkpoint_and_a_row_cut_short(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path))
    for step, phase in [(0, "before"), (1, "train"), (2, "train"), (3, "train"), (3, "after")]:
        folder.append_metrics({"step": step, "phase": phase})
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "pha')
    for step in ("000001", "000002", "000003", "000003_mine"):
        (folder.exports / f"step_{step}").mkdir(parents=True)
    folder.rewind(2)
    assert sorted(model.name for model in folder.exports.iterdir()) == ["step_000001", "step_000002", "step_000003_mine"]
    assert [(row["step"], row["phase"]) for row in folder.read_metrics()] == [(0, "before"), (1, "train"), (2, "train")]


def test_the_config_in_the_folder_is_what_runs_and_what_ran_is_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path, steps=3))
    first = folder.config.read_text()
    assert folder.keep_config(to_toml(load_config(folder.config)), 2) is None and not folder.history.exists()
    for steps in (5, 7):  # the second one is given before anything was trained with the first
        longer = load_config(folder.config, [f"steps={steps}"])
        origins = read_origins(folder.config, [f"steps={steps}"])
        assert folder.keep_config(to_toml(longer, origins), 2) == folder.history / "until_000002.toml"
        assert load_config(folder.config).steps == steps and f"override steps={steps}" in folder.config.read_text()
    assert (folder.history / "until_000002.toml").read_text() == first
    folder.keep_config(to_toml(load_config(folder.config, ["steps=9"])), 4)
    assert [load_config(file).steps for file in sorted(folder.history.iterdir())] == [3, 7]


@pytest.mark.parametrize(
    "bad", [b"\0\0\0\0", b'{"step": 3, "phase": "tr', b"\xff\xfe", b"[1]", b'{"step": null, "phase": "train"}', b"[" * 5000]
)
def test_what_is_no_row_of_the_metrics_is_left_out_and_cut_by_a_resume(tmp_path: Path, bad: bytes) -> None:
    """In the middle, and as the torn end of a kill."""
    folder = RunFolder.create(config(tmp_path))
    rows = [json.dumps({"step": step, "phase": "train", "loss": step / 2}).encode() for step in (1, 2, 3)]
    folder.metrics.write_bytes(b"\n".join([rows[0], bad, rows[1], rows[2], bad]))
    assert [row["loss"] for row in folder.read_metrics()] == [0.5, 1.0, 1.5]
    assert folder.rewind(2) == [2, 5]
    assert folder.metrics.read_bytes() == rows[0] + b"\n" + rows[1] + b"\n"
    assert folder.rewind(2) == []


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    atomic_write(path, "old")
    script = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom agentrl.utils.files import atomic_write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: atomic_write(Path(sys.argv[1]), 'n' * 100000)\nexcept OSError: sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], timeout=60)
    assert done.returncode == 3
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_too_little_disk_memory_or_cores_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity.check_capacity(RunStart(config(tmp_path)))
    with pytest.raises(ResourceError, match=r"cores cannot run 64 worker processes"):
        monkeypatch.setattr(capacity, "MEMORY_PER_PROCESS_MIB", 1)
        capacity.check_capacity(RunStart(config(tmp_path, cluster={"actors": 64})))
    monkeypatch.setattr(capacity, "MIN_MEMORY_MIB", 1 << 30)
    with pytest.raises(ResourceError, match=r"MiB of memory are free, about .* are needed"):
        capacity.check_capacity(RunStart(config(tmp_path)))
    monkeypatch.setattr(capacity, "MIN_DISK_MIB", 1 << 40)
    with pytest.raises(ResourceError, match=r"MiB of disk are free, .* are needed"):
        capacity.check_capacity(RunStart(config(tmp_path)))


# One driver per folder

HOLDS = """
import sys, time
from pathlib import Path
from threading import Timer
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


def test_a_second_driver_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    folder = RunFolder.create(one := config(tmp_path))
    folder.write_summary({"status": "of before"})
    half_written = folder.checkpoints / ".writing_step_000002"
    half_written.mkdir(parents=True)
    with other_driver(folder.path) as first:
        says = rf"{folder.path}: process {first.pid} on \S+ has been writing there since \d{{4}}-.*kill {first.pid}"
        with pytest.raises(ConfigError, match=says):
            execute(one, folder, resumed=True)
        with pytest.raises(ConfigError, match=says):
            open_folder(one, overwrite=True)
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


def test_a_killed_driver_keeps_nobody_out_and_a_live_one_keeps_out_its_own_process_too(tmp_path: Path) -> None:
    folder = RunFolder.create(one := config(tmp_path))
    with other_driver(folder.path) as first:
        first.kill()
        first.wait()
        assert json.loads((folder.path / LOCK).read_text())["pid"] == first.pid
        with lock_folder(folder.path), pytest.raises(ConfigError, match="has been writing there"), lock_folder(folder.path):
            pass
    again = open_folder(one, overwrite=True)
    assert again.config.is_file()


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_new_run_is_locked_from_its_creation_on(tmp_path: Path, overwrite: bool) -> None:
    """A second --overwrite could remove it in between; it then wrote into the other's folder."""
    one = config(tmp_path)
    if overwrite:
        RunFolder.create(one).write_summary({"status": "of before"})
    first = open_folder(one, overwrite=overwrite)
    said = config(tmp_path, seed=7)
    with pytest.raises(ConfigError, match=rf"{first.path}: process {os.getpid()} on .* has been writing there since"):
        open_folder(said, overwrite=True)
    assert first.config.is_file() and "seed = 7" not in first.config.read_text() and not first.summary.exists()
    with first.lock(), pytest.raises(ConfigError, match="has been writing there"):  # the same lock, handed over
        open_folder(said, overwrite=True)
    assert "seed = 7" in open_folder(said, overwrite=True).config.read_text()


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_config_that_names_what_is_missing_removes_no_run_and_leaves_no_folder(tmp_path: Path, overwrite: bool) -> None:
    """Training on data does not look for its environment before; the name was taken from then on."""
    if overwrite:
        RunFolder.create(config(tmp_path)).write_summary({"status": "of before"})
    with pytest.raises(CatalogError, match="no environment 'nope'"):
        open_folder(config(tmp_path, env={"id": "nope"}), overwrite=overwrite)
    assert (tmp_path / "x").exists() == (tmp_path / "x" / "summary.json").exists() == overwrite


@pytest.mark.parametrize("key", ["model", "data"])
def test_an_overwrite_does_not_remove_what_its_config_names(key: str, tmp_path: Path) -> None:
    (path := RunFolder.create(config(tmp_path)).final).mkdir()
    given = str(tmp_path / "y" / ".." / "x" / "final")
    with pytest.raises(ConfigError, match=rf"{key}\.path = .*final: --overwrite would remove it\. Choose .*: name=x-2"):
        open_folder(config(tmp_path, **{key: {"path": [given] if key == "data" else given}}), overwrite=True)
    assert path.is_dir()


def test_a_second_overwrite_in_the_middle_of_the_first_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = config(tmp_path)
    RunFolder.create(one).write_summary({"status": "of before"})
    refused, unlink = list[str](), Path.unlink

    def late(path: Path, **more: bool) -> None:
        unlink(path, **more)
        with pytest.raises(ConfigError) as error:
            open_folder(one, overwrite=True)
        refused.append(str(error.value))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", late)
        first = open_folder(one, overwrite=True)
    assert refused and all("has been writing there since" in said for said in refused)
    assert first.config.is_file() and first.trajectories.is_dir() and not first.summary.exists()


def test_of_two_runs_that_begin_at_once_one_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    first = RunFolder.create(one := config(tmp_path))  # the second looked before this one was there
    with pytest.raises(NameTakenError, match="another run of that name has just begun"):
        RunFolder.create(one)
    assert first.config.is_file()


def test_an_overwrite_that_was_cut_short_can_be_repeated_also_of_a_linked_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(one := config(tmp_path))
    folder.path.rename(tmp_path / "large disk")
    folder.path.symlink_to(tmp_path / "large disk")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
        open_folder(one, overwrite=True)
    assert open_folder(one, overwrite=True).trajectories.is_dir() and folder.path.is_symlink()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "create", Mock(side_effect=KeyboardInterrupt))
        open_folder(one, overwrite=True)
    assert open_folder(one, overwrite=True).trajectories.is_dir()


def test_two_evals_export_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = list[Path]()

    def export(run: Path, out: Path, step: int) -> None:
        out.mkdir()
        made.append(out)
        time.sleep(0.2)
        (out / "config.json").write_text("{}")

    monkeypatch.setattr("agentrl.run.provenance.export_run", export)
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(_export_path, [RunFolder(tmp_path)] * 2, [4, 4])) == {tmp_path / "exports" / "step_000004"}
    assert len(made) == 1 and "is waited for, for 3600 s at most; Ctrl-C ends this" in caplog.text


def test_a_wait_for_another_process_says_so_again_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was one line, and then for ever, whatever Ctrl-C did."""
    monkeypatch.setattr("agentrl.run.folder.LOCK_WARN_S", 0.2)
    monkeypatch.setattr("agentrl.run.folder.LOCK_WAIT_S", 0.5)
    (place := RunFolder(tmp_path).exports).mkdir()
    with other_driver(place) as first:
        with pytest.raises(ConfigError, match=rf"process {first.pid} on .*kill {first.pid}.* or repeat this later"):
            _export_path(RunFolder(tmp_path), 4)
        assert 2 <= caplog.text.count("is waited for") <= 3 and f'"pid": {first.pid}' in caplog.text
        monkeypatch.setattr("agentrl.run.folder.LOCK_WAIT_S", 60)
        Timer(0.3, first.kill).start()
        with lock_folder(place, wait=True):  # a killed one holds nothing
            assert json.loads((place / LOCK).read_text())["pid"] == os.getpid()


def test_a_second_evaluation_into_one_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each replaces the episodes of the other: the report was then of others than those in the file."""
    with lock_folder(tmp_path):
        assert main(["eval", "key_value", "--policy", "gold", "-n", "1", "--out", str(tmp_path)]) == 2
    assert "use another --out" in capsys.readouterr().err and not (tmp_path / "eval.json").exists()
