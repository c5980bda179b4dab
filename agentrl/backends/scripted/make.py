"""Scripted policies, requested as the model "policy:NAME" (`--policy NAME`): for evaluation, never for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.backends.api.make import TranscriptMaker
from agentrl.env.scripts import SCRIPTS
from agentrl.errors import ConfigError, hinted
from agentrl.rollout.engine import Engine
from agentrl.rollout.engine_maker import ENGINES

if TYPE_CHECKING:
    from agentrl.backends.api.engine import Transcript
    from agentrl.backends.scripted.engine import ScriptedEngine

POLICY = "policy:"
"""Prefix of a scripted policy's name, wherever a model is named."""


def is_script(model: str | None) -> bool:
    """Whether a model's name is that of a scripted policy."""
    return model is not None and model.startswith(POLICY)


@ENGINES.register("scripted_policy", traits={"messages"})
class ScriptedMaker(TranscriptMaker):
    """The script of that name, which plays each environment's own episodes: gold, idle, refuse, echo or spam."""

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.backends.scripted.engine import ScriptedEngine

        return ScriptedEngine

    @classmethod
    def claims(cls, model: str | None) -> bool:
        return is_script(model)

    def check(self) -> None:
        name = str(self.config.model.path).removeprefix(POLICY)
        if name not in SCRIPTS:
            raise ConfigError(f"--policy {name}: expected {', '.join(SCRIPTS)}{hinted(name, SCRIPTS)}")
        if self.config.rollout.top_k or self.config.rollout.top_p < 1:
            raise ConfigError("rollout.top_k, rollout.top_p: a scripted policy draws nothing")

    def make_with(self, transcript: Transcript) -> ScriptedEngine:
        """The engine over the caller's transcript."""
        from agentrl.backends.scripted.engine import ScriptedEngine

        return ScriptedEngine(str(self.config.model.path).removeprefix(POLICY), transcript)
