"""Runs that are broken off at a chosen place, in a process of their own, and resumed with the real command."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.contrib.remote_envs.served import TOKEN, VARIABLE
from tests.e2e.inside import config_of
from tests.e2e.runs import forked, numbers, rows

TINY = ["model.init={layers=1,hidden=32,mlp=32,heads=2,kv_heads=1,head_dim=16}", "checkpoint.every=1", "rollout.groups=2",
        "rollout.group_size=4", "rollout.max_turns=3", "optim.schedule=constant", "health.lint=false"]  # fmt: skip
WAYS = ("ctrl-c", "killed after a checkpoint", "killed before a checkpoint", "killed between its parts")


def begun(out: str, name: str, overrides: list[str], way: str, step: int, code_file: str) -> None:
    """Begin the run; at update `step` it ends as `way` says."""
    from agentrl.run.checks import check_config
    from agentrl.run.driver import execute
    from agentrl.run.folder import RunFolder
    from agentrl.run.provenance import Provenance

    break_off(way, step)
    os.environ[VARIABLE] = TOKEN
    config = config_of(Path(out), name, *overrides)
    check_config(config, capacity=True)
    folder = RunFolder.create(config)
    (folder.path / "provenance.json").write_text(Provenance(folder, config).record())
    Path(code_file).write_text(str(execute(config, folder, resumed=False)))


def command(words: list[str], code_file: str) -> None:
    from agentrl.cli.main import main

    os.environ[VARIABLE] = TOKEN
    Path(code_file).write_text(str(main(words)))


def break_off(way: str, step: int) -> None:
    """Arrange that this process gets Ctrl-C, or kills itself, at update `step`."""
    from agentrl.run.folder import RunFolder
    from agentrl.trainer import checkpoint
    from agentrl.trainer.checkpoint import Checkpoints

    commit, append, seal = Checkpoints.commit, RunFolder.append_metrics, checkpoint.seal

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def commits(self: Checkpoints, at: int, score: float | None = None) -> None:
        if (way, at) == ("killed before a checkpoint", step):
            die()
        commit(self, at, score)
        if (way, at) == ("killed after a checkpoint", step):
            die()

    def seals(aside: Path, at: int, score: float | None) -> None:
        seal(aside, at, score)
        if (way, at) == ("killed between its parts", step):  # whole, and not yet in its place
            die()

    def appends(self: RunFolder, row: Mapping[str, Any]) -> None:
        append(self, row)
        if (way, row["phase"], row["step"]) == ("ctrl-c", "train", step):
            os.kill(os.getpid(), signal.SIGINT)

    Checkpoints.commit, RunFolder.append_metrics = commits, appends  # type: ignore[method-assign]
    checkpoint.seal = seals


def in_process(target: Any, *words: Any, code_file: Path, timeout: float = 500) -> int:
    """The exit code of `target` in a process of its own; minus the signal if it was killed."""
    code_file.unlink(missing_ok=True)
    process = forked(target, *words, str(code_file))
    process.start()
    process.join(timeout)
    code = process.exitcode
    process.kill()
    assert code is not None, "it hangs"
    return code if code else int(code_file.read_text())


def broken_and_resumed(out: Path, name: str, overrides: list[str], way: str, step: int, changed: Sequence[str] = ()) -> Path:
    """The folder of a run that was broken off at update `step` and resumed, `changed` being what changes then."""
    code_file = out / f"{name}.code"
    found = in_process(begun, str(out), name, overrides, way, step, code_file=code_file)
    assert found == {"ctrl-c": 130}.get(way, -signal.SIGKILL), (way, found)
    run = out / name
    assert in_process(command, ["train", "--resume", str(run), *changed], code_file=code_file) == 0
    return run


def assert_same(run: Path, whole: Path) -> None:
    """`run` is `whole` to the digit, with no row or episode twice."""
    assert [without_clock(row) for row in numbers(run)] == [without_clock(row) for row in numbers(whole)]
    assert (run / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()
    for folder in ("trajectories", "tokens"):
        assert files(run / folder) == files(whole / folder), folder
    for file in files(run / "trajectories"):
        ours, theirs = (told(path / "trajectories" / file) for path in (run, whole))
        assert ours == theirs
        assert set(Counter((row["env"], row["task"]["id"], row["member"]) for row in ours).values()) == {1}, file
    phases = Counter((row["phase"], row["step"]) for row in rows(run))
    assert set(phases.values()) == {1}, phases


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.jsonl"))


def without_clock(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(("loop/", "rollout/worker"))}


def told(file: Path) -> list[dict[str, Any]]:
    """Episodes of a file without times."""
    return [timeless(json.loads(line)) for line in file.read_text().splitlines()]


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "timings")}
    return [timeless(one) for one in value] if isinstance(value, list) else value
