"""The model that is trained: where it is from, and how it is computed and sharded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.schema.base import Day, Frozen, Positive, PositiveInt, Ranks, Tokens, Unit
from agentrl.processor import TINY, prefers_bfloat16, size_of_folder, size_of_shape


class InitModelConfig(Frozen):
    """A small randomly initialized model with the packaged tokenizer: of Qwen3's architecture, with `vision` of Qwen2.5-VL's."""

    layers: Annotated[PositiveInt, Unit("layers")] = 3
    """How many layers it has."""
    hidden: Annotated[PositiveInt, Unit("dimensions")] = 64
    """Width of what flows between layers (and of the tied embeddings)."""
    mlp: Annotated[PositiveInt, Unit("dimensions")] = 128
    """Width inside of each gated MLP."""
    heads: Annotated[PositiveInt, Unit("heads")] = 4
    """Query heads of each attention."""
    kv_heads: Annotated[PositiveInt, Unit("heads")] = 2
    """Key and value heads of each attention; `heads` must be a multiple."""
    head_dim: Annotated[PositiveInt, Unit("dimensions")] = 32
    """Width of each head."""
    context: Tokens = 4096
    """The longest sequence that the model takes."""
    init_std: Annotated[Positive, Unit("1")] = 0.05
    """Standard deviation of the normal distribution that every matrix is drawn from."""
    vision: bool = False
    """Whether it takes images: a model of Qwen2.5-VL's architecture, with a vision tower of one block (docs/howto/images.md);
    `hidden` must be `heads` times `head_dim`."""


class LoraSection(Frozen):
    """Train low-rank adapters instead of the weights (needs the extra `peft`). `weights.lora` says how they are published."""

    rank: Annotated[PositiveInt, Unit("dimensions")] = 16
    """Rank of each adapter."""
    alpha: Annotated[Positive, Unit("1")] = 32.0
    """The adapter's output is multiplied by `alpha` / `rank`."""
    modules: list[str] = Field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    """Names of the linear layers that get an adapter."""


class ModelConfig(Frozen):
    """The model: `path` or `init`, and how it is computed and sharded."""

    path: str | None = None
    """A folder or hub name of a causal language model; the alternative to `init`."""
    init: InitModelConfig | None = None
    """Build a tiny model with random weights; the alternative to `path`."""
    trust_remote_code: bool = False
    """Code that the model at `path` (and those of other roles, as `critic.path`) brings along may run in every process of a run.
    Without it a model that needs such code is refused, and one whose family transformers has is loaded by transformers' own
    classes. Read the code first: it can do whatever you can."""
    chat_template: str | None = None
    """The chat template, in place of the tokenizer's own: "hermes", "chatml", "llama3", "gemma", "phi3" or "deepseek"
    (docs/templates.md), or a Jinja file. For a model whose template knows no tools; it is saved with the trained model."""
    date: Day | None = None
    """The day (YYYY-MM-DD) that a chat template with a date is given, as `strftime_now` and `date_string`; by default the one on
    which the run or evaluation starts, kept in its folder."""
    tool_parser: str = "auto"
    """The parser of the model's tool calls, by name: one of agentrl's ("hermes", "glm", ...: docs/templates.md), or "vllm:NAME"
    for one of vLLM's own; "auto" picks the one that fits the chat template."""
    engine: str = "fsdp2"
    """The library that shards and computes the trained model: "fsdp2", "titan", or a plug-in's (docs/training_engines.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the computation, of trainer and engine (the trainer's weights and optimizer stay float32); "auto": bfloat16 on
    GPUs, and for all but tiny models on CPUs that are faster in it (AMX, or AMD with AVX512_BF16), else float32."""
    threads: Annotated[PositiveInt, Unit("threads")] | Literal["auto"] = "auto"
    """Threads of each process of trainer and engine that computes on a CPU; "auto": OMP_NUM_THREADS, else one for a tiny model,
    and for any other the cores, shared by the processes that compute at the same time."""
    activation_checkpointing: bool | None = None
    """Compute activations again in the backward pass, which saves memory; by default from 1B parameters on."""
    shard_gradients: bool | None = None
    """Add gradients up over the ranks after every micro-batch, so that each keeps its shard, instead of keeping them whole until
    the optimizer step; by default from 1B trained parameters on."""
    replicas: Ranks = 1
    """Shard within `cluster.actors` / `replicas` ranks and replicate across (HSDP)."""
    sequence_parallel: Ranks = 1
    """So many ranks share the tokens of each micro-batch (Ulysses)."""
    tensor_parallel: Ranks = 1
    """So many ranks split each matrix by the model's plan, and the attention heads with them."""
    expert_parallel: Ranks = 1
    """So many ranks have other experts each, to which tokens travel (docs/moe.md)."""
    cpu_offload: bool = False
    """Keep weights and optimizer in host memory (GPUs only)."""
    offload: Literal["never", "idle"] = "never"
    """"idle" moves weights and optimizer to host memory while the role waits for others on its GPU: another role, or with
    `rollout.colocate` the engine."""
    compile: bool = False
    """Compile each layer, and the softmax of the head, by torch.compile, for GPUs (the first micro-batches take minutes)."""
    packing: Literal["auto", "packed", "one_row", "one_row_eager"] = "auto"
    """How rows are computed: "packed" (all rows of a micro-batch end to end), "one_row" (one row a pass, with the model's own
    attention: slower, for families whose rows cannot be kept apart), "one_row_eager" (the same with transformers' eager
    attention, which keeps every score, for families that it computes right in no other way), or "auto": what a probe of the
    model's family finds right before the run starts (docs/families.md)."""
    kernels: Literal["torch", "liger"] = "torch"
    """"liger" replaces norms, rotary embeddings and gated MLPs by Liger's Triton kernels (GPUs only, needs the extra `liger`)."""
    lora: LoraSection | None = None
    """Train low-rank adapters instead of the weights."""

    def computes_in(self, cuda: bool) -> Literal["float32", "bfloat16"]:
        """The type of the computation on GPUs, or on CPUs."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if cuda or (prefers_bfloat16() and self.size() > TINY) else "float32"

    def size(self) -> float:
        """Parameters, roughly, as far as the config and the folder at `path` say it; infinite if they do not."""
        if self.path is not None:
            return size_of_folder(self.path)
        init = self.init or InitModelConfig()
        shape = {"num_hidden_layers": init.layers, "hidden_size": init.hidden, "intermediate_size": init.mlp}
        return size_of_shape(shape)
