"""A policy that is a Python function, requested as the model "given:NAME": for evaluation, never for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.backends.api.make import TranscriptMaker
from agentrl.errors import ConfigError
from agentrl.given import is_given, taken
from agentrl.rollout.engine import Engine
from agentrl.rollout.engine_maker import ENGINES

if TYPE_CHECKING:
    from agentrl.backends.api.engine import Transcript
    from agentrl.backends.python.engine import FunctionEngine


@ENGINES.register("python_function", traits={"messages"})
class PythonMaker(TranscriptMaker):
    """The function that was given under the model's name."""

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.backends.python.engine import FunctionEngine

        return FunctionEngine

    @classmethod
    def claims(cls, model: str | None) -> bool:
        return is_given(model)

    def check(self) -> None:
        name = str(self.config.model.path)
        if not is_given(name) or not callable(taken(name, "model.path").value):
            raise ConfigError(f"model.path = {name!r}: expected the name of a function: agentrl.give(function)")
        if self.config.rollout.top_k or self.config.rollout.top_p < 1:
            raise ConfigError("rollout.top_k, rollout.top_p: a Python policy draws by itself")

    def make_with(self, transcript: Transcript) -> FunctionEngine:
        """The engine over the caller's transcript."""
        from agentrl.backends.python.engine import FunctionEngine

        name = str(self.config.model.path)
        return FunctionEngine(name, taken(name, "model.path").value, transcript)
