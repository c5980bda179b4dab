"""The index reads what is new and nothing else, while files come, grow, and are written anew."""

import json
import os
import shutil
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentrl.contrib.view.index as module
from agentrl.contrib.view.index import Index, cache_folder
from agentrl.data.trajectory import Trajectory
from agentrl.run.folder import RunFolder
from agentrl.run.reader import RunRecord
from agentrl.utils.errors import RunFolderError
from tests.run.made_folders import episode, run_folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks of the episodes that were parsed, in order."""
    seen: list[str] = []
    real = module.features_of

    def counted(row: Any) -> Any:
        seen.append(row["task"]["id"])
        return real(row)

    monkeypatch.setattr(module, "features_of", counted)
    return seen


def indexed(at: Path, *members: Trajectory) -> tuple[RunFolder, Index]:
    """A run with one file, and its index, which is up to date."""
    folder = run_folder(at / "r", {"step_000001": [*members]})
    index = Index(RunRecord(folder.path))
    index.refresh()
    return folder, index


def ids(index: Index) -> list[str]:
    with index.reading() as db:
        rows = db.execute("SELECT f.name || '.' || e.row FROM episodes e JOIN files f ON f.id = e.file ORDER BY f.name, e.row")
        return [row[0] for row in rows]


def test_a_new_file_is_read_and_the_old_ones_are_not(tmp_path: Path, read: list[str]) -> None:
    folder = run_folder(tmp_path / "r", {"step_000001": [episode(1)]})
    index = Index(RunRecord(folder.path))
    assert index.refresh() and not index.refresh()
    folder.write_trajectories("step_000002", [episode(2), episode(3)])
    assert index.refresh()
    assert read == ["t/train/1", "t/train/2", "t/train/3"] and ids(index) == ["step_000001.0", "step_000002.0", "step_000002.1"]
    assert Index(RunRecord(folder.path)).refresh() is False, "another process finds what this one read"


def test_tokens_of_an_api_model_are_those_that_its_provider_counts() -> None:
    """The ids in its ledgers are messages; 0 prompt tokens: they are not known."""
    row = episode().to_json()
    for prompt, sampled, tokens in ((None, None, 4), (1000, 70, 140), (0, 0, 0)):
        known = {} if prompt is None else {"prompt_tokens": prompt, "sampled_tokens": sampled}
        found = module.features_of({**row, "turns": [{**turn, **known} for turn in row["turns"]]})
        assert found.columns["tokens"] == tokens


def test_a_file_that_grows_is_read_on_from_where_it_ended(tmp_path: Path, read: list[str]) -> None:
    """As `agentrl eval` writes: row by row, of which the last may be half there."""
    at = tmp_path / "eval"
    at.mkdir()
    lines = [json.dumps(episode(n, split="heldout").to_json()) + "\n" for n in range(3)]
    path = at / "trajectories.jsonl"
    path.write_text(lines[0] + lines[1][:100])
    index = Index(RunRecord(at))
    index.refresh()
    assert len(read) == 1 and not index.refresh()
    with path.open("a") as file:
        file.write(lines[1][100:] + lines[2])
    assert index.refresh()
    assert read == ["t/heldout/0", "t/heldout/1", "t/heldout/2"]
    assert ids(index) == ["trajectories.0", "trajectories.1", "trajectories.2"]


def test_a_file_that_was_written_anew_is_read_again(tmp_path: Path, read: list[str]) -> None:
    folder, index = indexed(tmp_path, episode(1), episode(2))
    folder.write_trajectories("step_000001", [episode(3)])  # as a resumed run does
    index.refresh()
    assert ids(index) == ["step_000001.0"] and read[-1] == "t/train/3"
    path = folder.trajectories / "step_000001.jsonl"
    inode = path.stat().st_ino
    path.write_text(json.dumps(episode(4).to_json()) + "\n" + json.dumps(episode(5).to_json()) + "\n")  # in place
    assert path.stat().st_ino == inode
    index.refresh()
    assert read[-2:] == ["t/train/4", "t/train/5"] and len(ids(index)) == 2
    path.unlink()
    index.refresh()
    assert ids(index) == []
    with index.reading() as db:
        for table in ("tools", "errors", "terms", "failures"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] == 0


def test_many_rows_are_read_in_parts_that_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 2)
    members = [episode(n // 4, n % 4) for n in range(7)]
    for one in members:  # by id and seed alone, as the batch is grouped: whatever their content, whichever part they are in
        one.task = replace(one.task, id="t", data={"member": one.member})
    folder = run_folder(tmp_path / "r", {"step_000001": members})
    index, asked = Index(RunRecord(folder.path)), iter([False, False, True, True])
    index.refresh(lambda: next(asked))
    assert len(ids(index)) == 4 and index.progress()[0] == 4 and index.progress()[1] in (6, 7, 8)
    index.refresh()
    assert len(ids(index)) == 7 and index.progress() == (7, 7)
    with index.reading() as db:
        assert [row[0] for row in db.execute("SELECT grp FROM episodes ORDER BY row")] == [0, 0, 0, 0, 1, 1, 1]


def test_two_at_once_read_each_row_once(tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 3)
    folder = run_folder(tmp_path / "r", {f"step_{n:06d}": [episode(10 * n + m) for m in range(8)] for n in range(4)})
    threads = [threading.Thread(target=Index(RunRecord(folder.path)).refresh) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read) == sorted(f"t/train/{10 * n + m}" for n in range(4) for m in range(8))


def test_damaged_rows_are_counted_and_named_and_hide_no_other(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r", {"step_000001": [episode(1), episode(2)]})
    path = folder.trajectories / "step_000001.jsonl"
    good = path.read_text().splitlines()
    odd = ['{"task": {"id": "x"}}', "not json", "[1]", json.dumps({**json.loads(good[0]), "turns": 5})]
    odd += [json.dumps({**json.loads(good[0]), **large}) for large in ({"member": 1 << 70}, {"reward": 10**400})]
    odd.append('{"evidence": ' + "[" * 20000 + "]" * 20000 + "}")
    lone = json.loads(good[1])
    lone["error"], lone["task"]["id"] = "half \ud83d a pair", "\udc00"
    path.write_text("\n".join([good[0], *odd, json.dumps(lone), good[1]]) + "\n")
    index = Index(RunRecord(folder.path))
    index.refresh()
    assert ids(index) == ["step_000001.0", "step_000001.8", "step_000001.9"]
    with index.reading() as db:
        found = db.execute("SELECT rows, damaged, problem FROM files").fetchone()
    assert tuple(found)[:2] == (10, 7) and "row 2" in found["problem"] and "turns" in found["problem"]


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    _, index = indexed(tmp_path, episode(1))

    def of_other_tables() -> None:
        index._drop()
        with sqlite3.connect(index.path) as db:
            db.execute("CREATE TABLE files (other INTEGER)")

    for damage in (lambda: index.path.write_bytes(b"no database at all" * 100), of_other_tables):
        damage()
        with pytest.raises(sqlite3.DatabaseError):
            ids(index)
        index.refresh()
        assert ids(index) == ["step_000001.0"], damage


def test_the_index_lies_in_the_run_or_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "r", {"step_000001": [episode(1)]})
    assert cache_folder(folder.path) == folder.path / ".view"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode, **how: folder.path != path and access(path, mode))
    index = Index(RunRecord(folder.path))
    index.refresh()
    assert index.path.is_relative_to(tmp_path / "cache" / "agentrl" / "view") and ids(index) == ["step_000001.0"]
    assert not (folder.path / ".view").exists()


def test_a_run_that_is_started_over_is_indexed_anew(tmp_path: Path) -> None:
    folder, index = indexed(tmp_path, episode(1))
    shutil.rmtree(folder.path)
    run_folder(tmp_path / "r", {"step_000002": [episode(2)]})
    index.refresh()
    assert ids(index) == ["step_000002.0"]
    shutil.rmtree(folder.path)
    with pytest.raises(RunFolderError, match="the run folder no longer exists"):
        index.refresh()
    with pytest.raises(RunFolderError), index.reading():
        pass
    assert not folder.path.exists(), "who looks must not bring a deleted run back"


def test_a_look_at_a_run_in_which_nothing_is_new_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, index = indexed(tmp_path, episode(1))
    real, opened = index._writing, []
    monkeypatch.setattr(index, "_writing", lambda: opened.append(1) or real())
    assert not index.refresh() and opened == []
    index._drop()
    assert index.refresh() and ids(index) == ["step_000001.0"], "the index was deleted meanwhile"


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "r", {"step_000001": [episode(1)]})
    index = Index(RunRecord(folder.path))

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(module, "_read_rows", full)
    with pytest.raises(RunFolderError, match="cannot be written: database or disk is full"):
        index.refresh()
