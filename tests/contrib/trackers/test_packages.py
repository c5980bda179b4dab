"""Weights & Biases, MLflow and Trackio, the real packages, offline: what a run gives them is in their files, each row once,
also after a resume that does steps again."""

import json
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest

from agentrl.run.trackers import Status, TrackedRun
from tests.contrib.trackers.test_trackers import opened, tracked

Rows = dict[str, list[tuple[int, float]]]
GIVEN: Rows = {
    "before/success": [(0, 0.25)],
    "sft/loss": [(10, 2.0)],
    "train/reward": [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.45)],
    "after/success": [(4, 0.75)],
}


def lived(out: Path, choice: dict[str, Any]) -> list[str]:
    """A run that is killed after step 3 of 4, with a checkpoint of step 2, resumed, and ended. Returns how to look at it."""
    picture = out / "curve.png"
    run = tracked(out, choice)
    picture.write_bytes(PNG)
    looks = []
    for resumed in (False, True):
        tracker = opened(TrackedRun(run.folder, run.config, resumed))
        looks.append(tracker.look() or "")
        if resumed:
            tracker.rewind(2)
        else:
            tracker.row("sft", 10, {"loss": 2.0})
            tracker.row("before", 0, {"success": 0.25, "reward": None})
            tracker.episodes("before", 0, [{"task": "t0", "reward": 1.0, "transcript": "user: hi"}])
        for step, reward in [(3, 0.3), (4, 0.45)] if resumed else [(1, 0.1), (2, 0.2), (3, 0.3)]:
            tracker.row("train", step, {"reward": reward})
        if resumed:
            tracker.row("after", 4, {"success": 0.75})
            tracker.picture("curve", picture)
        end: tuple[Status, dict[str, Any]] = ("done", {"steps": 4, "status": "done"}) if resumed else ("failed", {"steps": 3})
        tracker.close(*end)
    return looks


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs agentrl[wandb]")
    monkeypatch.setenv("WANDB_SILENT", "true")
    looks = lived(tmp_path, {"name": "wandb", "args": {"mode": "offline", "project": "p", "tags": ["a"]}})
    wandb.teardown()  # as at the end of a process: its service writes what it still has
    parts = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(parts) == 2 and [look.split()[:2] for look in looks] == [["wandb", "sync"]] * 2
    found: Rows = {}
    steps: list[int] = []
    ids, exits, tables = set(), [], 0
    for record in (record for part in parts for record in wandb_records(part)):
        if record.HasField("run"):
            ids.add((record.run.run_id, record.run.display_name, record.run.project))
        if record.HasField("exit"):
            exits.append(record.exit.exit_code)
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            steps.append(row["_step"])
            for key in set(row) & set(GIVEN):
                found.setdefault(key, []).append((row[f"{key.partition('/')[0]}/step"], row[key]))
            tables += any(key.startswith("before/episodes/") for key in row)
    assert found == GIVEN and tables == 1
    assert len(ids) == 1 and next(iter(ids))[1:] == ("run", "p") and exits == [1, 0]
    assert steps == sorted(set(steps)), "W&B drops what goes back"


def wandb_records(file: Path) -> list[Any]:
    """The records of a .wandb file, which is a log as LevelDB's: blocks of 32 KiB, with a head of 7 bytes before each piece."""
    from wandb.proto import wandb_internal_pb2

    data, at, found, whole = file.read_bytes(), 7, [], b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def test_mlflow(tmp_path: Path) -> None:
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package, reason="needs agentrl[mlflow]")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    looks = lived(tmp_path, {"name": "mlflow", "args": {"uri": uri, "experiment": "e"}})
    assert looks == [f"mlflow ui --backend-store-uri {uri}"] * 2
    client = MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    assert {key: [(one.step, one.value) for one in history] for key, history in histories.items()} == GIVEN
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["env.id"] == "key_value" and run.data.params["rollout.group_size"] == "8"
    artifacts = {path.relative_to(tmp_path / "mlartifacts").name for path in (tmp_path / "mlartifacts").rglob("*.*")}
    assert {"curve.png", "before_000000.json", "summary.json"} <= artifacts


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = pytest.importorskip("trackio.sqlite_storage", reason="needs agentrl[trackio]")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    lived(tmp_path, {"name": "trackio", "args": {"project": "p"}})
    [file] = (tmp_path / "trackio").glob("*.db")
    found: Rows = {}
    names = set()
    with sqlite3.connect(file) as db:
        for name, step, text in db.execute("select run_name, step, metrics from metrics order by id"):
            names.add(name)
            for key, value in json.loads(text).items():
                if key in GIVEN:
                    found.setdefault(key, []).append((step, value))
    assert found == GIVEN and len(names) == 1 and next(iter(names)).startswith("run-")


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
"""A picture of one pixel."""
