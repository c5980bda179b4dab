"""A training step over all roles: critic, reference, KL control. What each key does is in test_keys.py."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig
from agentrl.data.rows import Ragged, collate, nested_tensor
from agentrl.trainer.actor import Actor
from agentrl.trainer.learner import Learner, check_learner
from agentrl.trainer.minibatch import adapted_kl_coef, with_selection
from agentrl.trainer.pretrained import init_model
from agentrl.trainer.roles import Critic
from agentrl.utils.errors import ConfigError
from tests.publishing import flat
from tests.tiny import SMALL
from tests.trainer.learners import config_of, opened, save, start
from tests.trainer.train_batches import make_batch, toy_critic, trajectories


def own_logprobs(learner: Learner, count: int = 16, seed: int = 0) -> Any:
    """A batch whose behaviour logprobs are the policy's own, so that importance ratios are near 1."""
    batch = collate(trajectories(count, seed=seed))
    found = learner.actors.run(Actor.compute_logprob, batch)["logprobs"].values()
    noise = 0.3 * torch.randn(len(found), generator=torch.Generator().manual_seed(1))
    batch["logprobs"].values().copy_((found + noise) * batch["sampled"].values())
    return batch


GAE = AlgorithmConfig(advantage=Choice(name="gae"), minibatch=8)


def test_a_critic_of_another_model(tiny: str, tmp_path: Path) -> None:
    """The value head is as wide as the critic's model: 32 for the policy's own, 16 for the other."""
    other = str(init_model(SMALL.model_copy(update={"hidden": 16}), tmp_path / "other", seed=1))
    sizes, widths = [], []
    for path in (None, other):
        learner = opened(tiny, config_of(algorithm=GAE, critic=toy_critic(path=path)))
        assert asyncio.run(learner.step(own_logprobs(learner), 0))["grad_norm"] > 0
        learner.critics.run(Critic.save, str(tmp_path / "c"))  # type: ignore[union-attr]
        [critic] = learner.critics.backend.workers  # type: ignore[union-attr]
        widths.append(tuple(critic._engine.module.head.weight.shape))
        sizes.append(sum(file.stat().st_size for file in (tmp_path / "c").glob("*.distcp")))
    assert sizes[1] < sizes[0] and widths == [(1, 32), (1, 16)]


def test_the_critic_learns_what_turns_are_worth_and_warms_up_alone(tiny: str) -> None:
    algorithm = AlgorithmConfig(advantage=Choice(name="gae_turns"), minibatch=8)
    learner = opened(tiny, config_of(algorithm=algorithm, critic=toy_critic(lr=3e-3, warmup=2)))
    batch = collate(trajectories(16))
    rows = [asyncio.run(learner.step(batch, step)) for step in range(12)]
    assert ["grad_norm" in row for row in rows[:4]] == [False, False, True, True]
    assert rows[-1]["critic/loss"] < 0.6 * rows[0]["critic/loss"] and rows[-1]["critic/explained_variance"] > 0.2
    # gamma = lambda = 1: every token's target is its episode's reward, as with `gae`
    sampled = batch["sampled"].values()
    counts = torch.tensor([int(part.sum()) for part in batch["sampled"].unbind()]).double()
    mean = float((batch["reward"].double() ** 2 * counts).sum() / sampled.sum()) / 2
    assert rows[0]["critic/loss"] == pytest.approx(mean, rel=0.15)  # values begin at 0


def test_save_and_resume_of_all_roles(tiny: str, tmp_path: Path) -> None:
    algorithm = GAE.model_copy(update={"kl": KlConfig(coef=0.1, target=0.01, horizon=20)})
    config = config_of(algorithm=algorithm, critic=toy_critic())
    straight, broken, resumed = (opened(tiny, config) for _ in range(3))
    batches = [own_logprobs(straight, seed=step) for step in range(4)]
    for step in range(4):
        last = asyncio.run(straight.step(batches[step], step))
    for step in range(2):
        asyncio.run(broken.step(batches[step], step))
    save(broken, tmp_path)
    asyncio.run(resumed.load(tmp_path))
    assert resumed.kl_coef == broken.kl_coef != 0.1
    # A coefficient that a resume changes, or that nothing steers any more, is the config's; so is one that an older run had not.
    older, later = tmp_path / "older", tmp_path / "later"  # the later one steered the entropy bonus too
    for folder, state in ((older, '"entropy_coef": 0.0, "kl_coef": 0.0'), (later, '"kl_coef": 0.2, "begun": [0.3, 0.0]')):
        folder.mkdir()
        for role in ("actor", "critic"):
            (folder / role).symlink_to(tmp_path / role)
        (folder / "learner.json").write_text(f"{{{state}}}")
    changed = KlConfig(coef=0.3, target=0.01, horizon=20)
    cases = (tmp_path, changed, 0.3), (tmp_path, KlConfig(coef=0.1), 0.1), (older, changed, 0.3), (later, changed, 0.2)
    for folder, kl, coef in cases:
        other = opened(tiny, config_of(algorithm=algorithm.model_copy(update={"kl": kl}), critic=toy_critic()))
        asyncio.run(other.load(folder))
        assert other.kl_coef == coef
    for step in range(2, 4):
        again = asyncio.run(resumed.step(batches[step], step))
    assert torch.equal(flat(straight.actors), flat(resumed.actors))
    assert again == last


def test_steering() -> None:
    """With a horizon: tests/algorithm/test_against_verl.py."""
    assert adapted_kl_coef(0.1, 50.0, 10, KlConfig(coef=0.1)) == 0.1
    # Without a horizon: 1 % per update, whatever its size.
    assert adapted_kl_coef(0.1, 50.0, 8, KlConfig(coef=0.1, target=2.0)) == pytest.approx(0.101)
    assert adapted_kl_coef(0.1, 50.0, 512, KlConfig(coef=0.1, target=2.0)) == pytest.approx(0.101)


DECOUPLED = AlgorithmConfig(loss=Choice(name="decoupled_ppo"), proximal="recompute", correction=Choice(name="reject_sequence"))


@pytest.mark.parametrize(("sections", "message"), [
    ({"algorithm": GAE}, "needs a critic"),
    ({"critic": toy_critic()}, "does not use a critic"),
    ({"algorithm": GAE, "critic": toy_critic(warmup=4), "steps": 4}, "critic.warmup = 4: .* steps = 4"),
    ({"algorithm": AlgorithmConfig(kl=KlConfig(target=1.0))}, "must be above 0"),
    ({"algorithm": AlgorithmConfig(correction=Choice(name="masked"))}, "recompute"),
    ({"algorithm": AlgorithmConfig(advantage=Choice(name="multi_reward"))}, "terms"),
    ({"algorithm": AlgorithmConfig(loss=Choice(name="ppo_clop"))}, "ppo_clip"),
    ({"algorithm": AlgorithmConfig(loss=Choice(name="decoupled_ppo"))}, "needs algorithm.proximal"),
    ({"algorithm": AlgorithmConfig(kl=KlConfig(coef=0.1, kind="k1"))}, "mean 0"),
    ({"algorithm": AlgorithmConfig(kl=KlConfig(kind="k1"))}, r"kl.kind = 'k1' is read with algorithm.kl.coef above 0 alone"),
    ({"algorithm": AlgorithmConfig(kl=KlConfig(where="reward"))}, r"kl.where = 'reward' is read with"),
    (
        {"algorithm": AlgorithmConfig(kl=KlConfig(coef=0.1, horizon=5))},
        r"kl.horizon = 5 is read with algorithm.kl.target alone",
    ),
    ({"algorithm": AlgorithmConfig(kl=KlConfig(coef=0.1, where="reward", kind="k1+"))}, "changes a gradient"),
    ({"algorithm": AlgorithmConfig(length_norm=5)}, "length_norm = 5 is read with algorithm.aggregate ="),
    ({"algorithm": DECOUPLED.model_copy(update={"correction": Choice(name="truncated")})}, "twice"),
])  # fmt: skip
def test_combinations_that_mean_nothing(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_learner(config_of(**sections))
    check_learner(config_of(algorithm=DECOUPLED))


def test_rejected_tokens_are_part_of_the_mismatch(tiny: str) -> None:
    """What a correction rejects lies furthest off: left out, it would hide what the number is there to show."""
    algorithm = AlgorithmConfig(minibatch=6, proximal="recompute", correction=Choice(name="masked_sequence", args={"cap": 2.0}))
    learner = opened(tiny, config_of(algorithm=algorithm))
    batch = collate(trajectories(8))
    own = learner.actors.run(Actor.compute_logprob, batch)["logprobs"].values()
    sampled = batch["sampled"].values()
    far = sampled & (torch.arange(len(sampled)) < int(batch["sampled"].offsets()[3]))  # three rows, at e^2 a token
    batch["logprobs"].values().copy_((own - 2.0 * far) * sampled)
    metrics = asyncio.run(learner.step(batch, 0))
    assert metrics["tokens_trained"] == int((sampled & ~far).sum())
    expected = float(far.sum() / sampled.sum()) * (np.exp(-2.0) - 1 + 2.0)
    assert metrics["mismatch_kl"] == pytest.approx(expected, rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(2.0, abs=1e-4)


def test_picked_are_the_tokens_of_the_largest_covariance_over_the_whole_minibatch() -> None:
    """Against numpy: means over all trained tokens of the minibatch, rows without advantage included, rejected tokens not."""
    batch = make_batch(12)
    batch["advantages"].values()[: int(batch["advantages"].offsets()[6])] = 0.0
    sampled, offsets = batch["sampled"].values().numpy(), batch["sampled"].offsets().numpy()
    weights = sampled * (np.arange(len(sampled)) % 5 != 0)
    batch["weights"] = nested_tensor(torch.from_numpy(weights).float(), batch["sampled"].offsets())
    logprobs, advantages = (batch[name].values().double().numpy() for name in ("logprobs", "advantages"))
    parts, view = [np.arange(0, 12, 2), np.arange(1, 12, 2)], Ragged.of(batch)
    choices = Choice(name="kl_cov", args={"share": 0.1}), Choice(name="clip_cov", args={"share": 0.1, "low": -0.05, "high": 0.05})
    largest, within = (with_selection(view, parts, loss, seed=0).tokens("picked").numpy() for loss in choices)
    for rows in parts:
        mine = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
        mine = mine[weights[mine] > 0]
        covariance = (logprobs[mine] - logprobs[mine].mean()) * (advantages[mine] - advantages[mine].mean())
        wanted = max(int(0.1 * len(mine)), 1)
        assert sorted(mine[largest[mine]]) == sorted(mine[np.argsort(-covariance)[:wanted]])
        near = np.abs(covariance) < 0.05
        assert within[mine].sum() == min(wanted, near.sum()) > 0 and near[within[mine]].all()
    assert not (largest | within)[~(weights > 0)].any()


@pytest.mark.parametrize(
    "loss", [Choice(name="kl_cov", args={"share": 0.25}), Choice(name="clip_cov", args={"share": 0.25, "low": 0.0, "high": 99.0})]
)
def test_picks_do_not_depend_on_the_order_of_rows(tiny: str, loss: Choice) -> None:
    from agentrl.data.rows import select

    batch = make_batch(12)
    batch["old_logprobs"] = batch["logprobs"].clone()
    order = list(range(11, -1, -1))
    found = [
        with_selection(Ragged.of(given), [np.arange(12)], loss, seed=2**63 - 1).row("picked")
        for given in (batch, select(batch, order))
    ]
    for row in range(12):
        assert torch.equal(found[0][row], found[1][order[row]])
    assert int(found[0].values().sum()) == int(0.25 * int(batch["sampled"].values().sum()))


def test_a_role_with_a_pool_is_started_there_and_the_others_beside_the_actor(tiny: str) -> None:
    """The learner and its roles with a pool of two processes for the critic; the rest is inline."""

    class TwoForTheCritic:
        asked: ClassVar[list[Any]] = []

        def __contains__(self, role: str) -> bool:
            return role == "critic"

        def slots(self, role: str) -> int:
            return 2

        def launch(self, role: str, cls: Any, mesh: dict[str, int]) -> Any:
            self.asked.append((role, mesh))
            return launch(cls, backend="inline")

    config = config_of(critic=toy_critic(), algorithm=AlgorithmConfig(advantage=Choice(name="gae"), kl=KlConfig(coef=0.1)))
    actors = start(tiny)
    pools = TwoForTheCritic()
    learner = Learner(config, actors, pools)  # type: ignore[arg-type]
    asyncio.run(learner.open(tiny))
    assert pools.asked == [("critic", {"dp": 2, "sp": 1})] and learner.references is not None
    metrics = asyncio.run(learner.step(own_logprobs(learner), 0))
    assert "critic/loss" in metrics and metrics["prefix_ratio_possible"] >= 1.0
