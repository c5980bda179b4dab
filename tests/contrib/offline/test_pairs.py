"""Losses of data against TRL's of the same batch (benchmarks/parts/trl_losses.py made the numbers), however rows are packed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cluster.launch import launch
from agentrl.config.schema import ModelConfig
from agentrl.contrib.offline.objectives import OfflineActor, RewardTrainer
from agentrl.data.rows import Ragged
from agentrl.run.sft import steps_batch
from agentrl.trainer.roles import RewardModel
from tests.trainer.pair_batches import PAIRS, episodes, models
from tests.trainer.train_batches import toy_optim, train_batch

TRL = json.loads((Path(__file__).parent / "trl_losses.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    models(made)
    return made


def group(role: Any, path: Path, cap: int) -> Any:
    found = launch(role, backend="inline", world_size=1)
    found.run(role.init_model, str(path), ModelConfig(), toy_optim(micro_tokens=cap, max_grad_norm=1e9))
    return found


def paired(reference: torch.Tensor | None = None, sharing: Any = "off") -> Ragged:
    """The batch with what a step of pairs needs; `reference`: of each row."""
    view = Ragged.of(steps_batch(episodes(), 2 * PAIRS, sharing))
    given = torch.zeros(len(view), dtype=torch.float64) if reference is None else reference
    return view.with_rows(reference=given, whole=torch.ones(len(view), dtype=torch.bool))


def same(found: dict[str, float], name: str) -> None:
    assert found["loss"] == pytest.approx(TRL[name]["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(TRL[name]["grad_norm"], rel=1e-5)


def test_the_supervised_loss_is_trls(folder: Path) -> None:
    chosen = steps_batch(episodes()[0::2], PAIRS, "off")
    same(train_batch(group(OfflineActor, folder / "policy", 512), OfflineActor.supervise, chosen, 1), "sft")


@pytest.mark.parametrize(("cap", "sharing"), [(512, "off"), (512, "on"), (40, "off")])
def test_the_dpo_loss_and_its_gradient_are_trls_also_with_the_rows_of_a_pair_apart(folder: Path, cap: int, sharing: str) -> None:
    """A cap of 40 tokens puts nearly every row into a micro-batch of its own."""
    before = group(OfflineActor, folder / "reference", cap).run(OfflineActor.compute_logprob, paired().batch)["logprobs"]
    reference = torch.stack([row.sum() for row in before.unbind()]).double()
    found = train_batch(
        group(OfflineActor, folder / "policy", cap), OfflineActor.prefer, paired(reference, sharing).batch, 1, PAIRS, TRL["beta"]
    )
    same(found, "dpo")


def test_the_reward_models_loss_is_trls_and_what_it_writes_is_a_reward_model(folder: Path, tmp_path: Path) -> None:
    trained = group(RewardTrainer, folder / "classifier", 512)
    same(train_batch(trained, RewardTrainer.prefer, paired().batch, 1, PAIRS), "reward")
    trained.run(RewardTrainer.export_hf, str(tmp_path / "out"))
    judge = group(RewardModel, tmp_path / "out", 512)
    now = trained.run(RewardTrainer.compute_scores, paired().batch)["score"]
    torch.testing.assert_close(judge.run(RewardModel.compute_scores, paired().batch)["score"], now)
