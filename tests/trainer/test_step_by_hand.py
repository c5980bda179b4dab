"""What a step does to the weights, against a computation of its own: entropy bonus, temperature, decay, schedules, the KL."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from agentrl.cluster.launch import launch
from agentrl.config.schema import (
    AlgorithmConfig,
    Choice,
    KlConfig,
    ModelConfig,
    RolloutConfig,
)
from agentrl.data.rows import Ragged, collate, nested_tensor, offsets_of
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Task, Trajectory
from agentrl.trainer.actor import Actor
from agentrl.trainer.estimator_inputs import with_advantages
from agentrl.trainer.learner import check_learner, fill_length_norm, policy_updates
from agentrl.trainer.minibatch import kl_kind
from agentrl.trainer.roles import Critic, Reference, with_scores
from agentrl.utils.errors import ConfigError
from tests.publishing import weights_of as named
from tests.trainer.learners import config_of, opened, start
from tests.trainer.train_batches import make_batch, toy_critic, toy_optim, train_batch, trajectories

MODES = ["token_mean", "seq_mean_token_mean"]


def tables(model: Any, batch: TensorDict, temperature: float) -> list[torch.Tensor]:
    """log softmax(z / T) before each sampled token, by a plain forward pass a row: [M_row, V] each."""
    found = []
    for row in range(len(batch)):
        ids, sampled = batch["token_ids"][row], batch["sampled"][row]
        z = model(ids[None]).logits[0].double() / temperature
        found.append(torch.log_softmax(z, -1)[:-1][sampled[1:]])
    return found


def plain(tiny: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager").double()


def chosen(model: Any, batch: TensorDict, temperature: float) -> torch.Tensor:
    """Logprobs of all sampled tokens, [M]."""
    return torch.cat(
        [
            table.gather(1, batch["token_ids"][row][batch["sampled"][row]][:, None]).squeeze(1)
            for row, table in enumerate(tables(model, batch, temperature))
        ]
    )


# -- entropy bonus ---------------------------------------------------------------------------------


def no_advantage(count: int = 6) -> TensorDict:
    batch = make_batch(count)
    batch["advantages"].values().zero_()
    return batch


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_bonus_alone_has_the_gradient_of_its_term_and_raises_entropy(tiny: str, temperature: float) -> None:
    batch, bonus = no_advantage(), 0.3
    algorithm = AlgorithmConfig(minibatch=6, entropy_bonus=bonus)
    actor = start(tiny, lr=1e-4, max_grad_norm=1e9)
    before = named(actor)
    metrics = train_batch(actor, Actor.update, batch, algorithm, temperature=temperature)
    moved = {name: tensor - before[name] for name, tensor in named(actor).items()}
    model = plain(tiny)
    entropies = torch.cat([-(table.exp() * table).sum(-1) for table in tables(model, batch, temperature)])
    (-bonus * entropies.mean()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if name in moved}
    assert metrics["grad_norm"] == pytest.approx(torch.cat([g.flatten() for g in grads.values()]).norm().item(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(-bonus * entropies.mean().item(), rel=1e-5)
    for name, grad in grads.items():  # the first step of Adam is lr against the sign of the gradient
        clear = grad.abs() > 1e-5
        assert torch.allclose(moved[name][clear].double(), -1e-4 * grad[clear].sign(), atol=2e-6), name
    after = actor.run(Actor.compute_logprob, batch, temperature)["entropy"].values().sum() / len(entropies)
    assert after > entropies.mean().item() + 1e-5


def test_the_gradient_of_the_bonus_is_a_finite_difference_of_the_entropy(tiny: str) -> None:
    """Along the step that the optimizer takes, entropy changes by its gradient times the step."""
    batch = no_advantage(4)
    model = plain(tiny)
    entropy = lambda: torch.cat([-(t.exp() * t).sum(-1) for t in tables(model, batch, 1.0)]).mean()  # noqa: E731
    value = entropy()
    value.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    square = sum(float(g.square().sum()) for g in grads)
    eps, found = 0.02, []  # transformers' softmax is float32: not too small
    with torch.no_grad():
        for shift in (eps, -2 * eps):
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.add_(shift * grad)
            found.append(entropy().item())
    assert (found[0] - found[1]) / (2 * eps) == pytest.approx(square, rel=1e-2)
    bonus = AlgorithmConfig(minibatch=4, entropy_bonus=1.0)
    metrics = train_batch(start(tiny, max_grad_norm=1e9), Actor.update, batch, bonus)
    assert metrics["grad_norm"] ** 2 == pytest.approx(square, rel=1e-4)


# -- temperature -----------------------------------------------------------------------------------


def test_actor_proximal_and_reference_are_all_taken_at_the_temperature_of_the_rollout(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T = 0.7: what the update compares are log softmax(z / 0.7) of plain transformers, three times."""
    algorithm = AlgorithmConfig(minibatch=8, proximal="recompute", loss=Choice(name="reinforce"), kl=KlConfig(coef=0.5))
    learner = opened(tiny, config_of(algorithm=algorithm, rollout=RolloutConfig(temperature=0.7)))
    batch = collate(trajectories(8))
    expected = chosen(plain(tiny), batch, 0.7).detach()
    assert (expected - chosen(plain(tiny), batch, 1.0).detach()).abs().max() > 0.01  # a wrong one would be seen
    seen: dict[str, Any] = {}
    arun = learner.actors.arun

    async def watched(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is Actor.update:
            seen.update({name: args[0][name].values()[args[0]["sampled"].values()] for name in ("old_logprobs", "ref_logprobs")})
        return await arun(method, *args, **kwargs)

    monkeypatch.setattr(learner.actors, "arun", watched)
    metrics = asyncio.run(learner.step(batch, 0))
    for name in ("old_logprobs", "ref_logprobs"):
        assert torch.allclose(seen[name].double(), expected, atol=2e-6), name
    behaviour = batch["logprobs"].values()[batch["sampled"].values()].double()
    assert metrics["kl_behaviour"] == pytest.approx((behaviour - expected).mean().item(), abs=1e-5)  # the actor's own
    gap = expected - behaviour
    assert metrics["mismatch_kl"] == pytest.approx((torch.exp(-gap) - 1 + gap).mean().item(), rel=1e-4)
    assert metrics["kl_reference"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_the_gradient_is_that_of_logprobs_at_the_temperature(tiny: str, temperature: float) -> None:
    batch = make_batch(6)
    algorithm = AlgorithmConfig(minibatch=6, loss=Choice(name="reinforce"))
    metrics = train_batch(start(tiny, max_grad_norm=1e9), Actor.update, batch, algorithm, temperature=temperature)
    model = plain(tiny)
    loss = -(chosen(model, batch, temperature) * batch["advantages"].values()[batch["sampled"].values()].double()).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_greedy_rollouts_are_trained_at_temperature_one(tiny: str) -> None:
    batch = make_batch(4)
    found = [train_batch(start(tiny), Actor.update, batch, AlgorithmConfig(), temperature=t) for t in (0.0, 1.0)]
    assert found[0] == found[1]


# -- decay and schedules ---------------------------------------------------------------------------


def test_decay_shrinks_matrices_by_lr_times_decay_and_leaves_vectors(tiny: str) -> None:
    batch = make_batch(4)
    batch["advantages"].values().zero_()
    actor = start(tiny, lr=1e-2, weight_decay=0.5)
    before = named(actor)
    train_batch(actor, Actor.update, batch, AlgorithmConfig(minibatch=4))
    after = named(actor)
    vectors = [name for name, tensor in before.items() if tensor.ndim == 1]
    assert any("norm" in name for name in vectors) and len(vectors) < len(before)
    for name, tensor in before.items():
        expected = tensor if name in vectors else tensor * (1 - 1e-2 * 0.5)
        assert torch.allclose(after[name], expected, rtol=1e-6, atol=0), name
        assert torch.equal(after[name], tensor) == (name in vectors), name


def critic_of(tiny: str, total: int | None = None, **optim: Any) -> Any:
    critic = launch(Critic, backend="inline", world_size=1)
    critic.run(Critic.init_model, tiny, ModelConfig(), toy_optim(**optim), toy_critic(lr=1e-3, clip=None), total)
    return critic


def valued(seed: int = 0) -> TensorDict:
    batch = make_batch(6, seed)
    zeros = nested_tensor(torch.zeros(len(batch["sampled"].values())), offsets_of(batch["sampled"]))
    return batch.update({"returns": batch["advantages"].clone(), "values": zeros})


def test_the_critic_follows_warm_up_and_schedule_and_a_resume_goes_on_with_them(tiny: str, tmp_path: Path) -> None:
    optim = {"warmup": 2, "schedule": "linear"}
    critic = critic_of(tiny, 6, **optim)
    expected = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    for step in range(4):
        metrics = train_batch(critic, Critic.update, valued(step), AlgorithmConfig(), step=step)
        assert metrics["critic/lr"] == pytest.approx(1e-3 * expected[step])
    critic.run(Critic.save, str(tmp_path / "c"))
    resumed = critic_of(tiny, 6, **optim)
    resumed.run(Critic.load, str(tmp_path / "c"))
    for step in (4, 5):
        found = [train_batch(one, Critic.update, valued(step), AlgorithmConfig(), step=step) for one in (critic, resumed)]
        assert found[0] == found[1] and found[0]["critic/lr"] == pytest.approx(1e-3 * expected[step])
    values = [one.run(Critic.compute_values, valued())["values"].values() for one in (critic, resumed)]
    assert torch.equal(*values)
    with pytest.raises(ConfigError, match="number of steps"):
        critic_of(tiny, None, schedule="cosine")


def test_the_rate_of_the_critic_reaches_its_weights(tiny: str) -> None:
    """The first step of Adam is the rate itself: the value head starts at 0, so its largest weight is lr x share after it."""
    for warmup, share in ((0, 1.0), (10, 0.1)):
        critic = critic_of(tiny, warmup=warmup)
        train_batch(critic, Critic.update, valued(), AlgorithmConfig(minibatch=6))
        [worker] = critic.backend._workers
        head = worker._engine.module.head.weight
        assert head.abs().max().item() == pytest.approx(1e-3 * share, rel=1e-3)


def test_the_policys_schedule_ends_with_the_run_when_the_critic_warms_up_first(tiny: str) -> None:
    """5 steps, 3 of them of the critic alone: the policy's two updates are at the start and the middle of its schedule."""
    algorithm = AlgorithmConfig(advantage=Choice(name="gae"), minibatch=8)
    config = config_of(algorithm=algorithm, critic=toy_critic(warmup=3), optim=toy_optim(schedule="linear", lr=1e-3), steps=5)
    assert policy_updates(config) == 2 and policy_updates(config_of(steps=7)) == 7
    learner = opened(tiny, config)
    found = [asyncio.run(learner.step(collate(trajectories(8)), step)) for step in range(5)]
    assert [row.get("lr") for row in found] == [None, None, None, 1e-3, pytest.approx(5e-4)]
    assert [row["critic/lr"] for row in found] == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4])


# -- the KL ----------------------------------------------------------------------------------------


def test_the_kl_in_the_reward_is_k1_of_the_proximal_policy_to_the_reference(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine logprobs lie 2 off the trainer's; under "recompute" the penalty knows nothing of that."""
    kl = KlConfig(coef=0.2, where="reward")
    assert kl_kind(kl) == "k1" and kl_kind(KlConfig()) == "k3"
    assert kl_kind(KlConfig(where="reward", kind="k3")) == "k3" and kl_kind(KlConfig(kind="k2")) == "k2"
    algorithm = AlgorithmConfig(advantage=Choice(name="reinforce_pp"), minibatch=8, proximal="recompute", kl=kl)
    learner = opened(tiny, config_of(algorithm=algorithm))
    asyncio.run(learner.step(collate(trajectories(8)), 0))  # away from the reference
    batch = collate(trajectories(8, seed=1))
    sampled = batch["sampled"].values()
    now = learner.actors.run(Actor.compute_logprob, batch)["logprobs"].values()
    assert learner.references is not None
    reference = learner.references.run(Reference.compute_logprob, batch)["logprobs"].values()
    batch["logprobs"].values().copy_((now + 2.0) * sampled)
    distance = (now - reference)[sampled]
    assert distance.abs().max() > 1e-3
    seen: dict[str, Any] = {}

    def watched(given: Ragged, *args: Any) -> Any:
        out, metrics = with_advantages(given, *args)
        seen["returns"] = out.tokens("returns")
        return out, metrics

    monkeypatch.setattr("agentrl.trainer.learner.with_advantages", watched)
    metrics = asyncio.run(learner.step(batch, 1))
    assert metrics["kl_reward"] == pytest.approx(distance.mean().item(), rel=1e-4, abs=1e-7)
    offsets = offsets_of(batch["token_ids"])
    for row in range(8):
        span = slice(int(offsets[row]), int(offsets[row + 1]))
        mask = sampled[span]
        each = (batch["rewards"].values()[span] - 0.2 * (now - reference)[span])[mask].double()
        to_go = torch.flip(torch.cumsum(torch.flip(each, [0]), 0), [0])
        assert torch.allclose(seen["returns"][span][mask].double(), to_go, atol=1e-5)


def kl_batch() -> TensorDict:
    """Two episodes, of two rows and of one; d = 0.5 on each sampled token."""
    made = []
    for member, counts in enumerate([(3, 2), (4,)]):
        ledgers = []
        for count in counts:
            ledger = TokenLedger()
            ledger.append_context([5, 6], 0)
            ledger.append_sampled(list(range(7, 7 + count)), [-1.0] * count, [0] * count, 0)
            ledgers.append(ledger)
        made.append(Trajectory("made-up", Task("t", 0), member=member, ledgers=ledgers, reward=1.0))
    batch = collate(made)
    sampled, offsets = batch["sampled"].values(), offsets_of(batch["sampled"])
    columns = {"old_logprobs": -1.0 * sampled, "ref_logprobs": -1.5 * sampled}
    return batch.update({name: nested_tensor(column, offsets) for name, column in columns.items()})


def test_the_kl_of_all_ledgers_is_taken_off_the_reward_of_an_episode() -> None:
    """coef 0.2, d 0.5: 5 sampled tokens cost 0.5, 4 cost 0.4; so the group's advantages are -+0.05."""
    algorithm = AlgorithmConfig(advantage=Choice(name="dr_grpo"), kl=KlConfig(coef=0.2, where="reward"))
    out, metrics = with_advantages(Ragged.of(kl_batch()), algorithm, 0.2)
    assert metrics["kl_reward"] == pytest.approx(0.5)
    per_row = [float(out.row("advantages")[row][-1]) for row in range(3)]
    assert per_row == pytest.approx([-0.05, -0.05, 0.05], abs=1e-6)


def test_the_coefficient_is_steered_by_episodes_and_only_where_the_policy_learns(tiny: str) -> None:
    """Horizon 20 and 8 episodes: 0.1 (1 - 0.2 x 8 / 20) = 0.092 after the first step in which the policy learned."""
    kl = KlConfig(coef=0.1, target=0.5, horizon=20, where="reward")
    algorithm = AlgorithmConfig(advantage=Choice(name="gae"), minibatch=8, proximal="recompute", kl=kl)
    learner = opened(tiny, config_of(algorithm=algorithm, critic=toy_critic(warmup=2)))
    found = []
    for step in range(3):
        asyncio.run(learner.step(collate(trajectories(8, seed=step)), step))
        found.append(learner.kl_coef)
    assert found == pytest.approx([0.1, 0.1, 0.092])
    two = opened(tiny, config_of(algorithm=algorithm.model_copy(update={"advantage": Choice(name="grpo")})))
    batch = collate(trajectories(8))
    batch["member"] //= 2  # two ledgers an episode: 4 episodes
    asyncio.run(two.step(batch, 0))
    assert two.kl_coef == pytest.approx(0.1 * (1 - 0.2 * 4 / 20))


def test_a_penalty_in_the_reward_is_steered_by_what_was_taken_off(tiny: str) -> None:
    """The engine's policy lies 2 from the reference, the trainer's at it; target 1: the penalty, which is of the first, grows."""
    algorithm = AlgorithmConfig(
        advantage=Choice(name="reinforce_pp"), minibatch=8, kl=KlConfig(coef=0.1, target=1.0, horizon=20, where="reward")
    )
    learner = opened(tiny, config_of(algorithm=algorithm))
    batch = collate(trajectories(8))
    now = learner.actors.run(Actor.compute_logprob, batch)["logprobs"].values()
    batch["logprobs"].values().copy_((now + 2.0) * batch["sampled"].values())
    metrics = asyncio.run(learner.step(batch, 0))
    assert metrics["kl_reward"] == pytest.approx(2.0, abs=1e-4) and abs(metrics["kl_reference"]) < 0.1
    assert metrics["kl_coef"] == 0.1 and learner.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 8 / 20))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"kl": KlConfig(coef=0.1, kind="k1")}, "mean 0"),
        ({"kl": KlConfig(coef=0.1, where="reward", kind="k1+")}, "changes a gradient"),
        ({"length_norm": 5}, "it is not used"),
        ({"loss": Choice(name="decoupled_ppo"), "proximal": "recompute", "correction": Choice(name="truncated")}, "twice"),
    ],
)
def test_what_would_mean_nothing_or_count_twice_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_learner(config_of(algorithm=AlgorithmConfig(**sections)))
    check_learner(
        config_of(
            algorithm=AlgorithmConfig(
                loss=Choice(name="decoupled_ppo"), proximal="recompute", correction=Choice(name="reject_sequence")
            )
        )
    )


def test_the_constant_length_is_what_an_episode_may_sample() -> None:
    norm = AlgorithmConfig(aggregate="seq_mean_token_sum_norm")
    for turns, tokens, most, expected in ((4, 10, 1000, 40), (4, 10, 30, 30)):
        rollout = RolloutConfig(max_turns=turns, max_turn_tokens=tokens, max_episode_tokens=most)
        assert fill_length_norm(config_of(algorithm=norm, rollout=rollout)).length_norm == expected
    given = norm.model_copy(update={"length_norm": 7})
    assert fill_length_norm(config_of(algorithm=given)).length_norm == 7
    assert fill_length_norm(config_of()).length_norm is None


# -- the reward model's score ----------------------------------------------------------------------


def test_a_score_lies_on_the_last_sampled_token_of_the_episode() -> None:
    """The last ledger ends with an observation, and samples nothing; the score of its row counts all the same."""
    first, second = TokenLedger(), TokenLedger()
    first.append_context([5, 6], 0)
    first.append_sampled([7, 8], [-1.0, -1.0], [0, 0], 0)
    first.append_context([9], 0)
    second.append_context([5, 6, 7], 1)
    batch = collate([Trajectory("made-up", Task("t", 0), member=0, ledgers=[first, second], reward=0.0)])
    out = with_scores(Ragged.of(batch), torch.tensor([1.0, 3.0]), 2.0)
    assert out.tokens("rewards").tolist() == [0, 0, 0, 6, 0, 0, 0, 0] and out.row("reward").tolist() == [6, 6]


def test_ratio_one_makes_the_loss_minus_the_mean_advantage(tiny: str) -> None:
    """The sign of the policy term: with ratios of 1 ppo_clip's loss is -mean A, and a step raises the logprob of A > 0."""
    batch = make_batch(6)
    sampled = batch["sampled"].values()
    actor = start(tiny, lr=1e-4, max_grad_norm=1e9)
    now = actor.run(Actor.compute_logprob, batch)["logprobs"].values()
    batch["logprobs"].values().copy_(now)
    batch["advantages"].values().copy_(sampled.float())
    metrics = train_batch(actor, Actor.update, batch, AlgorithmConfig(minibatch=6))
    assert metrics["loss"] == pytest.approx(-1.0, abs=1e-6) and metrics["mismatch_max"] < 1e-5
    after = actor.run(Actor.compute_logprob, batch)["logprobs"].values()
    assert after.sum() > now.sum() + 1e-3
    assert math.isclose(metrics["ratio"], 1.0, abs_tol=1e-6) and np.isclose(metrics["clip_fraction"], 0.0)
