"""A run on data learns and measures as plain forward passes and TRL do (benchmarks/parts/trl_losses.py)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from agentrl.cluster.launch import launch
from agentrl.config.schema import DataConfig, ModelConfig
from agentrl.contrib.offline.objectives import OfflineActor, Preferring, RewardTrainer, Scoring, Supervised
from agentrl.contrib.offline.store import RowStore, RowWriter
from agentrl.data.token_ledger import TokenLedger
from agentrl.run.display import Count
from agentrl.run.sft import steps_batch
from agentrl.trainer.roles import RewardModel
from tests.trainer.pair_batches import PAIRS, episodes, ledger_of, models
from tests.trainer.pair_batches import batch_rows as numbers
from tests.trainer.train_batches import toy_optim, train_batch

BETA = 0.3
CONFIG = DataConfig(path=["x"], beta=BETA)
TRL = json.loads((Path(__file__).parent / "trl_losses.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    models(made)
    return made


@pytest.fixture(scope="module")
def stored() -> list[list[list[TokenLedger]]]:
    """Pairs: of the first two the chosen episode has two rows, of the last the rejected one."""
    rows = [ledger_of(row["ids"], row["sampled"]) for row in numbers()]
    pairs = [[[rows[2 * n]], [rows[2 * n + 1]]] for n in range(PAIRS)]
    for pair, side, more in ((0, 0, 3), (1, 0, 0), (2, 1, 1)):
        pairs[pair][side] = [rows[more], *pairs[pair][side]]
    return pairs


def store_of(examples: list[list[list[TokenLedger]]], folder: Path) -> RowStore:
    with RowWriter(folder, len(examples[0])) as writer:
        for number, episodes in enumerate(examples):
            writer.add(str(number), episodes)
        writer.finish(0.0, 0, len(examples), [], {}, {})
    return RowStore(folder)


def group(role: Any, path: Path, cap: int = 64) -> Any:
    found = launch(role, backend="inline", world_size=1)
    found.run(role.init_model, str(path), ModelConfig(), toy_optim(micro_tokens=cap, max_grad_norm=1e9))
    return found


def total(model: Any, ledgers: list[TokenLedger]) -> float:
    """The sum of the log probabilities of all sampled tokens of an episode's rows."""
    found = 0.0
    for ledger in ledgers:
        ids, sampled = torch.tensor(ledger.ids()), torch.from_numpy(np.array(ledger.sampled))
        with torch.no_grad():
            table = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
        found += float(table[:-1][sampled[1:]].gather(1, ids[sampled][:, None]).sum())
    return found


def policy(folder: Path, name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager").double()


def test_supervised_examples_weigh_by_their_trained_tokens(folder: Path, stored: Any, tmp_path: Path) -> None:
    store = store_of([[side] for pair in stored for side in pair], tmp_path)
    objective = Supervised(CONFIG, store, group(OfflineActor, folder / "policy"), "off")
    model, episodes = policy(folder, "policy"), [side for pair in stored for side in pair]
    for chosen in ([0], [1, 4], list(range(2 * PAIRS))):
        tokens = sum(ledger.sampled_tokens for n in chosen for ledger in episodes[n])
        weight, found = asyncio.run(objective.measure(np.array(chosen)))
        assert weight == tokens
        assert found["loss"] == pytest.approx(-sum(total(model, episodes[n]) for n in chosen) / tokens, rel=1e-5)


def test_a_step_of_dpo_has_the_start_models_sums_over_all_rows_of_an_episode(folder: Path, stored: Any, tmp_path: Path) -> None:
    objective = Preferring(CONFIG, store_of(stored, tmp_path), group(OfflineActor, folder / "reference"), "off")
    asyncio.run(objective.begin(ended := Count(PAIRS, "examples")))
    assert str(ended) == f"{PAIRS}/{PAIRS} examples"
    objective.group = group(OfflineActor, folder / "policy")  # as if that had been learned since
    now, before = policy(folder, "policy"), policy(folder, "reference")
    rewards = torch.tensor([[BETA * (total(now, side) - total(before, side)) for side in pair] for pair in stored])
    margins = rewards[:, 0] - rewards[:, 1]
    for found in (asyncio.run(objective.measure(np.arange(PAIRS)))[1], asyncio.run(objective.step(np.arange(PAIRS)))):
        assert found["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(margins).mean()), rel=1e-5)
        assert found["accuracy"] == float((margins > 0).double().mean()) and 0 < found["accuracy"] < 1
        assert found["reward_chosen"] == pytest.approx(float(rewards[:, 0].mean()), rel=1e-4)
        assert found["reward_rejected"] == pytest.approx(float(rewards[:, 1].mean()), rel=1e-4)
        assert found["reward_margin"] == pytest.approx(float(margins.mean()), rel=1e-4)


def test_the_pairs_of_a_step_have_their_own_references_in_whatever_order(folder: Path, stored: Any, tmp_path: Path) -> None:
    """A step's examples are drawn in any order, and a model that is the start model still has margins of 0."""
    objective = Preferring(CONFIG, store_of(stored, tmp_path), group(OfflineActor, folder / "policy"), "off")
    asyncio.run(objective.begin(Count(PAIRS)))
    for drawn in ([2, 0], [1]):
        weight, found = asyncio.run(objective.measure(np.array(drawn)))
        assert weight == len(drawn) and found["loss"] == pytest.approx(np.log(2), rel=1e-6)
    found = asyncio.run(objective.step(np.array([2, 0, 1])))
    assert found["loss"] == pytest.approx(np.log(2), rel=1e-5) and found["reward_chosen"] == pytest.approx(0.0, abs=1e-5)


def test_a_score_is_that_of_an_episodes_last_row_alone(folder: Path, stored: Any, tmp_path: Path) -> None:
    objective = Scoring(CONFIG, store_of(stored, tmp_path), group(RewardTrainer, folder / "classifier"), "off")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "classifier", attn_implementation="eager", num_labels=1)
    model.config.pad_token_id = 0
    with torch.no_grad():
        scores = torch.tensor([[float(model(torch.tensor([side[-1].ids()])).logits) for side in pair] for pair in stored])
    margins = scores[:, 0] - scores[:, 1]
    for found in (asyncio.run(objective.measure(np.arange(PAIRS)))[1], asyncio.run(objective.step(np.arange(PAIRS)))):
        assert found["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(margins).mean()), rel=1e-5)
        assert found["reward_chosen"] == pytest.approx(float(scores[:, 0].mean()), rel=1e-5)


def paired(sharing: Any = "off") -> TensorDict:
    """The rows of all pairs."""
    return steps_batch(episodes(), 2 * PAIRS, sharing)


def same(found: dict[str, float], name: str) -> None:
    assert found["loss"] == pytest.approx(TRL[name]["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(TRL[name]["grad_norm"], rel=1e-5)


def test_the_supervised_loss_is_trls(folder: Path) -> None:
    chosen = steps_batch(episodes()[0::2], PAIRS, "off")
    same(train_batch(group(OfflineActor, folder / "policy", 512), OfflineActor.supervise, chosen, 1), "sft")


@pytest.mark.parametrize(("cap", "sharing"), [(512, "off"), (512, "on"), (40, "off")])
def test_the_dpo_loss_and_its_gradient_are_trls_also_with_the_rows_of_a_pair_apart(folder: Path, cap: int, sharing: str) -> None:
    """A cap of 40 tokens puts nearly every row into a micro-batch of its own."""
    before = group(OfflineActor, folder / "reference", cap).run(OfflineActor.compute_logprob, paired())["logprobs"]
    reference = torch.stack([row.sum() for row in before.unbind()]).double().view(PAIRS, 2)
    trained = group(OfflineActor, folder / "policy", cap)
    same(train_batch(trained, OfflineActor.prefer, paired(sharing), 1, reference, TRL["beta"]), "dpo")


def test_the_reward_models_loss_is_trls_and_what_it_writes_is_a_reward_model(folder: Path, tmp_path: Path) -> None:
    trained = group(RewardTrainer, folder / "classifier", 512)
    same(train_batch(trained, RewardTrainer.prefer, paired(), 1, PAIRS), "reward")
    trained.run(RewardTrainer.export_hf, str(tmp_path / "out"))
    judge = group(RewardModel, tmp_path / "out", 512)
    now = trained.run(RewardTrainer.compute_scores, paired())["score"]
    torch.testing.assert_close(judge.run(RewardModel.compute_scores, paired())["score"], now)
