"""Groups of several environments in one run: in which shares they are drawn, what a resume draws, and what a collector does."""

import json
import random
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import Choice, RolloutConfig
from agentrl.data.trajectory import Group, Task, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec
from agentrl.rollout.collector import Collector
from agentrl.rollout.episode import Limits, Policy
from agentrl.rollout.mixtures import EnvOutcome, MixedTasks, Part, make_mixture, pick
from agentrl.rollout.player import LocalPlayer, RunEnv
from agentrl.utils.errors import ConfigError, NothingScoredError, StalledError
from tests.rollout.conftest import LENGTH, FaultyEngine, only_update, resume, steps
from tests.rollout.test_samplers import BUCKETS, STAGES

ENV = EnvRef("key_value")
POOL = Choice(name="uniform", args={"pool": 12})
FIXED, BY_SUCCESS, BY_TOKENS = Choice(name="fixed"), Choice(name="by_success"), Choice(name="by_tokens")


def mixed(weights: dict[str, Any], mixture: Choice = FIXED, seed: int = 3, sampler: Choice = POOL) -> MixedTasks:
    return MixedTasks([Part(name, ENV, sampler, weight) for name, weight in weights.items()], mixture, seed)


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.0]), min_size=2),
    st.integers(0, 2**40),
    st.integers(0, 10_000),
)
def test_shares_converge_to_the_weights_and_a_weight_of_0_is_never_drawn(
    weights: dict[str, float], seed: int, first: int
) -> None:
    total = sum(weights.values())
    if not total:
        return
    drawn = Counter(pick(weights, seed, index) for index in range(first, first + 1000))
    for name, weight in weights.items():
        assert abs(drawn[name] - 1000 * weight / total) <= 5, "independent draws would be off by 16"
        assert weight > 0 or name not in drawn


def test_nothing_is_asked_of_an_environment_that_no_group_was_in() -> None:
    """Its sampler has no pool yet: `success_weighted` divided by 0, and a resume counted the tasks of one that trains nothing."""
    sampler = Choice(name="success_weighted", args={"pool": 3})
    tasks, restored = (mixed({"a": 1.0, "b": [(0, 0.0), (1, 1.0)]}, sampler=sampler) for _ in range(2))
    tasks.draw(0)
    assert {key.split("/")[1] for key in tasks.metrics() if key.startswith("sampler/")} == {"a"}
    restored.load_json(json.loads(json.dumps(tasks.to_json())))
    assert ["pool" in vars(restored.sources[name]) for name in "ab"] == [True, False]
    assert restored.metrics() == tasks.metrics()
    for one in (tasks, restored):
        one.update(1)
    assert [tasks.draw(index) for index in range(1, 9)] == [restored.draw(index) for index in range(1, 9)]
    assert "sampler/b/success" in restored.metrics()


def test_a_schedule_of_weights_is_followed_update_by_update() -> None:
    tasks = mixed({"a": [(0, 1.0), (10, 0.0)], "b": [(0, 0.0), (10, 3.0)]})
    for step, share in ((0, 1.0), (5, 0.25), (10, 0.0)):
        tasks.update(step)
        drawn = Counter(tasks.draw(1000 * step + index).env for index in range(400))
        assert tasks.shares()["a"] == pytest.approx(share) and drawn["a"] == pytest.approx(400 * share, abs=4)
        assert tasks.metrics()["mixture/a/share"] == pytest.approx(share)


def outcomes(env: str, *successes: float | None, tokens: int = 100) -> list[EnvOutcome]:
    return [EnvOutcome(index, env, success, tokens) for index, success in enumerate(successes)]


def test_by_success_favours_what_is_sometimes_solved_within_a_group() -> None:
    mixture = make_mixture(Choice(name="by_success", args={"decay": 1.0, "floor": 0.05}))
    weights = dict.fromkeys(("solved", "half", "extremes", "new", "unknown"), 1.0)
    mixture.observe(outcomes("solved", *[1.0] * 19) + outcomes("half", *[0.5] * 19) + outcomes("extremes", *[0.0, 1.0] * 10))
    mixture.observe(outcomes("unknown", None, None))
    # Means of 4 s (1 - s) with one group of 1 before: 1/20 (the floor), 20/20, 1/21 (raised to the floor), 1, 1.
    assert mixture.shares(weights) == pytest.approx({"solved": 0.05, "half": 1.0, "extremes": 0.05, "new": 1.0, "unknown": 1.0})
    assert mixture.shares({"half": 2.0, "new": 0.0}) == {"half": 2.0, "new": 0.0}
    mixture = make_mixture(Choice(name="by_success", args={"decay": 0.5}))
    mixture.observe(outcomes("a", 1.0, 0.75))  # (0.5 (0.5 + 0) + 0.75) / (0.5 (0.5 + 1) + 1)
    assert mixture.metrics() == {"a/learnable": pytest.approx(1.0 / 1.75)}


@pytest.mark.parametrize("weights", [{"long": 1.0, "short": 1.0}, {"long": 3.0, "short": 1.0}])
def test_by_tokens_shares_the_sampled_tokens_and_not_the_groups(weights: dict[str, float]) -> None:
    """Groups of about 900 and 100 tokens: over 60 updates of 16 groups the tokens are shared as the weights say."""
    tasks, rng, sampled = mixed(weights, BY_TOKENS), random.Random(1), Counter[str]()
    for step in range(60):
        for index in range(16 * step, 16 * step + 16):
            name = tasks.draw(index).env
            tokens = rng.randint(600, 1200) if name == "long" else rng.randint(50, 150)
            sampled[name] += tokens if step >= 10 else 0
            tasks.finish(index, 0.5, tokens)
        tasks.update(step + 1)
    share = sampled["long"] / sampled.total()
    assert share == pytest.approx(weights["long"] / sum(weights.values()), abs=0.03)
    found = tasks.metrics()
    assert found["mixture/long/group_tokens"] == pytest.approx(900, rel=0.05)
    assert found["mixture/short/share"] > 2 * found["mixture/long/share"], "of the groups, the short ones have more"


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([FIXED, BY_SUCCESS, BY_TOKENS]),
    st.sampled_from([POOL, BUCKETS, STAGES]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 500)), max_size=40),
    st.randoms(use_true_random=False),
)
def test_neither_arrival_order_nor_a_resume_changes_what_is_drawn(
    choice: Choice, sampler: Choice, ends: list[Any], rng: Any
) -> None:
    weights = {"a": [(0, 1.0), (4, 2.0)], "b": 1.0, "c": 0.5}
    straight, shuffled = mixed(weights, choice, sampler=sampler), mixed(weights, choice, sampler=sampler)
    for step, start in enumerate(range(0, len(ends), 5)):
        part = list(enumerate(ends))[start : start + 5]
        drawn = [[tasks.draw(index) for index, _ in part] for tasks in (straight, shuffled)]
        assert drawn[0] == drawn[1]
        for tasks, order in ((straight, part), (shuffled, rng.sample(part, len(part)))):
            for index, (success, tokens) in order:
                # One in seven fails, and says nothing.
                tasks.forget(index) if index % 7 == 6 else tasks.finish(index, success, tokens)
        shuffled.draw(10_000 + step)  # one that still runs
        straight.draw(10_000 + step)
        # At any moment, here with outcomes that nobody knows yet.
        kept = json.loads(json.dumps(shuffled.to_json()))
        shuffled = mixed(weights, choice, sampler=sampler)
        shuffled.load_json(kept)
        straight.update(step + 1)
        shuffled.update(step + 1)
    assert straight.shares() == shuffled.shares() and straight.to_json() == shuffled.to_json()
    # Also those that still ran at the checkpoint get their environment and task again.
    again = [*range(10_000, 10_000 + len(ends) // 5), *range(100, 140)]
    assert [straight.draw(i) for i in again] == [shuffled.draw(i) for i in again]


def test_each_environment_goes_through_its_own_pool() -> None:
    """Of 24 groups in turn each environment gets 12: all tasks of its pool of 12, each once, in orders of their own."""
    tasks = mixed({"a": 1.0, "b": 1.0})
    seeds: dict[str, list[int]] = {"a": [], "b": []}
    for index in range(27):
        choice = tasks.draw(index)
        seeds[choice.env].append(choice.seed)
    assert [len(set(found[:12])) for found in seeds.values()] == [12, 12]
    assert seeds["a"][:12] != seeds["b"][:12]


def test_another_mixture_or_other_environments_do_not_take_up_a_checkpoint() -> None:
    state = mixed({"a": 1.0, "b": 1.0}, BY_TOKENS).to_json()
    for other in (mixed({"a": 1.0, "b": 1.0}), mixed({"a": 1.0, "c": 1.0}, BY_TOKENS)):
        with pytest.raises(ConfigError, match=r"written with 'by_tokens' over \['a', 'b'\]"):
            other.load_json(state)
    with pytest.raises(ConfigError, match=r"one environment"):
        mixed({"a": 1.0, "b": 1.0}).load_json(mixed({"a": 1.0}).to_json())


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -1.0])
def test_a_share_that_is_no_number_is_an_error_and_not_the_end_of_the_other_environments(share: float) -> None:
    tasks = mixed({"a": 1.0, "b": 1.0})
    tasks.mixture.shares = lambda weights: {"a": 1.0, "b": share}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"rollout.mixture 'fixed' returned shares .*, expected one >= 0 for each of a, b"):
        tasks.draw(0)


def test_a_misspelled_mixture_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'by_tokens'"):
        make_mixture(Choice(name="by_token"))
    with pytest.raises(ConfigError, match="unknown argument 'flor'; did you mean 'floor'"):
        make_mixture(Choice(name="by_success", args={"flor": 0.1}))


# -- the collector ---------------------------------------------------------------------------------


def collector(
    renderer: Renderer, weights: dict[str, Any], mixture: Choice = FIXED, *, delay: float = 0.0, seed: int = 0, **rollout: Any
) -> Collector:
    """Of environments that differ in name and, if it is "broken", in that no request of it is answered."""
    engine, broken = (FaultyEngine(renderer.stop_token_ids[0], max_delay=delay, seed=seed, fail=fail) for fail in (0.0, 1.0))
    config = RolloutConfig(**{"groups": 4, "group_size": 2, "max_turns": 2, "retries": 0, "stall_timeout": 20.0, **rollout})
    limits = Limits.of(config, 2048)
    policies = {name: Policy(broken if name == "broken" else engine, renderer) for name in weights}
    envs = [RunEnv(name, ENV, policies[name], compile_spec(LENGTH), limits) for name in weights]
    tasks = MixedTasks([Part(name, ENV, config.sampler, weight) for name, weight in weights.items()], mixture, 0)
    greedy = [name for name in weights if name == "greedy"]
    return Collector(LocalPlayer(envs), envs, tasks, config, seed=0, greedy=greedy)


def drawn(groups: list[Group]) -> list[Any]:
    calls = [len(group.trajectories[0].task.gold["calls"]) for group in groups]
    rows = [(group.index, group.env, group.task_seed, [t.reward for t in group.trajectories]) for group in groups]
    return list(zip(rows, calls, strict=True))


@pytest.mark.parametrize(
    ("mixture", "sampler"),
    [(FIXED, Choice(name="uniform")), (BY_SUCCESS, BUCKETS), (BY_TOKENS, STAGES)],
    ids=lambda choice: choice.name,
)
async def test_k_updates_a_resume_and_k_more_are_2k(renderer: Renderer, mixture: Choice, sampler: Choice) -> None:
    """With groups filtered and replaced in between, and with other delays."""
    weights = {"a": 2.0, "b": 1.0, "greedy": [(0, 0.0), (3, 1.0)]}
    more: dict[str, Any] = {"filter_zero_variance": True, "sampler": sampler}
    whole, collect, again = (
        collector(renderer, weights, mixture, delay=delay, seed=seed, **more)
        for delay, seed in ((0.0, 0), (0.004, 0), (0.004, 2))
    )
    straight, resumed = await steps(whole, 8), await steps(collect, 4)
    await resume(collect, again)
    resumed += await steps(again, 4)
    await whole.close()
    await again.close()
    assert drawn(straight) == drawn(resumed) and whole.metrics() == again.metrics()
    assert {group.env for group in straight} == set(weights)
    assert len({calls for _, calls in drawn(straight)}) > 1, "one kind of task only: nothing was sampled"
    for group in straight:
        assert {t.env for t in group.trajectories} == {group.env} and (group.baseline is not None) == (group.env == "greedy")


async def test_an_environment_that_always_fails_ends_the_run_by_its_name(renderer: Renderer) -> None:
    """The others fill every update, so without that it would be left out unnoticed. Its share of 4 groups an update is 1, so 8
    failures in a row are borne."""
    collect = collector(renderer, {"sound": 3.0, "broken": 1.0})
    said = r"the last 9 groups of environment 'broken' failed \(limit 8\).*the replica went away"
    with pytest.raises(StalledError, match=said):
        await steps(collect, 40)
    assert collect.ledger.counts()["failed"] == 9
    await collect.close()


async def test_that_nothing_was_ever_scored_is_counted_by_environment(renderer: Renderer, request: Any) -> None:
    """No request of either is answered; a run that bears that goes on to the limit of groups, which it counts by environment."""
    unscored = r"none of the first 8 episodes of 4 groups \(2 of broken, 2 of sound\) could be scored; the first: "
    collect = collector(renderer, {"broken": 1.0, "sound": 1.0})
    collect.envs["sound"].policy.engine.fail = 1.0  # type: ignore[attr-defined]
    with pytest.raises(NothingScoredError, match=f"^{unscored}.*engine_error: the replica went away"):
        await only_update(collect)
    request.getfixturevalue("patient")
    collect = collector(renderer, {"broken": 1.0, "sound": 1.0})
    collect.envs["sound"].policy.engine.fail = 1.0  # type: ignore[attr-defined]
    with pytest.raises(StalledError) as caught:
        await only_update(collect)
    found = re.search(r"(\d+) groups failed \(limit 32\), of them (\d+) of broken, (\d+) of sound; the last:", str(caught.value))
    assert found is not None, caught.value
    total, *parts = map(int, found.groups())
    assert total == sum(parts) > 32 and min(parts) >= 14


def test_older_groups_and_trajectories_have_no_name() -> None:

    group = Group(3, 5, [Trajectory("made-up", task=Task("t", 0), env="a")], env="a")
    row = json.loads("".join(group.json_chunks()))
    assert row == json.loads(json.dumps(group.to_json())) and (row["env"], row["trajectories"][0]["env"]) == ("a", "a")
    assert Group.from_json(row) == group
    del row["env"], row["trajectories"][0]["env"]
    older = Group.from_json(row)
    assert (older.env, older.trajectories[0].env) == ("", "")
