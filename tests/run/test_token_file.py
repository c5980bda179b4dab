"""`tokens/*.jsonl` against advantages, ratios and log probabilities that this file computes itself."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from agentrl.config.schema import AlgorithmConfig, Choice, LoraSection, ModelConfig
from agentrl.data.rows import collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Trajectory
from agentrl.run.reader import token_columns, token_lines
from agentrl.trainer.actor import Actor
from tests.trainer.learners import config_of, opened
from tests.trainer.train_batches import toy_optim, trajectories

TAUGHT = AlgorithmConfig(minibatch=64, epochs=2)


def members() -> list[Trajectory]:
    """Three groups of four: one teaches and has an unscored member, one of two ledgers and an empty one; one does not teach."""
    found = trajectories(12, seed=3)
    for place, reward in enumerate([1.0, 0.0, None, 0.25, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0]):
        found[place].reward = reward
    second = TokenLedger()
    second.append_context([9, 10, 11], 3)
    second.append_sampled([12, 13], [-6.0, -5.5], [0, 0], 3)
    found[1].ledgers += [TokenLedger(), second]  # an empty one is no row of a batch
    return found


def by_hand(found: list[Trajectory]) -> list[float | None]:
    """GRPO in float64: (r - mean) / (std + 1e-6) over the scored members of a task, std unbiased."""
    out: list[float | None] = []
    for member in found:
        rewards = np.array([m.reward for m in found if m.task.id == member.task.id and m.reward is not None], dtype=np.float64)
        alone = member.reward is None
        out.append(None if alone else float((member.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)))
    return out


@pytest.mark.parametrize("way", ["behaviour", "recompute", "lora"])
def test_advantages_and_ratios_of_every_sampled_token(tiny: str, way: str) -> None:
    algorithm = TAUGHT.model_copy(update={"proximal": "recompute"}) if way == "recompute" else TAUGHT
    model = ModelConfig(lora=LoraSection(rank=4)) if way == "lora" else ModelConfig()
    learner = opened(tiny, config_of(algorithm=algorithm, model=model, optim=toy_optim(lr=1e-2)))
    found = members()
    batch = collate([m for m in found if m.reward is not None])
    now = learner.actors.run(Actor.compute_logprob, batch)["logprobs"].values().double().numpy()
    expected = np.exp(now - batch["logprobs"].values().double().numpy())
    starts = batch["logprobs"].offsets().tolist()
    asyncio.run(learner.step(batch, 0, True))
    assert learner.tokens is not None
    rows = [json.loads(line) for line in token_lines(found, learner.tokens)]
    assert len(rows) == 12 and rows[2]["ledgers"] is None
    # One minibatch: no step was taken before any row was visited. Rows without a gradient are visited only if recomputed.
    at, seen = 0, 0
    for member, row, advantage in zip(found, rows, by_hand(found), strict=True):
        for place, ledger in enumerate(member.ledgers):
            columns = token_columns(row, member.ledgers, place)
            if advantage is None:
                assert columns is None
                continue
            if len(ledger) == 0:
                assert columns is not None and len(columns[0]) == 0
                continue
            assert columns is not None
            advantages, ratio = columns
            np.testing.assert_allclose(advantages, [advantage] * ledger.sampled_tokens, rtol=1e-5, atol=1e-7)
            if way != "recompute" and abs(advantage) < 1e-9:
                assert ratio is None
            else:
                mine = expected[starts[at] : starts[at + 1]][ledger.sampled]
                np.testing.assert_allclose(np.log(ratio), np.log(mine), rtol=2e-3, atol=2e-6)  # float16 of the logarithm
                seen += 1
            at += 1
    assert seen == (12 if way == "recompute" else 8)


def test_without_keep_nothing_is_kept_and_the_update_is_the_same(tiny: str) -> None:
    batch = collate([m for m in members() if m.reward is not None])
    learners = [opened(tiny, config_of(algorithm=TAUGHT)) for _ in range(2)]
    plain, kept = (
        asyncio.run(learner.step(batch.copy(), 0, keep)) for learner, keep in zip(learners, (False, True), strict=True)
    )
    assert plain == kept and learners[0].tokens is None
    assert learners[0].actors.run(Actor.take_visits) == {}


def test_with_a_critic_each_token_has_its_own_advantage(tiny: str) -> None:
    from tests.trainer.train_batches import toy_critic

    gae = AlgorithmConfig(advantage=Choice(name="gae", args={"gamma": 0.9}), minibatch=64)
    learner = opened(tiny, config_of(algorithm=gae, critic=toy_critic()))
    found = [m for m in members() if m.reward is not None]
    seen: dict[str, Any] = {}
    real = learner._learn

    async def learn(view: Any, *given: Any) -> dict[str, float]:
        seen["advantages"] = view.tokens("advantages")[view.tokens("sampled")].numpy().copy()
        return await real(view, *given)

    learner._learn = learn
    asyncio.run(learner.step(collate(found), 0, True))
    rows = [json.loads(line) for line in token_lines(found, learner.tokens)]
    columns = [token_columns(row, m.ledgers, k) for row, m in zip(rows, found, strict=True) for k in range(len(m.ledgers))]
    np.testing.assert_array_equal(np.concatenate([c[0] for c in columns]), seen["advantages"])
    assert any(isinstance(entry["advantage"], str) for row in rows for entry in row["ledgers"])


def test_a_row_of_another_episode_is_not_taken() -> None:
    class Tokens:
        def row(self, number: int) -> Any:
            return np.array([0.5, 0.5], dtype=np.float32), None

    one, other = trajectories(2, seed=1)
    [line] = token_lines([one], Tokens())
    row = json.loads(line)
    one.reward = 1.0
    assert row["ledgers"] == [{"advantage": 0.5, "log_ratio": None}]
    assert token_columns(row, other.ledgers, 0) is None
    with pytest.raises(IndexError):
        token_columns(row, one.ledgers, 7)
