"""Rare successes that are kept (`algorithm.experience`) and demonstrations: which, for how long, and what they do to a step."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from agentrl.config.schema import AlgorithmConfig, Choice, DemonstrationsConfig, ExperienceConfig, KlConfig, RolloutConfig
from agentrl.contrib.experience.hooks import RARE, Demonstrations, Echo, Experience, check_experience, demonstration_rows
from agentrl.data.expert_routing import FREE
from agentrl.data.rows import Ragged, collate, nested_tensor, offsets_of
from agentrl.data.schedule import FRESH, ORIGIN, cut_minibatches
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Task, Trajectory
from agentrl.run.checks import RunStart
from agentrl.trainer.learner import Learner, check_learner
from agentrl.trainer.minibatch import Term, with_selection
from agentrl.trainer.update_hooks import join_rows
from agentrl.utils.errors import CheckpointError, ConfigError
from tests.trainer.learners import config_of, opened
from tests.trainer.train_batches import toy_critic, toy_optim, trajectories

CLIP = 0.2
RLOO, PLAIN = Choice(name="rloo"), Choice(name="ppo_clip", args={"dual_clip": None})


# -- a batch, and the loss of a step by hand -----------------------------------------------------------


def plain(tiny: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager").double()


def logprobs(model: Any, batch: TensorDict, row: int, temperature: float) -> torch.Tensor:
    """Of the sampled tokens of a row, by a plain forward pass."""
    ids, sampled = batch["token_ids"][row].long(), batch["sampled"][row]
    table = torch.log_softmax(model(ids[None]).logits[0].double() / temperature, -1)
    return table[:-1][sampled[1:]].gather(1, ids[sampled][:, None]).squeeze(1)


def members_of(seed: int, group: int) -> TensorDict:
    """Two groups of four: the even members' rewards are 1, the others' 0; each second episode has two ledgers."""
    members, spare = trajectories(8, seed=seed), trajectories(8, seed=seed + 100)
    for place, member in enumerate(members):
        member.reward = float(place % 2 == 0)
        member.ledgers += spare[place].ledgers if place % 4 in (1, 2) else []
    return collate(members, [group + place // 4 for place in range(8)])


def played(tiny: str, seed: int, group: int, temperature: float = 1.0, noise: float = 0.3) -> TensorDict:
    """The same; their behaviour logprobs are the model's own, with noise."""
    batch = members_of(seed, group)
    model, shift = plain(tiny), np.random.default_rng(seed)
    with torch.no_grad():
        for row in range(len(batch)):
            found = logprobs(model, batch, row, temperature)
            found = found + noise * torch.from_numpy(shift.standard_normal(len(found)))
            batch["logprobs"][row][batch["sampled"][row]] = found.float()
    batch[RARE] = torch.zeros(len(batch), dtype=torch.bool)
    return batch


def advantage(reward: float) -> float:
    """rloo of two successes and two failures: R minus the mean of the other three."""
    return reward - (2 - reward) / 3


def policy_loss(model: Any, batch: TensorDict, row: int, temperature: float) -> torch.Tensor:
    ratio = (logprobs(model, batch, row, temperature) - batch["logprobs"][row][batch["sampled"][row]].double()).exp()
    gain = advantage(float(batch["reward"][row]))
    return -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)


def by_episode(batch: TensorDict, rows: Any, losses: Any) -> dict[tuple[int, int], torch.Tensor]:
    """The token losses of each episode, over its rows."""
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    for row in rows:
        found.setdefault((int(batch["group"][row]), int(batch["member"][row])), []).append(losses(row))
    return {key: torch.cat(parts) for key, parts in found.items()}


def summed(losses: dict[Any, torch.Tensor], mode: str) -> torch.Tensor:
    return sum(torch.stack([x.sum() if mode == "token_mean" else x.mean() for x in losses.values()]))  # type: ignore[return-value]


def parts(losses: dict[Any, torch.Tensor], mode: str) -> int:
    return sum(map(len, losses.values())) if mode == "token_mean" else len(losses)


def experience(**changed: Any) -> ExperienceConfig:
    return ExperienceConfig(**{"share": 0.5, **changed})


def algorithm(**changed: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**{"advantage": RLOO, "loss": PLAIN, "minibatch": 64, **changed})


def keep(learner: Any, batch: TensorDict, kept: list[tuple[int, int]]) -> None:
    """Let the learner see the batch as if it had been an update's, whose episodes `kept` were rare."""
    pairs = zip(batch["group"].tolist(), batch["member"].tolist(), strict=True)
    batch[RARE] = torch.tensor([pair in kept for pair in pairs])
    view, _, broken = asyncio.run(learner.ready(batch))
    assert not broken
    learner.hooks["experience"].keep(view)


def store_of(seed: int = 0, **changed: Any) -> Experience:
    return Experience(ExperienceConfig(**changed), config_of(seed=seed))


def shown_of(**marks: Any) -> TensorDict:
    """Two transcripts, of the groups 20 and 21."""
    gold = trajectories(2, seed=3)
    for one in gold:
        one.member, one.reward = -2, None
        for name, value in marks.items():
            setattr(one, name, value)
    return collate(gold, [20, 21], allow_unscored=True)


def check_step(metrics: dict[str, float], model: Any, loss: torch.Tensor) -> None:
    """The loss of a step and the norm of its gradient are those by hand."""
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def step(learner: Learner, batch: TensorDict, number: int, shown: TensorDict | None = None) -> dict[str, float]:
    """A training step, to which the transcripts `shown` are added as demonstrations."""
    hook = learner.hooks.get("demonstrations")
    if shown is not None and isinstance(hook, Demonstrations):
        hook._ready = demonstration_rows(shown), {}
    return asyncio.run(learner.step(batch, number))


@pytest.mark.parametrize(("term", "mode", "temperature", "cut"), [
    ("policy", "token_mean", 1.0, False), ("policy", "seq_mean_token_mean", 1.5, False),
    ("supervised", "seq_mean_token_mean", 1.5, False),
    ("policy", "token_mean", 1.0, True), ("policy", "seq_mean_token_mean", 1.0, True),
    ("", "token_mean", 1.0, True), ("", "seq_mean_token_mean", 1.0, True),
])  # fmt: skip
def test_loss_and_gradient_of_a_step_are_those_by_hand(tiny: str, term: str, mode: str, temperature: float, cut: bool) -> None:
    """`cut`: of each group a success and a failure are masked; they count in the baseline alone, also of what was kept. Without
    a `term` nothing is added."""
    own_keys: dict[str, Any] = {"truncated": "mask"} if cut else {}
    if term:
        own_keys |= {"experience": experience(term=term, coef=0.7), "demonstrations": DemonstrationsConfig(coef=0.3)}
    chosen = algorithm(aggregate=mode, **own_keys)
    learner = opened(tiny, config_of(algorithm=chosen, rollout=RolloutConfig(temperature=temperature)))
    old, new = played(tiny, 1, 10, temperature), played(tiny, 2, 20, temperature)
    for batch in (old, new):
        batch["truncated"] = ((batch["member"] == 0) | (batch["member"] == 3)) & cut
    shown, wanted = shown_of(truncated=cut), [(10, 0), (10, 2), (11, 2)]  # of which two have two ledgers
    if term:
        keep(learner, old, wanted)
    metrics = step(learner, new, 1, shown if term else None)  # the mask is for what was sampled

    model = plain(tiny)
    trained = (~new["truncated"]).nonzero()[:, 0].tolist()
    own = by_episode(new, trained, lambda row: policy_loss(model, new, row, temperature))
    assert metrics["episodes_trained"] == len(own) == (4 if cut else 8)
    assert metrics["tokens_trained"] == sum(map(len, own.values()))
    loss = summed(own, mode) / parts(own, mode)
    pairs = zip(old["group"].tolist(), old["member"].tolist(), old["truncated"].tolist(), strict=True)
    rows = [row for row, (group, member, masked) in enumerate(pairs) if (group, member) in wanted and not masked]
    assert len(rows) == (4 if cut else 5)
    if term == "policy":
        again = by_episode(old, rows, lambda row: policy_loss(model, old, row, temperature))
        loss = loss + 0.7 * summed(again, mode) / parts(own, mode)
    elif term:
        loss = loss - 0.7 * torch.cat([logprobs(model, old, row, temperature) for row in rows]).mean()
    if term:
        loss = loss - 0.3 * torch.cat([logprobs(model, shown, row, temperature) for row in range(2)]).mean()
        assert metrics["experience/episodes"] == (2 if cut else 3) and metrics["experience/age_max"] == 1
    check_step(metrics, model, loss)
    if term == "policy":  # the weights are those of before the step
        now = torch.cat([logprobs(model, old, row, temperature).detach() for row in rows])
        apart = now - torch.cat([old["logprobs"][row][old["sampled"][row]].double() for row in rows])
        assert metrics["experience/kl_behaviour"] == pytest.approx(-apart.mean().item(), rel=1e-3) and apart.mean().abs() > 1e-3
        assert metrics["experience/log_ratio_max"] == pytest.approx(apart.abs().max().item(), rel=1e-3)
        assert metrics["experience/ratio"] == pytest.approx(apart.exp().mean().item(), rel=1e-3)


@pytest.mark.parametrize("sharing", ["off", "auto"])
@pytest.mark.parametrize(("mode", "temperature"), [("token_mean", 1.0), ("seq_mean_token_mean", 1.5)])
def test_results_of_tools_are_learned_by_their_likelihood(tiny: str, sharing: str, mode: str, temperature: float) -> None:
    """Loss and gradient by hand: of each row the tokens after its first sampled one that the policy did not sample."""
    config = config_of(
        algorithm=algorithm(aggregate=mode, truncated="mask"),
        rollout=RolloutConfig(temperature=temperature),
        optim=toy_optim(prefix_sharing=sharing),
    )
    learner = opened(tiny, config)
    learner.hooks["echo"] = Echo(coef=0.3)
    batch = played(tiny, 2, 20, temperature)
    batch["truncated"] = batch["member"] == 3  # no policy loss, but what its calls returned is true
    metrics = step(learner, batch, 1)

    model = plain(tiny)
    trained = [row for row in range(len(batch)) if int(batch["member"][row]) != 3]
    own = by_episode(batch, trained, lambda row: policy_loss(model, batch, row, temperature))
    returned = []
    for row in range(len(batch)):
        sampled = batch["sampled"][row].tolist()
        after = [place for place in range(sampled.index(True), len(sampled)) if not sampled[place]]
        ids = batch["token_ids"][row].long()
        table = torch.log_softmax(model(ids[None]).logits[0].double() / temperature, -1)
        returned += [-table[place - 1, ids[place]] for place in after]
    assert len(returned) > 20 and metrics["echo/tokens"] == len(returned)
    mean = torch.stack(returned).mean()
    loss = summed(own, mode) / parts(own, mode) + 0.3 * mean
    check_step(metrics, model, loss)
    assert metrics["echo/nll"] == pytest.approx(mean.item(), rel=1e-4)
    assert metrics["tokens_trained"] == sum(map(len, own.values()))
    assert metrics["prefix_ratio"] > 1.5 if sharing == "auto" else metrics["prefix_ratio"] == 1


@pytest.mark.parametrize("coef", [0.0, -1.0, float("nan"), float("inf")])
def test_echo_needs_a_coefficient_above_0(coef: float) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.echo\.coef: .* is not a number above 0"):
        Echo(coef)


def test_a_batch_that_does_not_say_which_episodes_were_cut_cannot_be_masked(tiny: str) -> None:
    learner = opened(tiny, config_of(algorithm=algorithm(truncated="mask")))
    with pytest.raises(ConfigError, match=r'algorithm\.truncated = "mask": the batch has no column truncated'):
        asyncio.run(learner.step(played(tiny, 2, 20).exclude("truncated"), 0))


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "gmpo", "cispo", "sapo", "decoupled_ppo", "truncated"])
def test_episodes_that_are_added_again_count_twice_in_every_loss_and_mean(tiny: str, loss: str) -> None:
    """The update's own episodes as kept ones: loss and gradient are twice as large, whatever a row's loss hangs on."""
    modes = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
    batch = played(tiny, 2, 20)
    for mode in modes if loss in ("ppo_clip", "gspo") else modes[1:2]:
        own: dict[str, Any] = {"aggregate": mode, "loss": Choice(name=loss)}
        if loss in ("decoupled_ppo", "truncated"):
            own["proximal"] = "recompute"
        if loss == "truncated":
            own |= {"loss": Choice(name="ppo_clip"), "correction": Choice(name="truncated")}
        found = []
        for kept in (None, experience(share=1.0)):
            optim = toy_optim(max_grad_norm=1e9)
            learner = opened(tiny, config_of(algorithm=algorithm(**own, experience=kept), optim=optim))
            if kept is not None:
                keep(learner, batch.clone(), [(g, m) for g in (20, 21) for m in range(4)])
                for _, rows in learner.hooks["experience"]._kept:  # other groups, as those of another update would be
                    rows["group"] += 100
            found.append(asyncio.run(learner.step(batch, 1)))
        once, twice = found
        assert abs(once["loss"]) > 1e-5 and once["grad_norm"] > 0
        assert twice["loss"] == pytest.approx(2 * once["loss"], rel=1e-3), mode
        assert twice["grad_norm"] == pytest.approx(2 * once["grad_norm"], rel=1e-3), mode
        assert twice["episodes_trained"] == once["episodes_trained"] == 8


@pytest.mark.parametrize("groups", ["split", "kept"])
def test_shared_prefixes_change_nothing_about_what_is_added(tiny: str, groups: str) -> None:
    """Members of one kept group share their prompt, a demonstration that of its group; nothing joins a prefix that it lacks."""
    found = []
    for mode in ("off", "on"):
        added = {"experience": experience(share=1.0), "demonstrations": DemonstrationsConfig(coef=0.3)}
        chosen = algorithm(groups=groups, minibatch=8, **added)
        learner = opened(tiny, config_of(algorithm=chosen, optim=toy_optim(prefix_sharing=mode)))
        keep(learner, long_prompts(1, 10), [(10, 0), (10, 1), (11, 2)])
        gold = long_prompts(2, 20, 2)  # the prompts of the update's own groups
        gold["member"] -= 9
        found.append(step(learner, long_prompts(2, 20), 1, gold))
    off, on = found
    assert off.pop("prefix_ratio") == 1.0 and on.pop("prefix_ratio") > 1.5
    assert off.pop("prefix_ratio_possible") == 1.0 and on.pop("prefix_ratio_possible") > 1.5
    assert on == pytest.approx(off, rel=1e-4, abs=1e-5) and off["experience/episodes"] == 3


def long_prompts(seed: int, group: int, size: int = 4) -> TensorDict:
    """Two groups of `size`, each behind a prompt of 60 tokens of its own."""
    rng, members = np.random.default_rng(seed), []
    prompts = [rng.integers(7, 400, 60).tolist() for _ in range(2)]
    for place in range(2 * size):
        ledger = TokenLedger()
        ledger.append_context(prompts[place // size], 0)
        ledger.append_sampled(rng.integers(7, 400, 6).tolist(), [-6.0] * 6, [0] * 6, 0)
        task = Task(id=f"t{place // size}", seed=seed)
        members.append(Trajectory("made-up", task, member=place % size, ledgers=[ledger], reward=float(place % 2)))
    batch = collate(members, [group + place // size for place in range(2 * size)])
    batch[RARE] = torch.zeros(len(batch), dtype=torch.bool)
    return batch


ALONE = {
    "critic": ({"advantage": Choice(name="gae")}, ["critic/loss", "critic/value", "critic/grad_norm", "advantage_abs"]),
    "reference": ({"kl": KlConfig(coef=0.5)}, ["kl_reference"]),
    "correction": ({"proximal": "recompute", "correction": Choice(name="masked", args={"cap": 1.1})}, []),
}


@pytest.mark.parametrize("part", ALONE)
def test_what_is_added_is_in_the_supervised_term_alone(tiny: str, part: str) -> None:
    """Critic, KL and correction are of an update's own episodes; the added term has no ratio."""
    own, same = ALONE[part]
    found = []
    for kept in (None, experience(term="supervised", share=1.0)):
        more = {"critic": toy_critic()} if part == "critic" else {}
        learner = opened(tiny, config_of(algorithm=algorithm(**own, experience=kept), **more))
        if part == "reference":
            asyncio.run(learner.step(played(tiny, 3, 30), 0))  # so that the policy is not the reference any more
        if kept is not None:
            keep(learner, played(tiny, 1, 10), [(10, 0), (11, 2)])
        found.append(asyncio.run(learner.step(played(tiny, 2, 20), 1)))
    without, added = found
    for name in (*same, "tokens_trained"):
        assert (without[name] != 0 or part == "critic") and added[name] == pytest.approx(without[name], rel=1e-5), name
    assert added["experience/nll"] > 1
    assert added["loss"] == pytest.approx(without["loss"] + added["experience/nll"], rel=1e-5)
    assert (without["tokens_trained"] < int(played(tiny, 2, 20)["sampled"].values().sum())) == (part == "correction")


def test_nothing_is_kept_while_only_the_critic_learns(tiny: str) -> None:
    own = algorithm(advantage=Choice(name="gae"), experience=experience(term="supervised"))
    learner = opened(tiny, config_of(algorithm=own, critic=toy_critic(warmup=1)))
    held = []
    for step in range(2):
        batch = played(tiny, step, 10 * step)
        batch[RARE] = torch.ones(len(batch), dtype=torch.bool)
        asyncio.run(learner.step(batch, step))
        held.append(len(learner.hooks["experience"]._kept))
    assert held == [0, 8]


def test_an_update_that_teaches_nothing_by_itself_is_still_compared_with_the_engine(tiny: str) -> None:
    """All members of its groups score alike; what is added teaches, and is no measure of the engine."""
    learner = opened(tiny, config_of(algorithm=algorithm(experience=experience())))
    keep(learner, played(tiny, 1, 10), [(10, 0), (11, 2)])
    new = played(tiny, 2, 20, noise=0.0)
    new["reward"] = torch.ones_like(new["reward"])
    metrics = asyncio.run(learner.step(new, 1))
    assert metrics["experience/episodes"] == 2 and metrics["grad_norm"] > 0.01
    assert metrics["mismatch_max"] < 1e-4, "the noise of kept episodes' log probabilities is not the engine's"


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_tokens_are_picked_among_an_updates_own(tiny: str, loss: str) -> None:
    """The same as without kept episodes, whose high covariances would be picked first and move the means."""
    args = {"low": -9.0, "high": 9.0} if loss == "clip_cov" else {}
    choice = Choice(name=loss, args={"share": 0.2, **args})
    fresh = Ragged.of(played(tiny, 2, 20))
    noise = torch.randn(int(fresh.offsets[-1]), generator=torch.Generator().manual_seed(0))
    fresh = fresh.with_tokens(advantages=noise * fresh.tokens("sampled"))
    store = store_of(share=1.0)
    old = kept_of(tiny, 10, 0)
    store.keep(old.with_tokens(advantages=5.0 * old.tokens("logprobs")))
    kept, _ = store.draw(1, 8)
    assert kept is not None
    picked = []
    for view in (fresh, join_rows(fresh, [(store.term, kept)], "off")):
        picked.append(with_selection(view, [np.arange(len(view))], choice, 7).tokens("picked"))
    assert int(picked[0].sum()) > 5
    assert torch.equal(picked[1][: len(picked[0])], picked[0]) and not picked[1][len(picked[0]) :].any()


def test_experts_that_nobody_recorded_are_free(tiny: str) -> None:
    batch = played(tiny, 2, 20)
    offsets = offsets_of(batch["sampled"])
    batch["experts"] = nested_tensor(torch.ones(int(offsets[-1]), 2, 3, dtype=torch.uint8), offsets)
    view = Ragged.of(batch)
    view = view.with_tokens(advantages=torch.ones(int(view.offsets[-1])))
    store = store_of(share=1.0)
    store.keep(view.with_rows(**{RARE: torch.ones(len(view), dtype=torch.bool)}))
    kept, _ = store.draw(1, 8)
    assert kept is not None
    gold = Term("demonstrations", True, 1.0), demonstration_rows(collate(trajectories(2, seed=3), [30, 30]))
    whole = join_rows(view, [(store.term, kept), gold], "off")
    origin, experts = whole.numbers(ORIGIN), whole.batch["experts"]
    for row in range(len(whole)):
        assert (experts[row] == (FREE[torch.uint8] if origin[row] == 2 else 1)).all()


def test_every_other_number_of_the_row_is_of_the_updates_own_episodes(tiny: str) -> None:
    """The same step with and without kept episodes and demonstrations differs in the loss, its gradient, and names of its own."""
    rows = []
    for more in ({}, {"experience": experience(coef=1.0), "demonstrations": DemonstrationsConfig()}):
        learner = opened(tiny, config_of(algorithm=algorithm(entropy_bonus=0.01, **more)))
        if "experience" in learner.hooks:
            keep(learner, played(tiny, 1, 10), [(10, 0), (11, 2)])
        shown = collate(trajectories(1, seed=3), [30]) if more else None
        rows.append(step(learner, played(tiny, 2, 20), 1, shown))
    without, added = rows
    apart = {"loss", "grad_norm", "prefix_ratio"}
    assert {name: added[name] for name in without if name not in apart} == pytest.approx(
        {name: value for name, value in without.items() if name not in apart}, rel=1e-5
    )
    assert abs(added["loss"] - without["loss"]) > 0.01
    assert {name.split("/")[0] for name in set(added) - set(without)} == {"experience", "demonstrations"}


def test_kept_episodes_change_neither_the_steps_nor_what_else_is_in_one(tiny: str) -> None:
    new, store = Ragged.of(played(tiny, 2, 20)), store_of(share=0.5)
    new = new.with_tokens(advantages=torch.ones(int(new.offsets[-1])))
    store.keep(kept_of(tiny, 10, 0))
    kept, _ = store.draw(1, 8)
    assert kept is not None
    both = join_rows(new, [(store.term, kept)], "off")
    for groups in ("split", "kept"):
        config = algorithm(minibatch=4, groups=groups)
        plain_parts, with_parts = cut_minibatches(new, config, 0, 1), cut_minibatches(both, config, 0, 1)
        assert len(plain_parts) == len(with_parts) == 2
        for before, after in zip(plain_parts, with_parts, strict=True):
            assert after[: len(before)].tolist() == before.tolist()
            assert (both.numbers(ORIGIN)[after[len(before) :]] != FRESH).all() and len(after) > len(before)
        dealt = np.concatenate(with_parts)
        again = np.concatenate(cut_minibatches(both, config, 0, 1))
        assert dealt.tolist() == again.tolist(), "a resumed run deals them out alike"
        assert sorted(dealt.tolist()) == list(range(len(both)))
        for part in with_parts:  # an episode is in one step, and of kept groups all of it
            units = both.numbers("group") if groups == "kept" else both.episode
            assert not set(units[part]) & {unit for other in with_parts if other is not part for unit in units[other]}


# -- which are kept, and for how long ------------------------------------------------------------------


def outcome(index: int, successes: list[bool | None]) -> Group:
    members = trajectories(len(successes), seed=index)
    for place, (member, success) in enumerate(zip(members, successes, strict=True)):
        member.member, member.success, member.reward = place, success, None if success is None else float(success)
    return Group(index, 0, members)


def test_successes_of_groups_in_which_few_succeeded_are_marked() -> None:
    groups = [outcome(0, [True, False, False, False]), outcome(1, [True, True, False, False]), outcome(2, [None, True, False])]
    members = [t for group in groups for t in group.scored()]
    batch = collate(members, [group.index for group in groups for _ in group.scored()])
    for rare, marked in ((0.25, [(0, 0)]), (0.5, [(0, 0), (1, 0), (1, 1), (2, 1)])):
        found = asyncio.run(store_of(rare=rare).prepare(batch, groups, []))
        rows = zip(found["group"].tolist(), found["member"].tolist(), found[RARE].tolist(), strict=True)
        assert [(group, member) for group, member, rare_one in rows if rare_one] == marked


def kept_of(tiny: str, group: int, version: int) -> Ragged:
    """A batch of eight rare episodes, sampled under `version`."""
    batch = played(tiny, group, group)
    batch["versions"].values()[batch["sampled"].values()] = version
    view = Ragged.of(batch)
    view = view.with_tokens(advantages=torch.ones(int(view.offsets[-1])))
    return view.with_rows(**{RARE: torch.ones(len(view), dtype=torch.bool)})


def test_the_newest_are_kept_and_none_beyond_its_age_and_they_are_saved(tiny: str, tmp_path: Path) -> None:
    store, again = (store_of(seed=5, size=12, max_age=3, share=0.25) for _ in range(2))
    assert store.draw(0, 16) == (None, {"experience/held": 0.0, "experience/episodes": 0.0})
    store.keep(kept_of(tiny, 10, 0))
    store.keep(kept_of(tiny, 20, 2))
    assert len(store._kept) == 12  # four of the older ones left first
    store.save(tmp_path)
    again.load(tmp_path)
    for one in (store, again):
        rows, metrics = one.draw(3, 16)
        assert rows is not None and metrics["experience/episodes"] == 4 and metrics["experience/age_max"] in (1, 3)
        assert set(rows["group"].tolist()) <= {10, 11, 20, 21}
    other, last = store.draw(3, 16)[0], again.draw(3, 16)[0]
    assert other is not None and last is not None
    for name in ("token_ids", "logprobs", "advantages"):
        assert torch.equal(other[name].values(), last[name].values())
    assert store.draw(4, 16)[1]["experience/held"] == 8  # those of version 0 are 4 updates old
    assert store.draw(6, 16) == (None, {"experience/held": 0.0, "experience/episodes": 0.0})
    store.save(tmp_path)
    again.load(tmp_path)
    assert len(again._kept) == 0
    with pytest.raises(CheckpointError, match=r"without algorithm\.experience"):
        again.load(tmp_path / "missing")


def test_an_episode_is_as_old_as_its_oldest_token_and_max_age_itself_is_drawn(tiny: str) -> None:
    """All tokens of version 4 but each row's first, which are of 1: age 3 at update 4, which is the bound."""
    view = kept_of(tiny, 10, 4)
    for row in range(len(view)):
        span = slice(int(view.offsets[row]), int(view.offsets[row + 1]))
        view.tokens("versions")[span][view.tokens("sampled")[span].nonzero()[0]] = 1
    store = store_of(max_age=3, share=1.0)
    store.keep(view)
    drawn = store.draw(4, 8)[1]
    assert (drawn["experience/held"], drawn["experience/age_mean"], drawn["experience/age_max"]) == (8, 3, 3)
    assert store.draw(5, 8) == (None, {"experience/held": 0.0, "experience/episodes": 0.0})


def test_the_share_is_rounded_and_each_update_draws_anew(tiny: str) -> None:
    store = store_of(share=0.25, max_age=99)
    store.keep(kept_of(tiny, 10, 0))
    counts = [store.draw(1, fresh)[1]["experience/episodes"] for fresh in (1, 2, 5, 6, 99)]
    assert counts == [0, 1, 1, 2, 8]  # 0.25, 0.5, 1.25, 1.5 of them, and all that there are

    def drawn(step: int) -> tuple[tuple[int, int], ...]:
        rows = store.draw(step, 8)[0]
        assert rows is not None
        return tuple(zip(rows["group"].tolist(), rows["member"].tolist(), strict=True))

    assert drawn(3) == drawn(3) and len({drawn(step) for step in range(8)}) > 3


def test_an_episode_without_an_advantage_is_kept_for_the_supervised_term_alone(tiny: str) -> None:
    view = kept_of(tiny, 10, 0)
    idle = view.with_tokens(advantages=torch.zeros(int(view.offsets[-1])))
    for term, count in (("policy", 0), ("supervised", 8)):
        store = store_of(term=term)
        store.keep(idle)
        assert len(store._kept) == count


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("sections", "named"), [
    ({"rollout": {"max_staleness": 8}}, r"max_age = 8.*rollout\.max_staleness = 8.*at least 9"),
    ({"algorithm": {"loss": "reinforce"}}, r'"reinforce" has no ratio'),
    ({"algorithm": {"proximal": "recompute"}}, r'proximal = "recompute".*nothing corrects'),
    ({"algorithm": {"advantage": "gae"}, "critic": {}}, r'"gae" is of a critic'),
    ({"algorithm": {"proximal": "recompute", "correction": "truncated"}}, None),
    ({"algorithm": {"proximal": "recompute", "loss": "decoupled_ppo"}}, None),
])  # fmt: skip
def test_what_could_not_be_right_is_refused_by_name(sections: dict[str, Any], named: str | None) -> None:
    def made(term: str) -> Any:
        given = sections.get("algorithm", {})
        own = {name: value if name == "proximal" else Choice(name=value) for name, value in given.items()}
        kept = AlgorithmConfig(**own, experience=ExperienceConfig(term=term))
        more = {"critic": toy_critic()} if "critic" in sections else {}
        return config_of(algorithm=kept, rollout=RolloutConfig(**sections.get("rollout", {})), optim=toy_optim(), **more)

    with nullcontext() if named is None else pytest.raises(ConfigError, match=named):
        check_experience(RunStart(made("policy"), {}))
        check_learner(made("policy"))
    if "rollout" not in sections:
        check_experience(RunStart(made("supervised"), {}))
