"""Factory of a run's SGLang engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl.rollout.engine import ENGINES, Engine, EngineMaker
from agentrl.utils.errors import ConfigError, EngineError


@ENGINES.register("sglang")
class SglangMaker(EngineMaker):
    """Makes an engine of the running servers in `sglang.servers`. Never chosen automatically."""

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.contrib.sglang.engine import SglangEngine

        return SglangEngine

    def check(self) -> None:
        """Query every server, so that a wrong address or model fails before anything starts."""
        if not self.config.sglang.servers:
            raise ConfigError('engine = "sglang" needs sglang.servers, for example ["http://127.0.0.1:30000"]')
        for address in self.config.sglang.servers:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
                raise ConfigError(f"sglang.servers: {address!r} is not the address of a server. Write http://HOST:PORT")
        if len({address.rstrip("/") for address in self.config.sglang.servers}) < len(self.config.sglang.servers):
            raise ConfigError("sglang.servers names a server twice")
        if self.config.weights.lora == "adapter":
            raise ConfigError(
                'weights.lora = "adapter" does not work with engine = "sglang", whose servers do not say which adapter sampled a '
                'token; use weights.lora = "merged"'
            )
        from agentrl.contrib.sglang.servers import TOP_K_WITH_TOP_P

        if self.config.rollout.top_k and self.config.rollout.top_p < 1:
            raise ConfigError(TOP_K_WITH_TOP_P)
        self._ask_context  # noqa: B018 - raises

    @cached_property
    def _key(self) -> str | None:
        name = self.config.sglang.api_key_env
        if name is None:
            return None
        if not os.environ.get(name):
            raise ConfigError(f"sglang.api_key_env: the environment variable {name} is not set")
        return os.environ[name]

    @cached_property
    def _ask_context(self) -> int:
        """Return the servers' smallest context. Raises ConfigError if one cannot be reached or used."""
        from agentrl.contrib.sglang.servers import ask, check

        kind = self._model_type(self.config.model.path)
        try:
            facts = [ask(address.rstrip("/"), self.config.sglang, self._key) for address in self.config.sglang.servers]
            for one in facts:
                check(one, self.config.sglang, kind)
        except EngineError as problem:
            raise ConfigError(str(problem)) from problem
        return min(one.context for one in facts)

    def context(self, positions: int) -> int:
        return min(positions, self._ask_context)

    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        from agentrl.contrib.sglang.engine import SglangEngine

        folder = self.config.weights.folder
        return SglangEngine(
            model,
            self.config.sglang,
            key=self._key,
            folder=None if folder is None else str(Path(folder).absolute()),
            model_type=self._model_type(model),
            trust=self.config.model.trust_remote_code,
            unused=self.unused,
        )

    def _model_type(self, model: str | None) -> str | None:
        """Return `model_type` of the model's config; None if there is no model yet."""
        if model is None:
            return None
        from transformers import AutoConfig

        try:
            return str(AutoConfig.from_pretrained(model, trust_remote_code=self.config.model.trust_remote_code).model_type)
        except (OSError, ValueError, KeyError):
            return None  # the model check reports it
