"""The coefficients that updates steer, of KL and of the entropy bonus: a learner's part of a checkpoint beside its roles' own."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from agentrl.errors import CheckpointError
from agentrl.plain_data import json_text, read_json

STATE = "learner.json"
COEFFICIENTS = ("kl_coef", "entropy_coef")


class Steered(Protocol):
    """Who has them, by these attributes."""

    kl_coef: float
    entropy_coef: float


def save_coefficients(learner: Steered, folder: Path) -> None:
    """Write them to `folder`."""
    coefficients = {name: getattr(learner, name) for name in COEFFICIENTS}
    (folder / STATE).write_text(json_text(coefficients), encoding="utf-8")


def load_coefficients(learner: Steered, folder: Path) -> None:
    """Set them to what `folder` holds; an older checkpoint has fewer, or none, which nothing steered. Raises CheckpointError."""
    path = folder / STATE
    if not path.is_file():
        return
    found = read_json(path.read_text(encoding="utf-8"))
    for name in (name for name in COEFFICIENTS if name in found):
        if found[name] is None:
            raise CheckpointError(f"{path}: {name} was not a number when it was saved; resume an older checkpoint")
        setattr(learner, name, float(found[name]))
