"""The step-wise loop: the parts of a run, opened, with every step in the caller's hands."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from agentrl.cli.configs import open_folder
from agentrl.config import TrainConfig
from agentrl.config.temperature import one_temperature
from agentrl.errors import ConfigError, StepOrderError
from agentrl.executors import in_thread
from agentrl.python.background import Both, BothMethod
from agentrl.python.configs import Config, config_of
from agentrl.python.policy import LivePolicy
from agentrl.python.trainer import Trainer
from agentrl.run.checks import check_train
from agentrl.run.display import Display
from agentrl.run.folder import RunFolder
from agentrl.run.gc_threshold import raise_gc_threshold
from agentrl.run.interrupt import Interrupt
from agentrl.run.run_log import RunLog
from agentrl.run.session import Session, open_session
from agentrl.run.sft import warm_start
from agentrl.shown import console
from agentrl.train.families.choice import with_packing


class StepLoop:
    """An opened session: `policy` samples, `trainer` trains; `close` (or the end of a `with`) frees everything.

    `folder`: where it writes its model and checkpoints.
    """

    def __init__(self, session: Session, run_log: RunLog, temporary: tempfile.TemporaryDirectory[str] | None) -> None:
        self._session, self._run_log, self._temporary = session, run_log, temporary
        self._closed = False
        self.config: TrainConfig = session.config
        self.folder: Path = session.folder.path
        self._trainer = Trainer(session)
        self._policy = LivePolicy(session, self._trainer)

    @property
    def policy(self) -> LivePolicy:
        """Samples prompts, plays episodes, evaluates."""
        self._check_open()
        return self._policy

    @property
    def trainer(self) -> Trainer:
        """Batches, gradients, optimizer steps, publishing."""
        self._check_open()
        return self._trainer

    @property
    def session(self) -> Session:
        """The live parts themselves, as `run/loop.py` has them."""
        self._check_open()
        return self._session

    def _check_open(self) -> None:
        if self._closed:
            raise StepOrderError("the session is closed; open another one: agentrl.session(config)")

    async def _close(self) -> None:
        """Stop the engine, episodes and workers; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._session.close()
        finally:
            self._run_log.__exit__(None, None, None)
            if self._temporary is not None:
                await in_thread("files", self._temporary.cleanup)

    close = BothMethod(_close)

    def __enter__(self) -> StepLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> StepLoop:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close.aio()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"version {self._trainer.version}"
        return f"<StepLoop of {self.config.name!r}, {state}, in {self.folder}>"


async def _session(
    config: Config, *, folder: str | Path | None = None, quiet: bool = True, overrides: Mapping[str, Any] | None = None
) -> StepLoop:
    """Open the parts of a run for a step-wise loop: the actors, the engine with the first weights in it, the environments. With
    an [sft] section the warm start is done first, as a run does it.

    `config`: as of `agentrl.train`, with `overrides` on top. `folder`: keeps model and checkpoints there, and goes on from the
    newest if there are some; by default a temporary one. Raises a UserError for what the user can fix, before anything starts.
    """
    made = config_of(config, overrides)
    for name in ("experience", "demonstrations"):
        if getattr(made.algorithm, name) is not None:
            raise ConfigError(
                f"algorithm.{name}: a step-wise loop chooses itself what is in a batch, and nothing is added to it; leave it out "
                f"(overrides={{'algorithm.{name}': False}})"
            )
    one_temperature(made.rollout, "a step-wise loop")
    await in_thread("load", check_train, made)
    raise_gc_threshold()
    temporary = tempfile.TemporaryDirectory(prefix="agentrl-session-") if folder is None else None
    path = Path(temporary.name if temporary is not None else str(folder)).absolute()
    made = made.model_copy(update={"out": str(path.parent), "name": path.name})
    place = await in_thread("files", _folder, made, path)
    made = place.dated(made)
    display = Display(console(quiet=True) if quiet else None)
    run_log = RunLog(place, display, [])
    made = await in_thread("load", with_packing, made)  # one decision for all roles and ranks
    session = await open_session(made, place, display)
    try:
        if made.rollout.colocate:
            await session.publisher.sleep()
        if made.sft is not None and not (place.warm_start / "config.json").is_file():
            await warm_start(session, run_log, Interrupt(display.say))
        await session.begin()
    except BaseException:
        await session.close()
        raise
    return StepLoop(session, run_log, temporary)


session = Both(_session)


def _folder(config: TrainConfig, path: Path) -> RunFolder:
    """A fresh folder, or that of an earlier session. Raises ConfigError for a folder of something else."""
    if (path / "config.toml").is_file():
        return RunFolder(path)
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"folder = {path}: it holds something else than a session; name a new folder")
    return open_folder(config, overwrite=False)
