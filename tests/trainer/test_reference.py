"""A reference that moves: its weights after each update, the KL to it, resumes, and refusals."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.config.load import config_from
from agentrl.config.schema import AlgorithmConfig, Choice, ClusterConfig, KlConfig, LoraSection, ModelConfig, PoolConfig
from agentrl.data.rows import collate
from agentrl.run.checks.size_checks import check_placement
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.role_placement import RunRoles
from agentrl.trainer import learner as learner_of
from agentrl.trainer.actor import Actor
from agentrl.trainer.learner import Learner, check_learner
from agentrl.trainer.roles import Reference
from agentrl.trainer.train_engine import check_train_engine
from agentrl.trainer.train_state import saved_tensors
from agentrl.utils.errors import CheckpointError, ConfigError
from tests.run.starts import start_of
from tests.trainer.learners import config_of, opened, role_of, save, start
from tests.trainer.train_batches import make_batch, toy_critic, toy_optim, trajectories

Weights = dict[str, Tensor]


def section(decay: float = 0.75, **more: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**{"minibatch": 8, "kl": KlConfig(coef=0.1, reference="moving", decay=decay), **more})


def step(learner: Learner, number: int) -> dict[str, float]:
    return asyncio.run(learner.step(collate(trajectories(8, seed=number)), number))


def saved(learner: Learner, folder: Path) -> tuple[Weights, Weights]:
    """The policy and the reference of a checkpoint, in float64."""
    folder.mkdir()
    save(learner, folder)
    return of(folder / "actor"), of(folder / "reference")


def of(folder: Path) -> Weights:
    names, read = saved_tensors(folder)
    return {name: read(name).double() for name in names if name.startswith("model.")}


def gap(first: Weights, second: Weights) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def mixed(first: Weights, second: Weights, share: float) -> Weights:
    return {name: share * first[name] + (1 - share) * second[name] for name in first}


def test_after_each_update_it_is_decay_of_itself_and_the_rest_of_the_policy(tiny: str, tmp_path: Path) -> None:
    """Three updates, one of them of two optimizer steps; the recursion is computed here, from the saved policies."""
    learner = opened(tiny, config_of(algorithm=section(minibatch=4)))
    start, expected = saved(learner, tmp_path / "start")
    assert gap(start, expected) == 0
    for number in range(3):
        assert step(learner, number)["optimizer_steps"] == 2
        policy, found = saved(learner, tmp_path / str(number))
        expected = mixed(expected, policy, 0.75)
        assert gap(found, expected) < 5e-7 and gap(found, policy) > 2e-4 and gap(found, start) > 2e-4
    view, metrics, _ = asyncio.run(learner.ready(collate(trajectories(8)), step=3))
    broken = view.with_tokens(advantages=torch.full_like(view.tokens("advantages"), torch.inf))
    row = asyncio.run(learner.learn(broken, 3, metrics))  # of which no optimizer step is taken
    assert row["skipped_steps"] == 1 and row["optimizer_steps"] == 0
    assert gap(saved(learner, tmp_path / "skipped")[1], found) == 0


def test_it_stays_while_only_the_critic_learns(tiny: str, tmp_path: Path) -> None:
    learner = opened(tiny, config_of(algorithm=section(advantage=Choice(name="gae")), critic=toy_critic(warmup=1)))
    _, start = saved(learner, tmp_path / "start")
    step(learner, 0)
    assert gap(saved(learner, tmp_path / "0")[1], start) == 0
    step(learner, 1)
    policy, found = saved(learner, tmp_path / "1")
    assert gap(found, mixed(start, policy, 0.75)) < 5e-7 and gap(found, start) > 1e-4


def test_the_kl_is_to_the_average_and_less_than_to_the_start(tiny: str, tmp_path: Path) -> None:
    """At 0 distance the penalty has no gradient, so after the first update both policies are the same, theta_1: the second
    measures k3 of it to theta_0, or to 0.75 theta_0 + 0.25 theta_1, which transformers writes here as a model of its own."""
    rows, learners = {}, {}
    for name, algorithm in (("start", section(kl=KlConfig(coef=0.1))), ("moving", section())):
        learner = learners[name] = opened(tiny, config_of(algorithm=algorithm, optim=toy_optim(lr=0.01)))
        if name == "moving":
            start, _ = saved(learner, tmp_path / "0")
        rows[name] = [step(learner, 0)]
        if name == "moving":
            policy, _ = saved(learner, tmp_path / "1")
        batch = collate(trajectories(8, seed=1))
        now = learner.actors.run(Actor.compute_logprob, batch)["logprobs"].values()
        rows[name].append(step(learner, 1))
    for name, share in (("start", 1.0), ("moving", 0.75)):
        model = AutoModelForCausalLM.from_pretrained(tiny)
        weights = {key.removeprefix("model."): tensor.float() for key, tensor in mixed(start, policy, share).items()}
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
        model.save_pretrained(tmp_path / name)
        group = role_of(Reference, str(tmp_path / name))
        then = group.run(Reference.compute_logprob, batch)["logprobs"].values()
        first, second = (row["kl_reference"] for row in rows[name])
        assert first == pytest.approx(0, abs=1e-9) and second > 1e-5
        sampled = batch["sampled"].values()
        d = (now - then).double()[sampled]
        assert second == pytest.approx(float((torch.exp(-d) - 1 + d).mean()), rel=1e-3)
    assert rows["moving"][1]["kl_reference"] < 0.7 * rows["start"][1]["kl_reference"]


def test_without_memory_it_is_the_policy_before_each_update(tiny: str) -> None:
    learner = opened(tiny, config_of(algorithm=section(decay=0.0), optim=toy_optim(lr=0.01)))
    assert [step(learner, number)["kl_reference"] for number in range(3)] == pytest.approx([0, 0, 0], abs=1e-9)


def test_a_resume_goes_on_with_it_to_the_digit(tiny: str, tmp_path: Path) -> None:
    whole, rows = opened(tiny, config_of(algorithm=section())), []
    for number in range(4):
        if number == 2:
            saved(whole, tmp_path / "2")
        rows.append(step(whole, number))
    resumed = opened(tiny, config_of(algorithm=section()))
    asyncio.run(resumed.load(tmp_path / "2"))
    assert [step(resumed, number) for number in (2, 3)] == rows[2:]
    assert all(gap(*pair) == 0 for pair in zip(saved(whole, tmp_path / "4"), saved(resumed, tmp_path / "r"), strict=True))
    plain = opened(tiny, config_of(algorithm=section(kl=KlConfig(coef=0.1))))
    (tmp_path / "plain").mkdir()
    save(plain, tmp_path / "plain")
    assert not (tmp_path / "plain/reference").exists()  # one that stands still is loaded from where it stood
    with pytest.raises(CheckpointError, match="plain/reference"):
        asyncio.run(resumed.load(tmp_path / "plain"))


APART = ClusterConfig(backend="ray", pools={"p": PoolConfig(), "q": PoolConfig()}, roles={"actor": "p", "reference": "q"})
MOVING = section()
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "without a penalty": ({"algorithm": section(kl=KlConfig(reference="moving"))}, "algorithm.kl.coef = 0"),
    "adapters": ({"model": ModelConfig(lora=LoraSection())}, r"with \[model.lora\] the reference is the actor's own model"),
    "offloaded": ({"model": ModelConfig(offload="idle")}, 'model.offload = "idle" takes them out'),
    "on the host": ({"model": ModelConfig(offload="always")}, 'model.offload = "always" takes them out'),
    "elsewhere": ({"cluster": APART}, "remove cluster.roles.reference"),
    "another engine": ({"model": ModelConfig(engine="titan")}, 'model.engine = "titan" does not support it'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_follow_is_refused_before_the_run(case: str) -> None:
    if case == "another engine":
        pytest.importorskip("agentrl.contrib.titan")
    sections, words = REFUSED[case]
    config = config_of(algorithm=MOVING).model_copy(update=sections)
    with pytest.raises(ConfigError, match=words) as refused:
        check_train_engine(config)
        check_learner(config)
    assert 'algorithm.kl.reference = "moving"' in str(refused.value)


def test_roles_of_one_pool_are_together(tiny: str) -> None:
    together = ClusterConfig(backend="ray", pools={"p": PoolConfig()}, roles={"actor": "p", "reference": "p"})
    here = APART.model_copy(update={"backend": "inline"})  # all roles are in one process, wherever Ray would put them
    for cluster in (together, here):
        check_learner(config_of(algorithm=MOVING).model_copy(update={"cluster": cluster}))
    alone = role_of(Reference, tiny)
    with pytest.raises(ConfigError, match="not in the process of this rank"):
        alone.run(Reference.follow, "nobody", 0.9)


# -- the frozen base of adapters -------------------------------------------------------------------


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
