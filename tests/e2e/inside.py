"""Small real runs inside the test's own process, and in processes that can be killed and start warm."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.data.trajectory import Trajectory
from tests.e2e.runs import GROUPS, MEMBERS, ROOT, SHORT, exit_code, forked, numbers, rows, updates

HERE = f"""
    cluster.backend=inline engine=embedded eval.tasks=4 eval.every=0 checkpoint.every=100 trajectories_every=1
    rollout.groups={GROUPS} rollout.group_size={MEMBERS} rollout.max_turns=4 rollout.max_turn_tokens=24 stop_at_success=false
""".split()
HERE.append(f"env.reward={SHORT}")


def config_of(out: Path, name: str, *overrides: str) -> Any:
    """The quickstart's config without its warm start, shrunk to one layer, with overrides; without its model if they name one."""
    from agentrl.config.load import config_from, read_toml

    table = read_toml(ROOT / "configs" / "quickstart.toml")
    if not any(text.startswith("sft.") for text in overrides):
        del table["sft"]
    table["model"]["init"]["layers"] = 1
    if any(text.startswith("model.path=") for text in overrides):
        del table["model"]
    return config_from(table, [f"name={name}", f"out={out}", *HERE, *overrides])


def execute(config: Any, *, resumed: bool = False, only_warm_start: bool = False) -> Path:
    """Run it to its end in this process; returns its folder."""
    from agentrl.run.checks import check_config
    from agentrl.run.driver import execute as run
    from agentrl.run.folder import RunFolder

    with logging_kept():
        check_config(config)
        folder = RunFolder(Path(config.out) / config.name) if resumed else RunFolder.create(config)
        folder.only_warm_start = only_warm_start
        assert run(config, folder, resumed=resumed) == 0
    return folder.path


@contextmanager
def logging_kept() -> Iterator[None]:
    """A run takes agentrl's log for its own file; other tests want it back."""
    logger = logging.getLogger("agentrl")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    try:
        yield
    finally:
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.level, logger.propagate, logger.handlers = level, propagate, handlers


def start_or_resume(out: str, name: str, overrides: list[str]) -> None:
    """A process of its own: go on with the run if it is there, else begin it."""
    resumed = (Path(out) / name / "config.toml").is_file()
    execute(config_of(Path(out), name, *overrides), resumed=resumed)


def killed_at_random(out: Path, name: str, overrides: list[str], kills: int, steps: int) -> list[tuple[int, float]]:
    """Run to the end of `steps` updates; on the way the process is killed `kills` times, each at a random moment of a
    random update. Returns (updates recorded, seconds after that) of the kills, for an assertion's message."""
    folder, moments = out / name, list[tuple[int, float]]()
    for _ in range(kills):
        process = forked(start_or_resume, str(out), name, overrides)
        process.start()
        last = steps - 1 if moments else steps // 2  # the first one surely before the run's end
        wanted, late = random.randint(min(_recorded(folder), last), last), random.uniform(0.0, 0.3)
        deadline = time.monotonic() + 120
        while process.exitcode is None and _recorded(folder) < wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        process.join(late)
        assert process.exitcode in (None, 0), (process.exitcode, moments)
        if process.exitcode is None:
            moments.append((_recorded(folder), late))
        process.kill()
        process.join()
    code = exit_code(start_or_resume, str(out), name, overrides)
    assert code == 0 and (moments or not kills), (code, moments)
    return moments


def _recorded(folder: Path) -> int:
    """Updates in metrics.jsonl now."""
    file = folder / "metrics.jsonl"
    return file.read_text().count('"phase": "train"') if file.exists() else 0


def episodes(folder: Path, step: int, phase: str = "step") -> list[Trajectory]:
    """The episodes that update `step` was given, or those of an evaluation."""
    lines = (folder / "trajectories" / f"{phase}_{step:06d}.jsonl").read_text().splitlines()
    return [Trajectory.from_json(json.loads(line)) for line in lines]


def ledger_of(folder: Path) -> dict[str, Any]:
    """The group ledger in the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step_*"))
    ledger: dict[str, Any] = json.loads((newest / "driver.json").read_text())["ledger"]
    return ledger


__all__ = ["config_of", "episodes", "execute", "killed_at_random", "ledger_of", "numbers", "rows", "updates"]
