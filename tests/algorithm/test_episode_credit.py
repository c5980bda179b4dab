"""Groups without a difference, and credit from trajectories: over their ledgers, and with a KL in the reward."""

from __future__ import annotations

import pytest
import torch

from agentrl.config import Choice
from agentrl.config.schema import AlgorithmConfig, KlConfig
from agentrl.data.rows import Ragged, collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, Trajectory, Turn
from agentrl.trainer.algorithms import advantages
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput
from agentrl.trainer.estimator_inputs import with_advantages
from tests.sources import core_names


def batch_of(reward: float, lengths: list[int], dtype: torch.dtype) -> AdvantageInput:
    """A group of members of one reward: a token of context, then so many sampled ones, the last with the reward."""
    ends = torch.tensor(lengths).add(1).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    mask, rewards = torch.ones(int(ends[-1]), dtype=torch.bool), torch.zeros(int(ends[-1]), dtype=dtype)
    mask[offsets[:-1]], rewards[ends - 1] = False, reward
    count, zero = len(lengths), torch.zeros(len(mask), dtype=torch.int64)
    all_of = torch.full((count,), reward, dtype=dtype)
    terms, group = all_of[:, None].repeat(1, 2), torch.zeros(count, dtype=torch.int64)
    return AdvantageInput(
        rewards, mask, offsets, group, all_of, turns=zero, member=torch.arange(count), terms=terms, anchors=zero
    )


GROUP_BASED = [name for name in core_names(ADVANTAGES) if "group" in ADVANTAGES.entry(name).needs]


@pytest.mark.parametrize("name", GROUP_BASED)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -2.3, 1e6 + 0.1])
def test_a_group_without_a_difference_gets_exactly_zero(name: str, reward: float) -> None:
    args = {"terms": ["a", "b"]} if name == "multi_reward" else {}
    for dtype in (torch.float32, torch.float64):
        for size in (3, 5, 6, 7, 11, 16, 33, 64):
            out = advantages(name, args)(batch_of(reward, [1 + i % 3 for i in range(size)], dtype))
            assert out.advantages.dtype == dtype
            assert out.advantages.abs().max().item() == 0.0, (dtype, size)


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


def test_the_kl_of_all_tokens_of_a_turn_is_taken_off_its_reward() -> None:
    """coef .2 and d = .5 on each token: every turn of one token costs .1. With V = 0 and gamma = lam = 1 a turn's advantage is
    its reward-to-go: .8 and .9 for the winner of 1, -.2 and -.1 for the loser."""
    view = Ragged.of(collate([played(0, 1.0, 2), played(1, 0.0, 2)], groups=[0, 0]))
    sampled = view.tokens("sampled")
    view = view.with_tokens(old_logprobs=-1.0 * sampled, ref_logprobs=-1.5 * sampled, values=0.0 * sampled)
    advantage = Choice(name="gae_turns", args={"whitened": False})
    out, _ = with_advantages(view, AlgorithmConfig(advantage=advantage, kl=KlConfig(coef=0.2, where="reward")), 0.2)
    assert out.tokens("advantages")[sampled].tolist() == pytest.approx([0.8, 0.9, -0.2, -0.1])
