"""torchtitan's models with agentrl's parts. Import it after `engine.require_torchtitan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.distributed.parallel_dims
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import Embedding
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config, make_moe_config, make_token_dispatcher_config
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from agentrl.config.schema import ModelConfig
from agentrl.contrib.moe.routers import Routers
from agentrl.data.expert_routing import FREE
from agentrl.trainer.attention import PackedSequences, packed_attention
from agentrl.trainer.language_model import HeadRule, Micro, split_indices
from agentrl.trainer.parallel import Ulysses, compute_divided
from agentrl.utils.errors import ModelError

# Modules of agentrl


class PackedAttention(Module):
    """Causal attention within each row. `attention_masks` holds agentrl's layout of the rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    # Axis names as in torchtitan's sharding of attention: batch (1), tokens, heads, width.
    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: PackedSequences, scale: float | None, **_: Any
    ) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        return packed_attention(self, q, k, v, None, packed=attention_masks, scaling=scale)[0]


class Rotary(CosSinRoPE):
    """Rotary embeddings with transformers' frequencies for the model's config, including scaled ones.

    torchtitan stores the angles of all positions in every layer, which takes 128 MiB per layer for 128k tokens; here they are
    computed from the positions. The halves of a head are rotated as in transformers, so that no weight has to be permuted for
    loading or publishing.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        frequencies: tuple[float, ...]  # one per pair of dimensions of a head
        scale: float = 1.0

    def _precompute_cache(self) -> Tensor:
        return torch.tensor(self.config.frequencies, dtype=torch.float32, device="cpu")

    def _reshape_cache(self, query: Tensor, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        angles = positions[..., None].float() * local(self.cache)  # [1, T, D / 2]
        both = torch.cat([angles, angles], dim=-1)
        found: Tensor = (torch.cat([both.cos(), both.sin()], dim=-1) * self.config.scale)[:, :, None]
        if not isinstance(query, DTensor):
            return found
        # Replicated on all tensor-parallel ranks.
        return DTensor.from_local(found, query.device_mesh, [Replicate()] * query.device_mesh.ndim, run_check=False)


class LogprobDecoder:
    """Mixin of torchtitan decoders whose forward returns log pi and entropy of chosen tokens.

    The head runs inside this forward, because a sharded weight is gathered only there.
    """

    _skip_lm_head = True  # torchtitan's switch: its own forward ends with the last norm

    def forward(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """Return log pi and entropy of the tokens `micro.targets`, two float32 [M]."""
        group = micro.packed.ulysses
        part = slice(0, None) if group is None else group.slice_of(len(micro.input_ids))
        packed = micro.packed if micro.experts is None else replace(micro.packed, experts=micro.experts[part])
        model: Any = super()
        hidden = local(model.forward(micro.input_ids[None, part], micro.position_ids[None, part], packed))[0]
        head: Callable[..., tuple[Tensor, Tensor]] = self.lm_head  # type: ignore[attr-defined]
        if group is None:
            return head(hidden.index_select(0, micro.before), micro.targets, temperature, entropy)
        mine, counts, back = split_indices(micro.before, len(hidden), group)
        own = head(hidden.index_select(0, micro.before[mine] - part.start), micro.targets[mine], temperature, entropy)
        return group.gather(own[0], counts)[back], group.gather(own[1], counts)[back]


class LogprobHead(Linear):
    """Output embedding whose forward returns log pi and entropy of given tokens, never all logits at once."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    tensor: Ulysses | None = None
    """Tensor-parallel ranks, which divide the tokens among them."""

    def forward(self, input: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """Map hidden states `input` [M, E], equal on all tensor-parallel ranks, and `targets` int64 [M] to two float32 [M]."""

        def compute(hidden: Tensor, head: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
            return HeadRule().logprobs(hidden, head, targets, temperature, entropy=entropy)

        if self.tensor is None:
            return compute(input, self, targets)
        return compute_divided(compute, input, self, targets, self.tensor)


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor that is replicated on the tensor-parallel ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Routers


class Router(TokenChoiceTopKRouter):
    """Routes tokens to the experts in `rows` (`PackedSequences.experts`), and tokens without an entry to the experts of highest
    score. A callback, if set, gets the choices. `layer`: index among the model's routers."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.experts, self.layer, self.strict = config.num_experts, 0, False
        self.rows: PackedSequences | None = None
        self.observer: Callable[[Tensor], None] | None = None

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return gates and experts of the tokens, both [1, T, k], and the scores of all experts [1, T, E]."""
        gates, chosen, scores = super().forward(x_BLD, expert_bias_E)
        if self.rows is not None and self.rows.experts is not None:
            dictated = self.rows.experts[None, :, self.layer]
            chosen = torch.where(dictated == FREE[dictated.dtype], chosen, dictated.to(chosen.dtype))
            gates = scores.gather(-1, chosen)
            if self.route_norm:
                gates = gates / gates.sum(-1, keepdim=True)
            gates = gates * self.route_scale
        if self.observer is not None:
            self.observer(chosen[0])
        return gates, chosen, scores


class RoutedBlock(Qwen3TransformerBlock):
    """Layer that passes the experts to replay to its router, also when recomputed for the backward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def forward(self, x: Tensor, attention_masks: PackedSequences, positions: Tensor | None = None) -> Tensor:
        self.moe.router.rows = attention_masks
        found: Tensor = super().forward(x, attention_masks, positions)
        return found


class TitanRouters(Routers):
    """Routers of a torchtitan model, in layer order."""

    def __init__(self, decoder: nn.Module) -> None:
        self.problem = ""
        found: Any = [module for module in decoder.modules() if isinstance(module, Router)]
        for layer, router in enumerate(found):
            router.layer = layer
        self._routers = found


# Experts

NAMES = {
    f"layers.{{}}.moe.routed_experts.inner_experts.{name}": f"model.layers.{{}}.mlp.experts.{name}"
    for name in ("gate_up_proj", "down_proj")
}
"""Hugging Face names of the stacked expert weights; torchtitan's table has a name per expert."""


class Experts(GroupedExperts):
    """All experts of a layer, with two weights as in transformers; torchtitan has three.

    They compute in the type of the input; torchtitan's always compute in bfloat16, which in a float32 run differs from the
    inference engine.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        self.num_experts = config.num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.hidden_dim, config.dim))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Map tokens [R, D], sorted by expert, and the number of tokens per expert [E] to outputs [R, D]."""
        offsets = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        gate_up, down = (local(weight).to(x_RD.dtype).transpose(-2, -1) for weight in (self.gate_up_proj, self.down_proj))
        gate, up = torch._grouped_mm(x_RD, gate_up, offs=offsets).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, down, offs=offsets)


def experts_config(config: Any) -> Any:
    """Return torchtitan's config of one layer's experts, without load balancing, which the model does not have."""
    count, top = config.num_experts, config.num_experts_per_tok
    return make_moe_config(
        num_experts=count,
        load_balance_coeff=None,
        router=Router.Config(
            num_experts=count,
            gate=Linear.Config(in_features=config.hidden_size, out_features=count),
            top_k=top,
            score_func="softmax",
            route_norm=config.norm_topk_prob,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(dim=config.hidden_size, hidden_dim=config.moe_intermediate_size, num_experts=count),
            token_dispatcher=make_token_dispatcher_config(num_experts=count, top_k=top, comm_backend="standard"),
        ),
    )


# Families

ROPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose frequencies do not depend on the row length."""


@dataclass(frozen=True, slots=True)
class Family:
    """torchtitan's classes for one architecture. `qk_norm`: queries and keys are normalized; `sparse`: layers have experts."""

    model: Any
    block: Any
    adapter: Any
    shard: Callable[[Any], None]
    parallelize: Callable[..., Any]
    qk_norm: bool
    sparse: bool = False


QWEN3 = Family(
    Qwen3Model,
    Qwen3TransformerBlock,
    Qwen3StateDictAdapter,
    lambda config: set_qwen3_sharding_config(config, enable_sp=False, enable_ep=False),
    parallelize_qwen3,
    qk_norm=True,
)
FAMILIES: dict[str, Family] = {
    "qwen3": QWEN3,
    "qwen3_moe": replace(QWEN3, sparse=True),
    "llama": Family(
        Llama3Model,
        Llama3TransformerBlock,
        Llama3StateDictAdapter,
        lambda config: set_llama3_sharding_config(config, enable_sp=False),
        parallelize_llama,
        qk_norm=False,
    ),
}
"""Families by `model_type` of transformers."""


def family_of(path: str, config: Any) -> Family:
    """Return a model's family. Raises ModelError for an unknown one, and for features that torchtitan's model lacks."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise ModelError(f'{path}: model.engine = "titan" has models for {", ".join(FAMILIES)}, not for {kind}; "fsdp2" does')
    rope = config.rope_parameters or {}
    known = {
        "hidden_act": (config.hidden_act, ("silu",)),
        "attention_bias": (getattr(config, "attention_bias", False), (False,)),
        "mlp_bias": (getattr(config, "mlp_bias", False), (False,)),
        "attention_dropout": (config.attention_dropout or 0.0, (0.0,)),
        "use_sliding_window": (getattr(config, "use_sliding_window", False), (False,)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), (1.0,)),
        "rope_type": (rope.get("rope_type", "default"), ROPES),
    }
    for key, (value, allowed) in known.items():
        if value not in allowed:
            raise ModelError(f'{path}: {key} = {value!r} in its config.json: model.engine = "titan" supports {allowed}')
    return FAMILIES[kind]


def titan_config(family: Family, config: Any, rotary: Any, expert_parallel: bool) -> Any:
    """Return torchtitan's config of a model. `rotary`: the model's rotary embedding in transformers, for the frequencies.
    `expert_parallel`: experts are divided over the ranks."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps)

    rope = Rotary.Config(
        dim=width,
        max_seq_len=config.max_position_embeddings,
        frequencies=tuple(rotary.inv_freq.tolist()),
        scale=float(rotary.attention_scaling),
    )
    # No initialization, since weights are always loaded.
    sparse = [False] * config.num_hidden_layers
    if family.sparse and config.num_experts > 0:  # Qwen3-MoE's rule for layers with experts
        dense, each = config.mlp_only_layers or [], config.decoder_sparse_step
        sparse = [layer not in dense and (layer + 1) % each == 0 for layer in range(config.num_hidden_layers)]
    layers = [
        (RoutedBlock if experts else family.block).Config(
            attention_norm=norm(config.hidden_size),
            ffn_norm=norm(config.hidden_size),
            attention=make_gqa_config(
                dim=config.hidden_size,
                n_heads=heads,
                n_kv_heads=config.num_key_value_heads,
                head_dim=width,
                wqkv_param_init={},
                wo_param_init={},
                inner_attention=PackedAttention.Config(),
                rope=rope,
                qk_norm=norm(width) if family.qk_norm else None,
            ),
            feed_forward=None
            if experts
            else make_ffn_config(
                dim=config.hidden_size, hidden_dim=config.intermediate_size, w1_param_init={}, w2w3_param_init={}
            ),
            moe=experts_config(config) if experts else None,
        )
        for experts in sparse
    ]
    found = family.model.Config(
        dim=config.hidden_size,
        vocab_size=config.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=config.hidden_size),
        norm=norm(config.hidden_size),
        lm_head=LogprobHead.Config(in_features=config.hidden_size, out_features=config.vocab_size),
        layers=layers,
        enable_weight_tying=bool(config.tie_word_embeddings),
    )
    family.shard(found)
    for layer in found.layers:
        if layer.moe is not None:
            layout = {"gate_up_proj": spmd_types.R, "down_proj": spmd_types.R}  # replicated over tensor-parallel ranks
            set_moe_sharding_config(layer.moe, enable_ep=expert_parallel, enable_sp=False, expert_param_layout=layout)
    # The head gathers its weight itself; its inputs and outputs are plain tensors.
    found.lm_head.sharding_config = ShardingConfig(state_shardings=found.lm_head.sharding_config.state_shardings)
    return found


def hf_names(family: Family, config: Any, names: list[str]) -> dict[str, str]:
    """Map torchtitan's parameter names to Hugging Face names by its adapter's table. Raises ModelError for a missing one."""
    table = {titan: name for name, titan in family.adapter(config, None).from_hf_map.items() if titan is not None}
    table |= NAMES
    found = {}
    for name in names:
        layer = next((part for part in name.split(".") if part.isdigit()), "")
        pattern = name.replace(f".{layer}.", ".{}.", 1) if layer else name
        if pattern not in table:
            raise ModelError(f"torchtitan's table of names has no {name}")
        found[name] = table[pattern].format(layer)
    return found


# Sharding

BACKEND = "partial_dtensor"
"""Keeps parameters as DTensors, which are gathered and saved as with FSDP2; torchtitan's default has plain tensors."""


def dims_of(cfg: ModelConfig, device: torch.device) -> ParallelDims:
    """Return torchtitan's meshes over all ranks."""
    world = dist.get_world_size()
    # torchtitan uses the machine's accelerator type, and assumes a GPU if there is none.
    torchtitan.distributed.parallel_dims.device_type = device.type
    set_spmd_backend(BACKEND)
    tensor, experts = cfg.tensor_parallel, cfg.expert_parallel
    found = ParallelDims(cfg.replicas, -1, cp=1, tp=tensor, pp=1, ep=experts, world_size=world, spmd_backend=BACKEND)
    found.build_mesh()
    return found


def sharded_decoder(family: Family, config: Any, dims: ParallelDims, dtype: torch.dtype, checkpoints: bool) -> nn.Module:
    """Build the sharded model on the meta device, with torchtitan's names. Gradients are summed over the ranks in float32.
    `dtype`: type of the computation; `checkpoints`: use activation checkpointing."""
    name = str(dtype).removeprefix("torch.")
    with torch.device("meta"):
        decoder: nn.Module = type("TitanDecoder", (LogprobDecoder, family.model), {})(config)
    family.parallelize(
        decoder,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=name),
        parallelism=ParallelismConfig(spmd_backend=BACKEND),
        compile_config=CompileConfig(),
        ac_config=FullAC.Config(preserve_rng_state=False) if checkpoints else None,
        dump_folder="",
    )
    if dims.tp > 1:
        head: Any = decoder.lm_head
        head.tensor = Ulysses(dims.get_mesh("tp").get_group())
    for part in decoder.modules():
        if isinstance(part, FSDPModule):
            # torchtitan requests sums through the divide factor, which gloo does not support.
            part.set_force_sum_reduction_for_comms(True)
    return decoder
