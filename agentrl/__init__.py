"""agentrl: reinforcement learning for multi-turn, tool-calling language-model agents.

    env = agentrl.make("key_value")                            an environment that scores itself
    agentrl.evaluate("Qwen/Qwen3-0.6B", "key_value", n=50)     a model, an API, a run's folder, or a policy in Python
    agentrl.train("quickstart", steps=10)                      a whole run
    loop = agentrl.session("quickstart")                       its parts, to be stepped by hand

Importing this package is cheap and has no side effects: no torch, no ray, no registration. Each name below is loaded when it is
first used (docs/python.md). See `docs/design.md` for the rooms and `agentrl --help` for the commands.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl import env as env
    from agentrl.data.token_ledger import TokenLedger
    from agentrl.data.trajectory import Group, Message, Task, ToolCall, Trajectory
    from agentrl.env import ToolEnv
    from agentrl.run.api.base import make
    from agentrl.run.api.functions import EvalReport, evaluate, rollout, train
    from agentrl.run.api.steps import Draw, LivePolicy, StepLoop, session
    from agentrl.run.api.trainer import TrainBatch, Trainer
    from agentrl.run.callbacks import Callback
    from agentrl.run.reader import RunRecord, load_run
    from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput, LossInput, LossOutput
    from agentrl.utils.search_path import give

__version__ = "0.1.0"

_NAMES = {
    "agentrl.data.trajectory": "Group Message Task TokenLedger ToolCall Trajectory",
    "agentrl.env": "ToolEnv",
    "agentrl.run.api.base": "make",
    "agentrl.run.api.functions": "EvalReport evaluate train",
    "agentrl.run.api.steps": "Draw LivePolicy StepLoop session",
    "agentrl.run.api.trainer": "TrainBatch Trainer",
    "agentrl.run.callbacks": "Callback",
    "agentrl.run.reader": "RunRecord load_run",
    "agentrl.trainer.algorithms.base": "AdvantageInput AdvantageOutput LossInput LossOutput",
    "agentrl.utils.search_path": "give",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Public name -> its module."""
_ROOMS = ("env", "rollout")
"""Rooms with a public face; the last one can be called."""

__all__ = [
    "AdvantageInput",
    "AdvantageOutput",
    "Callback",
    "Draw",
    "EvalReport",
    "Group",
    "LivePolicy",
    "LossInput",
    "LossOutput",
    "Message",
    "RunRecord",
    "StepLoop",
    "Task",
    "TokenLedger",
    "ToolCall",
    "ToolEnv",
    "TrainBatch",
    "Trainer",
    "Trajectory",
    "__version__",
    "env",
    "evaluate",
    "give",
    "load_run",
    "make",
    "rollout",
    "session",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"agentrl.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
