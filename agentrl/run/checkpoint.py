"""A run's checkpoint: the actors' state and the driver's, under one manifest."""

from __future__ import annotations

import json

from agentrl.run.session import Session
from agentrl.train.checkpoint import Checkpoints

DRIVER = "driver.json"


async def save_checkpoint(session: Session) -> None:
    """Write `checkpoints/step_NNNNNN` whole or not at all; the newest `checkpoint.keep` are kept.

    Holds model, optimizer, schedule and RNG of the actors, and the driver's group ledger (with finished
    but untrained groups), which is also the data cursor.
    """
    checkpoints = Checkpoints(session.folder.checkpoints, keep=session.config.checkpoint.keep)
    step = session.collector.ledger.version
    with checkpoints.writing(step) as folder:
        await session.learner.save(folder)
        (folder / DRIVER).write_text(json.dumps({"step": step, "ledger": session.collector.ledger.to_json()}))


async def load_checkpoint(session: Session) -> bool:
    """Take up the newest whole checkpoint; False where there is none. Metrics beyond it are forgotten."""
    checkpoints = Checkpoints(session.folder.checkpoints, keep=session.config.checkpoint.keep)
    newest = checkpoints.newest()
    if newest is None:
        return False
    await session.learner.load(newest)
    state = json.loads((newest / DRIVER).read_text())
    session.collector.ledger.load_json(state["ledger"])
    session.folder.rewind(state["step"])
    return True
