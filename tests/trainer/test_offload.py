"""Roles that wait give their memory back and learn the same to the bit; `check_on_host` passes here."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.schema import (
    AlgorithmConfig,
    Choice,
    ClusterConfig,
    KlConfig,
    LoraSection,
    ModelConfig,
    RewardModelConfig,
    WeightsConfig,
)
from agentrl.data.rows import collate
from agentrl.engines.weights.base import WakeStage
from agentrl.trainer import roles as role
from agentrl.trainer import train_engine as layout
from agentrl.trainer.actor import Actor
from agentrl.trainer.learner import Learner, check_learner
from agentrl.trainer.publish import Publisher
from agentrl.trainer.roles import Critic, Reference, RewardModel
from agentrl.trainer.train_engine import offloads_when_idle
from agentrl.utils.errors import AgentrlError, ConfigError
from tests.publishing import VersionOnly, weights_of
from tests.trainer.learners import config_of, opened, role_of, start
from tests.trainer.train_batches import make_batch, toy_critic, train_batch, trajectories

ALGORITHM = AlgorithmConfig(minibatch=8)
GAE = AlgorithmConfig(advantage=Choice(name="gae"), minibatch=8)
IDLE = ModelConfig(offload="idle")


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "check_on_host", lambda cfg: None)


def engine_of(group: Any) -> Any:
    [worker] = group.backend.workers
    return worker._engine


def resident(group: Any) -> int:
    """Bytes of the parameters and of the optimizer's moments where they are used."""
    engine = engine_of(group)
    moments = [] if engine.optimizers is None else engine.optimizers.tensors()
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in [*engine.module.parameters(), *moments]}
    return sum(storages.values())


@pytest.mark.parametrize("lora", [None, LoraSection(rank=2)], ids=["whole", "adapters"])
def test_an_actor_that_is_sent_away_frees_its_storages_is_saved_and_loaded_there_and_learns_the_same(
    tiny: str, tmp_path: Path, anywhere: None, lora: LoraSection | None
) -> None:
    stays, goes = (start(tiny, ModelConfig(offload="idle", lora=lora)) for _ in range(2))
    numbers = sum(p.numel() for p in engine_of(goes).module.parameters())
    trained = sum(p.numel() for _, p in engine_of(goes).named_weights())
    for step in range(2):
        batch = make_batch(8, seed=step)
        rows = [train_batch(group, Actor.update, batch, ALGORITHM, step=step) for group in (stays, goes)]
        assert rows[0] == rows[1]
        assert resident(goes) == 4 * numbers + 8 * trained  # float32, and AdamW's two moments
        goes.run(Actor.offload)
        goes.run(Actor.offload)  # idempotent
        goes.run(Actor.begin_save, str(tmp_path / f"{step}"))
        assert resident(goes) == 0
    while not goes.run(Actor.is_saved):
        pass
    # What was saved from the host is the state; what is loaded there is back with the memory.
    for away in (False, True):
        resumed = start(tiny, ModelConfig(offload="idle", lora=lora))
        resumed.run(Actor.offload) if away else None
        resumed.run(Actor.load, str(tmp_path / "1"))
        assert (resident(resumed) == 0) == away
        found = [weights_of(group) for group in (stays, resumed)]
        assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_what_has_no_optimizer_and_what_has_not_stepped(tiny: str, anywhere: None) -> None:
    group = role_of(Reference, tiny, model=IDLE)
    batch = make_batch(4)
    before = group.run(Reference.compute_logprob, batch)["logprobs"].values()
    for _ in range(2):
        group.run(Reference.offload)
        assert resident(group) == 0
        assert torch.equal(group.run(Reference.compute_logprob, batch)["logprobs"].values(), before)
        assert resident(group) > 0
    actor = start(tiny, IDLE)
    engine = engine_of(actor)
    next(engine.module.parameters()).grad = torch.zeros_like(next(engine.module.parameters()))
    with pytest.raises(AgentrlError, match="gradients wait for an optimizer step"):
        engine.offload()


def test_each_role_has_the_device_to_itself_in_its_turn_and_all_learn_the_same(
    tiny: str, classifier: str, anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for offload in ("never", "idle"):
        algorithm = AlgorithmConfig(
            advantage=Choice(name="gae"), minibatch=8, proximal="recompute", kl=KlConfig(coef=0.1, where="reward")
        )
        config = config_of(
            algorithm=algorithm,
            critic=toy_critic(),
            reward_model=RewardModelConfig(path=classifier),
            model=ModelConfig(offload=offload),
        )
        learner = opened(tiny, config)
        groups = {"actor": learner.actors, "critic": learner.critics, "reference": learner.references}
        groups["reward_model"] = learner.reward_models
        turns: list[tuple[str, list[str]]] = []
        for name, group in groups.items():
            watch(monkeypatch, name, group, groups, turns)
        rows = []
        for step in range(2):
            rows.append(asyncio.run(learner.step(collate(trajectories(8, seed=step)), step)))
            asyncio.run(sent(learner, offload == "idle"))
        found[offload] = rows, weights_of(learner.actors), turns
        if offload == "idle":
            assert [resident(group) for group in groups.values()][1:] == [0, 0, 0]
    (rows, weights, beside), (others, theirs, alone) = found["never"], found["idle"]
    assert rows == others and all(torch.equal(weights[name], theirs[name]) for name in weights)
    four = ["actor", "critic", "reference", "reward_model"]
    assert [name for name, _ in alone] == [name for name, _ in beside]
    assert all(there == four for _, there in beside)
    first = ["reward_model", "actor", "reference", "critic", "critic", "actor"]
    assert [(name, there) for name, there in alone] == 2 * [(name, [name]) for name in first]


def watch(monkeypatch: Any, name: str, group: Any, groups: dict[str, Any], turns: list[tuple[str, list[str]]]) -> None:
    """Note at the end of each of the group's turns who has memory."""
    arun = group.arun

    async def watched(method: Any, *args: Any, **kwargs: Any) -> Any:
        out = await arun(method, *args, **kwargs)
        if method in (RewardModel.compute_scores, Actor.compute_logprob, Reference.compute_logprob) or method in (
            Critic.compute_values,
            Critic.update,
            Actor.update,
        ):
            turns.append((name, [other for other, one in groups.items() if resident(one)]))
        return out

    monkeypatch.setattr(group, "arun", watched)


class Beside(VersionOnly):
    """An engine that notes what the actor has of the device's memory when its own stages come."""

    def __init__(self) -> None:
        self.actors: Any = None
        self.seen: list[tuple[str, bool]] = []

    async def wake(self, stage: WakeStage) -> None:
        self.seen.append((stage, resident(self.actors) > 0))

    async def receive(self, version: int, buckets: Any) -> None:
        self.seen.append(("receive", resident(self.actors) > 0))
        async for _ in buckets:
            pass


async def sent(learner: Learner, offload: bool, colocated: bool = False) -> list[tuple[str, bool]]:
    engine = Beside()
    engine.actors = learner.actors
    how = {"offload": offload, "colocated": colocated}
    publisher = Publisher(learner.actors, engine, WeightsConfig(route="memory"), **how)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(role, "free_cached", lambda: engine.seen.append(("cached memory is freed", resident(engine.actors) > 0)))
        await publisher.send(1)
    await publisher.close()
    return engine.seen


def test_a_publish_gives_the_memory_back_before_the_engine_allocates_its_cache(tiny: str, anywhere: None) -> None:
    learner = opened(tiny, config_of(model=IDLE, rollout={"colocate": True}))
    learner.actors.run(Actor.offload)
    assert asyncio.run(sent(learner, True)) == [("weights", False), ("receive", True), ("cache", False)]
    learner.actors.run(Actor.onload)
    assert asyncio.run(sent(learner, False)) == [("weights", True), ("receive", True), ("cache", True)]
    # An engine on the same device needs also what the actors' allocator keeps, each time before it allocates.
    freed = "cached memory is freed"
    there = [(freed, True), ("weights", True), ("receive", True), (freed, True), ("cache", True)]
    assert asyncio.run(sent(learner, False, colocated=True)) == there
    gone = [(freed, True), ("weights", True), ("receive", True), (freed, False), ("cache", False)]
    assert asyncio.run(sent(learner, True, colocated=True)) == gone


def test_what_frees_nothing_is_refused(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r'model.offload = "idle": there is no GPU'):
        start(tiny, IDLE)
    with pytest.raises(ConfigError, match=r"model.offload.*never waits"):
        check_learner(config_of(model=IDLE))
    check_learner(config_of(model=IDLE, rollout={"colocate": True}))
    # Who has the processes of a pool to itself keeps its memory.
    apart = {"pools": {"a": {}, "b": {}}, "roles": {"actor": "a", "critic": "b"}}
    config = config_of(model=IDLE, algorithm=GAE, critic=toy_critic()).model_copy(update={"cluster": ClusterConfig(**apart)})
    with pytest.raises(ConfigError, match=r"model.offload.*never waits"):
        check_learner(config)
    beside = config.model_copy(update={"reward_model": RewardModelConfig(path="somewhere")})
    assert [offloads_when_idle(beside, role) for role in ("actor", "critic", "reward_model")] == [True, False, True]
    check_learner(config_of(model=IDLE, algorithm=AlgorithmConfig(kl=KlConfig(coef=0.1))))
