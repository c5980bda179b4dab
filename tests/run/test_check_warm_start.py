"""A warm start that cannot be is refused before anything starts; a transcript too long for a row is left out and counted."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.cluster.launch import launch
from agentrl.config.load import config_from
from agentrl.config.schema import InitModelConfig, ModelConfig, OptimConfig
from agentrl.data.rows import Ragged
from agentrl.data.schedule import Mode, token_ratio
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.warm_start import TRIES, Transcripts
from agentrl.run.assembly import RunStart
from agentrl.run.checks.rollout_checks import check_warm_start
from agentrl.run.sft import steps_batch
from agentrl.trainer.actor import Actor
from agentrl.trainer.pretrained import init_model, packaged_tokenizer
from agentrl.utils.errors import ConfigError
from tests.trainer.train_batches import train_batch


def config_of(*overrides: str) -> Any:
    sft = {"batch": 4, "teacher": {"stop": 0.1}, "params": {"calls": [2, 8]}}
    base = {"seed": 3, "env": {"id": "key_value"}, "model": {"init": {"context": 4096}}, "sft": sft}
    return config_from(base, list(overrides))


def source(config: Any, most: int | None = None) -> Transcripts:
    env = replace(EnvRef.of(config.the_env, config.tools), params=dict(config.sft.params))
    return Transcripts(env, make_renderer(packaged_tokenizer(4096)), config.sft.teacher, config.seed, most)


async def lengths(config: Any, count: int) -> list[int]:
    return [made.tokens for made in await source(config).take(0, count)]


async def test_a_transcript_that_is_too_long_is_another_draw_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Those that fit stay the very same ones, at the same number."""
    config = config_of()
    free = await lengths(config, 24)
    most = sorted(free)[16]
    bound = source(config, most)
    with caplog.at_level(logging.WARNING):
        rows = await bound.take(0, 24)
    found = [made.tokens for made in rows]
    assert max(found) <= most and len(found) == 24
    assert all(a == b for a, b in zip(found, free, strict=True) if b <= most)
    first, *others = [i for i, n in enumerate(free) if n > most]
    assert bound.skipped > len(others) >= 1 and len(caplog.records) == 1
    assert f"transcript {first}, of task" in caplog.text and f"{free[first]} tokens" in caplog.text
    assert "raise optim.micro_tokens" in caplog.text
    again = await source(config, most).take(first, 1)
    assert again[0].ledgers == rows[first].ledgers, "number i is the same whatever was taken before it"


async def test_where_every_draw_is_too_long_the_run_is_refused_before_it_starts() -> None:
    """It died in the workers at the first step: "sequence 0 has 87 tokens, more than the hard cap"."""
    config = config_of()
    shortest = min(await lengths(config, 64))
    said = rf"transcript 0, of task '.*': \d+ tokens.*may have {shortest // 2} .*raise optim.micro_tokens.*all {TRIES} tasks"
    with pytest.raises(ConfigError, match=said):
        check_warm_start(RunStart(config_of(f"optim.micro_tokens={shortest // 2}")))
    with pytest.raises(ConfigError, match=said):
        check_warm_start(RunStart(config_of(f"model.init.context={shortest // 2}")))
    check_warm_start(RunStart(config_of("optim.micro_tokens=4096")))


@pytest.mark.parametrize(("overrides", "said"), [
    ("sft.min_steps=401 sft.max_steps=400", "sft.min_steps = 401 is above sft.max_steps = 400"),
    ("sft.min_steps=400 sft.max_steps=400", None),
    ("sft.min_steps=1 sft.max_steps=400", None),
    ("sft.teacher={wrog=0.2}", r"sft.teacher.*wrog"),
    ("sft.teacher={wrong='x'}", r"sft.teacher = \{'wrong': 'x'\}: teacher: wrong = 'x'; expected a share within 0\.\.1"),
    # Its optimizer is of whole weights, and the folder that it leaves would have the adapters merged, then trained again.
    ("model.lora.rank=4", r"model\.lora.*\[sft\].*agentrl sft.*model\.lora=false"),
])  # fmt: skip
def test_steps_a_teacher_and_a_model_that_cannot_be_are_refused(overrides: str, said: str | None) -> None:
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_warm_start(RunStart(config_of(*overrides.split())))


def learned(folder: Path, micro_tokens: int, calls: list[Any], steps: int) -> tuple[list[dict[str, float]], Path]:
    """The metrics of a warm start in these calls of so many steps, and its weights."""
    small = InitModelConfig(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16)
    actor = launch(Actor, backend="inline")
    model = str(init_model(small, folder / "model", seed=0))
    actor.run(Actor.init_model, model, ModelConfig(dtype="float32"), OptimConfig(micro_tokens=micro_tokens))
    actor.run(Actor.begin_sft, config_of().sft)
    metrics = [one for call in calls for one in train_batch(actor, Actor.sft_steps, call, steps)]
    actor.run(Actor.end_sft, str(folder / "end"))
    return metrics, folder / "end" / "model.safetensors"


@pytest.mark.parametrize("mode", ["off", "on"])
async def test_steps_of_one_call_are_those_of_a_call_each(mode: Mode, tmp_path: Path) -> None:
    """To the last digit: metrics of each step, and the weights."""
    rows = await source(config_of()).take(0, 12)
    found = []
    for each in (1, 3):  # steps a call
        calls = [steps_batch(rows[first : first + 4 * each], 4, mode) for first in range(0, 12, 4 * each)]
        metrics, weights = learned(tmp_path / str(each), 1024, calls, each)
        found.append((metrics, weights.read_bytes()))
    assert len(found[0][0]) == 3 and found[0] == found[1]


async def test_transcripts_of_a_step_compute_the_prompt_that_they_share_once(tmp_path: Path) -> None:
    """A quarter of the quickstart's warm start was the same prompt, computed for each of a step's rows."""
    rows = await source(config_of()).take(0, 12)
    batch = {mode: steps_batch(rows, 4, mode) for mode in ("off", "on")}
    found, weights = {}, {}
    for mode in batch:
        found[mode], file = learned(tmp_path / mode, 8192, [batch[mode]], 3)
        weights[mode] = load_file(file)
    for on, off in zip(found["on"], found["off"], strict=True):
        assert on["loss"] == pytest.approx(off["loss"], rel=1e-5)
        assert on["tokens_trained"] == off["tokens_trained"]
    for name, value in weights["off"].items():
        assert torch.allclose(weights["on"][name], value, atol=2e-5), name
    texts = [row.ledgers[0].token_ids.tolist() for row in rows]
    # Of zip's columns, those before the first in which not all are the same token.
    alike = [len(list(takewhile(lambda at: len(set(at)) == 1, zip(*texts[i : i + 4], strict=False)))) for i in (0, 4, 8)]
    plain = sum(map(len, texts))
    assert min(alike) > 40 and token_ratio(Ragged.of(batch["on"])) >= plain / (plain - 3 * sum(alike)) > 1.2
    assert "tree" not in batch["off"]
