"""The state of each optimizer on one rank and on two (FSDP2 over gloo, in Ray actors)."""

from pathlib import Path

import pytest

from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, ModelConfig
from agentrl.trainer.actor import Actor
from tests.conftest import proof
from tests.publishing import weights_of as weights
from tests.trainer.test_optimizers import KINDS
from tests.trainer.train_batches import make_batch, toy_optim, train_batch

pytestmark = proof
ALGORITHM = AlgorithmConfig(minibatch=6)


def agree(one: dict[str, float], other: dict[str, float]) -> None:
    for name in ("loss", "grad_norm", "entropy", "kl_behaviour", "mismatch_kl", "clip_fraction"):
        assert one[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5), name
    assert one["tokens_trained"] == other["tokens_trained"]


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
