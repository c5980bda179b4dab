"""What scores episodes beside the reward spec: Python functions, judges, and a reward model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from agentrl.config.schema.base import (
    Frozen,
    JudgeArgs,
    NotNegativeInt,
    Positive,
    PositiveInt,
    Prices,
    Seconds,
    Tokens,
    Unit,
)
from agentrl.config.schema.engines import VllmConfig


class JudgeEngineConfig(Frozen):
    """A judge of the run's own, which a judge leaf asks as `"model": "engine:NAME"`: a model whose weights stay as they are, on
    an engine beside the policy's, from the start of the run to its end. It samples greedily; of an engine that can, only what
    fits the form of a verdict. Of `reward.judge` it heeds `cache`, `timeout` and `retries`; no budget is spent."""

    path: str
    """Its folder or hub name, with a chat template of its own; it need not have the policy's tokenizer."""
    engine: str = "embedded"
    """What samples: "embedded" (in the driver's process), "vllm" (in processes of its own), or an engine in `plugins/` of a shelf
    with the trait "judges"."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an engine that has no section here."""
    concurrency: Annotated[PositiveInt, Unit("verdicts")] = 64
    """How many are sampled at once; they are computed together."""
    reasoning: bool = False
    """It may reason before the verdict, within the leaf's `max_tokens`."""
    max_model_len: Tokens = 16384
    """The longest prompt with its verdict; lowered to the model's context, and to `vllm.max_model_len`, if that is less."""
    vllm: VllmConfig = VllmConfig()
    """As the section `vllm` is for the policy."""


class JudgeConfig(Frozen):
    """How the models of judge leaves are called; model and prompt are in the spec. Keys come from the environment variables that
    litellm reads. A run that has spent a budget (`calls`, `usd`) stops with a checkpoint."""

    engines: dict[str, JudgeEngineConfig] = Field(default_factory=dict)
    """Judges on engines of the run's own, by the name with which a leaf asks them: "engine:NAME"."""

    api_base: str | None = None
    """URL of your own server; by default the provider's."""
    args: JudgeArgs = Field(default_factory=dict)
    """Any other argument of litellm's calls, by name, as `api.args`; `temperature` (0 by default) and `drop_params` (true by
    default) too."""
    cache: str | None = None
    """A folder for verdicts: what was asked before is not asked again, also in other runs."""
    calls: Annotated[PositiveInt, Unit("calls")] | None = 10_000
    """Budget of the whole run; a run that certainly needs more calls is refused."""
    usd: Annotated[Positive, Unit("USD")] | None = None
    """Budget of the whole run; by default none."""
    usd_per_million: Prices | None = None
    """Prices of prompt and of sampled tokens, if litellm has none."""
    concurrency: Annotated[PositiveInt, Unit("calls")] = 8
    """How many run at once."""
    timeout: Seconds = 60.0
    """Limit of each attempt."""
    retries: Annotated[NotNegativeInt, Unit("attempts")] = 3
    """Further attempts at a call that failed; after the last one the episode is unscored."""


class RewardConfig(Frozen):
    """What a reward spec may use in addition to the episode."""

    python: dict[str, str] = Field(default_factory=dict)
    """Functions that `python` leaves may call, by name, each as "module:function"."""
    judge: JudgeConfig = JudgeConfig()
    """How judges are called."""


class RewardModelConfig(Frozen):
    """A sequence classifier whose score, times `weight`, is added to the reward of each episode."""

    path: str
    """Its folder or hub name; it must read the policy's token ids (the same tokenizer)."""
    weight: Annotated[float, Unit("1")] = 1.0
    """What its score is multiplied by."""
