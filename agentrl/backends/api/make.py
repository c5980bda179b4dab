"""API models, requested by `--model api:NAME`: for evaluation, never for training."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError, DependencyError
from agentrl.rollout.engine import Engine
from agentrl.rollout.engine_maker import ENGINES, EngineMaker

if TYPE_CHECKING:
    from agentrl.backends.api.engine import LiteLlmEngine, Transcript

API = "api:"
"""Prefix of an API model's name, wherever a model is named."""

UNBOUNDED = 2**31 - 1
"""An API model's ids are messages, so their number is not limited; the provider's own context limit applies."""


def api_name(model: str | None) -> str | None:
    """The model in litellm's form if `model` is `api:NAME`; None for a folder or hub name."""
    return model.removeprefix(API) if model is not None and model.startswith(API) else None


class TranscriptMaker(EngineMaker):
    """Of an engine whose ids are numbers of messages in a transcript; a subclass has `make_with`."""

    def context(self, positions: int) -> int:
        return UNBOUNDED

    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        from agentrl.backends.api.engine import Transcript

        return self.make_with(Transcript())


@ENGINES.register("api", traits={"messages"})
class ApiMaker(TranscriptMaker):
    """The model of `api:NAME`, called as the section `api` says."""

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.backends.api.engine import LiteLlmEngine

        return LiteLlmEngine

    @classmethod
    def claims(cls, model: str | None) -> bool:
        return api_name(model) is not None

    def check(self) -> None:
        name = api_name(self.config.model.path)
        if not name:
            raise ConfigError("--model api:NAME: NAME is missing; litellm's form, for example api:openai/gpt-4.1-mini")
        if self.config.rollout.top_k:
            raise ConfigError("rollout.top_k: API models take no top_k")
        if importlib.util.find_spec("litellm") is None:
            raise DependencyError("API models need litellm: pip install 'agentrl[litellm]'")

    def make_with(self, transcript: Transcript) -> LiteLlmEngine:
        """The engine over the caller's transcript; its `renderer` is the one to use."""
        from agentrl.backends.api.engine import LiteLlmEngine

        name = api_name(self.config.model.path)
        assert name is not None
        return LiteLlmEngine(name, self.config.api, transcript=transcript)
