"""One rank and two (FSDP2 over gloo, in Ray actors): the same losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, ModelConfig
from agentrl.data.rows import collate
from agentrl.trainer.actor import Actor
from agentrl.utils.errors import WorkerError
from tests.conftest import proof
from tests.publishing import weights_of as weights
from tests.trainer.test_optimizers import KINDS
from tests.trainer.train_batches import make_batch, toy_optim, toy_sft, train_batch, trajectories

pytestmark = proof
ALGORITHM = AlgorithmConfig(minibatch=6)


def start(tiny: str, ranks: int, backend: str, name: str, dtype: str = "float32") -> WorkerGroup[Actor]:
    group = launch(Actor, backend=backend, world_size=ranks, name=name, num_cpus=0.5)
    group.run(Actor.init_model, tiny, ModelConfig(dtype=dtype), toy_optim(micro_tokens=150))
    return group


@pytest.fixture(scope="module")
def two(ray_up: None, tiny: str) -> Iterator[WorkerGroup[Actor]]:
    with start(tiny, 2, "ray", "two") as group:
        yield group


def agree(one: dict[str, float], other: dict[str, float]) -> None:
    for name in ("loss", "grad_norm", "entropy", "kl_behaviour", "mismatch_kl", "clip_fraction"):
        assert one[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5), name
    assert one["tokens_trained"] == other["tokens_trained"]


def exported(group: WorkerGroup[Actor], folder: Path) -> set[torch.dtype]:
    """The types in an exported folder, whose weights must be those that the ranks publish."""
    group.run(Actor.export_hf, str(folder))
    held, published = load_file(folder / "model.safetensors"), weights(group)
    assert held.keys() == published.keys()
    assert all(torch.equal(held[name], published[name]) for name in held)
    return {tensor.dtype for tensor in held.values()}


def test_two_ranks_train_as_one_and_load_as_one(two: WorkerGroup[Actor], tiny: str, tmp_path: Path) -> None:
    one = start(tiny, 1, "inline", "one")
    for step in range(3):  # 13 rows in minibatches of 5, 4, 4: ragged for two ranks
        batch = make_batch(13, seed=step)
        agree(
            train_batch(one, Actor.update, batch, ALGORITHM, step=step),
            train_batch(two, Actor.update, batch, ALGORITHM, step=step),
        )
    mine, theirs = weights(one), weights(two)
    assert mine.keys() == theirs.keys()
    assert max((mine[n] - theirs[n]).abs().max().item() for n in mine) < 1e-5
    assert exported(two, tmp_path / "hf") == {torch.float32}
    (tmp_path / "file").touch()
    with pytest.raises(WorkerError, match="FileExistsError"):  # of rank 0, which the other does not wait for
        two.run(Actor.export_hf, str(tmp_path / "file"))
    batch = make_batch(5, seed=9)
    logprobs = [group.run(Actor.compute_logprob, batch)["logprobs"].values() for group in (one, two)]
    assert torch.allclose(*logprobs, atol=1e-5)
    two.run(Actor.save, str(tmp_path / "c"))
    resumed = start(tiny, 1, "inline", "resumed")
    resumed.run(Actor.load, str(tmp_path / "c"))
    back = weights(resumed)
    assert all(torch.equal(back[n], theirs[n]) for n in back)
    batch = make_batch(11, seed=5)
    agree(train_batch(resumed, Actor.update, batch, ALGORITHM, step=3), train_batch(two, Actor.update, batch, ALGORITHM, step=3))
    mine, theirs = weights(resumed), weights(two)  # by name: how a model is cut decides the order they come in
    assert mine.keys() == theirs.keys()
    assert max((mine[n] - theirs[n]).abs().max().item() for n in mine) < 1e-5


def test_fewer_rows_than_ranks(two: WorkerGroup[Actor]) -> None:
    metrics = train_batch(two, Actor.update, make_batch(1), ALGORITHM)
    assert metrics["episodes_trained"] == 1


@pytest.mark.parametrize("name", KINDS)
def test_each_optimizer_goes_on_with_another_number_of_ranks(ray_up: None, tiny: str, tmp_path: Path, name: str) -> None:
    optim = toy_optim(micro_tokens=150, name=name)
    with launch(Actor, backend="ray", world_size=2, name=name, num_cpus=0.5) as two:
        two.run(Actor.init_model, tiny, ModelConfig(dtype="float32"), optim)
        train_batch(two, Actor.update, make_batch(6), ALGORITHM)
        two.run(Actor.save, str(tmp_path / "c"))
        one = launch(Actor, backend="inline", world_size=1)
        one.run(Actor.init_model, tiny, ModelConfig(), optim)
        one.run(Actor.load, str(tmp_path / "c"))
        one.run(Actor.save, str(tmp_path / "again"))
        two.run(Actor.load, str(tmp_path / "again"))
        batch = make_batch(11, seed=5)
        agree(train_batch(one, Actor.update, batch, ALGORITHM, step=1), train_batch(two, Actor.update, batch, ALGORITHM, step=1))
        mine, theirs = weights(one), weights(two)
    # Muon computes in bfloat16, and 8 bits round by the digits of the mean: both to a share of a step of 1e-3.
    tolerance = {"muon": 1e-4, "adamw_8bit": 1e-4}.get(name, 1e-5)
    assert max((mine[n] - theirs[n]).abs().max().item() for n in mine) < tolerance


def test_supervised_steps_on_two_ranks(two: WorkerGroup[Actor], tiny: str, tmp_path: Path) -> None:
    one = start(tiny, 1, "inline", "one")
    two.run(Actor.save, str(tmp_path / "c"))
    one.run(Actor.load, str(tmp_path / "c"))
    batch = collate(trajectories(12, seed=4))
    losses = []
    for group in (one, two):
        group.run(Actor.begin_sft, toy_sft(warmup=1, min_steps=50))
        losses.append([train_batch(group, Actor.sft_steps, batch, 3)[-1]["loss"] for _ in range(4)])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)  # Muon works in bfloat16
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[1][-1] < losses[1][0]


def test_bfloat16_is_close_and_not_equal(ray_up: None, tiny: str, tmp_path: Path) -> None:
    batch = make_batch(6)
    one = start(tiny, 1, "inline", "one").run(Actor.compute_logprob, batch)["logprobs"].values()
    with start(tiny, 1, "ray", "half", dtype="bfloat16") as group:
        half = group.run(Actor.compute_logprob, batch)["logprobs"].values()
        assert exported(group, tmp_path / "hf") == {torch.bfloat16}
        assert train_batch(group, Actor.update, batch, ALGORITHM)["grad_norm"] > 0
    assert 0 < (one - half).abs().max() < 0.05
