"""Config sections of learning: model, data, algorithm, optimizer, critic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.schema.base import (
    Beta,
    Choice,
    Day,
    Fraction,
    Frozen,
    Limit,
    NotNegative,
    NotNegativeInt,
    Positive,
    PositiveInt,
    Ranks,
    Rate,
    Tokens,
    Unit,
)
from agentrl.utils.processor import TINY, prefers_bfloat16, size_of_folder, size_of_shape


class InitModelConfig(Frozen):
    """A small randomly initialized model with the packaged tokenizer: of Qwen3's architecture, with `vision` of Qwen2.5-VL's."""

    layers: Annotated[int, Field(ge=1, le=1000), Unit("layers")] = 3
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
    modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Last parts of the names of the linear layers that get an adapter; by default all but output head, routers, experts and
    vision tower. Adapters of attention alone learn less (Schulman et al. 2025, "LoRA Without Regret")."""


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
    """This many ranks share the tokens of each micro-batch (Ulysses)."""
    tensor_parallel: Ranks = 1
    """This many ranks split each matrix by the model's plan, and the attention heads with them."""
    expert_parallel: Ranks = 1
    """This many ranks have other experts each, to which tokens travel (docs/moe.md)."""
    offload: Literal["never", "idle", "always"] = "never"
    """"idle" moves weights and optimizer to host memory while the role waits for others on its GPU: another role, or with
    `rollout.colocate` the engine; "always" keeps them there (GPUs only)."""
    compile: bool = False
    """Compile each layer, and the softmax of the head, by torch.compile, for GPUs (the first micro-batches take minutes)."""
    packing: Literal["auto", "packed", "one_row", "one_row_eager"] = "auto"
    """How rows are computed: "packed" (all rows of a micro-batch end to end), "one_row" (one row a pass, with the model's own
    attention: slower, for families whose rows cannot be kept apart), "one_row_eager" (the same with transformers' eager
    attention, which keeps every score, for families that it computes right in no other way), or "auto": what a probe of the
    model's family finds right before the run starts (docs/families.md)."""
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


class DataConfig(Frozen):
    """Training on data that is there already: episodes of runs, conversations, or pairs with a preferred one
    (docs/offline.md). Its learning rate and schedule are those of [optim]."""

    path: Annotated[list[str], Field(min_length=1)]
    """Files (.jsonl, .parquet), folders of them, and folders of runs, evaluations and rollouts."""
    loss: Literal["sft", "dpo", "reward"] = "sft"
    """The objective: the assistant's tokens ("sft"), to prefer one of two episodes ("dpo", arXiv:2305.18290), or a reward model
    that does ("reward")."""
    batch: Annotated[PositiveInt, Unit("examples")] = 8
    """Examples of each optimizer step: episodes, conversations, or pairs."""
    epochs: Annotated[PositiveInt, Unit("passes")] = 1
    """How often the data is gone over, each time in another order."""
    heldout: Fraction = 0.05
    """This share of the tasks (of chat data: of the rows) is never trained on; the loss on it is measured before, every
    `eval.every` steps, and after."""
    max_bad: Fraction = 0.01
    """The largest share of rows that may be left out because they cannot be used; with more the run does not start."""
    split: str | None = "train"
    """Of episodes: only tasks of this split, so that held-out tasks stay held out; false is any."""
    min_reward: Annotated[float, Unit("reward")] | None = None
    """Of episodes: only those with at least this reward."""
    success: bool = False
    """Of episodes: only those that solved their task."""
    per_task: Annotated[PositiveInt, Unit("episodes")] | None = None
    """Of episodes: this many of each task at most, the best first; with a loss of pairs, this many pairs of each task. By default
    all, and one pair."""
    rerender: bool = False
    """Of episodes: not the tokens that were sampled, but those of their messages as the model's chat template writes them now;
    for a model with another tokenizer."""
    margin: Annotated[Positive, Unit("reward")] = 1e-6
    """Of pairs from episodes: the better one has at least so much more reward."""
    beta: Annotated[Positive, Unit("1")] = 0.1
    """Of "dpo": how strongly the start model holds the policy back."""


OptimizerName = Literal["adamw", "muon", "sgd"]


class SftConfig(Frozen):
    """Supervised warm start on transcripts of the environment's scripted teacher.

    A transcript that is longer than `optim.micro_tokens` or the model's context is replaced by another one and counted (the
    metric `transcripts_skipped`).
    """

    envs: list[str] | None = None
    """Of several environments, the names of those that take part, by default all with a weight at step 0; transcripts are shared
    out by these weights. The gate opens once each of them reaches its own."""
    max_steps: Annotated[PositiveInt, Unit("optimizer steps")] = 1500
    """After this many steps the warm start fails if its gate has not opened."""
    min_steps: Annotated[PositiveInt, Unit("optimizer steps")] = 400
    """The gate is measured from this step on; the learning rate falls until here."""
    batch: Annotated[PositiveInt, Unit("transcripts")] = 8
    """Transcripts of each step."""
    optimizer: OptimizerName | None = None
    """Its optimizer (as `optim.name`); by default "muon" if `matrix_lr` is set, and else `optim.name`."""
    lr: Rate | None = None
    """Learning rate; by default 1e-5, with `[model.lora]` 1e-4, and 3e-3 for a model of random weights."""
    matrix_lr: Rate | None = None
    """Learning rate of Muon (as `optim.matrix_lr`)."""
    warmup: Annotated[NotNegativeInt, Unit("optimizer steps")] = 30
    """The learning rate rises over this many steps."""
    teacher: dict[str, Any] = Field(default_factory=dict)
    """The teacher's own parameters, by name."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Environment parameters for the transcripts that override `env.params`."""
    gate: Fraction = 0.95
    """The greedy success that ends the warm start."""
    gate_params: dict[str, Any] = Field(default_factory=dict)
    """Environment parameters for the gate's tasks that override `env.params`."""
    gate_tasks: Annotated[PositiveInt, Unit("tasks")] = 64
    """Tasks by which the gate is measured."""
    gate_every: Annotated[PositiveInt, Unit("optimizer steps")] = 100
    """How often the gate is measured from `min_steps` on; also after `max_steps`."""


class KlConfig(Frozen):
    """A penalty for moving away from the reference policy."""

    coef: Annotated[NotNegative, Unit("1")] = 0.0
    """What the divergence is multiplied by; 0 means no penalty, and no reference."""
    kind: Literal["k1", "k2", "k3", "k1+", "k3+"] | None = None
    """The estimator; by default k3 in the loss and k1 in the reward. With "+", which is for the loss, its value with the gradient
    of k2."""
    where: Literal["loss", "reward"] = "loss"
    """In the loss, or subtracted from the token rewards before advantages are computed."""
    target: Annotated[Positive, Unit("nats per token")] | None = None
    """The coefficient is controlled so that the KL stays near it; by default it stays as it is."""
    horizon: Annotated[PositiveInt, Unit("episodes")] | None = None
    """How quickly `target` is followed: the coefficient changes by at most 20 % x episodes / `horizon` per update in which the
    policy learns. By default the episodes of 20 updates, so by at most 1 % per update, whatever the size of an update."""
    reference: Literal["start", "moving"] = "start"
    """The model that the run started from, or a moving average of the policy's weights: after every update in which the policy
    learned, the reference is `decay` times itself plus 1 - `decay` times the policy."""
    decay: Beta = 0.99
    """How much of itself a moving reference keeps at each update: about 1 / (1 - `decay`) updates are in it."""


class ExperienceConfig(Frozen):
    """Rare successes are kept for later updates: episodes that succeeded in groups where few did (docs/algorithms.md). They take
    part in no baseline and in no statistic of a group."""

    size: Annotated[PositiveInt, Unit("episodes")] = 64
    """This many are kept at most, the newest."""
    rare: Annotated[float, Field(gt=0.0, le=1.0), Unit("share")] = 0.25
    """A success is rare if at most this share of its group succeeded."""
    share: Annotated[Positive, Unit("1")] = 0.25
    """This many times the episodes of an update are added to it from those that are kept: drawn without replacement, fewer if
    fewer are kept."""
    max_age: Annotated[PositiveInt, Unit("updates")] = 8
    """Their bound on staleness: an episode is forgotten once the oldest weights that sampled it are more updates behind."""
    term: Literal["policy", "supervised"] = "policy"
    """In the policy loss, with the advantages that they had and the ratio to the policy that sampled them; or -log pi of their
    tokens, which is added to the loss."""
    coef: Annotated[Positive, Unit("1")] = 1.0
    """In the policy loss each counts as much as this many episodes of the update; of the supervised term the mean over their
    tokens is multiplied by it."""


class DemonstrationsConfig(Frozen):
    """The gold solutions of tasks at which a whole group failed are added to the update, as tokens of the policy whose -log pi is
    made small (docs/algorithms.md)."""

    episodes: Annotated[PositiveInt, Unit("episodes")] = 4
    """This many at most in an update: of the groups that failed since the last one, those with the lowest numbers."""
    coef: Annotated[Positive, Unit("1")] = 0.1
    """What the mean of -log pi over their tokens is multiplied by."""


class DistillationConfig(Frozen):
    """A teacher is learned from: the advantage of each sampled token is `reward_coef` times the estimator's plus `coef` times the
    teacher's log probability of it less the policy's (docs/algorithms.md)."""

    path: str
    """The teacher's folder or hub name; it must have the policy's tokenizer. It may be of another size and family."""
    coef: Annotated[Positive, Unit("1")] = 1.0
    """What the difference of log probabilities, in nats, is multiplied by."""
    reward_coef: Annotated[NotNegative, Unit("1")] = 1.0
    """What the estimator's advantages are multiplied by; at 0 the teacher alone is learned from, and rewards are measured."""


class AlgorithmConfig(Frozen):
    """Advantage estimator, policy loss and how token losses are averaged (docs/algorithms.md)."""

    advantage: Choice = Choice(name="grpo")
    """The advantage estimator."""
    loss: Choice = Choice(name="ppo_clip")
    """The policy loss."""
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """The mean over tokens, or the mean over episodes of their tokens' mean or sum; "seq_mean_token_sum_norm" divides that sum by
    the constant `length_norm`."""
    length_norm: Tokens | None = None
    """What "seq_mean_token_sum_norm" divides by; by default the most that an episode may sample: the lesser of
    `rollout.max_turns` x `rollout.max_turn_tokens` and `rollout.max_episode_tokens`."""
    epochs: Annotated[PositiveInt, Unit("passes")] = 1
    """How often an update goes over its episodes."""
    minibatch: Annotated[PositiveInt, Unit("episodes")] = 128
    """The most episodes per optimizer step; all ledgers of an episode are in the same one."""
    groups: Literal["split", "kept"] = "split"
    """"kept" puts all members of a group into one minibatch, on one rank and, as far as `optim.micro_tokens` allows, into one
    micro-batch; "split" draws episodes one by one and places every row separately."""
    proximal: Literal["behaviour", "recompute"] = "behaviour"
    """The policy in the denominator of the ratios: the one that sampled ("behaviour": the engine's logprobs), or the trainer's
    weights at the start of the update ("recompute": one more forward pass)."""
    correction: Choice | None = None
    """Weights between those two policies (trainer/algorithms/losses.py); it needs `proximal` "recompute". By default none."""
    truncated: Literal["score", "mask"] = "score"
    """Episodes that a budget of turns, tokens or time ended: "score" trains on them like on any other; "mask" keeps their reward
    in the group's baseline but trains none of their tokens, and no mean of the loss counts them (DAPO, arXiv:2503.14476; TRL's
    `mask_truncated_completions`). A critic learns from all episodes."""
    kl: KlConfig = KlConfig()
    """A penalty for moving away from the reference policy."""
    entropy_bonus: Annotated[NotNegative, Unit("1")] = 0.0
    """This many times the entropy of each token's distribution is subtracted from its loss."""
    experience: ExperienceConfig | None = None
    """Rare successes are kept for later updates; by default none."""
    distillation: DistillationConfig | None = None
    """A teacher model is learned from too; by default none."""
    demonstrations: DemonstrationsConfig | None = None
    """Gold solutions of tasks at which a whole group failed are added; by default none."""


class OptimConfig(Frozen):
    """Optimizer and micro-batching. docs/hyperparameters.md has rates by the size of a model, and their sources."""

    name: OptimizerName = "adamw"
    """The optimizer of every training. "adamw" keeps 8 bytes for each number that is trained; "muon" 4 for matrices
    inside the layers, for which it computes several products a step; "sgd" 4, or 0 if the first of `betas` is 0."""
    lr: Rate | None = None
    """Learning rate; by default of reinforcement learning and pairs 1e-6, of transcripts and of a reward model 1e-5, ten times
    that with `[model.lora]`, and 1e-3 for a model of random weights (transcripts 3e-3). "sgd" has no default."""
    matrix_lr: Rate | None = None
    """Learning rate of "muon" for matrices inside the layers, as Jordan (2024) scales it; by default a step of theirs is as long
    as AdamW's of `lr` (arXiv:2502.16982), which all other weights take."""
    weight_decay: Annotated[NotNegative, Unit("1")] = 0.0
    """Each step shrinks matrices by `lr` x `weight_decay`; with "sgd" that goes through the momentum, with "muon" only matrices
    inside the layers shrink."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """How slowly AdamW's means of the gradient and of its square forget; the first is the momentum of "sgd"."""
    max_grad_norm: Annotated[Limit, Unit("1")] = 1.0
    """Gradients with a longer norm (over all parameters) are scaled down to it; inf: none are."""
    warmup: Annotated[NotNegativeInt, Unit("updates")] = 0
    """The learning rate rises linearly over this many updates."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after that: it would be 0 one update after the run's last. With n updates after the warm-up the
    last one has 1/n of `lr` ("linear"), or about 2.5/n^2 ("cosine")."""
    micro_tokens: Tokens = 16384
    """Hard cap of a micro-batch per rank; it must hold the longest row."""
    prefix_sharing: Literal["off", "auto", "on"] = "auto"
    """Rows of a group that start with the same tokens compute them once: always ("on"), whenever that is faster
    for the slowest rank ("auto"; on CPUs only), or never ("off"). Results are the same."""


class CriticConfig(Frozen):
    """A value function next to the policy, for advantages that need one ("gae", "gae_turns")."""

    path: str | None = None
    """Its model, a folder or hub name; by default the policy's."""
    lr: Rate | None = None
    """Its learning rate, which follows `optim.warmup` and `optim.schedule`; by default 1e-5, with `[model.lora]` 1e-4, and 1e-3
    for a model of random weights."""
    clip: Annotated[Limit, Unit("1")] | None = 0.5
    """How far a value may move from the one used for the advantages."""
    epochs: Annotated[PositiveInt, Unit("passes")] = 1
    """How often it goes over the episodes of an update."""
    warmup: Annotated[NotNegativeInt, Unit("updates")] = 0
    """During the first this many updates only the critic learns."""
