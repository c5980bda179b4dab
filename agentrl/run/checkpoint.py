"""A run's checkpoints: the state of the training roles and of the driver, under one manifest.

save:  begin (state copied)  ->  ... training continues, a background task waits for the writers ...  ->  all files are here
       ->  commit
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config import TrainConfig
from agentrl.config.identity import identity_of
from agentrl.errors import CheckpointError
from agentrl.executors import in_thread
from agentrl.files import naming
from agentrl.plain_data import json_text, read_json
from agentrl.rollout.collect import Collector
from agentrl.rollout.evaluate import Evaluation
from agentrl.run.demonstrations import Demonstrations
from agentrl.run.folder import DRIVER, RunFolder, lines
from agentrl.spans import at, here, note, now, spanned
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.learner import Learner
from agentrl.trajectory import Group

GROUPS = "groups.jsonl"
POLL = 0.05
_NAMED = 5


class Saver:
    """Saves and loads a run's checkpoints; at most one is being written.

    A checkpoint holds model, optimizer, schedule and RNG of the training roles, and the driver's group
    ledger, which is also the data cursor, with its finished but untrained groups (`groups.jsonl`), and the
    demonstrations that are owed to the next update. With `checkpoint.asynchronous` its files are written while
    training continues; it is valid from the moment when its manifest exists, so a kill before that loses only this one.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        learner: Learner,
        collector: Collector,
        say: Callable[[str], None],
        demonstrations: Demonstrations | None = None,
    ) -> None:
        self._config, self._folder, self._learner, self._collector, self._say = config, folder, learner, collector, say
        self._demonstrations = demonstrations
        cfg = config.checkpoint
        self._checkpoints = Checkpoints(folder.checkpoints, cfg.keep, cfg.keep_best)
        self._writing: asyncio.Task[None] | None = None

    @spanned("checkpoint")
    async def save(self, evaluated: Evaluation | None = None) -> None:
        """Start the checkpoint of the ledger's version, after the previous one is complete.

        `evaluated`: the evaluation of exactly these weights, if there is one. Raises the error of the previous
        checkpoint if writing it failed; ResourceError if the disk is full.
        """
        await self.wait()
        step = self._collector.version
        aside = self._checkpoints.begin(step)
        try:
            await self._learner.begin_save(aside)
            # No await between these two: a group that ended in between would be in neither of them, or in both.
            state = {"step": step, "ledger": self._collector.to_json(contents=False)}
            groups = self._collector.complete_groups()
            if self._demonstrations is not None:
                state["demonstrations"] = self._demonstrations.to_json()
            state |= {"metrics": self._folder.metrics_seal(), "identity": identity_of(self._config, "train")}
            await in_thread("files", _write_driver, aside, state, groups)
        except Exception as error:
            self._checkpoints.give_up(step, error)
        place, since = here(), now()
        with at(None):  # what asks whether it is written is no part of the step
            writing = asyncio.create_task(self._finish(step, aside, self._score(evaluated)), name=f"checkpoint {step}")
        written = partial(note, "checkpoint", f"write checkpoint {step}", since, track="checkpoints", place=place)
        writing.add_done_callback(lambda _: written())
        self._writing = writing
        if not self._config.checkpoint.asynchronous:
            await self.wait()

    async def save_missing(self) -> int:
        """Ensure a complete checkpoint of the ledger's version; returns that version."""
        await self.wait()
        step, newest = self._collector.version, self._checkpoints.newest()
        if newest is None or newest.name != f"step_{step:06d}":
            await self.save()
            await self.wait()
        return step

    async def wait(self) -> None:
        """Wait until nothing is being written. Raises the error if writing failed."""
        if self._writing is not None:
            # Forgotten before it is awaited, so that its error is raised once and not again by the next save.
            writing, self._writing = self._writing, None
            await writing

    async def check(self) -> None:
        """Raise the error of a failed background save, without waiting for one in progress."""
        if self._writing is not None and self._writing.done():
            await self.wait()

    async def close(self) -> None:
        """Cancel a save that is not finished; it is lost."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def rate(self, evaluated: Evaluation) -> None:
        """Record the evaluation of the ledger's version, whose checkpoint exists already."""
        await self.wait()
        score = self._score(evaluated)
        if score is not None:
            self._checkpoints.rate(self._collector.version, score)

    def wanted(self, evaluated: Evaluation | None) -> bool:
        """Whether these weights deserve a checkpoint of their own: better than all that are kept as best."""
        score, best = self._score(evaluated), self._checkpoints.best()
        return self._config.checkpoint.keep_best > 0 and score is not None and (best is None or score > best[1])

    async def load(self) -> bool:
        """Load the newest complete checkpoint; False if there is none. Metrics after it are removed."""
        # Before `newest`: it may move back a checkpoint, which is then the newest one.
        lost = self._checkpoints.lost()
        newest, damaged = await in_thread("files", self._checkpoints.newest_intact)
        for problem in damaged:
            self._say(f"a checkpoint is damaged: {problem}; going on from {newest.name if newest else 'the start'}")
        if lost:
            names = ", ".join(str(step) for step in lost)
            self._say(
                f"checkpoint {names} was being written when the run ended and is lost; "
                f"going on from {newest.name if newest else 'the start'}"
            )
        if newest is None:
            return False
        await self._learner.load(newest)
        state = read_json((newest / DRIVER).read_text())
        self._collector.load_json(state["ledger"], _read_groups(newest / GROUPS))
        if self._demonstrations is not None:
            self._demonstrations.load_json(state.get("demonstrations", []))  # an older checkpoint has none
        if "metrics" in state and not self._folder.metrics_are(state["metrics"]):
            self._say(
                f"{self._folder.metrics}: not as written up to step {state['step']}: rows are missing or changed, and "
                "stay so; what is trained does not depend on them"
            )
        if torn := self._folder.rewind(state["step"]):
            at = ", ".join(map(str, torn[:_NAMED])) + (", ..." if len(torn) > _NAMED else "")
            self._say(
                f"{self._folder.metrics}: {len(torn)} damaged or cut {'line' if len(torn) == 1 else 'lines'} removed ({at})"
            )
        return True

    async def _finish(self, step: int, aside: Path, score: float | None) -> None:
        limit = self._config.cluster.call_timeout
        try:
            try:
                # Around the waiting alone: a TimeoutError of the commit has another cause.
                async with asyncio.timeout(limit):
                    while not await self._learner.saved():
                        await asyncio.sleep(POLL)
            except TimeoutError:
                raise CheckpointError(f"checkpoint {step} was not written within {limit:g} s (cluster.call_timeout)") from None
            # Before the commit, which seals what the driver sees: files on a rank's own disk would be missing from it unnoticed.
            await self._learner.check_saved(aside)
            await in_thread("files", self._folder.sync_metrics)
            await in_thread("files", self._checkpoints.commit, step, score)
        except Exception as error:
            self._checkpoints.give_up(step, error)

    def _score(self, evaluated: Evaluation | None) -> float | None:
        if evaluated is None:
            return None
        return evaluated.success if self._config.checkpoint.best == "success" else evaluated.reward


def _write_driver(folder: Path, state: dict[str, Any], groups: Iterable[Group]) -> None:
    """The driver's state, and its groups one per line, of which never more than one column is in memory as text."""
    with naming(folder / GROUPS), (folder / GROUPS).open("w") as file:
        file.writelines(lines(groups))
    (folder / DRIVER).write_text(json_text(state))


def _read_groups(path: Path) -> Iterator[Group]:
    """The groups in a file, one at a time; none if an older checkpoint has no such file."""
    if path.exists():
        with path.open() as file:
            for line in file:
                yield Group.from_json(read_json(line))
