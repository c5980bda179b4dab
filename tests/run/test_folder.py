"""The run folder: nothing half-written, nothing overwritten, and a rewind that forgets just enough."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config import TrainConfig, load_config, to_toml
from agentrl.config.origin import read_origins
from agentrl.run.assembly import RunStart
from agentrl.run.checks import size_checks as capacity
from agentrl.run.folder import RunFolder
from agentrl.utils.errors import ResourceError
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
    for step in (1, 2, 3):
        (folder.exports / f"step_{step:06d}").mkdir(parents=True)
    folder.rewind(2)
    assert sorted(model.name for model in folder.exports.iterdir()) == ["step_000001", "step_000002"]
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
