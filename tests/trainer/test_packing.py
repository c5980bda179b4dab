"""One row a pass (`model.packing`): the same update as from packed rows, with at most one row in each micro-batch."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cluster.worker import Mesh, WorkerContext
from agentrl.config.load import config_from
from agentrl.config.schema import AlgorithmConfig, LoraSection, ModelConfig
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.plan import Planner
from agentrl.run.role_placement import GIB, RunMemory
from agentrl.trainer.actor import Actor
from agentrl.trainer.train_engine import check_train_engine
from agentrl.utils.errors import ConfigError
from tests.trainer.family_models import build
from tests.trainer.ranks import logged, mine, of_ledgers
from tests.trainer.train_batches import toy_optim

ALGORITHM = AlgorithmConfig(minibatch=3, aggregate="seq_mean_token_mean")


def updated(path: str, **model: Any) -> tuple[list[int], list[dict[str, torch.Tensor]], dict[str, float]]:
    """Of an update of five episodes (13 ledgers) in two minibatches: rows of each micro-batch, the gradients, the metrics."""
    actor = Actor(WorkerContext("actor", 0, Mesh.of({"dp": 1}, 1)))
    actor.init_model(path, ModelConfig(**model), toy_optim(max_grad_norm=1e9))
    engine, log = actor._ready(onload=False), logged(actor)
    rows, logprobs = [], engine.logprobs

    def counted(micro: Any, *args: Any) -> Any:
        rows.append(len(micro.last))
        return logprobs(micro, *args)

    engine.logprobs = counted  # type: ignore[method-assign]
    batch = mine(Actor, of_ledgers(), ALGORITHM, actor.context)
    return rows, log.seen, actor.update(batch, ALGORITHM, temperature=0.7)


@pytest.mark.parametrize(
    "how", [{}, {"activation_checkpointing": True}, {"lora": LoraSection(rank=2, modules=["in_proj", "q_proj"])}]
)
def test_one_row_a_pass_gives_the_update_of_packed_rows(how: dict[str, Any], tmp_path: Path) -> None:
    """`packing` of a model with mixers, which needs row boundaries in one way and none in the other."""
    path = build("lfm2", tmp_path)
    packed, gradients, metrics = updated(path, packing="packed", **how)
    single, others, same = updated(path, packing="one_row", **how)
    assert sum(packed) == 13 and len(packed) == 2 and single == [1] * 13
    assert len(gradients) == len(others) == 2
    for one, other in zip(gradients, others, strict=True):
        top = max(g.abs().max().item() for g in one.values())
        assert top > 1e-3 and one.keys() == other.keys()
        assert all((g - other[name]).abs().max().item() < 1e-5 * max(top, 1.0) for name, g in one.items())
    assert metrics.keys() == same.keys()
    assert all(same[name] == pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in metrics.items())


def test_the_longest_row_and_not_the_cap_is_counted() -> None:
    """Activations grow with the tokens of a pass: by a sixteenth of them are a sixteenth."""
    base = {"env": {"id": "key_value"}, "engine": "embedded", "model": {"init": {}}, "cluster": {"backend": "inline"}}
    sizes = ["optim.micro_tokens=4096", "rollout.max_episode_tokens=256", "model.dtype=float32"]

    def activations(packing: str) -> int:
        found = RunMemory(EngineChoice(config_from(base, [*sizes, f"model.packing={packing}"])), 80 * GIB).roles()
        return next(one.memory.activations for one in found if one.role == "actor")

    assert activations("packed") == 16 * activations("one_row")


def test_a_dry_run_says_what_was_decided_and_why(tmp_path: Path) -> None:
    base = {"env": {"id": "key_value"}, "engine": "embedded", "cluster": {"backend": "inline"}}
    sizes = ["rollout.max_episode_tokens=256", "optim.micro_tokens=512", "engine_args={cache=false}"]
    config = config_from({**base, "model": {"path": build("lfm2", tmp_path)}}, sizes)
    said = r"\nmodel.packing: packed: model.path: the family lfm2 .*as each row alone, to \de-0[5-9](\n|$)"
    assert re.search(said, Planner(config).dry_run().text())


def test_an_engine_with_models_of_its_own_takes_no_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.trainer.train_engine import TRAIN_ENGINES

    entry = TRAIN_ENGINES.entry("fsdp2")
    config = config_from({"env": {"id": "key_value"}, "model": {"init": {}}}, ["model.packing=one_row"])
    check_train_engine(config)
    monkeypatch.setattr(TRAIN_ENGINES, "entry", lambda name: replace(entry, traits=entry.traits - {"families"}))
    with pytest.raises(ConfigError, match=r'model.packing = "one_row": model.engine = "fsdp2" does not support it'):
        check_train_engine(config)
