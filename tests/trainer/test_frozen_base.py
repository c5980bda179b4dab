"""The reference of a run with adapters is the actor's own model without them: no second model, and the same numbers."""

import asyncio
from typing import Any

import pytest
import torch

from agentrl.config.load import config_from
from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig, LoraSection, ModelConfig
from agentrl.data.rows import collate
from agentrl.run.checks.size_checks import check_placement
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.role_placement import RunRoles
from agentrl.trainer import learner as learner_of
from agentrl.trainer.actor import Actor
from agentrl.trainer.roles import Reference
from agentrl.utils.errors import ConfigError
from tests.run.starts import start_of
from tests.trainer.learners import config_of, opened, role_of, start
from tests.trainer.train_batches import make_batch, toy_optim, trajectories

LORA = ModelConfig(lora=LoraSection(rank=4, alpha=8.0))


def learned(tiny: str, where: Any) -> tuple[Any, list[dict[str, float]]]:
    algorithm = AlgorithmConfig(advantage=Choice(name="dr_grpo"), minibatch=4, kl=KlConfig(coef=0.3, where=where))
    run = opened(tiny, config_of(algorithm=algorithm, model=LORA, optim=toy_optim(lr=0.02)))
    return run, [asyncio.run(run.step(collate(trajectories(8, seed=step)), step)) for step in range(3)]


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_run_with_adapters_holds_one_model_and_its_penalty_is_that_of_two(
    tiny: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, rows = learned(tiny, where)
    assert one.references is None
    monkeypatch.setattr(learner_of, "separate_reference", lambda model, algorithm: True)
    two, others = learned(tiny, where)
    assert two.references is not None and rows == others
    measured = "kl_reference" if where == "loss" else "kl_reward"
    assert all(row["kl_coef"] == 0.3 and measured in row for row in rows)
    assert rows[0][measured] != rows[-1][measured] != 0  # the policy has moved away

    alone = role_of(Reference, tiny)
    batch = make_batch(6)
    base = one.actors.run(Actor.compute_reference, batch, 0.7)
    plain = alone.run(Reference.compute_logprob, batch, 0.7)
    for column in ("logprobs", "entropy"):
        assert torch.equal(base[column].values(), plain[column].values())
    # With the adapters the actor is another policy than its base, before and after having been asked for it.
    moved = one.actors.run(Actor.compute_logprob, batch, 0.7)["logprobs"].values()
    assert (moved - base["logprobs"].values()).abs().max() > 1e-3
    assert torch.equal(moved, two.actors.run(Actor.compute_logprob, batch, 0.7)["logprobs"].values())


def test_without_adapters_the_actor_is_no_reference(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora"):
        start(tiny).run(Actor.compute_reference, make_batch(2))


def test_a_reference_that_has_no_model_of_its_own_is_not_placed() -> None:
    base: dict[str, Any] = {
        "env": {"id": "key_value"},
        "model": {"path": "some/model"},
        "algorithm": {"kl": {"coef": 0.1}},
        "cluster": {"pools": {"train": {}}, "roles": {"actor": "train", "reference": "train"}},
    }
    config = config_from(base, [])
    assert RunRoles(EngineChoice(config, "embedded")).names == ["actor", "reference"]
    check_placement(start_of(config, "embedded"))
    config = config_from({**base, "model": {"path": "some/model", "lora": {}}}, [])
    assert RunRoles(EngineChoice(config, "embedded")).names == ["actor"]
    with pytest.raises(ConfigError, match=r"cluster.roles.reference.*model\.lora"):
        check_placement(start_of(config, "embedded"))
