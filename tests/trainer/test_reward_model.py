"""The reward model: scores of plain transformers, added to the reward of whole episodes."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from agentrl.config.schema import AlgorithmConfig, Choice, RewardModelConfig
from agentrl.data.rows import Ragged, collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.trainer.actor import Actor
from agentrl.trainer.roles import RewardModel, with_scores
from agentrl.utils.errors import ModelError
from tests.trainer.learners import config_of, opened, role_of
from tests.trainer.train_batches import trajectories


def test_a_causal_model_is_no_reward_model(tiny: str) -> None:
    with pytest.raises(ModelError, match="expected a sequence classifier, found Qwen3ForCausalLM"):
        role_of(RewardModel, tiny)


def test_an_episode_of_two_ledgers_takes_its_last_score_once_on_its_last_sampled_token() -> None:
    """The third one's last ledger samples nothing; the score of that row counts all the same."""
    episodes = trajectories(4)
    episodes[3].ledgers[0].append_sampled([9], [-1.0], [0], 9)  # in a later turn than those of the first ledger
    episodes[1].ledgers.append(episodes[3].ledgers[0])
    observed = TokenLedger()
    observed.append_context([5, 6, 7], 1)
    episodes[2].ledgers[0].append_context([9], 0)
    episodes[2].ledgers.append(observed)
    batch = collate(episodes[:3], groups=[0, 0, 0])
    view, mean = with_scores(Ragged.of(batch), torch.tensor([1.0, 5.0, 7.0, 2.0, 4.0]), weight=0.5)
    out = view.batch
    assert mean == 4 and torch.allclose(out["reward"] - batch["reward"], torch.tensor([0.5, 3.5, 3.5, 2.0, 2.0]))
    added = [(out["rewards"][row] - batch["rewards"][row]).tolist() for row in range(5)]
    at = {0: (-1, 0.5), 2: (-1, 3.5), 3: (-2, 2.0)}
    for row, found in enumerate(added):
        expected = [0.0] * len(found)
        if row in at:
            expected[at[row][0]] = at[row][1]
        assert found == pytest.approx(expected), row


def test_an_episode_takes_the_score_of_the_conversation_in_which_it_ends() -> None:
    main, other = TokenLedger(), TokenLedger()
    for ledger, turn in ((main, 0), (other, 1), (main, 2)):
        ledger.append_context([3], turn)
        ledger.append_sampled([5], [-1.0], [0], turn)
    batch = collate([replace(trajectories(1)[0], ledgers=[main, other], turns=[], reward=1.0)])
    view, mean = with_scores(Ragged.of(batch), torch.tensor([2.0, 8.0]), weight=1.0)
    assert mean == 2 and view.batch["reward"].tolist() == [3.0, 3.0]
    assert (view.tokens("rewards") - batch["rewards"].values()).tolist() == [0, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("weight", [1.0, -0.5, 0.0])
def test_the_advantages_are_those_of_the_reward_and_weight_times_the_score(
    tiny: str, classifier: str, monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    """What the actor is given, against plain transformers: reward + weight x score, less the mean of its group of four."""
    algorithm = AlgorithmConfig(advantage=Choice(name="dr_grpo"))
    learner = opened(tiny, config_of(algorithm=algorithm, reward_model=RewardModelConfig(path=classifier, weight=weight)))
    actors, batch = learner.actors, collate(trajectories(8))
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    with torch.no_grad():
        scores = torch.stack([model(batch["token_ids"][i][None]).logits[0, 0] for i in range(8)])
    total = (batch["reward"] + weight * scores).reshape(2, 4)
    expected = (total - total.mean(1, keepdim=True)).flatten()
    arun, seen = actors.arun, []

    async def watched(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is Actor.update:
            seen.extend(args[0]["advantages"][i][args[0]["sampled"][i]] for i in range(8))
        return await arun(method, *args, **kwargs)

    monkeypatch.setattr(actors, "arun", watched)
    metrics = asyncio.run(learner.step(batch, 0))
    assert metrics["reward_model/score"] == pytest.approx(scores.mean().item(), rel=1e-4)
    assert scores.std() > 0.1
    for found, one in zip(seen, expected, strict=True):
        assert torch.allclose(found, one.expand(len(found)), atol=1e-4)
