"""Checks of the warm start: the keys of [sft] fit each other, and the teacher's transcripts fit into a row."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError
from agentrl.run.assembly import longest_row, renderer_of, tokenizer_of
from agentrl.warm_start import Transcripts


def check_warm_start(config: TrainConfig, env: EnvRef) -> None:
    """Raise ConfigError if the warm start cannot run: max_steps is below min_steps, the model has adapters, there is no
    teacher, or a transcript of the first step is longer than a row may be (and so are those that could replace it).

    Reads: sft, env, tools, seed, model.path, model.init, model.lora, model.tool_parser, model.chat_template,
    model.date, optim.micro_tokens.
    """
    sft = config.sft
    if sft is None:
        return
    if sft.min_steps > sft.max_steps:
        raise ConfigError(
            f"sft.min_steps = {sft.min_steps} is above sft.max_steps = {sft.max_steps}: the gate could not open before the end"
        )
    if config.model.lora is not None:
        raise ConfigError(
            "model.lora: the warm start of [sft] trains whole weights, not adapters; make it a separate run (agentrl sft "
            "CONFIG model.lora=false), and train from its result (sft=false model.path=runs/NAME/warm_start)"
        )
    source = Transcripts(
        replace(env, params={**env.params, **sft.params}),
        renderer_of(config.model, tokenizer_of(config)),
        sft.teacher,
        config.seed,
        longest_row(config),
    )
    # In another thread, so that this can be called while an event loop is running (in a notebook).
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(asyncio.run, source.take(0, sft.batch)).result()
