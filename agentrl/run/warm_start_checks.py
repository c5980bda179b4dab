"""Before a run: the keys of [sft] fit each other, and the teacher's transcripts are no longer than a row may be."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError
from agentrl.run.tool_parser import renderer_of
from agentrl.train.pretrained import load_tokenizer, model_context
from agentrl.train.tokenizer import packaged_tokenizer
from agentrl.warm_start import Transcripts


def check_warm_start(config: TrainConfig, env: EnvRef) -> None:
    """Raise ConfigError where the warm start cannot be: its most steps are fewer than its least, there is no teacher, or one of
    the transcripts of the first step is longer than a row may be (and so are those that could take its place)."""
    sft, model = config.sft, config.model
    if sft is None:
        return
    if sft.min_steps > sft.max_steps:
        raise ConfigError(
            f"sft.min_steps = {sft.min_steps} is above sft.max_steps = {sft.max_steps}: the gate could not open before the end"
        )
    tokenizer = load_tokenizer(str(model.path)) if model.init is None else packaged_tokenizer(model.init.context)
    source = Transcripts(
        replace(env, params={**env.params, **sft.params}),
        renderer_of(model, tokenizer),
        sft.teacher,
        config.seed,
        longest_row(config),
    )
    # In a thread of its own, so that this can be called where an event loop runs.
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(asyncio.run, source.take(0, sft.batch)).result()


def longest_row(config: TrainConfig) -> int:
    """The most tokens that a transcript may have: those of a micro-batch, and not more than the model takes."""
    model = config.model
    context = model.init.context if model.init is not None else model_context(str(model.path))
    return min(config.optim.micro_tokens, context)
