"""Training engine on torchtitan: its models and parallelism, with agentrl's packed attention, head and weights."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from agentrl.config.schema import ModelConfig
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.language_model import Role
from agentrl.trainer.memory import by_size
from agentrl.trainer.model_folder import Loader, materialize
from agentrl.trainer.pretrained import empty_model, load_model_config
from agentrl.trainer.train_engine import TRAIN_ENGINES, BaseEngine
from agentrl.utils.errors import ConfigError, DependencyError, need_package

# The package

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def require_torchtitan() -> None:
    """Make torchtitan importable. Raises DependencyError if it is missing or of an unsupported version.

    Its models import Triton kernels for a token exchange between experts that is not used here. Without Triton, which CPU
    builds of torch lack, a module whose functions raise replaces these kernels.
    """
    need_package("torchtitan", "model.engine = \"titan\" needs torchtitan: pip install 'agentrl[titan]'")
    if KERNELS not in sys.modules and importlib.util.find_spec("triton") is None:
        sys.modules[KERNELS] = _Missing(KERNELS)
    try:
        import torchtitan.models.llama3
        import torchtitan.models.qwen3  # noqa: F401
    except ImportError as error:
        reason = "this torchtitan version is not supported (see the extra `titan`), or one of its packages is missing"
        raise DependencyError(f'model.engine = "titan": {reason}: {error}') from error


class _Missing(ModuleType):
    """Module whose attributes are functions that raise DependencyError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise DependencyError(f"{self.__name__}.{name} needs Triton")

        return refuse


WRAPPER = "_checkpoint_wrapped_module."
"""Part that torchtitan's activation checkpointing inserts into parameter names."""


@TRAIN_ENGINES.register(
    "titan",
    traits={
        "sft",
        "replicas",
        "sequence_parallel",
        "tensor_parallel",
        "expert_parallel",
        "offload",
        "shard_gradients",
        "activation_checkpointing",
        "prefix_sharing",
        "router_replay",
    },
)
class TitanEngine(FsdpEngine):
    """One rank's part of a torchtitan model; it needs a process group, also for one rank."""

    def _build(self, role: Role, world: int) -> None:
        """Also raises DependencyError without torchtitan, and ModelError for a model type that is not in `FAMILIES`."""
        if role != "policy":
            raise ConfigError(f'model.engine = "titan" computes logprobs, and has no role "{role}"')
        require_torchtitan()
        from agentrl.contrib.moe.routers import Routing
        from agentrl.contrib.titan import model as titan

        path, cfg = self.path, self.cfg
        shell = empty_model(path, load_model_config(path))
        loader = Loader(path, shell)
        self.config, tied = shell.config, bool(shell.config.tie_word_embeddings)
        self._left_out = {"lm_head.weight"} if tied else set()
        self.checkpoints = by_size(cfg.activation_checkpointing, sum(p.numel() for p in shell.parameters()))
        family = titan.family_of(path, self.config)
        # transformers' rotary embedding, created outside of the meta device, since its frequencies are read.
        made = titan.titan_config(family, self.config, type(shell.base_model.rotary_emb)(self.config), cfg.expert_parallel > 1)
        dims = titan.dims_of(cfg, self.device)  # of `layout`, only the ranks that share tokens count
        self.module = titan.sharded_decoder(family, made, dims, self.compute_dtype, self.checkpoints)
        self._names = titan.hf_names(family, made, [name.replace(WRAPPER, "") for name in self.module.state_dict()])
        routers = titan.TitanRouters(self.module)
        self.routing = Routing(routers, self.layout.ulysses) if len(routers) else None
        self._load(loader, tied)

    @classmethod
    def check(cls, cfg: ModelConfig, ranks: int) -> None:
        require_torchtitan()
        if cfg.path is not None:
            from agentrl.contrib.titan.model import family_of

            family_of(cfg.path, load_model_config(cfg.path))
        if cfg.tensor_parallel > 1 and cfg.expert_parallel > 1:
            # torchtitan redistributes tokens between tensor and expert parallelism only with its sequence parallelism.
            raise ConfigError(
                'model.tensor_parallel with model.expert_parallel: model.engine = "titan" has one of them; "fsdp2" has both'
            )
        super().check(cfg, ranks)

    def _load(self, loader: Loader, tied: bool) -> None:
        counts = [name for name, buffer in self.module.named_buffers() if buffer.is_meta]  # counters of tokens per expert
        materialize(self.module, self.device)
        for name in counts:
            self.module.get_buffer(name).zero_()
        if tied:  # allocation untied the weights; FSDP2 keeps the first one, the embedding's
            decoder = self.module
            decoder.lm_head.weight = decoder.tok_embeddings.weight  # type: ignore[union-attr, assignment]
        entries = {}
        for name in self.module.state_dict():
            owner, _, leaf = name.rpartition(".")
            entries[self.hf_name(name)] = self.module.get_submodule(owner), leaf
        loader.read_into(entries)
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(self.device)

    def hf_name(self, name: str) -> str:
        return self._names[name.replace(WRAPPER, "")]

    # Undo FsdpEngine's overrides: this engine has neither these roles nor adapters.
    values, scores = BaseEngine.values, BaseEngine.scores
    adapter, frozen_base = BaseEngine.adapter, BaseEngine.frozen_base  # type: ignore[assignment]
