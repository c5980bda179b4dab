"""What a run gives its trackers arrives in order and once, and no tracker that fails, hangs or is slow holds the run up."""

import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.load import config_from
from agentrl.data.trajectory import Message, Task, Trajectory, Turn
from agentrl.run.assembly import RunStart
from agentrl.run.folder import RunFolder, is_voided
from agentrl.run.trackers import CHARACTERS, LARGE, Outlet, TrackedRun, Tracker, check_trackers, makers, sampled_rows
from agentrl.utils.errors import ConfigError, DependencyError


def tracked(out: Path, *trackers: dict[str, Any], resumed: bool = False, **sections: Any) -> TrackedRun:
    table = {"name": "run", "out": str(out), "env": {"id": "key_value"}, "model": {"init": {}}, "trackers": list(trackers)}
    config = config_from({**table, **sections}, [])
    folder = RunFolder(out / "run") if resumed else RunFolder.create(config)
    return TrackedRun(folder, config, resumed)


def opened(run: TrackedRun) -> Tracker:
    [(_, make)] = makers(run.config.trackers, run)
    return make()


class Noted(Tracker):
    def __init__(self, faults: Callable[[int], None] = lambda step: None) -> None:
        self.calls: list[Any] = []
        self.faults = faults

    def row(self, phase: str, step: int, values: Any) -> None:
        self.faults(step)
        self.calls.append((phase, step, dict(values)))

    def rewind(self, step: int) -> None:
        self.calls.append(("rewind", step))

    def episodes(self, phase: str, step: int, rows: Any) -> None:
        self.calls.append(("episodes", phase, step, len(rows)))

    def close(self, status: str, summary: Any) -> None:
        self.calls.append((status, dict(summary)))

    def look(self) -> str:
        return "see it"


def closed(outlet: Outlet, limit: float = 5.0) -> float:
    began = time.monotonic()
    outlet.finish("done", {"steps": 3})
    outlet.join(limit)
    return time.monotonic() - began


def test_calls_arrive_in_order_in_another_thread_and_none_is_lost() -> None:
    noted, said, threads = Noted(), list[str](), set[int]()
    noted.faults = lambda step: threads.add(threading.get_ident())
    outlet = Outlet("noted", lambda: noted, said.append)
    outlet.call("row", "before", 0, {"success": None})
    outlet.call("rewind", 0)
    outlet.call("episodes", "eval", 1, [{"a": 1.0}])
    outlet.call("row", "train", 1, {"reward": 0.5})
    closed(outlet)
    expected: list[Any] = [
        ("before", 0, {"success": None}), ("rewind", 0), ("episodes", "eval", 1, 1), ("train", 1, {"reward": 0.5}),
        ("done", {"steps": 3}),
    ]  # fmt: skip
    assert noted.calls == expected and threads.isdisjoint({threading.get_ident()}) and outlet.look == "see it"
    assert said == [] and outlet.lost == 0


def test_what_a_tracker_raises_is_said_once_and_counted_and_later_rows_still_come() -> None:
    def fails(step: int) -> None:
        if step in (1, 2):
            raise OSError(28, "No space left on device")

    noted, said = Noted(fails), list[str]()
    outlet = Outlet("full", lambda: noted, said.append)
    for step in range(4):
        outlet.call("row", "train", step, {})
    closed(outlet)
    assert [call[1] for call in noted.calls[:-1]] == [0, 3] and outlet.lost == 2
    assert len(said) == 2 and "it failed, and the run continues: OSError: [Errno 28]" in said[0] and "2 rows" in said[1]


def test_one_that_cannot_be_opened_or_exits_is_said_once_and_all_its_rows_are_counted() -> None:
    def gone() -> Tracker:
        raise SystemExit("the network is gone")

    said: list[str] = []
    outlet = Outlet("gone", gone, said.append)
    for step in range(5):
        outlet.call("row", "train", step, {})
    closed(outlet)
    assert outlet.lost == 5 and len(said) == 2 and "continues without it: SystemExit: the network is gone" in said[0]


def test_one_that_hangs_costs_the_run_no_time_but_the_limit_at_its_end() -> None:
    said, release = list[str](), threading.Event()
    begun = threading.Event()

    def hangs(step: int) -> None:
        begun.set()
        release.wait(20)

    outlet = Outlet("hung", lambda: Noted(hangs), said.append, most=LARGE + 8)
    outlet.call("row", "train", 0, {})
    assert begun.wait(5)
    began = time.monotonic()
    for step in range(1, LARGE + 2):
        outlet.call("row", "train", step, {})
    outlet.call("episodes", "eval", 1, [{}])  # what is large gives way first
    assert outlet.lost == 1
    for step in range(100):
        outlet.call("row", "train", step, {})
    assert time.monotonic() - began < 0.5
    assert outlet._queue.qsize() == LARGE + 8 and outlet.lost == 1 + 100 - 7
    assert 0.2 <= closed(outlet, 0.2) < 1.0
    assert "too slow" in said[0] and "did not end within 0.2 s" in said[1]
    release.set()


def test_what_comes_again_after_a_rewind() -> None:
    again = [(phase, step) for phase in ("sft", "before", "train", "after") for step in (0, 4, 5) if is_voided(phase, step, 4)]
    assert again == [("before", 5), ("train", 5), ("after", 0), ("after", 4), ("after", 5)]


def test_tensorboard_takes_back_what_comes_again_and_keeps_the_warm_start(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked(tmp_path, {"name": "tensorboard"})
    tracker = opened(run)
    for phase, step, value in [
        ("sft", 10, 1.0), ("sft", 20, 0.9), ("before", 0, 0.1), ("train", 1, 0.2), ("train", 2, 0.3), ("eval", 2, 0.35),
        ("train", 3, 0.4), ("after", 3, 0.5),
    ]:  # fmt: skip
        tracker.row(phase, step, {"value": value, "unknown": None})
    tracker.close("done", {})
    tracker = opened(tracked(tmp_path, {"name": "tensorboard"}, resumed=True))
    tracker.rewind(2)
    tracker.row("train", 3, {"value": 0.41})
    tracker.row("after", 3, {"value": 0.51})
    tracker.episodes("after", 3, [{"task": "a|b", "reward": None, "transcript": "one\ntwo"}])
    tracker.close("done", {})
    events = EventAccumulator(str(run.folder.tensorboard))
    events.Reload()
    # Sorted: two files of one second are read in the order of their names, which end in a number without zeros before it.
    found = {tag: sorted((e.step, round(e.value, 6)) for e in events.Scalars(tag)) for tag in events.Tags()["scalars"]}
    assert found == {
        "sft/value": [(10, 1.0), (20, 0.9)], "before/value": [(0, 0.1)], "train/value": [(1, 0.2), (2, 0.3), (3, 0.41)],
        "eval/value": [(2, 0.35)], "after/value": [(3, 0.51)],
    }  # fmt: skip
    [text] = events.Tensors("after/episodes/text_summary")
    assert b"| a\\|b |  | one two |" in text.tensor_proto.string_val[0]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    hidden = lambda package, *more: None if package == name else find(package, *more)  # noqa: E731
    monkeypatch.setattr("agentrl.utils.errors.find_spec", hidden)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with pytest.raises(DependencyError, match=rf"pip install 'agentrl\[{name}\]'"):
        check_trackers(RunStart(tracked(tmp_path, {"name": name}).config))


def test_a_login_that_is_missing_is_refused_with_the_way_that_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.utils.errors.find_spec", lambda package: True)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    def checked(name: str, **args: Any) -> None:
        check_trackers(RunStart(tracked(tmp_path / f"{time.monotonic_ns()}", {"name": name, "args": args}).config))

    with pytest.raises(ConfigError, match=r'there is no login: run `wandb login`.*args.mode = "offline"'):
        checked("wandb")
    checked("wandb", mode="offline")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password sesame\n")
    (tmp_path / "netrc").chmod(0o600)
    checked("wandb")
    with pytest.raises(ConfigError, match=r"set args.uri or MLFLOW_TRACKING_URI.*sqlite:///"):
        checked("mlflow")
    checked("mlflow", uri="http://127.0.0.1:5000")
    with pytest.raises(ConfigError, match="unknown argument 'projct'; did you mean 'project'"):
        checked("wandb", projct="x")


def test_the_table_of_an_evaluation_has_the_same_tasks_each_time_and_short_transcripts() -> None:
    trajectories = [Trajectory("key_value", Task(f"t{n}", n)) for n in range(40)]
    for number, one in enumerate(trajectories):
        one.reward, one.success = number / 40, number % 2 == 0
        one.messages = [Message("user", "x" * 9000)]
        one.turns = [Turn(index=0, message=one.messages[0])]
    rows = sampled_rows(trajectories, 4)
    assert [row["task"] for row in rows] == ["t0", "t10", "t20", "t30"]
    assert [row["reward"] for row in rows] == [0.0, 0.25, 0.5, 0.75] and rows[0]["turns"] == 1.0
    assert all(len(str(row["transcript"])) < CHARACTERS + 20 for row in rows)
    assert len(sampled_rows(trajectories[:3], 4)) == 3
