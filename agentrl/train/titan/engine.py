"""A model of torchtitan, sharded by torchtitan: the decoder, FSDP2 with replicas and activation checkpointing are its own.

What is done with the sharded parameters is the same as in `FsdpEngine`, whose methods are used, as torchtitan shards with FSDP2
too. Nothing here imports torchtitan before an engine is made or checked.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError
from agentrl.train.attention import register_packed_attention
from agentrl.train.by_size import by_size
from agentrl.train.engine import TRAIN_ENGINES, BaseEngine, compute_dtype
from agentrl.train.fsdp import FsdpEngine
from agentrl.train.layout import Layout
from agentrl.train.loading import Loader, ModuleTensor, materialize
from agentrl.train.modules import Role
from agentrl.train.offload import Offloaded
from agentrl.train.pretrained import empty_causal_lm, load_model_config
from agentrl.train.titan.library import require_torchtitan

WRAPPER = "_checkpoint_wrapped_module."
"""What torchtitan's checkpointing puts into names."""


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

    def __init__(
        self, path: str, cfg: ModelConfig, max_grad_norm: float, role: Role = "policy", device: torch.device | None = None
    ) -> None:
        """Raises also DependencyError without torchtitan, and ModelError for a family that is not in titan/families.py."""
        if role != "policy":
            raise ConfigError(f'model.engine = "titan" computes logprobs, and has no role "{role}"')
        require_torchtitan()
        from agentrl.train.titan.families import family_of, hf_names, titan_config
        from agentrl.train.titan.routers import TitanRouting
        from agentrl.train.titan.sharding import Sharding, dims_of, sharded_decoder

        register_packed_attention()  # also for what it sets for this process
        self.path, self.cfg, self.max_grad_norm = path, cfg, max_grad_norm
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.compute_dtype, self.sharded = compute_dtype(cfg, self.device), True
        shell = empty_causal_lm(path)
        loader = Loader(path, shell)
        self.config, self.tied = shell.config, bool(shell.config.tie_word_embeddings)
        self.checkpoints = by_size(cfg.activation_checkpointing, sum(p.numel() for p in shell.parameters()))
        family = family_of(path, self.config)
        # transformers' own rotary embedding, made outside of the meta device: its frequencies are numbers.
        made = titan_config(family, self.config, type(shell.base_model.rotary_emb)(self.config), cfg.expert_parallel > 1)
        self.layout = Layout.of(cfg, self.device, dist.get_world_size())  # which ranks share tokens; the meshes are torchtitan's
        dims = dims_of(cfg, self.device)
        self.module = sharded_decoder(family, made, dims, Sharding(self.compute_dtype, self.checkpoints))
        self._names = hf_names(family, made, [name.replace(WRAPPER, "") for name in self.module.state_dict()])
        self.routing = TitanRouting(self.module, self.layout.ulysses)
        self._load(loader)
        self.module.train()
        self.optimizers, self._offloaded = None, Offloaded()
        self.shards_gradients = by_size(cfg.shard_gradients, sum(p.numel() for _, p in self.named()))

    @classmethod
    def check(cls, cfg: ModelConfig, ranks: int) -> None:
        require_torchtitan()
        if cfg.path is not None:
            from agentrl.train.titan.families import family_of

            family_of(cfg.path, load_model_config(cfg.path))
        if cfg.tensor_parallel > 1 and cfg.expert_parallel > 1:
            # torchtitan redistributes tokens between the two only with its own sequence parallelism.
            raise ConfigError(
                'model.tensor_parallel with model.expert_parallel: model.engine = "titan" has one of them; "fsdp2" has both'
            )
        super().check(cfg, ranks)

    def _load(self, loader: Loader) -> None:
        counts = [name for name, buffer in self.module.named_buffers() if buffer.is_meta]  # of the tokens of each expert
        materialize(self.module, self.device)
        for name in counts:
            self.module.get_buffer(name).zero_()
        if self.tied:  # they came apart as each got its memory; FSDP2 keeps the first of them, which is the embedding's
            decoder = self.module
            decoder.lm_head.weight = decoder.tok_embeddings.weight  # type: ignore[union-attr, assignment]
        entries = {}
        for name in self.module.state_dict():
            owner, _, leaf = name.rpartition(".")
            entries[self.hf_name(name)] = ModuleTensor(self.module.get_submodule(owner), leaf)
        loader.read_into(entries)
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(self.device)

    def hf_name(self, name: str) -> str:
        return self._names[name.replace(WRAPPER, "")]

    def _left_out(self, name: str) -> bool:
        return self.tied and name == "lm_head.weight"

    # Not FsdpEngine's: the roles and the adapters that these need are not here.
    values, scores = BaseEngine.values, BaseEngine.scores
    adapter, frozen_base = BaseEngine.adapter, BaseEngine.frozen_base
