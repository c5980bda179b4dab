"""A full disk at each writer of a run: one line names it, and what goes on later equals the whole."""

import json
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config import to_toml
from agentrl.run.folder import RunFolder
from agentrl.trainer.checkpoint import Checkpoints, check_intact
from agentrl.utils.errors import DiskFullError
from agentrl.utils.files import disk_full, explain_full_disk
from tests.conftest import proof
from tests.e2e.inside import config_of
from tests.run import full_disk
from tests.run.broken_off import TINY, assert_same, in_process

STEPS = 3
BEFORE_A_RUN = ("config.toml", "provenance.json")
LAST = "summary.json"
SFT = "sft={max_steps=4,min_steps=4,gate_every=4,gate=0.0,gate_tasks=2,batch=2}"
CONFIG = [*TINY, f"steps={STEPS}", "eval.tasks=2", "eval.every=2", "critic={}", "algorithm.advantage.name=gae", SFT]
CONFIG += ["profile={steps=[2]}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    assert train(place, place, "") == 0, (place / "said").read_text()
    return place / "run"


def train(place: Path, out: Path, writer: str, *more: str) -> int:
    """A run in `out`; what it says is in `place`/said."""
    (place / "mine.toml").write_text(to_toml(config_of(out, "run", *CONFIG, *more)))
    return command(place, ["train", str(place / "mine.toml")], writer, out)


def command(place: Path, words: list[str], writer: str, disk: Path) -> int:
    arguments = (words, writer, str(disk), str(place / "said"))
    return in_process(full_disk.commanded, *arguments, code_file=place / "code", timeout=280)


def resume(place: Path, run: Path, *more: str, writer: str = "") -> int:
    return command(place, ["train", "--resume", str(run), *more], writer, run.parent)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    try:
        with full_disk.small_disk(tmp_path / "disk") as made:
            yield made
    except PermissionError as why:
        pytest.skip(f"no file system can be mounted here: {why}")


def check_said(place: Path, code: int, named: str) -> str:
    """One line, the last, names the disk and what is free."""
    said = (place / "said").read_text()
    assert code == 2 and "Traceback" not in said and "Logging error" not in said, (code, said[-3000:])
    last = said.strip().splitlines()[-1]
    assert last.startswith("agentrl: ") and "the disk is full" in last and named in last and "bytes are free" in last, last
    return last


@pytest.mark.parametrize("writer", full_disk.ALL)
def test_a_writer_is_still_at_its_place(writer: str) -> None:
    """A function that moved would be found by the long form alone."""
    assert callable(pkgutil.resolve_name(full_disk.ALL[writer].at))


@proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("writer", [name for name in full_disk.TRAIN if name != LAST])
def test_it_is_said_and_the_run_goes_on_once_there_is_space(writer: str, whole: Path, tmp_path: Path, disk: Path) -> None:
    code = train(tmp_path, disk, writer)
    last = check_said(tmp_path, code, str(disk / "run"))
    full_disk.free_again(disk)
    run = disk / "run"
    found = RunFolder(run).read_summary() if run.exists() else None
    if writer in (*BEFORE_A_RUN, ".lock"):
        assert found is None
    else:
        assert found is not None and found["status"] == "failed", found
        assert any(text in found["error"] for text in ("disk is full", "No space left on device", "unexpected pos")), found
    assert (disk / "run/config.toml").exists() is (writer not in BEFORE_A_RUN)
    if writer in BEFORE_A_RUN:
        assert train(tmp_path, disk, "") == 0
    else:
        newest = Checkpoints(disk / "run/checkpoints", keep=1).newest()
        if newest is not None:
            check_intact(newest)
        assert "agentrl train --resume" in last, last
        assert resume(tmp_path, disk / "run") == 0, (tmp_path / "said").read_text()[-3000:]
    assert_same(disk / "run", whole)
    assert [path.name for path in (disk / "run").glob(".*") if path.name != ".lock"] == []


@proof
@pytest.mark.timeout(600)
def test_the_last_file_of_a_run_is_written_although_the_disk_is_full(whole: Path, tmp_path: Path, disk: Path) -> None:
    assert train(tmp_path, disk, LAST) == 0, (tmp_path / "said").read_text()[-3000:]
    full_disk.free_again(disk)
    assert (RunFolder(disk / "run").read_summary() or {})["status"] == "done"
    assert_same(disk / "run", whole)


@proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("writer", full_disk.RESUME)
def test_a_resume_that_finds_the_disk_full_loses_nothing(writer: str, whole: Path, tmp_path: Path, disk: Path) -> None:
    assert train(tmp_path, disk, "", "steps=2") == 0
    code = resume(tmp_path, disk / "run", f"steps={STEPS}", writer=writer)
    check_said(tmp_path, code, str(disk / "run"))
    full_disk.free_again(disk)
    assert resume(tmp_path, disk / "run", f"steps={STEPS}") == 0, (tmp_path / "said").read_text()[-3000:]
    # The run that ended at step 2 has an evaluation and a model of its own there.
    shutil.rmtree(disk / "run/config_history")
    (disk / "run/trajectories/after_000002.jsonl").unlink(missing_ok=True)
    assert_same(disk / "run", whole)


@proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("writer", full_disk.EVAL)
def test_an_evaluation_goes_on_once_there_is_space(writer: str, whole: Path, tmp_path: Path, disk: Path) -> None:
    shutil.copytree(whole, disk / "run")
    text = (disk / "run/config.toml").read_text()
    (disk / "run/config.toml").write_text(text.replace(str(whole.parent), str(disk)))
    checkpoint = ["--run", str(disk / "run"), "--checkpoint", "2"]
    words = ["eval", *checkpoint, "-n", "4", "--out", str(disk / "eval")]
    check_said(tmp_path, command(tmp_path, words, writer, disk), str(disk))
    full_disk.free_again(disk)
    assert command(tmp_path, words, "", disk) == 0, (tmp_path / "said").read_text()[-3000:]
    again = ["eval", *checkpoint, "-n", "4", "--out", str(disk / "alone")]
    assert command(tmp_path, again, "", disk) == 0, (tmp_path / "said").read_text()[-3000:]
    assert outcomes(disk / "eval") == outcomes(disk / "alone") and len(outcomes(disk / "eval")) == 4


def outcomes(folder: Path) -> list[object]:
    (file,) = folder.rglob("trajectories.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["task"]["id"], row["member"], row["reward"], row["messages"]) for row in rows]


@proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("writer", full_disk.EXPORT)
def test_an_export_leaves_nothing_and_can_be_repeated(writer: str, whole: Path, tmp_path: Path, disk: Path) -> None:
    words = ["export", str(whole), str(disk / "out")]
    check_said(tmp_path, command(tmp_path, words, writer, disk), str(disk / "out"))
    full_disk.free_again(disk)
    assert not (disk / "out").exists()
    assert command(tmp_path, words, "", disk) == 0, (tmp_path / "said").read_text()[-3000:]
    assert (disk / "out/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()


def test_a_summary_is_written_with_what_was_held_for_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.reserve()
    held = folder.reserved.stat()
    assert held.st_size >= 1 << 16 and held.st_blocks * 512 >= 1 << 16
    folder.write_summary({"status": "failed", "steps": 0, "engine": ""})
    assert not folder.reserved.exists() and (folder.read_summary() or {})["status"] == "failed"
    folder.reserved.mkdir()  # something else in its place holds nothing, and stops no run
    folder.reserve()
    folder.write_summary({"status": "done", "steps": 1, "engine": ""})
    assert (folder.read_summary() or {})["status"] == "done"


def test_what_a_library_says_of_a_full_disk_is_understood() -> None:
    for said in ("No space left on device (os error 28)", "I/O error: File too large (os error 27)", "Disk quota exceeded"):
        assert disk_full(Exception(said))
    assert not disk_full(Exception("no such device"))
    says = r"^/a/b: the disk is full \(\d+ bytes are free\): free some space, or raise a quota or ulimit -f, and go on$"
    with pytest.raises(DiskFullError, match=says), explain_full_disk("/a/b", "go on"):
        raise RuntimeError("I/O error: No space left on device")
    with pytest.raises(DiskFullError, match=r"^/c: full; continue$"), explain_full_disk("/a/b", "continue"):
        raise DiskFullError("/c: full")  # whose cause a library did not name
    with pytest.raises(KeyError), explain_full_disk("/a/b", "go on"):
        raise KeyError("other")
