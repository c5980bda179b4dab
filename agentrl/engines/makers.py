"""Makers of engines without a server: API models, Python functions, scripted policies, the embedded engine.

Importing a maker loads no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.config import ModelConfig, TrainConfig
from agentrl.engines.weights.parameters import positions_of
from agentrl.env.check_tools import SCRIPTS
from agentrl.render.modality import config_modality
from agentrl.rollout.engine import ENGINES, Engine, EngineMaker, EngineMemory
from agentrl.utils.errors import ConfigError, ModelError, hint_text, need_package
from agentrl.utils.search_path import PREFIX as GIVEN
from agentrl.utils.search_path import given_object, is_given

if TYPE_CHECKING:
    from agentrl.engines.api_models import Transcript


# API models: `--model api:NAME`

API = "api:"
"""Prefix of an API model's name, wherever a model is named."""

UNBOUNDED = 2**31 - 1
"""Context of an API model in ids, which are messages; the provider's limit applies instead."""


def api_name(model: str | None) -> str | None:
    """Return NAME, in litellm's form, if `model` is `api:NAME`; None for a folder or hub name."""
    return model.removeprefix(API) if model is not None and model.startswith(API) else None


class TranscriptMaker(EngineMaker):
    """Maker of an engine whose ids are numbers of messages in a transcript; subclasses define `make_with`."""

    prefix: ClassVar[str]
    """Prefix of the names of models that this engine serves."""
    made: ClassVar[str]
    """Name of the engine's class in `api_models`."""

    @classmethod
    def engine(cls) -> Any:
        from agentrl.engines import api_models

        return getattr(api_models, cls.made)

    @classmethod
    def claims(cls, model: str | None) -> bool:
        return model is not None and model.startswith(cls.prefix)

    def context(self, positions: int) -> int:
        return UNBOUNDED

    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        from agentrl.engines.api_models import Transcript

        return self.make_with(Transcript())


@ENGINES.register("api", traits={"messages"})
class ApiMaker(TranscriptMaker):
    """API model `api:NAME`, configured by [api]."""

    prefix, made = API, "LiteLlmEngine"

    def check(self) -> None:
        name = api_name(self.config.model.path)
        if not name:
            raise ConfigError("--model api:NAME: NAME is missing; litellm's form, for example api:openai/gpt-4.1-mini")
        if self.config.rollout.top_k:
            raise ConfigError("rollout.top_k: API models take no top_k")
        need_package("litellm", "API models need litellm: pip install 'agentrl[litellm]'")

    def make_with(self, transcript: Transcript) -> Any:
        return self.engine()(api_name(self.config.model.path), self.config.api, transcript=transcript)


# Python functions: the model "given:NAME"


@ENGINES.register("python_function", traits={"messages"})
class PythonMaker(TranscriptMaker):
    """Python function registered with `agentrl.give` under the model's name."""

    prefix, made = GIVEN, "FunctionEngine"

    def check(self) -> None:
        name = str(self.config.model.path)
        if not is_given(name) or not callable(given_object(name, "model.path").value):
            raise ConfigError(f"model.path = {name!r}: expected the name of a function: agentrl.give(function)")
        if self.config.rollout.top_k or self.config.rollout.top_p < 1:
            raise ConfigError("rollout.top_k, rollout.top_p: a Python policy draws by itself")

    def make_with(self, transcript: Transcript) -> Any:
        name = str(self.config.model.path)
        return self.engine()(name, given_object(name, "model.path").value, transcript)


# Scripted policies: `--policy NAME`

POLICY = "policy:"
"""Prefix of a scripted policy's name, wherever a model is named."""


@ENGINES.register("scripted_policy", traits={"messages"})
class ScriptedMaker(TranscriptMaker):
    """Scripted policy: gold, idle, refuse, echo or spam."""

    prefix, made = POLICY, "ScriptedEngine"

    def check(self) -> None:
        name = str(self.config.model.path).removeprefix(POLICY)
        if name not in SCRIPTS:
            raise ConfigError(f"--policy {name}: expected {', '.join(SCRIPTS)}{hint_text(name, SCRIPTS)}")
        if self.config.rollout.top_k or self.config.rollout.top_p < 1:
            raise ConfigError("rollout.top_k, rollout.top_p: a scripted policy draws nothing")

    def make_with(self, transcript: Transcript) -> Any:
        return self.engine()(str(self.config.model.path).removeprefix(POLICY), transcript)


# The embedded engine

TOKEN_ID = 8
"""Bytes of a token without a cache: its id takes the place of a key and a value (RecomputedModel)."""


@ENGINES.register("embedded", traits={"sleeps", "judges", "experts", "transformers", "vision", "fills"})
class EmbeddedMaker(EngineMaker):
    """Engine in the driver's process, for every machine. `cache = false`: each token costs a pass over its whole prefix, for
    families that keep more than keys and values (recurrent layers, convolutions). `kv_cache_mib`: upper limit of the cache; by
    default the GPU memory that the run's other roles leave, or a part of host memory."""

    def __init__(self, config: TrainConfig, *, cache: bool = True, kv_cache_mib: int | None = None) -> None:
        super().__init__(config)
        self.cache, self.kv_cache_mib = cache, kv_cache_mib

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.engines.embedded.embedded_engine import EmbeddedEngine

        return EmbeddedEngine

    def check(self) -> None:
        if self.kv_cache_mib is not None and self.kv_cache_mib < 1:
            raise ConfigError(f"engine_args.kv_cache_mib = {self.kv_cache_mib}: a cache has at least 1 MiB. Raise or unset it")
        if self.config.rollout.router_replay and not self.cache:
            raise ConfigError("engine_args.cache = false: the engine records no experts then. Unset it, or rollout.router_replay")
        if not self.cache:
            return
        found = _architecture(self.config.model)
        if config_modality(self.config.model, found) is not None:
            raise ConfigError(
                "engine_args.cache: the model takes images, which the embedded engine's cache does not know; set "
                "engine_args = { cache = false }, with which each token costs a pass over its whole prefix"
            )
        from agentrl.engines.embedded.embedded_model import ATTENDING, CACHE_ADVICE

        layers = None if found is None else getattr(found.get_text_config(), "layer_types", None)
        if others := sorted(set(layers or ()) - ATTENDING):
            # Checked here too, since the engine checks only after it has loaded the weights.
            raise ModelError(
                f"model.path = {self.config.model.path}: its layers are of the types {', '.join(others)}, and the embedded "
                f"engine's cache holds keys and values alone; {CACHE_ADVICE}"
            )

    @classmethod
    def suits(cls, gpus: float) -> int:
        return 1

    def memory(self, weights: int, token: int, device: int | None) -> EngineMemory:
        from agentrl.engines.embedded.kv_cache import cache_limit

        rollout, model = self.config.rollout, self.config.model
        token = token if self.cache else TOKEN_ID
        if model.path is None and model.init is not None:
            positions: int | None = model.init.context
        else:
            positions = positions_of(_architecture(model))
        length = min(rollout.max_episode_tokens, positions or rollout.max_episode_tokens)
        limit = cache_limit(self.kv_cache_mib, self.room, weights, token, length)
        wanted = rollout.max_episodes * rollout.max_episode_tokens * token
        lower = "rollout.max_episodes" if wanted < limit else "engine_args.kv_cache_mib"
        value = rollout.max_episodes if wanted < limit else self.kv_cache_mib or limit >> 20
        return EngineMemory(weights, min(limit, wanted), f"{lower} = {value}")

    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        import torch

        from agentrl.engines.embedded.embedded_engine import EmbeddedEngine

        rollout = self.config.rollout
        # One slot per episode, to keep its cache for the next turn. `max_context` is also bounded by the model's positions,
        # since an episode whose conversation is rewritten may have more tokens in total than any single prompt.
        return EmbeddedEngine(
            model,
            dtype=self.config.model.computes_in(torch.cuda.is_available()),  # of this process, wherever the actors are
            threads=self.threads(),
            max_slots=rollout.max_episodes,
            max_context=min(rollout.max_episode_tokens, positions),
            kv_cache_mib=self.kv_cache_mib,
            room=self.room,
            trust=self.config.model.trust_remote_code,
            unused=self.unused,
            router_replay=rollout.router_replay,
            cache=self.cache,
        )


def _architecture(model: ModelConfig) -> Any:
    """Load the transformers config of `model.path`; None for a model that is built from [model.init]."""
    from transformers import AutoConfig

    return None if model.path is None else AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
