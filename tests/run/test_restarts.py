"""A dead worker restarts the run from its newest checkpoint; a whole run: tests/e2e/test_train.py."""

import asyncio
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.cli.main import main as cli
from agentrl.config.schema import ClusterConfig, EnvConfig, TrainConfig
from agentrl.rollout.warm_start import Transcripts
from agentrl.run import driver as main
from agentrl.run.folder import RunFolder
from agentrl.run.interrupt import Interrupt
from agentrl.run.reader import load_run
from agentrl.trainer.learner import Learner
from agentrl.trainer.train_state import saved_tensors
from agentrl.utils.errors import WorkerDiedError, WorkerError
from tests.conftest import proof
from tests.e2e.inside import config_of, execute, numbers


@pytest.mark.parametrize(("limit", "deaths", "error", "attempts"), [
    *((limit, 99, WorkerDiedError, limit + 1) for limit in (0, 1, 2)),
    (2, 2, WorkerDiedError, 3),  # it lives again
    (2, 1, WorkerError, 1),  # another error
])  # fmt: skip
def test_a_run_starts_again_after_the_death_of_a_worker_as_often_as_its_limit_says(
    monkeypatch: pytest.MonkeyPatch, limit: int, deaths: int, error: type[BaseException], attempts: int
) -> None:
    begun, lines, outcome = list[int](), list[str](), main.RunOutcome()

    async def attempt(*_: Any) -> None:
        begun.append(len(begun))
        if len(begun) <= deaths:
            raise error("group 'actor': worker process gone: rank 1")

    monkeypatch.setattr(main.RunDriver, "_attempt", attempt)
    config = TrainConfig(env=EnvConfig(id="none"), cluster=ClusterConfig(max_restarts=limit))
    display: Any = SimpleNamespace(say=lines.append)
    run = main.RunDriver(config, None, display, None, outcome, Interrupt(display.say))  # type: ignore[arg-type]
    with pytest.raises(error) if deaths >= attempts else nullcontext():
        asyncio.run(run.train())
    assert (len(begun), outcome.restarts, len(lines)) == (attempts, attempts - 1, attempts - 1)
    assert all("rank 1" in line and f"of {limit})" in line for line in lines)


def test_a_run_that_its_own_code_cancelled_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def attempt(*_: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(main.RunDriver, "_attempt", attempt)
    display: Any = SimpleNamespace(say=lambda _: None)
    config = TrainConfig(env=EnvConfig(id="none"))
    run = main.RunDriver(config, None, display, None, main.RunOutcome(), Interrupt(display.say))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cancelled by code inside of it"):
        asyncio.run(run.train())


def test_a_run_that_goes_on_has_no_summary_of_its_last_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks tells by it whether a run is over (agentrl.run.reader)."""
    init = {"layers": 1, "hidden": 32, "mlp": 32, "heads": 2, "kv_heads": 1, "head_dim": 16}
    config = TrainConfig(name="x", out=str(tmp_path), env=EnvConfig(id="key_value"), model={"init": init})
    folder = RunFolder.create(config)
    folder.write_summary({"status": "interrupted", "seconds": 50.0})
    seen: list[tuple[bool, bool]] = []

    async def train(*_: Any) -> None:
        folder.append_metrics({"step": 1, "phase": "sft"})
        seen.append((folder.summary.exists(), load_run(folder.path).live))
        raise WorkerError("over")

    monkeypatch.setattr(main.RunDriver, "train", train)
    monkeypatch.setattr(main, "draw_curve", lambda *_: None)
    with pytest.raises(WorkerError):
        main.execute(config, folder, resumed=True)
    assert seen == [(False, True)]
    summary = load_run(folder.path).summary
    assert summary["status"] == "failed" and 50 <= summary["seconds"] < 60 and not load_run(folder.path).live
    folder.append_metrics({"step": 1, "phase": "train", "time/rollout_s": 60.0, "time/update_s": 40.0, "time/episode_s": 9.0})
    folder.summary.unlink()  # as a kill leaves it: what its rows took is known
    with pytest.raises(WorkerError):
        main.execute(config, folder, resumed=True)
    assert 100 <= load_run(folder.path).summary["seconds"] < 109


TINY = [f"model.init.{key}={value}" for key, value in {"layers": 1, "hidden": 32, "mlp": 32, "heads": 2, "kv_heads": 1}.items()]


@pytest.mark.parametrize("resumed", [pytest.param(False, marks=proof), True])
def test_a_warm_start_that_was_cut_off_has_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool) -> None:
    """It begins again, by a restart of the run's own or by a resume, and its rows are those of an unbroken one."""
    sft = ["sft.max_steps=20", "sft.min_steps=20", "sft.gate_every=20", "sft.batch=2", *TINY, "sft.gate=0.0", "sft.gate_tasks=2"]
    expected = numbers(execute(config_of(tmp_path, "whole", *sft), only_warm_start=True))
    take, calls = Transcripts.take, list[int]()

    async def dying(self: Transcripts, start: int, count: int) -> Any:
        if start >= 20 and not calls:  # the second ten steps, of two transcripts each
            calls.append(start)
            raise WorkerDiedError("group 'actor': worker process gone: rank 0")
        return await take(self, start, count)

    monkeypatch.setattr(Transcripts, "take", dying)
    config = config_of(tmp_path, "cut", *sft, f"cluster.max_restarts={0 if resumed else 1}")
    if resumed:
        with pytest.raises(WorkerDiedError, match="continue with: agentrl sft --resume"):
            execute(config, only_warm_start=True)
        assert [cli(["sft", "--resume", str(tmp_path / "cut")]) for _ in range(2)] == [0, 2], "once, as far as the warm start"
    found = numbers(tmp_path / "cut" if resumed else execute(config, only_warm_start=True))
    steps = [("sft", step) for step in range(1, 21)]
    assert len(calls) == 1 and [(row["phase"], row["step"]) for row in found] == [*steps, ("gate", 20)]
    assert found == expected


def test_a_run_whose_worker_died_goes_on_from_its_newest_checkpoint_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It dies in its third update, of which a row is lost that no checkpoint has."""
    every = ["steps=3", "checkpoint.every=2", "checkpoint.asynchronous=false", *TINY]
    whole = execute(config_of(tmp_path, "whole", *every))
    learn, steps = Learner._learn, list[int]()

    async def dying(self: Learner, *args: Any) -> Any:
        steps.append(args[1])
        if steps == [0, 1, 2]:
            raise WorkerDiedError("group 'actor': worker process gone: rank 1")
        return await learn(self, *args)

    monkeypatch.setattr(Learner, "_learn", dying)
    run = execute(config_of(tmp_path, "cut", *every, "cluster.max_restarts=1"))
    assert steps == [0, 1, 2, 2] and numbers(run) == numbers(whole)
    assert "rank 1; restarting from the newest checkpoint (1 of 1)" in capsys.readouterr().out.replace("\n", " ")
    assert load_run(run).summary["restarts"] == 1


def policy(checkpoint: Path) -> torch.Tensor:
    """All weights of the policy, float64."""
    names, read = saved_tensors(checkpoint / "actor")
    return torch.cat([read(name).double().flatten() for name in sorted(names) if name.startswith("model.")])


@pytest.mark.parametrize("factor", [0.5, pytest.param(3.0, marks=proof)])
def test_a_resume_takes_another_rate_and_says_from_which_update_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    """An update from one state moves the weights in proportion to the rate (AdamW without decay)."""
    every = ["steps=3", "checkpoint.every=1", "checkpoint.keep=9", "optim.schedule=constant", "optim.lr=1e-4", "seed=3", *TINY]
    run = execute(config_of(tmp_path, "whole", *every))
    shutil.copytree(run, tmp_path / "other")
    for late in ("checkpoints/step_000003", "final"):
        shutil.rmtree(tmp_path / "other" / late)
    (tmp_path / "other" / "summary.json").unlink()
    rate = 1e-4 * factor
    assert cli(["train", "--resume", str(tmp_path / "other"), f"optim.lr={rate}", "eval.tasks=1", "eval.temperature=0.5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"optim.lr was 0.0001, is {rate} from update 3 on" in said
    assert "is 0.5: evaluations before and after this resume, and the scores of checkpoints, do not compare" in said
    before, as_begun, other = (policy(at) for at in steps_of(run, (2, 3)) + steps_of(tmp_path / "other", (3,)))
    assert (as_begun - before).norm() > 0
    assert (other - before - factor * (as_begun - before)).norm() < 1e-3 * (as_begun - before).norm()
    assert len(list((tmp_path / "other" / "config_history").glob("until_000002.toml"))) == 1
    # The newest checkpoint has the new rate as its own: a resume without an override goes on with it.
    assert cli(["train", "--resume", str(tmp_path / "other"), "steps=4"]) == 0
    assert [row["lr"] for row in numbers(tmp_path / "other") if row["phase"] == "train"][-2:] == pytest.approx([rate, rate])


def steps_of(run: Path, steps: tuple[int, ...]) -> list[Path]:
    return [run / "checkpoints" / f"step_{step:06d}" for step in steps]


@pytest.mark.parametrize(
    "gone", ["trajectories", *(pytest.param(name, marks=proof) for name in ("tokens", "config_history", "tensorboard"))]
)
def test_a_run_whose_folder_of_rows_was_deleted_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], gone: str) -> None:
    run = execute(config_of(tmp_path, "run", "steps=1", "checkpoint.every=1", *TINY))
    shutil.rmtree(run / gone, ignore_errors=True)
    assert cli(["train", "--resume", str(run), "steps=2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("trajectories: the folder was deleted" in said) == (gone == "trajectories")
    assert (run / "trajectories" / "step_000002.jsonl").is_file()
