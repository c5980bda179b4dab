"""A run that goes on: new files and rows appear without asking anew, and what a resume writes again is seen as such."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import agentrl.contrib.view.library as module
from agentrl.contrib.view.library import Library
from agentrl.contrib.view.server import guard_app, make_app
from agentrl.utils.files import atomic_write
from tests.contrib.view.test_api import Asking
from tests.run.made_folders import episode, run_folder


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not appear"
        time.sleep(0.01)


def test_what_a_run_writes_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.02)
    runs = tmp_path / "runs"
    runs.mkdir()
    library = Library([runs])
    asking = Asking(guard_app(make_app(library)), base_url="http://localhost")
    library.start()
    try:
        assert asking.ask("/runs") == []
        row = {"step": 1, "phase": "train", "success": 0.0, "tokens": 4}
        folder = run_folder(runs / "new", {"step_000001": [episode(1)]}, [row])
        assert [(found["run"], found["live"], found["status"]) for found in asking.ask("/runs")] == [("new", True, "running")]
        assert [found["id"] for found in asking.ask("/runs/new/episodes")["rows"]] == ["step_000001.0"], "the first answer waits"
        first = asking.ask("/runs/new/metrics")
        folder.write_trajectories("step_000002", [episode(2)])
        with folder.metrics.open("a") as file:
            file.write(json.dumps({**row, "step": 2}) + "\n" + '{"step": 3, "pha')
        until(lambda: asking.ask("/runs/new/episodes")["total"] == 2)
        new = asking.ask(f"/runs/new/metrics?after={first['next']}&edition={first['edition']}")
        assert [found["step"] for found in new["rows"]] == [2] and not new["anew"], "half a row is not read"
        # A resume from step 1 rewinds the rows and writes step 2 again: more rows than before, but others.
        atomic_write(folder.metrics, "".join(json.dumps({**row, "step": n, "success": 0.5}) + "\n" for n in (1, 2, 3)))
        folder.write_trajectories("step_000002", [episode(7), episode(8)])
        again = asking.ask(f"/runs/new/metrics?after={new['next']}&edition={new['edition']}")
        assert again["anew"] and [found["success"] for found in again["rows"]] == [0.5] * 3
        until(lambda: asking.ask("/runs/new/episodes")["total"] == 3)
        assert asking.ask("/runs/new/episodes/step_000002.1")["task"] == "t/train/8"
        folder.write_summary({"status": "done", "seconds": 3.0})
        assert [(found["live"], found["status"]) for found in asking.ask("/runs")] == [(False, "done")]
    finally:
        library.close()


def test_an_episode_of_a_file_that_was_written_anew_since_is_not_mixed_up(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r", {"step_000001": [episode(1)]})
    library = Library([tmp_path])
    [one] = library.scan()
    library.refresh(one)
    asking = Asking(guard_app(make_app(library)), base_url="http://localhost")
    folder.write_trajectories("step_000001", [episode(2)])
    found = asking.get("/api/runs/r/episodes/step_000001.0")
    assert found.status_code == 400 and "written anew meanwhile" in found.json()["error"]
    library.refresh(one)
    assert asking.ask("/runs/r/episodes/step_000001.0")["task"] == "t/train/2"
