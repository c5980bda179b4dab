"""Prefix sharing in the trainer: the same loss, gradients, logprobs and values, and fewer computed tokens."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from agentrl.config.schema import AlgorithmConfig, KlConfig
from agentrl.data.rows import collate, nested_tensor, offsets_of
from agentrl.data.schedule import plan_ranks, shuffle_parts
from agentrl.data.trajectory import Task, Trajectory
from agentrl.trainer.actor import Actor
from agentrl.trainer.learner import Learner
from agentrl.trainer.minibatch import cut_update
from agentrl.trainer.roles import Critic, Reference
from tests.publishing import flat
from tests.trainer.learners import agree, config_of, opened, role_of, start
from tests.trainer.train_batches import random_ledger, sharing, toy_critic, toy_optim, train_batch

ALGORITHM = AlgorithmConfig(minibatch=64, groups="kept", epochs=2, entropy_bonus=0.01, kl=KlConfig(coef=0.1))


def groups_of(sizes: tuple[int, ...], prompt: int = 40, seed: int = 0) -> TensorDict:
    """Groups over one prompt each; the last member's forked second ledger keeps half of the prompt."""
    rng = np.random.default_rng(seed)
    found = []
    for number, size in enumerate(sizes):
        text = rng.integers(7, 400, prompt).tolist()
        for member in range(size):
            ledgers = [random_ledger(rng, text)]
            if member == size - 1:  # its history was rewritten after the first half of the prompt
                ledgers.append(random_ledger(rng, text[: prompt // 2] + rng.integers(7, 400, 5).tolist()))
            task = Task(id=f"t{number}", seed=number)
            found.append(Trajectory("made-up", task, member=member, ledgers=ledgers, reward=float(rng.integers(0, 2))))
    batch = collate(found)
    sampled = batch["sampled"]
    values = torch.from_numpy(rng.standard_normal(len(sampled.values()))).float() * sampled.values()
    columns = {"advantages": values, "ref_logprobs": -6.0 * sampled.values(), "values": values, "returns": 2 * values}
    return batch.update({name: nested_tensor(column, offsets_of(sampled)) for name, column in columns.items()})


@pytest.mark.parametrize("sizes", [(1,), (3, 7), (1, 3, 7)])
@pytest.mark.parametrize("cap", [4096, 130])
def test_an_update_is_the_same_with_shared_prefixes(tiny: str, sizes: tuple[int, ...], cap: int) -> None:
    batch = groups_of(sizes)
    plain, shared = (start(tiny, micro_tokens=cap) for _ in range(2))
    one = train_batch(plain, Actor.update, batch, ALGORITHM)
    other = train_batch(shared, Actor.update, sharing(batch, "on"), ALGORITHM)
    agree(one, other, "prefix_ratio")
    assert (flat(plain) - flat(shared)).abs().max() < 1e-5
    assert one["prefix_ratio"] == 1.0 and other["prefix_ratio"] > (1.1 if len(sizes) == 1 else 1.3)
    reference = role_of(Reference, tiny, micro_tokens=cap)
    found = [reference.run(Reference.compute_logprob, rows, 0.7) for rows in (batch, sharing(batch, "on"))]
    for name in ("logprobs", "entropy"):
        assert torch.allclose(found[0][name].values(), found[1][name].values(), atol=1e-5)


def test_the_critic_is_the_same_with_shared_prefixes(tiny: str) -> None:
    batch = groups_of((3, 4))
    algorithm = ALGORITHM.model_copy(update={"minibatch": 4})
    found = []
    for rows in (batch, sharing(batch, "on")):
        critic = role_of(Critic, tiny, toy_critic())
        metrics = train_batch(critic, Critic.update, rows, algorithm)
        found.append((metrics, critic.run(Critic.compute_values, rows)["values"].values()))
    agree(found[0][0], found[1][0], "prefix_ratio")
    assert found[0][1].abs().max() > 0 and torch.allclose(found[0][1], found[1][1], atol=1e-5)


def test_auto_shares_where_it_wins_and_not_where_it_does_not(tiny: str) -> None:
    """Two members behind a prompt of 200 tokens, of 17 and of 16: a tree of two rows costs as much as 16 tokens besides."""
    actor = start(tiny)
    ratios = {}
    for prompt in (200, 17, 16):
        for mode in ("off", "auto", "on"):
            metrics = train_batch(actor, Actor.update, sharing(groups_of((2,), prompt), mode), ALGORITHM)
            ratios[prompt, mode] = metrics["prefix_ratio"]
    assert ratios[200, "auto"] == ratios[200, "on"] > 1.5 and ratios[200, "off"] == 1.0
    assert ratios[17, "auto"] == ratios[17, "on"] > 1.0
    assert ratios[16, "on"] > 1.0 and ratios[16, "auto"] == 1.0


def test_prefix_sharing_by_the_config_gives_the_same_step(tiny: str) -> None:
    """Each choice of optim.prefix_sharing, with a reference: only the ratio of computed tokens differs."""
    found = {}
    for mode in ("off", "auto", "on"):
        algorithm = AlgorithmConfig(minibatch=16, groups="kept", kl=KlConfig(coef=0.1))
        learner = opened(tiny, config_of(algorithm=algorithm, optim=toy_optim(prefix_sharing=mode)))
        found[mode] = asyncio.run(learner.step(groups_of((4, 4), 60), 0))
    ratios = {mode: metrics.pop("prefix_ratio") for mode, metrics in found.items()}
    possible = {mode: metrics.pop("prefix_ratio_possible") for mode, metrics in found.items()}
    assert ratios["off"] == possible["off"] == 1.0 and ratios["auto"] == ratios["on"] == possible["on"] > 2
    for mode in ("auto", "on"):
        assert found[mode] == pytest.approx(found["off"], rel=1e-5, abs=1e-5)


def test_auto_is_off_if_the_actors_have_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors', not the driver's, which has none here."""
    for gpus, auto in ((True, "off"), (False, "auto")):
        monkeypatch.setattr("agentrl.trainer.learner.has_gpus", lambda cluster, role, gpus=gpus: gpus and role == "actor")
        found = [
            Learner(config_of(optim=toy_optim(prefix_sharing=mode)), None).sharing  # type: ignore[arg-type]
            for mode in ("off", "auto", "on")
        ]
        assert found == ["off", auto, "on"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
)
def test_groups_are_kept_or_split_and_trees_stay_together(
    rows: list[tuple[int, int]], size: int, ranks: int, kept: bool, tree_cost: float
) -> None:
    """Every row in one minibatch of at most `size` rows and on one rank; kept groups whole in both."""
    lengths, groups = np.asarray([5 + n for n, _ in rows]), np.asarray([g for _, g in rows])
    keep = groups if kept else None
    parts = shuffle_parts(len(rows), size, 0, 0, keep)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    assert all(len(part) <= size for part in parts)
    if not kept:
        assert len(parts) == -(-len(rows) // size)
    for part in parts:
        trees = (groups[part], np.full(len(part), 4))
        found = plan_ranks(lengths[part], ranks, trees, tree_cost, None if keep is None else keep[part])
        assert len(found.rank) == len(part) and found.rank.min() >= 0 and found.rank.max() < ranks
        mine_of = [np.flatnonzero(found.rank == number) for number in range(ranks)]
        computed = [
            lengths[part][mine].sum()
            - sum(4 * (np.sum(found.together[mine] == tree) - 1) for tree in set(found.together[mine][found.prefix[mine] > 0]))
            for mine in mine_of
        ]
        # Parts of one tree that land on one rank may meet in a micro-batch: then even less is computed.
        assert max(computed) <= found.load
        plain = plan_ranks(lengths[part], ranks, None, 0.0, None if keep is None else keep[part])
        # On the rank with the most of them, 8 tokens a tree and 4 for each of its rows.
        trees_of = [found.together[mine][found.prefix[mine] > 0].tolist() for mine in mine_of]
        own = max(8 * len(set(mine)) + 4 * len(mine) for mine in trees_of)
        assert not found.prefix.any() or found.load + tree_cost * own < plain.load
        for number in set(groups[part].tolist()):
            homes = {r for r, mine in enumerate(mine_of) if number in groups[part][mine]}
            members = int((groups == number).sum())
            if kept:
                assert len(homes) == 1
                if members <= size:
                    assert sum(number in groups[p] for p in parts) == 1


@pytest.mark.parametrize("groups", ["kept", "split"])
def test_the_key_groups_keeps_a_group_in_one_minibatch_and_on_one_rank(groups: str) -> None:
    """Six groups of four members, eight a minibatch, two ranks: three minibatches of eight either way. Kept: two whole groups
    in each, one on either rank. Split: groups are spread over both."""
    batch = groups_of((4,) * 6)
    algorithm = AlgorithmConfig(minibatch=8, groups=groups)  # type: ignore[arg-type]
    planned = cut_update(batch, algorithm, 2)
    homes: dict[int, set[tuple[int, int]]] = {}
    for group, part, rank in zip(planned["group"], planned["minibatch"], planned["dp_rank"], strict=True):
        homes.setdefault(int(group), set()).add((int(part), int(rank)))
    placed = set(zip(*(planned[name].tolist() for name in ("group", "member", "minibatch")), strict=True))
    sizes = [sum(part == number for _, _, part in placed) for number in range(3)]
    assert sizes == [8, 8, 8] and int(planned["minibatch"].max()) == 2
    assert {len(ranks) for ranks in homes.values()} == {1} if groups == "kept" else max(map(len, homes.values())) > 2
