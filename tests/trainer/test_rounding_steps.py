"""A minibatch in which nothing is to be learned, under a KL penalty to a reference that is still the policy: its gradient is
rounding, which the first step of Adam makes as large as any other. Layouts that agree to rounding differ from there on."""

from typing import Any, Literal

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, KlConfig
from agentrl.data.rows import nested_tensor, offsets_of
from agentrl.trainer.actor import Actor
from tests.publishing import weights_of
from tests.trainer.learners import start
from tests.trainer.plain_trainer import Batch, load, norm_of, tokens_of
from tests.trainer.train_batches import make_batch, sharing, train_batch

COEF, LR = 0.1, 1e-3
ALGORITHM = AlgorithmConfig(minibatch=4, kl=KlConfig(coef=COEF))


def given(tiny: str, taught: int, moved: float, mode: Literal["off", "on"]) -> tuple[Any, Any]:
    """An actor, and a batch of one group whose advantages are `taught` times random ones. The reference is the policy itself, by
    passes of its own as in a run, `moved` times a normal number away per token."""
    actor, batch = start(tiny, lr=LR), make_batch(4, seed=2, longest=120)
    offsets = offsets_of(batch["sampled"])
    alone = [actor.run(Actor.compute_logprob, batch[row : row + 1])["logprobs"].values() for row in range(len(batch))]
    own = torch.cat(alone)
    noise = torch.randn(len(own), generator=torch.Generator().manual_seed(0)) * batch["sampled"].values()
    none = taught * batch["advantages"].values()
    batch = batch.update(
        {"ref_logprobs": nested_tensor(own + moved * noise, offsets), "advantages": nested_tensor(none, offsets)}
    )
    return actor, sharing(batch, mode)


def exact(tiny: str, batch: Any, moved: float) -> float:
    """The norm of the penalty's gradient in float64: mean over the sampled tokens of k3, by plain transformers."""
    model, sampled = load(tiny), batch["sampled"].values()
    noise = torch.randn(len(sampled), generator=torch.Generator().manual_seed(0)).double()[sampled]
    logprobs = torch.cat(tokens_of(model, Batch(batch))[0])
    d = -moved * noise + logprobs - logprobs.detach()
    (COEF * (torch.exp(-d) - 1 + d).mean()).backward()
    return norm_of(model)


def stepped(actor: Any, batch: Any) -> tuple[float, float]:
    """The gradient's norm, and the farthest that a weight went in its optimizer step."""
    before = {name: tensor.clone() for name, tensor in weights_of(actor).items()}
    train_batch(actor, Actor.forward_backward, batch, ALGORITHM, kl_coef=COEF)
    norm = actor.run(Actor.optim_step)["grad_norm"]
    return norm, max(float((tensor - before[name]).abs().max()) for name, tensor in weights_of(actor).items())


def test_a_penalty_at_distance_0_has_a_gradient_of_rounding_and_adam_takes_a_step_of_it(tiny: str) -> None:
    """The first step of Adam is g / (abs(g) + 1e-8) times the rate, whatever the size of g."""
    found = {mode: given(tiny, 0, 0.0, mode) for mode in ("off", "on")}
    assert exact(tiny, found["off"][1], 0.0) < 1e-15
    steps = {mode: stepped(*pair) for mode, pair in found.items()}
    assert all(norm < 1e-6 for norm, _ in steps.values()), steps
    assert max(far for _, far in steps.values()) > 0.1 * LR, steps
    # From here on the two layouts train different policies: the same minibatch, with advantages, has another gradient.
    later = [stepped(actor, given(tiny, 1, 0.0, mode)[1])[0] for mode, (actor, _) in found.items()]
    assert abs(later[0] - later[1]) > 1e-4 * later[0], later


@pytest.mark.parametrize(("taught", "moved"), [(0, 0.1), (1, 0.0)])
def test_at_a_distance_or_with_advantages_both_layouts_take_the_same_steps(tiny: str, taught: int, moved: float) -> None:
    """The same two steps; only what the first has to learn differs."""
    found = {mode: given(tiny, taught, moved, mode) for mode in ("off", "on")}
    if not taught:
        assert stepped(*given(tiny, taught, moved, "off"))[0] == pytest.approx(exact(tiny, found["off"][1], moved), rel=1e-4)
    first = [stepped(*found[mode])[0] for mode in ("off", "on")]
    assert first[0] == pytest.approx(first[1], rel=1e-5) and first[0] > 1e-4
    later = [stepped(actor, given(tiny, 1, 0.0, mode)[1])[0] for mode, (actor, _) in found.items()]
    assert later[0] == pytest.approx(later[1], rel=1e-5), later
