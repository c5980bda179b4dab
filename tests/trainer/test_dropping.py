"""Rows that cannot have a gradient are not computed, which changes no gradient, step or weight."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig
from agentrl.data.rows import Ragged, collate, nested_tensor, offsets_of, select
from agentrl.data.schedule import assign_ranks
from agentrl.data.trajectory import Task, Trajectory
from agentrl.trainer import minibatch
from agentrl.trainer.actor import Actor
from agentrl.trainer.algorithms.losses import POLICY_LOSSES
from agentrl.trainer.minibatch import with_counts, without_idle_rows
from tests.conftest import proof
from tests.publishing import flat
from tests.trainer.learners import start
from tests.trainer.train_batches import make_batch, random_ledger, sharing, train_batch

MODES = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def several(groups: int = 4, size: int = 4, teaching: int = 1, seed: int = 0, prompt_tokens: int = 12) -> TensorDict:
    """Groups of episodes of one to three ledgers; only the first `teaching` groups have advantages, one number an episode."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(groups):
        prompt = rng.integers(7, 400, prompt_tokens).tolist()
        for member in range(size):
            task = Task(id=f"t{group}", seed=group)
            made = [random_ledger(rng, prompt[: len(prompt) - n], 0.3) for n in range(1 + (member + group) % 3)]
            found.append(Trajectory("made-up", task, member=member, ledgers=made, reward=0.0))
    batch = collate(found)
    sampled, offsets = batch["sampled"].values(), offsets_of(batch["sampled"])
    per_episode = torch.from_numpy(rng.standard_normal(groups * size)).float()
    per_episode[teaching * size :] = 0.0
    per_row = per_episode[torch.from_numpy(Ragged.of(batch).episode)]
    tokens = torch.repeat_interleave(per_row, offsets.diff()) * sampled
    near = (batch["logprobs"].values() + 0.2 * torch.from_numpy(rng.standard_normal(len(sampled))).float()) * sampled
    return batch.update({"advantages": nested_tensor(tokens, offsets), "old_logprobs": nested_tensor(near, offsets)})


def both(tiny: str, batch: TensorDict, algorithm: AlgorithmConfig, monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[Any]:
    """Metrics and weights after an update, with rows left out and with every row computed."""
    found = []
    for dropping in (True, False):
        with monkeypatch.context() as patch:
            if not dropping:
                patch.setattr(minibatch, "without_idle_rows", lambda view, parts, algorithm: parts)
            actor = start(tiny, lr=1e-4, weight_decay=0.1)
            metrics = train_batch(actor, Actor.update, batch, algorithm, **given)
            found.append((metrics, flat(actor).double()))
    return found


ARGS = {"clip_cov": {"share": 0.1, "low": -9.0, "high": 9.0}, "kl_cov": {"share": 0.1}}
PAIRS = list(itertools.product(POLICY_LOSSES, MODES))
TOGETHER = [(loss, mode) for place, loss in enumerate(POLICY_LOSSES) for mode in (MODES[place % 4], MODES[(place + 1) % 4])]
"""Every loss, in two modes; `make proofs` runs the others."""
COMPARED = ("loss", "grad_norm", "tokens_trained", "episodes_trained", "minibatches", "optimizer_steps")


@pytest.mark.parametrize(
    ("loss", "mode"), [*TOGETHER, *(pytest.param(*pair, marks=proof) for pair in PAIRS if pair not in TOGETHER)]
)
def test_leaving_rows_out_changes_no_step(tiny: str, monkeypatch: pytest.MonkeyPatch, loss: str, mode: str) -> None:
    """Several ledgers an episode, a correction that rejects tokens, T = 0.7, two epochs, whole minibatches without advantage."""
    correction = (
        Choice(name="reject_sequence", args={"low": 0.9, "high": 1.2})
        if loss == "decoupled_ppo"
        else Choice(name="masked", args={"cap": 1.2})
    )
    algorithm = AlgorithmConfig(
        loss=Choice(name=loss, args=ARGS.get(loss, {})),
        aggregate=mode,
        length_norm=50 if mode.endswith("norm") else None,
        minibatch=3,
        epochs=2,
        proximal="recompute",
        correction=correction,
    )
    (one, left), (all_rows, right) = both(tiny, several(), algorithm, monkeypatch, temperature=0.7)
    assert one["tokens_computed"] < 0.6 * all_rows["tokens_computed"]
    assert (all_rows["minibatches"], all_rows["optimizer_steps"]) == (6, {"kl_cov": 12, "gspo": 5}.get(loss, 6)), "with gradient"
    for name in COMPARED:
        assert one[name] == pytest.approx(all_rows[name], rel=2e-5, abs=1e-6), name
    assert (left - right).abs().max() < 1e-6


@pytest.mark.parametrize("groups", ["kept", "split"])
def test_leaving_rows_out_changes_no_step_with_shared_prefixes(tiny: str, monkeypatch: pytest.MonkeyPatch, groups: str) -> None:
    algorithm = AlgorithmConfig(minibatch=8, groups=groups, aggregate="seq_mean_token_mean")
    (one, left), (all_rows, right) = both(tiny, sharing(several(prompt_tokens=40), "on"), algorithm, monkeypatch)
    assert one["tokens_computed"] < 0.6 * all_rows["tokens_computed"] and all_rows["prefix_ratio"] > 1.0
    assert (left - right).abs().max() < 5e-6  # of steps of 1e-4: two attentions are joined, in another order


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_batch_that_teaches_nothing_moves_no_weight(tiny: str, name: str) -> None:
    """Neither by momentum nor by weight decay; the next gradient meets the moments of the last."""
    still = make_batch(4)
    still["advantages"].values().zero_()
    algorithm = AlgorithmConfig(minibatch=4, loss=Choice(name="reinforce"))
    left, right = (start(tiny, name=name, lr=1e-2, weight_decay=0.1) for _ in range(2))
    for actor in (left, right):
        train_batch(actor, Actor.update, make_batch(4), algorithm)
    before = flat(left)
    metrics = train_batch(left, Actor.update, still, algorithm)
    assert metrics["grad_norm"] == metrics["loss"] == metrics["optimizer_steps"] == metrics["skipped_optimizer_steps"] == 0
    assert torch.equal(flat(left), before)
    for actor in (left, right):
        assert train_batch(actor, Actor.update, make_batch(4, seed=1), algorithm)["optimizer_steps"] == 1
    assert torch.equal(flat(left), flat(right)) and not torch.equal(flat(left), before)


def test_counts_are_taken_from_every_row_and_without_rejected_tokens() -> None:
    batch = several(groups=2, size=2, teaching=1)
    sampled, offsets = batch["sampled"].values(), offsets_of(batch["sampled"])
    weight = sampled.float()
    weight[int(offsets[0]) : int(offsets[1])] = 0.0  # the only ledger of the first episode is rejected whole
    batch["weights"] = nested_tensor(weight, offsets)
    parts = [np.arange(len(batch))]
    out = with_counts(Ragged.of(batch), parts, 10)
    (counts,) = out.batch["counts"]
    per_row = [int((sampled & (weight > 0))[offsets[r] : offsets[r + 1]].sum()) for r in range(len(batch))]
    episode = Ragged.of(batch).episode
    assert counts.tokens == sum(per_row) and counts.episodes == 3 and counts.length == 10
    expected = [sum(n for n, e in zip(per_row, episode, strict=True) if e == own) for own in episode]
    assert out.numbers("episode_tokens").tolist() == expected
    (left,) = without_idle_rows(out, parts, AlgorithmConfig())
    teaching = [row for row in range(len(batch)) if per_row[row] and bool((batch["advantages"][row] != 0).any())]
    assert left.tolist() == teaching and 0 < len(teaching) < len(batch)
    alone = assign_ranks(out, [left], 2).numbers("dp_rank").tolist()
    assert [row for row, rank in enumerate(alone) if rank >= 0] == teaching, "the others go to no rank, and are not copied"


def test_the_first_minibatch_keeps_a_row_so_that_the_engine_is_compared(tiny: str) -> None:
    batch = make_batch(8)
    batch["advantages"].values().zero_()
    own = start(tiny).run(Actor.compute_logprob, batch)["logprobs"].values()
    batch["logprobs"].values().copy_((own + 0.5) * batch["sampled"].values())
    metrics = train_batch(start(tiny), Actor.update, batch, AlgorithmConfig(minibatch=2))
    assert metrics["mismatch_max"] == pytest.approx(0.5, abs=1e-5) and metrics["kl_behaviour"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(np.exp(0.5) - 1 - 0.5, abs=1e-4)


def test_means_over_tokens_are_over_what_was_computed_which_under_an_entropy_bonus_is_all(tiny: str) -> None:
    batch = make_batch(8)
    batch["advantages"].values()[int(offsets_of(batch["advantages"])[4]) :] = 0
    actor = start(tiny)
    entropy = actor.run(Actor.compute_logprob, batch)["entropy"].values()
    end = int(offsets_of(batch["advantages"])[4])
    sampled = batch["sampled"].values()
    metrics = train_batch(actor, Actor.update, batch, AlgorithmConfig(minibatch=8))
    assert metrics["tokens_computed"] == int(sampled[:end].sum()) and metrics["tokens_trained"] == int(sampled.sum())
    assert metrics["entropy"] == pytest.approx(float(entropy[:end].sum() / sampled[:end].sum()), rel=1e-5)
    metrics = train_batch(start(tiny), Actor.update, batch, AlgorithmConfig(minibatch=8, entropy_bonus=0.1))
    assert metrics["tokens_computed"] == metrics["tokens_trained"] == int(sampled.sum())
    assert metrics["entropy"] == pytest.approx(float(entropy.sum() / sampled.sum()), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("correction", [None, Choice(name="truncated")])
def test_masked_episodes_are_trained_as_if_they_were_not_there(
    tiny: str, mode: Any, loss: str, correction: Choice | None
) -> None:
    """Against an update of the other rows alone, with the same advantages: numerators, denominators and KL are theirs."""
    batch = several(teaching=4)
    view = Ragged.of(batch)
    cut = torch.from_numpy(view.episode % 3 == 0)
    kl = KlConfig(coef=0.1, where="loss")
    batch = batch.update({"truncated": cut, "ref_logprobs": batch["old_logprobs"]})
    algorithm = AlgorithmConfig(
        aggregate=mode, length_norm=10, loss=Choice(name=loss), proximal="recompute", correction=correction, kl=kl
    )
    moved = []
    for rows, truncated in ((batch, "mask"), (select(batch, (~cut).nonzero().squeeze(1).numpy()), "score"), (batch, "score")):
        group = start(tiny, lr=1e-2)
        before = flat(group).double()
        train_batch(group, Actor.update, rows, algorithm.model_copy(update={"truncated": truncated}), step=0, seed=0, kl_coef=0.1)
        moved.append(flat(group).double() - before)
    assert (moved[0] - moved[1]).norm() < 1e-4 * moved[1].norm()
    assert (moved[0] - moved[2]).norm() > 1e-2 * moved[1].norm()


@pytest.mark.parametrize("mode", MODES)
def test_an_update_whose_tokens_are_all_rejected_trains_none_and_leaves_the_weights(tiny: str, mode: str) -> None:
    algorithm = AlgorithmConfig(
        minibatch=6,
        aggregate=mode,
        length_norm=9 if mode.endswith("norm") else None,
        proximal="recompute",
        correction=Choice(name="masked", args={"cap": 1e-6}),
        entropy_bonus=0.1,
    )
    actor = start(tiny)
    before = flat(actor).double()
    metrics = train_batch(actor, Actor.update, several(), algorithm)
    assert metrics["tokens_trained"] == metrics["episodes_trained"] == metrics["loss"] == metrics["grad_norm"] == 0
    assert "entropy" not in metrics and "ratio" not in metrics, "of no token nobody knows them; an entropy of 0 would be alarming"
    assert (metrics["optimizer_steps"], metrics["minibatches"]) == (0, 3) and torch.equal(before, flat(actor).double())


def test_means_do_not_depend_on_the_number_of_epochs(tiny: str) -> None:
    """With weights that stand still, two epochs say what one says: of tokens, of steps, and of the gap to the engine."""
    found = []
    for epochs in (1, 2):
        algorithm = AlgorithmConfig(minibatch=3, epochs=epochs, loss=Choice(name="reinforce"))
        found.append(train_batch(start(tiny, lr=1e-12, max_grad_norm=1e9), Actor.update, make_batch(8), algorithm))
    for name in ("entropy", "kl_behaviour", "mismatch_kl", "mismatch_max", *COMPARED[:4]):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5), name
    assert found[1]["tokens_computed"] == 2 * found[0]["tokens_computed"] and found[1]["optimizer_steps"] == 6
