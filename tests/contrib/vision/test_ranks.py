"""Rows with images over two ranks. Run as a script, it leaves `RANKS.pt` of one rank and of two in a folder."""

import sys
from pathlib import Path

import pytest

from tests.trainer.ranks import Body, UpdateLog, forked, join, mine  # isort: skip # sets variables before torch is imported

import torch

from agentrl.cluster.worker import WorkerContext
from agentrl.config.schema import AlgorithmConfig, ModelConfig
from agentrl.trainer.actor import Actor
from agentrl.trainer.pretrained import init_model
from tests.contrib.vision.test_model import TINY, pictured
from tests.e2e.runs import run_script
from tests.trainer.train_batches import toy_optim

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]


def of_images(out: Path, ranks: int) -> Body:
    """Metrics and gradients of an update of rows with images."""

    def body(context: WorkerContext) -> None:
        actor, algorithm, folder = Actor(context), AlgorithmConfig(minibatch=4), str(out / "vision")
        actor.init_model(folder, ModelConfig(packing="packed"), toy_optim(micro_tokens=100, max_grad_norm=1e9))
        actor._engine.optimizers = update_log = UpdateLog(actor._engine.named_weights())
        batch = mine(Actor, pictured(folder), algorithm, context)
        metrics = actor.update(batch, algorithm, step=1, temperature=0.7)
        if context.rank == 0:
            torch.save((metrics, update_log.seen), out / f"{ranks}.pt")

    return body


def test_rows_with_images_have_on_two_ranks_the_gradient_of_one(tmp_path: Path) -> None:
    """The vision tower is frozen on both, and is not among the gradients."""
    run_script(Path(__file__), str(tmp_path), timeout=400)
    (metrics, steps), (other, others) = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    assert len(steps) == len(others) == 3 and metrics["tokens_trained"] == other["tokens_trained"] > 30
    assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-5)
    for own, theirs in zip(steps, others, strict=True):
        top = max(grad.abs().max().item() for grad in own.values())
        assert top > 1e-3 and own.keys() == theirs.keys() and not any("visual" in name for name in own)
        assert max((grad - theirs[name]).abs().max().item() for name, grad in own.items()) < 1e-5 * max(top, 1.0)


if __name__ == "__main__":
    init_model(TINY, Path(sys.argv[1]) / "vision", 0)
    for ranks in (1, 2):
        join(forked({"dp": ranks}, Path(sys.argv[1]), of_images(Path(sys.argv[1]), ranks)))
