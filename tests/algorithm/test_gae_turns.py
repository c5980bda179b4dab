"""GAE whose time steps are turns: by hand, over ledgers, turns of several tokens, KL in the reward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig
from agentrl.data.rows import Ragged, collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, Trajectory, Turn
from agentrl.trainer.algorithms import advantages
from agentrl.trainer.algorithms.base import AdvantageInput
from agentrl.trainer.estimator_inputs import with_advantages
from agentrl.utils.errors import ConfigError

NAN = math.nan


def batch_of(rows: list[dict[str, Any]]) -> AdvantageInput:
    """Rows of a dict each: member, reward, and per token mask, turns, rewards, values."""
    lengths = torch.tensor([len(row["mask"]) for row in rows])

    def flat(name: str, kind: torch.dtype) -> torch.Tensor:
        return torch.tensor([v for row in rows for v in row.get(name, [0] * len(row["mask"]))], dtype=kind)

    return AdvantageInput(
        token_rewards=flat("rewards", torch.float64),
        mask=flat("mask", torch.bool),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        group=torch.zeros(len(rows), dtype=torch.int64),
        reward=torch.tensor([row["reward"] for row in rows], dtype=torch.float64),
        values=flat("values", torch.float64),
        turns=flat("turns", torch.int64),
        member=torch.tensor([row["member"] for row in rows]),
    )


# Two turns; the answers have 2 and 1 tokens. Values of tokens that begin no turn (9) and of context (7) must not be read.
LONG: dict[str, Any] = {
    "member": 0,
    "reward": 1.5,
    "mask": [0, 1, 1, 0, 1],
    "turns": [0, 0, 0, 1, 1],
    "rewards": [0, 0.25, 0.25, 0, 1.0],
    "values": [7, 0.2, 9, 7, 0.4],
}


def test_a_step_is_a_turn_and_every_token_of_it_has_its_advantage() -> None:
    """r = .5, 1 and V = .2, .4: delta_1 = 1 - .4 = .6; delta_0 = .5 + .5 x .4 - .2 = .5; A_0 = .5 + .5 x .8 x .6 = .74. Token by
    token the first would be another step away from the end. Targets are A + V of the turn, on all its tokens."""
    out = advantages("gae_turns", {"gamma": 0.5, "lam": 0.8, "whitened": False})(batch_of([LONG]))
    assert out.advantages.tolist() == pytest.approx([0, 0.74, 0.74, 0, 0.6])
    assert out.returns is not None and out.returns.tolist() == pytest.approx([0, 0.94, 0.94, 0, 1.0])


def test_with_one_token_a_turn_it_is_gae() -> None:
    row = {"member": 0, "reward": 1.0, "mask": [0, 1, 0, 1, 1], "turns": [0, 0, 1, 1, 2], "rewards": [0, 0.5, 0, -1, 2.0]}
    batch = batch_of([{**row, "values": [3, 0.1, 3, 0.7, -0.2]}, {**row, "member": 1, "values": [3, 1.1, 3, 0.2, 0.3]}])
    for args in ({}, {"gamma": 0.9, "lam": 0.7}, {"gamma": 0.9, "lam": 0.7, "whitened": False}):
        plain, turns = advantages("gae", args)(batch), advantages("gae_turns", args)(batch)
        assert torch.allclose(plain.advantages, turns.advantages, atol=1e-12)
        assert plain.returns is not None and turns.returns is not None
        assert torch.allclose(plain.returns, turns.returns, atol=1e-12)


def test_turns_run_over_the_ledgers_of_an_episode_and_a_turn_may_lie_in_two() -> None:
    """Turn 0, then a summary under the number of turn 1 at the end of the first ledger, and turn 1 in the second: two turns. The
    value of turn 1 is that of the summary's first token (.4), and no discount lies between the summary and the answer."""
    rows: list[dict[str, Any]] = [
        {"member": 0, "reward": 1, "mask": [0, 1, 0, 1], "turns": [0, 0, 1, 1], "values": [7, 0.2, 7, 0.4]},
        {"member": 1, "reward": 0, "mask": [0, 1], "turns": [0, 0], "values": [7, 0.3]},
        {"member": 0, "reward": 1, "mask": [0, 1], "turns": [1, 1], "rewards": [0, 1.0], "values": [7, 9]},
    ]
    out = advantages("gae_turns", {"gamma": 0.5, "lam": 1.0, "whitened": False})(batch_of(rows))
    # A_1 = 1 - .4 = .6; A_0 = .5 x .4 - .2 + .5 x .6 = .3; the other episode, in rows between: 0 - .3
    assert out.advantages.tolist() == pytest.approx([0, 0.3, 0, 0.6, 0, -0.3, 0, 0.6])
    assert out.returns is not None and out.returns.tolist() == pytest.approx([0, 0.5, 0, 1, 0, 0, 0, 1])


def test_a_reward_on_a_tools_answer_is_that_of_the_turn_that_called_it() -> None:
    row = {**LONG, "rewards": [0, 0, 0, 0.5, 1.0]}
    out = advantages("gae_turns", {"whitened": False})(batch_of([row]))
    assert out.returns is not None and out.returns.tolist() == pytest.approx([0, 1.5, 1.5, 0, 1.0])


def test_an_unscored_member_learns_nothing_and_moves_no_statistic() -> None:
    failed = {"member": 1, "reward": NAN, "mask": [0, 1, 1], "turns": [0, 0, 0], "rewards": [0, 0, NAN], "values": [7, 5, 6]}
    other = {"member": 2, "reward": 0, "mask": [0, 1], "turns": [0, 0], "values": [7, 0.5]}
    alone, mixed = (advantages("gae_turns", {})(batch_of(rows)) for rows in ([LONG, other], [LONG, failed, other]))
    assert alone.returns is not None and mixed.returns is not None
    assert mixed.advantages[5:8].tolist() == [0, 0, 0] and mixed.returns[5:8].tolist() == [0, 5, 6]
    kept = torch.tensor([0, 1, 2, 3, 4, 8, 9])
    assert torch.equal(mixed.advantages[kept], alone.advantages) and torch.equal(mixed.returns[kept], alone.returns)


def test_whitening_is_over_tokens_as_that_of_gae() -> None:
    """Raw advantages of the 4 sampled tokens: .94 twice, .6 and -.5 (gamma .5, lam 1: A_0 = .5 + .2 - .2 + .5 x .6 = .8)."""
    other = {"member": 1, "reward": 0, "mask": [0, 1], "turns": [0, 0], "values": [7, 0.5]}
    out = advantages("gae_turns", {"gamma": 0.5})(batch_of([LONG, other]))
    raw = torch.tensor([0.8, 0.8, 0.6, -0.5]).double()
    assert out.advantages[[1, 2, 4, 6]].tolist() == pytest.approx(((raw - raw.mean()) / raw.std()).tolist(), abs=1e-6)


def test_without_values_or_turns_it_is_refused_by_name() -> None:
    batch = batch_of([LONG])
    for name, message in (("values", 'gae_turns" needs a critic'), ("turns", "column `turns`")):
        given = {field: getattr(batch, field) for field in batch.__dataclass_fields__} | {name: None}
        with pytest.raises(ConfigError, match=message):
            advantages("gae_turns", {})(AdvantageInput(**given))


def played(member: int, reward: float) -> Trajectory:
    """Two turns of two tokens each, in two ledgers."""
    ledgers, turns = [TokenLedger(), TokenLedger()], []
    for turn, ledger in enumerate(ledgers):
        ledger.append_context([3, 4], turn)
        ledger.append_sampled([5 + turn, 7], [-1.0, -1.0], [0, 0], turn)
        turns.append(Turn(turn, Message("assistant", "x"), ledger=turn, end=len(ledger) - 1))
    return Trajectory("made-up", Task("t", 0), ledgers=ledgers, turns=turns, reward=reward, member=member)


def test_the_kl_of_all_tokens_of_a_turn_is_taken_off_its_reward() -> None:
    """coef .2 and d = .5 on each token: every turn of two tokens costs .2. With V = 0 and gamma = lam = 1 a turn's advantage is
    its reward-to-go: .6 and .8 for the winner of 1, -.4 and -.2 for the loser."""
    batch = collate([played(0, 1.0), played(1, 0.0)], groups=[0, 0])
    view = Ragged.of(batch)
    sampled = view.tokens("sampled")
    view = view.with_tokens(old_logprobs=-1.0 * sampled, ref_logprobs=-1.5 * sampled, values=0.0 * sampled)
    advantage = Choice(name="gae_turns", args={"whitened": False})
    out, _ = with_advantages(view, AlgorithmConfig(advantage=advantage, kl=KlConfig(coef=0.2, where="reward")), 0.2)
    found = out.tokens("advantages")[sampled].tolist()
    assert found == pytest.approx([0.6, 0.6, 0.8, 0.8, -0.4, -0.4, -0.2, -0.2])
