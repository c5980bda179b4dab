"""A full disk at a writer of a run: one line names it, and the run that goes on once there is space equals the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import to_toml
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.seal import check_intact
from tests.conftest import proof
from tests.e2e.inside import config_of
from tests.run import full_disk
from tests.run.broken_off import TINY, assert_same, in_process

STEPS = 4
CALLS = {"config.toml": 1, "provenance.json": 1}
SOON = ("config.toml", "provenance.json")
WRITERS = ("config.toml", "provenance.json", "metrics.jsonl", "trajectories", "tokens", "tensorboard")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    assert train(place, place, "", 0) == 0, (place / "said").read_text()
    return place / "run"


def train(place: Path, out: Path, writer: str, call: int) -> int:
    """A run in `out`; what it says is in `place`/said."""
    config = config_of(out, "run", *TINY, f"steps={STEPS}", "eval.tasks=2", "critic={}", "algorithm.advantage.name=gae")
    (place / "mine.toml").write_text(to_toml(config))
    words = [str(place / "mine.toml")]
    return in_process(full_disk.trained, words, writer, call, str(out), str(place / "said"), code_file=place / "code")


@proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize("writer", WRITERS)
def test_it_is_said_and_the_run_goes_on_once_there_is_space(writer: str, whole: Path, tmp_path: Path) -> None:
    try:
        with full_disk.small_disk(tmp_path / "disk") as disk:
            code = train(tmp_path, disk, writer, CALLS.get(writer, 3))
            said = (tmp_path / "said").read_text()
            full_disk.free_again(disk)
            assert code == 2 and "Traceback" not in said and "Logging error" not in said, (code, said[-3000:])
            last = said.strip().splitlines()[-1]
            assert "the disk is full" in last and str(disk / "run") in last and "bytes are free" in last, last
            assert (disk / "run/config.toml").exists() is (writer not in SOON)
            if writer in SOON:
                assert train(tmp_path, disk, "", 0) == 0
            else:
                newest = Checkpoints(disk / "run/checkpoints", keep=1).newest()
                assert newest is not None, said
                check_intact(newest)
                assert "agentrl train --resume" in last, last
                words = ["--resume", str(disk / "run")]
                code = in_process(full_disk.trained, words, "", 0, "", str(tmp_path / "again"), code_file=tmp_path / "code")
                assert code == 0, (tmp_path / "again").read_text()[-3000:]
            assert_same(disk / "run", whole)
    except PermissionError as why:
        pytest.skip(f"no file system can be mounted here: {why}")
