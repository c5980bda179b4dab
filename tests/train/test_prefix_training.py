"""Prefix sharing in the trainer: the same loss, gradients, logprobs and values, and fewer computed tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from agentrl.batch import collate
from agentrl.batch.rows import jagged, offsets_of
from agentrl.batch.sharing import with_trees
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.cluster.runtime import start_ray, stop_ray
from agentrl.config.schema import AlgorithmConfig, ClusterConfig, CriticConfig, KlConfig, ModelConfig, OptimConfig
from agentrl.train.actor import Actor
from agentrl.train.critic import Critic
from agentrl.train.reference import Reference
from agentrl.trajectory import Task, TokenLedger, Trajectory

ALGORITHM = AlgorithmConfig(minibatch=64, groups="kept", epochs=2, entropy_bonus=0.01, kl=KlConfig(coef=0.1))


def ledger(rng: np.random.Generator, prompt: list[int]) -> TokenLedger:
    made = TokenLedger()
    made.append_context(prompt, 0)
    for turn in range(int(rng.integers(1, 3))):
        count = int(rng.integers(1, 9))
        made.append_sampled(rng.integers(7, 400, count).tolist(), [-6.0] * count, [0] * count, turn)
        made.append_context(rng.integers(7, 400, int(rng.integers(1, 4))).tolist(), turn)
    return made


def groups_of(sizes: tuple[int, ...], prompt: int = 40, seed: int = 0) -> TensorDict:
    """Groups of so many members over one prompt each; the last member of each has a forked second ledger, which
    keeps half of the prompt."""
    rng = np.random.default_rng(seed)
    found = []
    for number, size in enumerate(sizes):
        text = rng.integers(7, 400, prompt).tolist()
        for member in range(size):
            ledgers = [ledger(rng, text)]
            if member == size - 1:  # its history was rewritten after the first half of the prompt
                ledgers.append(ledger(rng, text[: prompt // 2] + rng.integers(7, 400, 5).tolist()))
            task = Task(id=f"t{number}", seed=number)
            found.append(Trajectory("made-up", task, member=member, ledgers=ledgers, reward=float(rng.integers(0, 2))))
    batch = collate(found)
    sampled = batch["sampled"]
    values = torch.from_numpy(rng.standard_normal(len(sampled.values()))).float() * sampled.values()
    columns = {"advantages": values, "ref_logprobs": -6.0 * sampled.values(), "values": values, "returns": 2 * values}
    return batch.update({name: jagged(column, offsets_of(sampled)) for name, column in columns.items()})


def start(cls: type, tiny: str, ranks: int = 1, cap: int = 4096, name: str = "x", mesh: dict[str, int] | None = None,
          model: ModelConfig | None = None) -> WorkerGroup:
    backend = "ray" if ranks > 1 else "inline"
    group = launch(cls, backend=backend, world_size=ranks, name=name, num_cpus=0.25, mesh=mesh)
    more = (CriticConfig(),) if cls is Critic else ()
    group.run(cls.init_model, tiny, model or ModelConfig(), OptimConfig(micro_tokens=cap), *more)
    return group


def weights(group: WorkerGroup[Actor]) -> torch.Tensor:
    return torch.cat([t.flatten() for bucket in group.run(Actor.export_weights) for t in bucket.values()])


def agree(one: dict[str, float], other: dict[str, float]) -> None:
    assert one.keys() == other.keys()
    for name in one.keys() - {"prefix_ratio"}:
        assert one[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5), name


@pytest.mark.parametrize("sizes", [(1,), (3, 7), (1, 3, 7)])
@pytest.mark.parametrize("cap", [4096, 130])
def test_an_update_is_the_same_with_shared_prefixes(tiny: str, sizes: tuple[int, ...], cap: int) -> None:
    batch = groups_of(sizes)
    plain, shared = start(Actor, tiny, cap=cap), start(Actor, tiny, cap=cap)
    one = plain.run(Actor.update, batch, ALGORITHM)
    other = shared.run(Actor.update, with_trees(batch, "on"), ALGORITHM)
    agree(one, other)
    assert (weights(plain) - weights(shared)).abs().max() < 1e-5
    assert one["prefix_ratio"] == 1.0 and other["prefix_ratio"] > (1.1 if len(sizes) == 1 else 1.3)
    found = [start(Reference, tiny, cap=cap).run(Reference.compute_logprob, b, 0.7) for b in (batch, with_trees(batch, "on"))]
    for name in ("logprobs", "entropy"):
        assert torch.allclose(found[0][name].values(), found[1][name].values(), atol=1e-5)


def test_the_critic_is_the_same_with_shared_prefixes(tiny: str) -> None:
    batch = groups_of((3, 4))
    algorithm = ALGORITHM.model_copy(update={"minibatch": 4})
    found = []
    for given in (batch, with_trees(batch, "on")):
        critic = start(Critic, tiny)
        metrics = critic.run(Critic.update, given, algorithm)
        found.append((metrics, critic.run(Critic.compute_values, given)["values"].values()))
    agree(found[0][0], found[1][0])
    assert found[0][1].abs().max() > 0 and torch.allclose(found[0][1], found[1][1], atol=1e-5)


def test_auto_shares_where_it_wins_and_not_where_it_does_not(tiny: str) -> None:
    """Two members behind a prompt of 200 tokens, and behind one of 20."""
    actor = start(Actor, tiny)
    ratios = {}
    for prompt in (200, 20):
        for mode in ("off", "auto", "on"):
            metrics = actor.run(Actor.update, with_trees(groups_of((2,), prompt), mode), ALGORITHM)
            ratios[prompt, mode] = metrics["prefix_ratio"]
    assert ratios[200, "auto"] == ratios[200, "on"] > 1.5 and ratios[200, "off"] == 1.0
    assert 1.0 < ratios[20, "on"] < 1.5 and ratios[20, "auto"] == 1.0


@pytest.fixture(scope="module")
def ray_up() -> Iterator[None]:
    start_ray(ClusterConfig())
    yield
    stop_ray()


@pytest.mark.slow
def test_two_ranks_share_as_one_and_tokens_may_be_spread_over_ranks(ray_up: None, tiny: str) -> None:
    """Groups of 1, 3 and 7 and one group alone, cut over the ranks; then Ulysses over the same two ranks."""
    wide = ModelConfig(sequence_parallel=2)
    with (
        start(Actor, tiny, 2, 130, "two") as two,
        start(Actor, tiny, 2, 130, "tokens", {"dp": 1, "sp": 2}, wide) as tokens,
    ):
        free = ALGORITHM.model_copy(update={"groups": "split"})
        for step, (sizes, algorithm) in enumerate([((1, 3, 7), ALGORITHM), ((6,), free)]):
            batch = groups_of(sizes, seed=step)
            expected = start(Actor, tiny, cap=130).run(Actor.update, batch, algorithm) if not step else None
            shared = with_trees(batch, "on")
            for group in (two, tokens):
                metrics = group.run(Actor.update, shared, algorithm)
                assert metrics["prefix_ratio"] > 1.2
                if expected:
                    agree(expected, metrics)
        found = [g.run(Actor.compute_logprob, shared)["logprobs"].values() for g in (two, tokens)]
        assert torch.allclose(*found, atol=1e-5)
