"""Credit over an episode's ledgers, unscored members and groups without a difference, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentrl.config import Choice
from agentrl.config.schema import AlgorithmConfig
from agentrl.data.rows import Ragged, collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, Trajectory, Turn
from agentrl.trainer.algorithms import advantages
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput
from agentrl.trainer.estimator_inputs import with_advantages

NAN = math.nan


def batch_of(rows: list[dict[str, Any]], dtype: torch.dtype = torch.float32) -> AdvantageInput:
    """Rows of a dict each: group, member, reward, and per token mask, rewards, turns, values, anchors."""
    lengths = [len(row["mask"]) for row in rows]

    def flat(name: str, default: float, kind: torch.dtype) -> torch.Tensor:
        return torch.tensor([v for row in rows for v in row.get(name, [default] * len(row["mask"]))], dtype=kind)

    return AdvantageInput(
        token_rewards=flat("rewards", 0.0, dtype),
        mask=flat("mask", 0, torch.bool),
        offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        group=torch.tensor([row.get("group", 0) for row in rows]),
        reward=torch.tensor([row["reward"] for row in rows], dtype=dtype),
        values=flat("values", 0.0, dtype),
        turns=flat("turns", 0, torch.int64),
        member=torch.tensor([row["member"] for row in rows]),
        baseline=torch.zeros(len(rows), dtype=dtype),
        terms=torch.tensor([[row["reward"]] * 2 for row in rows], dtype=dtype),
        anchors=flat("anchors", 0, torch.int64),
    )


def two_ledgers(order: tuple[int, ...] = (0, 1, 2)) -> AdvantageInput:
    """A winner of two ledgers (turn 0 in the first, turn 1 with the reward in the second) and a loser of one."""
    rows: list[dict[str, Any]] = [
        {"member": 0, "reward": 1.0, "mask": [0, 1], "turns": [0, 0]},
        {"member": 0, "reward": 1.0, "mask": [0, 1], "rewards": [0, 1.0], "turns": [1, 1]},
        {"member": 1, "reward": 0.0, "mask": [0, 1, 0, 1], "turns": [0, 0, 1, 1]},
    ]
    return batch_of([rows[i] for i in order])


def test_turn_returns_run_over_the_ledgers_of_an_episode() -> None:
    out = advantages("turn_returns", {"divide": False})(two_ledgers())
    assert out.advantages.tolist() == [0, 0.5, 0, 0.5, 0, -0.5, 0, -0.5]
    assert out.returns is not None and out.returns.tolist() == [0, 1, 0, 1, 0, 0, 0, 0]


def test_reinforce_pp_runs_over_the_ledgers_of_an_episode() -> None:
    out = advantages("reinforce_pp", {"gamma": 0.5})(two_ledgers())
    returns = [0.5, 1.0, 0.0, 0.0]
    mean, std = 0.375, math.sqrt(sum((r - 0.375) ** 2 for r in returns) / 3)
    found = out.advantages[[1, 3, 5, 7]].tolist()
    assert found == pytest.approx([(r - mean) / std for r in returns], abs=1e-5)


def test_gae_carries_value_and_advantage_into_the_next_ledger() -> None:
    rows: list[dict[str, Any]] = [
        {"member": 0, "reward": 1.0, "mask": [0, 1], "values": [9.0, 0.2]},
        {"member": 0, "reward": 1.0, "mask": [0, 1], "values": [9.0, 0.4], "rewards": [0, 1.0]},
    ]
    out = advantages("gae", {"gamma": 0.5, "lam": 0.8, "whitened": False})(batch_of(rows))
    # delta_1 = 1 - .4 = .6; delta_0 = 0 + .5 * .4 - .2 = 0; A_0 = 0 + .5 * .8 * .6 = .24
    assert out.advantages.tolist() == pytest.approx([0, 0.24, 0, 0.6])
    assert out.returns is not None and out.returns.tolist() == pytest.approx([0, 0.44, 0, 1.0])


def test_gigpo_steps_run_over_the_ledgers_of_an_episode() -> None:
    rows: list[dict[str, Any]] = [
        {"member": 0, "reward": 1.0, "mask": [0, 1], "turns": [0, 0], "anchors": [5, 5]},
        {"member": 0, "reward": 1.0, "mask": [0, 1], "turns": [1, 1], "anchors": [6, 6], "rewards": [0, 1.0]},
        {"member": 1, "reward": 0.0, "mask": [0, 1, 0, 1], "turns": [0, 0, 1, 1], "anchors": [5, 5, 7, 7]},
    ]
    out = advantages("gigpo", {"gamma": 0.5, "divide": False})(batch_of(rows))
    # episodes +-.5; turn 0 in state 5: returns .5 and 0 -> +-.25; turn 1 in states of its own
    assert out.advantages[[1, 3, 5, 7]].tolist() == pytest.approx([0.75, 0.5, -0.75, -0.5])


@pytest.mark.parametrize("name", ["gae", "gae_turns", "reinforce_pp", "turn_returns", "gigpo"])
def test_rows_of_an_episode_need_not_be_neighbours(name: str) -> None:
    plain = advantages(name, {})(two_ledgers()).advantages.tolist()
    apart = advantages(name, {})(two_ledgers((0, 2, 1))).advantages.tolist()
    assert apart == plain[:2] + plain[4:] + plain[2:4]


@pytest.mark.parametrize("name", ["gae", "reinforce_pp", "turn_returns"])
@pytest.mark.parametrize("where", ["no sampled token", "before the first", "after the last"])
def test_a_reward_without_a_sampled_token_goes_to_the_nearest_one(name: str, where: str) -> None:
    rows: list[dict[str, Any]] = [
        {"member": 0, "reward": 1.0, "mask": [0, 1, 1]},
        {"member": 0, "reward": 1.0, "mask": [0, 0]},
        {"member": 0, "reward": 1.0, "mask": [0, 1, 0]},
    ]
    cases = {"no sampled token": (1, [0, 1.0]), "before the first": (0, [1.0, 0, 0]), "after the last": (2, [0, 0, 1.0])}
    row, column = cases[where]
    rows[row]["rewards"] = column
    args = {"gamma": 0.5} | ({"whitened": False, "lam": 1.0} if name == "gae" else {})
    out = advantages(name, args)(batch_of(rows))
    assert out.returns is not None
    wanted = {"no sampled token": [0.5, 1, 0], "before the first": [1, 0, 0], "after the last": [0.25, 0.5, 1]}[where]
    if name == "turn_returns":  # all three tokens are one turn
        wanted = [1, 1, 1]
    assert out.returns[torch.tensor([1, 2, 6])].tolist() == pytest.approx(wanted)


def test_a_turn_whose_number_goes_on_in_the_next_ledger_is_one_turn() -> None:
    """A summary lies in the old ledger under the number of the coming turn: no discount between the two."""
    rows: list[dict[str, Any]] = [
        {"member": 0, "reward": 1.0, "mask": [0, 1, 0, 1], "turns": [0, 0, 1, 1]},
        {"member": 0, "reward": 1.0, "mask": [0, 1], "rewards": [0, 1.0], "turns": [1, 1]},
        {"member": 1, "reward": 0.0, "mask": [0, 1, 0, 1], "turns": [0, 0, 1, 1]},
    ]
    out = advantages("turn_returns", {"gamma": 0.5, "divide": False})(batch_of(rows))
    assert out.returns is not None and out.returns.tolist() == [0, 0.5, 0, 1, 0, 1, 0, 0, 0, 0]
    assert out.advantages.tolist() == [0, 0.25, 0, 0.5, 0, 0.5, 0, -0.25, 0, -0.5]


def scored_and_unscored() -> tuple[AdvantageInput, AdvantageInput]:
    """A batch, and the same with an unscored member of two ledgers in the middle of it."""
    scored: list[dict[str, Any]] = [
        {"member": 0, "reward": 1.0, "mask": [0, 1, 1], "rewards": [0, 0, 1.0], "values": [0.1, 0.2, 0.3], "turns": [0, 0, 0]},
        {"member": 2, "reward": 0.1, "mask": [0, 1, 1], "rewards": [0, 0, 0.1], "values": [0.1, 0.5, 0.3], "turns": [0, 0, 1]},
        {"member": 3, "reward": 0.4, "mask": [0, 1], "rewards": [0, 0.4], "values": [0.1, 0.2], "turns": [0, 0]},
    ]
    failed: list[dict[str, Any]] = [
        {"member": 1, "reward": NAN, "mask": [0, 1], "rewards": [0, 7.0], "values": [0.6, 0.7], "turns": [0, 0]},
        {"member": 1, "reward": NAN, "mask": [1, 1], "rewards": [0, NAN], "values": [0.8, 0.9], "turns": [1, 1]},
    ]
    return batch_of(scored), batch_of([scored[0], *failed, *scored[1:]])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_unscored_member_changes_nothing_for_the_others(name: str) -> None:
    args = {"terms": ["a", "b"]} if name == "multi_reward" else {"k": 2} if name == "pass_at_k" else {}
    clean, mixed = scored_and_unscored()
    alone, found = advantages(name, args)(clean), advantages(name, args)(mixed)
    others = torch.tensor([0, 1, 2, 7, 8, 9, 10, 11])
    assert found.advantages[others].tolist() == pytest.approx(alone.advantages.tolist(), abs=1e-6)
    assert found.advantages[3:7].tolist() == [0, 0, 0, 0]
    if alone.returns is not None:
        assert found.returns is not None
        assert found.returns[others].tolist() == pytest.approx(alone.returns.tolist())
        # nothing to learn from: the critic's target is what it says already
        assert found.returns[3:7].tolist() == pytest.approx(
            [0, 0.7, 0.8, 0.9] if "values" in ADVANTAGES.entry(name).needs else [0] * 4
        )


GROUP_BASED = [
    "grpo", "dr_grpo", "rloo", "opo", "gpg", "gigpo", "max_variance", "maxrl", "multi_reward", "pass_at_k", "turn_returns",
]  # fmt: skip


@pytest.mark.parametrize("name", [*GROUP_BASED, "reinforce_pp_baseline"])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -2.3, 1e6 + 0.1])
def test_a_group_without_a_difference_gets_exactly_zero(name: str, reward: float) -> None:
    args = {"terms": ["a", "b"]} if name == "multi_reward" else {}
    for dtype in (torch.float32, torch.float64):
        for size in (3, 5, 6, 7, 11, 16, 33, 64):
            rows: list[dict[str, Any]] = [
                {"member": i, "reward": reward, "mask": [0] + [1] * (1 + i % 3), "rewards": [0] * (1 + i % 3) + [reward]}
                for i in range(size)
            ]
            out = advantages(name, args)(batch_of(rows, dtype))
            assert out.advantages.dtype == dtype
            assert out.advantages.abs().max().item() == 0.0, (dtype, size)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_the_dtype_of_the_rewards_comes_back(name: str) -> None:
    args = {"terms": ["a", "b"]} if name == "multi_reward" else {"k": 2} if name == "pass_at_k" else {}
    for dtype in (torch.float32, torch.float64):
        rows: list[dict[str, Any]] = [{"member": i, "reward": float(i), "mask": [0, 1], "rewards": [0, i]} for i in range(3)]
        out = advantages(name, args)(batch_of(rows, dtype))
        assert out.advantages.dtype == dtype and (out.returns is None or out.returns.dtype == dtype)
        assert out.advantages.abs().max() > 0


def test_a_term_that_could_not_be_scored_takes_part_in_no_statistic() -> None:
    rows: list[dict[str, Any]] = [{"member": i, "reward": 0.0, "mask": [1]} for i in range(3)]
    batch = batch_of(rows)
    assert batch.terms is not None
    batch.terms[:] = torch.tensor([[1.0, 100.0], [0.0, 300.0], [NAN, 200.0]])
    out = advantages("multi_reward", {"terms": ["right", "short"], "whitened": False, "eps": 0.0})(batch)
    half = 0.5 / math.sqrt(0.5)  # of the two that are known
    assert out.advantages.tolist() == pytest.approx([half - 1, -half + 1, 0.0])


def test_gdpo_whitens_over_episodes_whatever_their_length() -> None:
    rows: list[dict[str, Any]] = [{"member": 0, "reward": 2.0, "mask": [1] * 5}, {"member": 1, "reward": 1.0, "mask": [1]}]
    out = advantages("multi_reward", {"terms": ["a", "b"], "eps": 0.0})(batch_of(rows))
    # each term gives +-sqrt(.5); their sums +-sqrt(2), whose unbiased std over two episodes is 2
    assert out.advantages.tolist() == pytest.approx([math.sqrt(0.5)] * 5 + [-math.sqrt(0.5)], abs=1e-6)


def played(member: int, reward: float, ledgers: int) -> Trajectory:
    """Two turns of one token, in one ledger or in two; the reward is the episode's."""
    kept = [TokenLedger() for _ in range(ledgers)]
    turns = []
    for turn in range(2):
        ledger = kept[min(turn, ledgers - 1)]
        ledger.append_context([3], turn)
        ledger.append_sampled([5 + turn], [-1.0], [0], turn)
        turns.append(Turn(turn, Message("assistant", "x"), ledger=min(turn, ledgers - 1), end=len(ledger) - 1))
    return Trajectory("made-up", Task("t", 0), ledgers=kept, turns=turns, reward=reward, member=member)


@pytest.mark.parametrize("name", ["gae", "gae_turns", "reinforce_pp", "turn_returns", "gigpo", "grpo"])
def test_from_trajectories_on_two_ledgers_earn_what_one_would(name: str) -> None:
    """Collated, by the learner: the winner's tokens get the same whether its context was rewritten between the turns or not."""

    def found(ledgers: int) -> list[float]:
        batch = collate([played(0, 1.0, ledgers), played(1, 0.0, 1), played(2, 0.1, 1)], groups=[0, 0, 0])
        batch["values"] = batch["rewards"] * 0.25 + batch["logprobs"] * 0.125
        args = {"gamma": 0.5}
        algorithm = AlgorithmConfig(advantage=Choice(name=name, args={} if name == "grpo" else args))
        out, _ = with_advantages(Ragged.of(batch), algorithm, 0.0)
        return [float(v) for v in out.tokens("advantages")[out.tokens("sampled")]]

    one, two = found(1), found(2)
    assert two == pytest.approx(one, abs=1e-6)
    assert two[0] > 0 and two[1] > 0 > two[2]
