"""Damaged run folders: no command ends in a traceback, hangs, or goes on wrong; `make proofs` plays the whole matrix."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.identity import identity_of
from agentrl.config.schema import KeepConfig
from agentrl.contrib.view import index as index_place
from agentrl.run.driver import RunDriver, RunOutcome, execute
from agentrl.run.folder import LogFile, RunFolder
from agentrl.run.provenance import Provenance, check_own_config, origin_hint
from agentrl.run.run_log import Health
from agentrl.run.session import _write_driver
from agentrl.trainer.checkpoint import Checkpoints, check_model, seal
from agentrl.utils.errors import CallbackError, CheckpointError, ConfigError, RunFolderError
from agentrl.utils.files import read_plain
from tests.conftest import proof
from tests.run import damage
from tests.run.damage import COMMANDS, KINDS, Runs, cases, make_runs, tried, warmed
from tests.run.made_folders import episode, run_folder
from tests.trainer.test_checkpoints import writing

READ = ("config.toml", "metrics.jsonl", "summary.json", "trajectories/step_000002.jsonl", "trajectories")
MADE: list[Runs] = []
"""Those of the long form, once they are made."""


@pytest.fixture
def passable() -> Iterator[Path]:
    """A folder that any user may enter. Not one of pytest's: each session that starts locks the one that they all lie in."""
    with tempfile.TemporaryDirectory(prefix="agentrl-damage-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Folders with what readers read, without a run."""
    made = {}
    for name in ("whole", "cut", "other"):
        out = tmp_path_factory.mktemp(name)
        out.chmod(0o755)
        files = {f"step_{step:06d}": [episode(step), episode(step + 1)] for step in (1, 2, 3)}
        made[name] = run_folder(out / "run", files).path
        (made[name] / "summary.json").write_text(json.dumps({"status": "done", "steps": 3, "engine": "embedded", "error": None}))
    return Runs(**made)


@pytest.mark.parametrize("file", READ)
@pytest.mark.parametrize("name", ["view", pytest.param("show", marks=proof), pytest.param("runs", marks=proof)])
def test_readers_show_what_is_there_or_name_the_file(read: Runs, tmp_path: Path, name: str, file: str) -> None:
    tmp_path.chmod(0o755)
    found = {}
    for kind in damage.kinds_of(read.cut / file):
        if kind not in damage.DENIED:  # who may read what, a process without root's rights tries in `make proofs`
            verdict, outcome = tried(name, file, kind, read, tmp_path / "case")
            if verdict not in ("right", "said"):
                found[kind] = (verdict, outcome.said[-300:])
    assert found == {}


@proof
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_damage_ends_a_command_without_a_word(name: str, passable: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not MADE:
        MADE.append(make_runs(tmp_path_factory.mktemp("runs")))
        warmed(MADE[0], passable / "run")
    found = {}
    for file, kind in cases(MADE[0].cut):
        verdict, outcome = tried(name, file, kind, MADE[0], passable / "run")
        if verdict not in ("right", "said"):
            found[file, kind] = (verdict, outcome.said[-300:])
    assert found == {}


def config(out: Path, **more: object) -> TrainConfig:
    return TrainConfig.model_validate({"name": "x", "out": str(out), "env": {"id": "key_value"}, **more})


def checkpoint(folder: RunFolder, step: int, **state: object) -> Path:
    with writing(Checkpoints(folder.checkpoints, keep=3), step) as path:
        (path / "driver.json").write_text(json.dumps({"step": step, **state}))
    return folder.checkpoints / f"step_{step:06d}"


def test_a_config_changed_by_hand_or_of_another_run_is_refused_by_key_and_values(tmp_path: Path) -> None:
    folder, ran = RunFolder.create(config(tmp_path)), config(tmp_path, seed=3)
    path = checkpoint(folder, 2, identity=identity_of(ran, "train"))
    check_own_config(identity_of(ran, "train"), folder)
    check_own_config(identity_of(config(tmp_path, seed=3, steps=99), "train"), folder)  # may change
    with pytest.raises(ConfigError, match=rf"config.toml: {path} was trained with other values: seed was 3, is 4"):
        check_own_config(identity_of(config(tmp_path, seed=4), "train"), folder)
    with pytest.raises(ConfigError, match=r"rollout.groups was 16, is 4"):
        check_own_config(identity_of(config(tmp_path, seed=3, rollout={"groups": 4}), "train"), folder)
    (path / "driver.json").write_text("[" * (path / "driver.json").stat().st_size)
    check_own_config(identity_of(config(tmp_path, seed=4), "train"), folder)  # damaged, and not loaded


@pytest.mark.parametrize(("change", "same"), [
    (lambda text: text, True),
    (lambda text: text + '{"step": 3, "phase": "train"}\n', True),
    (lambda text: text.replace('"loss": 2', '"loss": 3'), False),
    (lambda text: text[text.index("\n") + 1 :], False),
    (lambda text: "", False),
])  # fmt: skip
def test_rows_that_are_missing_or_changed_are_seen_against_the_checkpoint(tmp_path: Path, change: object, same: bool) -> None:
    folder = RunFolder.create(config(tmp_path))
    for step in (1, 2):
        folder.append_metrics({"step": step, "phase": "train", "loss": step})
    written = folder.metrics_seal()
    assert written["size"] == folder.metrics.stat().st_size
    folder.metrics.write_text(change(folder.metrics.read_text()))  # type: ignore[operator]
    assert (folder.metrics_seal(written["size"]) == written) is same
    folder.rewind(2)
    assert (folder.metrics_seal(written["size"]) == written) is same, "a rewind keeps the rows as they were, to the byte"


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("read-only", "unreadable", "a file", "another run's", "missing")]
)
def test_a_damaged_record_of_the_run_is_named_with_what_to_do(tmp_path: Path, kind: str) -> None:
    folder = RunFolder.create(config(tmp_path))
    (folder.path / "provenance.json").write_text(json.dumps({"folder": "/elsewhere", "contents": {}}))
    folder.write_summary({"status": "done", "steps": 2, "engine": "embedded"})
    assert "the run began in /elsewhere" in origin_hint(folder) and (folder.read_summary() or {})["steps"] == 2
    with damage.limited(5):
        for path in (folder.path / "provenance.json", folder.summary):
            KINDS[kind](path, path)
        if kind != "a flipped bit":  # which may leave it JSON
            with pytest.raises(RunFolderError, match=r"provenance.json: damaged: .*restore it, or remove it"):
                origin_hint(folder)
            with pytest.raises(RunFolderError, match=r"summary.json: damaged: .*remove it"):
                folder.read_summary()


@pytest.mark.parametrize("envs", [1, 2])
def test_a_run_ends_whatever_a_figure_of_its_rows_has_become(tmp_path: Path, envs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was edited is JSON still: the last resume ended with a trace, and without a summary."""
    names = ["one", "two"][:envs]
    one = config(tmp_path, env=[{"id": "key_value", "name": name} for name in names])
    share = {"success": 0.5, "reward": 0.5, "scored": 8, "unscored": 0, "tokens": 90}
    means = {**share, **{f"env/{name}/{key}": value for name in names for key, value in share.items()}}
    spent = {"grad_norm": 0.0, "optimizer_steps": 1.0, "skipped_steps": 0.0, "groups_zero_variance": 4.0, "episodes_played": 9,
             "episodes_unscored": 1, "tokens_sampled": 90, "tokens_thrown": 9, "tokens_thrown/stale": 9}  # fmt: skip
    row, folder = {**means, **spent}, RunFolder.create(one)
    monkeypatch.setattr("agentrl.run.driver.draw_curve", lambda *_: None)  # which takes long
    for key, value in ((key, value) for key in row for value in ("x", None, [1], ...)):
        changed = {name: old if name != key else value for name, old in row.items() if name != key or value is not ...}
        folder.metrics.unlink(missing_ok=True)
        for phase, step in (("before", 0), ("train", 1), ("eval", 1), ("train", 2), ("after", 2)):
            folder.append_metrics({"step": step, "phase": phase, **changed})
        health = Health(one, print)
        health.begin(2, folder.read_metrics())
        log: Any = SimpleNamespace(trackers=[], health=health, end=lambda *_: None)
        display: Any = SimpleNamespace(say=lambda _: None)
        driver = RunDriver(one, folder, display, log, RunOutcome(status="done"), None)  # type: ignore[arg-type]
        driver.finish()
        driver.say_end()
        assert (folder.read_summary() or {})["steps"] == 2


def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_no_wait(tmp_path: Path) -> None:
    for kind in ("a pipe", "a folder", "a link to itself"):
        path = tmp_path / kind
        path.write_text("x")
        KINDS[kind](path, path)
        with damage.limited(5), pytest.raises(OSError, match=kind):
            read_plain(path)


@pytest.mark.parametrize("name", ["checkpoints", "trajectories", "final", "model", "exports", "tokens", "warm_start"])
def test_a_file_in_place_of_a_folder_of_the_run_is_named(tmp_path: Path, name: str) -> None:
    """At a resume, and before the trained model is written; it was a WorkerError at the end, or a trace."""
    folder = RunFolder.create(cfg := config(tmp_path))
    (folder.path / "provenance.json").write_text(Provenance(folder, cfg).record())
    shutil.rmtree(folder.path / name, ignore_errors=True)
    (folder.path / name).touch()
    said = rf"{name}: not a folder, but the run keeps one there. Move it away"
    for refuse in (
        folder.clear_final,
        partial(Provenance(folder, cfg).check_unchanged, cfg),
        partial(Provenance(folder, cfg).check_resumable, cfg, list),
        partial(execute, cfg, folder, resumed=True),
    ):
        with pytest.raises(RunFolderError, match=said):
            refuse()
    assert (folder.path / name).is_file()


def test_a_state_that_json_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match=r"driver.json: state\(\) of a sampler, .*set is not JSON serializable"):
        _write_driver(tmp_path, {"ledger": {"sampler": {"state": {"seen": {1, 2}}}}}, [])
    assert not (tmp_path / "driver.json").exists()


def test_a_flipped_bit_in_a_trained_model_is_found_before_it_is_evaluated(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1000))
    check_model(tmp_path)  # of an older version: without a manifest
    seal(tmp_path, 4)
    check_model(tmp_path)
    KINDS["a flipped bit"](file, file)
    with pytest.raises(CheckpointError, match=r"model.safetensors: not as written .* Copy the folder back"):
        check_model(tmp_path)


def kept(folder: RunFolder) -> list[str]:
    return sorted(path.stem for path in folder.trajectories.iterdir())


def test_of_the_newest_steps_so_many_keep_their_episodes(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path))
    names = ["before_000000", "step_000001", "step_000002", "eval_000002", "step_000003", "step_000009", "step_b", "after_000004"]
    for name in names:
        (folder.trajectories / f"{name}.jsonl").write_text("x" * 100)
        folder.tokens.mkdir(exist_ok=True)
        (folder.tokens / f"{name}.jsonl").write_text("y")
    folder.rotate(KeepConfig(), 3)
    assert kept(folder) == sorted(names)
    folder.rotate(KeepConfig(trajectories=2), 3)  # step 9 is of an attempt that was lost, and is no newest one
    assert kept(folder) == sorted(set(names) - {"step_000001"})
    assert not (folder.tokens / "step_000001.jsonl").exists() and (folder.tokens / "step_000002.jsonl").exists()
    folder.rotate(KeepConfig(trajectories=1), 3)
    assert kept(folder) == ["after_000004", "before_000000", "step_000003", "step_000009", "step_b"]


def test_readers_go_on_over_steps_that_are_gone(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", {f"step_{step:06d}": [episode(step)] for step in (1, 2, 3)})
    assert damage.command(["show", str(folder.path)]).code == 0
    folder.rotate(KeepConfig(trajectories=2), 3)
    from agentrl.run.reader import load_run

    assert [file.step for file in load_run(folder.path).files] == [2, 3] and len(list(load_run(folder.path).episodes())) == 2
    shown = json.loads(damage.command(["show", str(folder.path), "--json"]).said)
    assert [file["step"] for file in shown["steps"]] == [2, 3], "the index forgets what is gone"


def test_the_log_begins_anew_at_its_size_and_so_many_older_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.run.folder.LOG_BYTES", 1048)
    monkeypatch.setattr("agentrl.run.folder.LOG_FILES", 2)
    handler = LogFile(tmp_path / "log.txt")
    for number in range(100):
        handler.handle(logging.makeLogRecord({"name": "agentrl", "levelname": "INFO", "msg": f"line {number:02d} " + "x" * 60}))
    handler.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["log.txt", "log.txt.1", "log.txt.2"] and all((tmp_path / name).stat().st_size <= 1048 for name in names)
    text = "".join((tmp_path / name).read_text() for name in reversed(names))
    told = [int(line.split("line ")[1][:2]) for line in text.splitlines()]
    assert told == list(range(100 - len(told), 100)) and len(told) > 15


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is tried")
@pytest.mark.parametrize("name", ["show", "view"])
def test_an_index_that_can_lie_in_neither_folder_lies_in_a_temporary_one_and_both_are_named(
    passable: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder, home = run_folder(passable / "runs" / "run", {"step_000002": [episode(1), episode(2)]}), passable / "home"
    home.mkdir(mode=0o700)
    (temporary := passable / "tmp").mkdir()
    temporary.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    COMMANDS[name](folder.path)  # what is imported is then there, also for nobody
    (folder.path / ".view").rename(passable / "away")
    said = []
    os.seteuid(damage.NOBODY)
    try:
        for where in (temporary, home):
            monkeypatch.setattr(tempfile, "tempdir", str(where))
            monkeypatch.setattr(index_place, "_made", [])
            outcome = COMMANDS[name](folder.path)
            said.append((outcome, (outcome.said + capsys.readouterr().err).replace("\n", "")))
    finally:
        os.seteuid(0)
    for _, text in said:
        assert f"{folder.path}: neither it nor {home}/cache/agentrl/view/" in text and "set XDG_CACHE_HOME" in text, text
    (works, text), (nowhere, why) = said
    assert works.code == 0 and ("t/train/2" if name == "view" else "step_000002   train   2") in text, text
    assert "an index of its episodes must lie somewhere" in why and "Permission denied" in why
    assert nowhere.code == 2
