"""The reward model: scores of plain transformers, added to the reward of whole episodes."""

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from agentrl.config.schema import AlgorithmConfig, Choice, RewardModelConfig
from agentrl.data.rows import Ragged, collate
from agentrl.trainer.actor import Actor
from agentrl.trainer.roles import RewardModel, with_scores
from agentrl.utils.errors import ModelError
from tests.trainer.learners import config_of, opened, role_of
from tests.trainer.train_batches import make_batch, trajectories


@pytest.fixture(scope="module")
def classifier(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("models") / "judge")
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


def test_scores_are_those_of_plain_transformers(classifier: str) -> None:
    models = role_of(RewardModel, classifier, micro_tokens=120)
    batch = make_batch(7)
    found = models.run(RewardModel.compute_scores, batch)["score"]
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    with torch.no_grad():
        expected = torch.stack([model(batch["token_ids"][i][None]).logits[0, 0] for i in range(7)])
    assert torch.allclose(found, expected, atol=1e-4)
    assert found.std() > 0


def test_a_causal_model_is_no_reward_model(tiny: str) -> None:
    with pytest.raises(ModelError, match="expected a sequence classifier, found Qwen3ForCausalLM"):
        role_of(RewardModel, tiny)


def test_an_episode_of_two_ledgers_takes_its_last_score_once() -> None:
    episodes = trajectories(3)
    episodes[1].ledgers.append(episodes[2].ledgers[0])
    batch = collate(episodes[:2], groups=[0, 0])
    out = with_scores(Ragged.of(batch), torch.tensor([1.0, 5.0, 7.0]), weight=0.5)[0].batch
    assert torch.allclose(out["reward"] - batch["reward"], torch.tensor([0.5, 3.5, 3.5]))
    added = [float((out["rewards"][i] - batch["rewards"][i]).sum()) for i in range(3)]
    assert added == pytest.approx([0.5, 0.0, 3.5])
    assert out["rewards"][2][-1] - batch["rewards"][2][-1] == pytest.approx(3.5)


@pytest.mark.parametrize("weight", [1.0, -0.5])
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


@pytest.mark.parametrize("weight", [0.0, 1.0, -1.0])
def test_the_weight_decides(tiny: str, classifier: str, weight: float) -> None:
    def advantage_of(section: RewardModelConfig | None) -> float:
        learner = opened(tiny, config_of(reward_model=section))
        return asyncio.run(learner.step(collate(trajectories(8)), 0))["grad_norm"]

    plain = advantage_of(None)
    judged = advantage_of(RewardModelConfig(path=classifier, weight=weight))
    assert (judged == plain) is (weight == 0.0)
