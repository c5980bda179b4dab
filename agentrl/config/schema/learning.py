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
    """A small randomly initialized model with the packaged tokenizer: of Qwen3's architecture, or with `vision` Qwen2.5-VL's."""

    layers: Annotated[int, Field(ge=1, le=1000), Unit("layers")] = 3
    """Number of layers."""
    hidden: Annotated[PositiveInt, Unit("dimensions")] = 64
    """Hidden size (and that of the tied embeddings)."""
    mlp: Annotated[PositiveInt, Unit("dimensions")] = 128
    """Intermediate size of each gated MLP."""
    heads: Annotated[PositiveInt, Unit("heads")] = 4
    """Query heads per attention layer."""
    kv_heads: Annotated[PositiveInt, Unit("heads")] = 2
    """Key-value heads per attention layer; `heads` must be a multiple."""
    head_dim: Annotated[PositiveInt, Unit("dimensions")] = 32
    """Dimensions per head."""
    context: Tokens = 4096
    """Maximum sequence length of the model."""
    init_std: Annotated[Positive, Unit("1")] = 0.05
    """Standard deviation of the normal distribution from which every matrix is initialized."""
    vision: bool = False
    """Accept images: a model of Qwen2.5-VL's architecture, with a vision tower of one block (docs/howto/images.md); `hidden` must
    be `heads` times `head_dim`."""


class LoraSection(Frozen):
    """Train low-rank adapters instead of the weights (needs the extra `peft`). `weights.lora` sets how they are published."""

    rank: Annotated[PositiveInt, Unit("dimensions")] = 16
    """Rank of each adapter."""
    alpha: Annotated[Positive, Unit("1")] = 32.0
    """The adapter's output is multiplied by `alpha` / `rank`."""
    modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Last parts of the names of linear layers with an adapter; by default all except the output head, routers, experts and
    vision tower. Adapters of attention alone learn less (Schulman et al. 2025, "LoRA Without Regret")."""


class ModelConfig(Frozen):
    """The trained model: `path` or `init`, and its computation and sharding."""

    path: str | None = None
    """Folder or hub name of a causal language model; alternative to `init`."""
    init: InitModelConfig | None = None
    """Build a tiny model with random weights; alternative to `path`."""
    trust_remote_code: bool = False
    """Allow the Python code of the model at `path` (and of other roles, as `critic.path`) to run in every process of a run.
    Otherwise a model that needs such code is refused, and one of a family of transformers is loaded by transformers' own classes.
    Read the code first: it can do whatever you can."""
    chat_template: str | None = None
    """Chat template instead of the tokenizer's: "hermes", "chatml", "llama3", "gemma", "phi3" or "deepseek" (docs/templates.md),
    or a Jinja file. For a model whose template has no tools; it is saved with the trained model."""
    date: Day | None = None
    """Date (YYYY-MM-DD) passed to a chat template with a date, as `strftime_now` and `date_string`; by default the day on which
    the run or evaluation starts, stored in its folder."""
    tool_parser: str = "auto"
    """Parser of the model's tool calls: one of agentrl ("hermes", "glm", ...: docs/templates.md), or "vllm:NAME" for one of vLLM;
    "auto" picks the one that matches the chat template."""
    engine: str = "fsdp2"
    """Library that shards and computes the trained model: "fsdp2", "titan", or one of a plug-in (docs/training_engines.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of computations of trainer and engine (the trainer's weights and optimizer stay float32); "auto": bfloat16 on
    GPUs, and for all but tiny models on CPUs that are faster in it (AMX, or AMD with AVX512_BF16), else float32."""
    threads: Annotated[PositiveInt, Unit("threads")] | Literal["auto"] = "auto"
    """CPU threads of each trainer and engine process; "auto": OMP_NUM_THREADS, else one for a tiny model, and for any other the
    cores divided by the processes that compute at the same time."""
    activation_checkpointing: bool | None = None
    """Recompute activations in the backward pass, which saves memory; by default from 1B parameters."""
    shard_gradients: bool | None = None
    """Reduce-scatter gradients over the ranks after every micro-batch, so that each keeps its shard, instead of keeping them
    whole until the optimizer step; by default from 1B trained parameters."""
    replicas: Ranks = 1
    """Shard within `cluster.actors` / `replicas` ranks and replicate across them (HSDP)."""
    sequence_parallel: Ranks = 1
    """Ranks that share the tokens of each micro-batch (Ulysses)."""
    tensor_parallel: Ranks = 1
    """Ranks that split each matrix by the model's plan, and the attention heads with them."""
    expert_parallel: Ranks = 1
    """Ranks among which the experts are divided; tokens travel to them (docs/moe.md)."""
    offload: Literal["never", "idle", "always"] = "never"
    """"idle" moves weights and optimizer state to host memory while the role waits for others on its GPU: another role, or with
    `rollout.colocate` the engine; "always" keeps them there (GPUs only)."""
    compile: bool = False
    """Compile each layer, and the softmax of the head, by torch.compile, for GPUs (the first micro-batches take minutes)."""
    packing: Literal["auto", "packed", "one_row", "one_row_eager"] = "auto"
    """Layout of rows: "packed" (all rows of a micro-batch end to end), "one_row" (one row per pass, with the model's own
    attention: slower, for families whose rows would mix), "one_row_eager" (the same with transformers' eager attention, which
    stores every score, for families that only it computes correctly), or "auto": the layout that a probe of the model family
    finds correct before the run starts (docs/families.md)."""
    lora: LoraSection | None = None
    """Train low-rank adapters instead of the weights."""

    def computes_in(self, cuda: bool) -> Literal["float32", "bfloat16"]:
        """Return the number type of computations on GPUs (`cuda`) or CPUs."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if cuda or (prefers_bfloat16() and self.size() > TINY) else "float32"

    def size(self) -> float:
        """Estimate the parameters from the config and the folder at `path`; infinite if unknown."""
        if self.path is not None:
            return size_of_folder(self.path)
        init = self.init or InitModelConfig()
        shape = {"num_hidden_layers": init.layers, "hidden_size": init.hidden, "intermediate_size": init.mlp}
        return size_of_shape(shape)


class DataConfig(Frozen):
    """Training on existing data: episodes of runs, conversations, or preference pairs (docs/offline.md). Learning rate and
    schedule are those of [optim]."""

    path: Annotated[list[str], Field(min_length=1)]
    """Files (.jsonl, .parquet), folders of them, and folders of runs, evaluations and rollouts."""
    loss: Literal["sft", "dpo", "reward"] = "sft"
    """Objective: supervised on the assistant's tokens ("sft"), preference between two episodes ("dpo", arXiv:2305.18290), or a
    reward model trained on such pairs ("reward")."""
    batch: Annotated[PositiveInt, Unit("examples")] = 8
    """Examples per optimizer step: episodes, conversations, or pairs."""
    epochs: Annotated[PositiveInt, Unit("passes")] = 1
    """Passes over the data, each in another order."""
    heldout: Fraction = 0.05
    """Share of the tasks (of chat data: of the rows) held out from training; the loss on it is measured before, every
    `eval.every` steps, and after."""
    max_bad: Fraction = 0.01
    """Maximum share of unusable rows, which are skipped; with more the run does not start."""
    split: str | None = "train"
    """Only this split (of episodes by task, of other rows by their file's name in a folder); false is any."""
    min_reward: Annotated[float, Unit("reward")] | None = None
    """Episodes: only those with at least this reward."""
    success: bool = False
    """Episodes: only those that solved their task."""
    per_task: Annotated[PositiveInt, Unit("episodes")] | None = None
    """Episodes: maximum per task, best first; with a pairwise loss, maximum pairs per task. By default all episodes, and one
    pair."""
    rerender: bool = False
    """Episodes: train on tokens of their messages as rendered by the model's chat template now, not on the sampled tokens; for a
    model with another tokenizer."""
    margin: Annotated[Positive, Unit("reward")] = 1e-6
    """Pairs of episodes: minimum reward difference between the better and the worse."""
    beta: Annotated[Positive, Unit("1")] = 0.1
    """For "dpo": strength of the penalty for moving away from the start model."""


OptimizerName = Literal["adamw", "muon", "sgd"]


class SftConfig(Frozen):
    """Supervised warm start on transcripts of the environment's scripted teacher.

    A transcript longer than `optim.micro_tokens` or the model's context is replaced by another one and counted (metric
    `transcripts_skipped`).
    """

    envs: list[str] | None = None
    """Names of the participating environments, of several; by default all with a weight at step 0. Transcripts are distributed by
    these weights. The gate opens once each environment reaches its own."""
    max_steps: Annotated[PositiveInt, Unit("optimizer steps")] = 1500
    """Steps after which the warm start fails if its gate has not opened."""
    min_steps: Annotated[PositiveInt, Unit("optimizer steps")] = 400
    """First step at which the gate is measured; the learning rate decays until then."""
    batch: Annotated[PositiveInt, Unit("transcripts")] = 8
    """Transcripts per step."""
    optimizer: OptimizerName | None = None
    """Optimizer (as `optim.name`); by default "muon" if `matrix_lr` is set, else `optim.name`."""
    lr: Rate | None = None
    """Learning rate; by default 1e-5, with `[model.lora]` 1e-4, and 3e-3 for a model of random weights."""
    matrix_lr: Rate | None = None
    """Learning rate of Muon (as `optim.matrix_lr`)."""
    warmup: Annotated[NotNegativeInt, Unit("optimizer steps")] = 30
    """Steps over which the learning rate rises."""
    teacher: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the teacher, by name."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Environment parameters of the transcripts, which override `env.params`."""
    gate: Fraction = 0.95
    """Greedy success rate that ends the warm start."""
    gate_params: dict[str, Any] = Field(default_factory=dict)
    """Environment parameters of the gate's tasks, which override `env.params`."""
    gate_tasks: Annotated[PositiveInt, Unit("tasks")] = 64
    """Number of tasks that measure the gate."""
    gate_every: Annotated[PositiveInt, Unit("optimizer steps")] = 100
    """Interval of measuring the gate from `min_steps` on; also after `max_steps`."""


class KlConfig(Frozen):
    """KL penalty for moving away from the reference policy."""

    coef: Annotated[NotNegative, Unit("1")] = 0.0
    """Factor of the divergence; 0: no penalty and no reference model."""
    kind: Literal["k1", "k2", "k3", "k1+", "k3+"] | None = None
    """Estimator; by default k3 in the loss and k1 in the reward. With "+" (for the loss) its value with the gradient of k2."""
    where: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or subtract it from the token rewards before advantages are computed."""
    target: Annotated[Positive, Unit("nats per token")] | None = None
    """KL at which the coefficient is controlled; by default the coefficient is constant."""
    horizon: Annotated[PositiveInt, Unit("episodes")] | None = None
    """Speed of following `target`: the coefficient changes by at most 20 % x episodes / `horizon` per update in which the policy
    learns. By default the episodes of 20 updates: at most 1 % per update, whatever the size of an update."""
    reference: Literal["start", "moving"] = "start"
    """The start model of the run, or a moving average of the policy's weights: after every update in which the policy learned,
    the reference is `decay` times itself plus 1 - `decay` times the policy."""
    decay: Beta = 0.99
    """Weight of the old value of a moving reference at each update: it averages about 1 / (1 - `decay`) updates."""


class ExperienceConfig(Frozen):
    """Replay of rare successes: episodes that succeeded in groups where few did (docs/algorithms.md). They take part in no
    baseline and no group statistic."""

    size: Annotated[PositiveInt, Unit("episodes")] = 64
    """Maximum number of stored episodes, the newest."""
    rare: Annotated[float, Field(gt=0.0, le=1.0), Unit("share")] = 0.25
    """Maximum share of a group's members that succeed for its successes to be rare."""
    share: Annotated[Positive, Unit("1")] = 0.25
    """Stored episodes added to an update, as a multiple of its episodes: drawn without replacement, fewer if fewer are stored."""
    max_age: Annotated[PositiveInt, Unit("updates")] = 8
    """Maximum staleness: an episode is dropped once the oldest weights that sampled it are more updates behind."""
    term: Literal["policy", "supervised"] = "policy"
    """Add them to the policy loss, with their original advantages and the ratio to the policy that sampled them; or add -log pi
    of their tokens to the loss."""
    coef: Annotated[Positive, Unit("1")] = 1.0
    """Weight: in the policy loss each counts as this many episodes of the update; in the supervised term it multiplies the mean
    over their tokens."""


class DemonstrationsConfig(Frozen):
    """Add gold solutions of tasks at which a whole group failed to the update, as supervised tokens: -log pi is minimized
    (docs/algorithms.md)."""

    episodes: Annotated[PositiveInt, Unit("episodes")] = 4
    """Maximum number per update: of the groups that failed since the last one, those with the lowest numbers."""
    coef: Annotated[Positive, Unit("1")] = 0.1
    """Factor of the mean of -log pi over their tokens."""


class DistillationConfig(Frozen):
    """On-policy distillation: the advantage of each sampled token is `reward_coef` times the estimator's plus `coef` times the
    teacher's log probability of it minus the policy's (docs/algorithms.md)."""

    path: str
    """Folder or hub name of the teacher, of any size and family; must have the policy's tokenizer."""
    coef: Annotated[Positive, Unit("1")] = 1.0
    """Factor of the difference of log probabilities."""
    reward_coef: Annotated[NotNegative, Unit("1")] = 1.0
    """Factor of the estimator's advantages; at 0 only the teacher is learned from, and rewards are only measured."""


class AlgorithmConfig(Frozen):
    """Advantage estimator, policy loss and averaging of token losses (docs/algorithms.md)."""

    advantage: Choice = Choice(name="grpo")
    """The advantage estimator."""
    loss: Choice = Choice(name="ppo_clip")
    """The policy loss."""
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """Mean over tokens, or mean over episodes of their tokens' mean or sum; "seq_mean_token_sum_norm" divides that sum by the
    constant `length_norm`."""
    length_norm: Tokens | None = None
    """Divisor for "seq_mean_token_sum_norm"; by default the maximum that an episode may sample: the lesser of `rollout.max_turns`
    x `rollout.max_turn_tokens` and `rollout.max_episode_tokens`."""
    epochs: Annotated[PositiveInt, Unit("passes")] = 1
    """Passes of an update over its episodes."""
    minibatch: Annotated[PositiveInt, Unit("episodes")] = 128
    """Maximum episodes per optimizer step; all ledgers of an episode are in the same one."""
    groups: Literal["split", "kept"] = "split"
    """"kept" puts all members of a group into one minibatch, on one rank and, as far as `optim.micro_tokens` allows, into one
    micro-batch; "split" draws single episodes and places every row separately."""
    proximal: Literal["behaviour", "recompute"] = "behaviour"
    """Policy in the denominator of the ratios: the one that sampled ("behaviour": the engine's logprobs), or the trainer's
    weights at the start of the update ("recompute": one more forward pass)."""
    correction: Choice | None = None
    """Importance weights between these two policies (algorithms/losses.py); needs `proximal` "recompute". Default: none."""
    truncated: Literal["score", "mask"] = "score"
    """Episodes ended by a budget of turns, tokens or time: "score" trains on them like on any other; "mask" counts their reward
    in the group's baseline but trains none of their tokens and excludes them from means of the loss (DAPO, arXiv:2503.14476;
    TRL's `mask_truncated_completions`). A critic learns from all episodes."""
    kl: KlConfig = KlConfig()
    """KL penalty for moving away from the reference policy."""
    entropy_bonus: Annotated[NotNegative, Unit("1")] = 0.0
    """Factor of the entropy of each token's distribution, which is subtracted from its loss."""
    experience: ExperienceConfig | None = None
    """Replay of rare successes in later updates; by default none."""
    distillation: DistillationConfig | None = None
    """Distillation from a teacher model; by default none."""
    demonstrations: DemonstrationsConfig | None = None
    """Gold solutions of tasks at which a whole group failed; by default none."""


class OptimConfig(Frozen):
    """Optimizer and micro-batching. docs/hyperparameters.md lists rates by model size, with sources."""

    name: OptimizerName = "adamw"
    """Optimizer of every training. "adamw" keeps 8 bytes per trained parameter; "muon" 4 for matrices inside the layers, with
    several matrix products per step; "sgd" 4, or 0 if the first of `betas` is 0."""
    lr: Rate | None = None
    """Learning rate; by default 1e-6 for reinforcement learning and pairs, 1e-5 for transcripts and a reward model, ten times
    that with `[model.lora]`, and 1e-3 for a model of random weights (transcripts 3e-3). "sgd" has no default."""
    matrix_lr: Rate | None = None
    """Learning rate of "muon" for matrices inside the layers, scaled as by Jordan (2024); by default their steps are as long as
    AdamW's with `lr` (arXiv:2502.16982), which updates all other weights."""
    weight_decay: Annotated[NotNegative, Unit("1")] = 0.0
    """Each step shrinks matrices by `lr` x `weight_decay`; with "sgd" through the momentum, with "muon" only matrices inside the
    layers."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of AdamW's moments (gradient, squared gradient); the first is the momentum of "sgd"."""
    max_grad_norm: Annotated[Limit, Unit("1")] = 1.0
    """Gradients with a larger norm (over all parameters) are scaled down to it; inf: never."""
    warmup: Annotated[NotNegativeInt, Unit("updates")] = 0
    """Updates over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up, reaching 0 one update after the run's last. With n updates after the warm-up
    the last one has 1/n of `lr` ("linear"), or about 2.5/n^2 ("cosine")."""
    micro_tokens: Tokens = 16384
    """Maximum tokens of a micro-batch per rank; it must hold the longest row."""
    prefix_sharing: Literal["off", "auto", "on"] = "auto"
    """Compute a common prefix of a group's rows once: always ("on"), when that is faster for the slowest rank ("auto"; on CPUs
    only), or never ("off"). Results are the same."""


class CriticConfig(Frozen):
    """Value function for advantages that need one ("gae", "gae_turns")."""

    path: str | None = None
    """Folder or hub name of its model; by default the policy's."""
    lr: Rate | None = None
    """Learning rate, which follows `optim.warmup` and `optim.schedule`; by default 1e-5, with `[model.lora]` 1e-4, and 1e-3 for a
    model of random weights."""
    clip: Annotated[Limit, Unit("1")] | None = 0.5
    """Maximum distance of a value from the one used for the advantages (value clipping)."""
    epochs: Annotated[PositiveInt, Unit("passes")] = 1
    """Passes over the episodes of an update."""
    warmup: Annotated[NotNegativeInt, Unit("updates")] = 0
    """Number of first updates in which only the critic learns."""
