"""Environments with advantage estimators of their own, in one batch: each estimator gets its rows, and only these."""

from typing import Any

import numpy as np
import pytest
import torch

from agentrl.config import TrainConfig
from agentrl.config.envs import own_advantages
from agentrl.config.schema import AlgorithmConfig, Choice
from agentrl.data.rows import Ragged, collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Task, Trajectory
from agentrl.run.loop import make_batch
from agentrl.trainer.estimator_inputs import critic_rows, with_advantages
from agentrl.trainer.learner import check_learner
from agentrl.trainer.minibatch import broken_rows
from agentrl.utils.errors import ConfigError

GRPO, RLOO, PLUS = Choice(name="grpo"), Choice(name="rloo"), Choice(name="reinforce_pp")
GAE, REMAX = Choice(name="gae", args={"whitened": False}), Choice(name="remax")


def played(reward: float, member: int = 0, tokens: int = 2, **metrics: float) -> Trajectory:
    """An episode in two ledgers, of `tokens` sampled tokens each."""
    ledgers = []
    for number in range(2):
        ledger = TokenLedger()
        ledger.append_context([5, 6, 7 + number], number)
        ledger.append_sampled([8] * tokens, [-1.0] * tokens, [0] * tokens, number)
        ledgers.append(ledger)
    return Trajectory("made-up", Task("t", 0), member=member, ledgers=ledgers, reward=reward, metrics=dict(metrics))


def group(index: int, env: str, *rewards: float, greedy: float | None = None) -> Group:
    members = [played(reward, member, tokens=1 + member) for member, reward in enumerate(rewards)]
    return Group(index, 0, members, None if greedy is None else played(greedy), env)


def advantages_of(groups: list[Group], shared: Choice, own: dict[str, Choice], values: float | None = None) -> tuple[Any, Any]:
    """The view with advantages, and the advantage of each (group, member), which all its sampled tokens have."""
    view = Ragged.of(make_batch(groups, shared, own))
    if values is not None:
        view = view.with_tokens(values=torch.full((len(view.tokens("sampled")),), values))
    view, _ = with_advantages(view, AlgorithmConfig(advantage=shared), 0.0, own)
    found: dict[tuple[int, int], set[float]] = {}
    for row in range(len(view)):
        key = int(view.row("group")[row]), int(view.row("member")[row])
        span = slice(int(view.offsets[row]), int(view.offsets[row + 1]))
        sampled = view.tokens("sampled")[span]
        found.setdefault(key, set()).update(view.tokens("advantages")[span][sampled].tolist())
        assert not view.tokens("advantages")[span][~sampled].any()
    return view, found


def one(found: dict[tuple[int, int], set[float]]) -> dict[tuple[int, int], float]:
    assert all(max(values) - min(values) < 1e-6 for values in found.values())
    return {key: values.pop() for key, values in found.items()}


def test_each_group_goes_through_the_estimator_of_its_environment() -> None:
    """By hand. GRPO of {1, 0, 0}: 1.1547, -.5773 twice; of {4, 0}: .7071, -.7071. RLOO of {2, 0, 1}: 1.5, -1.5, 0. The groups lie
    mixed, and each episode is two rows."""
    groups = [group(0, "a", 1, 0, 0), group(1, "b", 2, 0, 1), group(2, "a", 4, 0), group(3, "c", 1, 3)]
    _, found = advantages_of(groups, GRPO, {"b": RLOO, "c": RLOO})
    expected = {
        (0, 0): 1.1547, (0, 1): -0.5773, (0, 2): -0.5773,
        (1, 0): 1.5, (1, 1): -1.5, (1, 2): 0.0,
        (2, 0): 0.7071, (2, 1): -0.7071,
        (3, 0): -2.0, (3, 1): 2.0,
    }  # fmt: skip
    assert one(found) == pytest.approx(expected, abs=1e-4)


def test_what_an_estimator_normalizes_is_over_its_own_rows() -> None:
    """REINFORCE++ whitens over all sampled tokens that it gets: those of the environments without an estimator of their own
    together, and those of an environment with one by themselves. Rewards of another scale then do not drown the others.
    Member m samples 2 (m + 1) tokens, all of which have its reward as their return."""
    groups = [group(0, "a", 1, 0), group(1, "b", 20, 10), group(2, "c", 3, 0)]

    def whitened(*rewards: float) -> np.ndarray:
        tokens = np.repeat(np.array(rewards, np.float64), [2, 4] * (len(rewards) // 2))
        scores = (tokens - tokens.mean()) / tokens.std(ddof=1)
        return scores[np.cumsum([2, 4] * (len(rewards) // 2)) - 1]

    _, shared = advantages_of(groups, PLUS, {})
    assert list(one(shared).values()) == pytest.approx(whitened(1, 0, 20, 10, 3, 0), abs=1e-5)
    _, parted = advantages_of(groups, PLUS, {"b": PLUS})
    expected = [*whitened(1, 0, 3, 0)[:2], *whitened(20, 10), *whitened(1, 0, 3, 0)[2:]]
    assert list(one(parted).values()) == pytest.approx(expected, abs=1e-5)
    # By hand: 2 tokens of 20 and 4 of 10 have the mean 40/3 and the std 5.16398; the example of docs/math.md.
    two = [group(0, "a", 20, 10), group(1, "b", 1, 0)]
    _, alone = advantages_of(two, PLUS, {"b": PLUS})
    assert list(one(alone).values()) == pytest.approx([1.29099, -0.64550] * 2, abs=1e-5)
    _, both = advantages_of(two, PLUS, {})
    assert list(one(both).values()) == pytest.approx([1.72392, 0.41461, -0.76376, -0.89469], abs=1e-5)


def test_a_critic_learns_from_the_rows_whose_estimator_reads_its_values() -> None:
    """GAE with gamma = lambda = 1 of a reward of 3 at the end and values of 1: advantages 2, returns 3. GRPO of {1, 0}: .7071."""
    groups = [group(0, "a", 1, 0), group(1, "b", 3, 3)]
    view, found = advantages_of(groups, GRPO, {"b": GAE}, values=1.0)
    assert one(found) == pytest.approx({(0, 0): 0.7071, (0, 1): -0.7071, (1, 0): 2.0, (1, 1): 2.0}, abs=1e-4)
    part = critic_rows(view.batch, GRPO, {"b": GAE})
    assert part["group"].tolist() == [1] * 4 and len(view.batch) == 8
    sampled = part["sampled"].values()
    assert part["returns"].values()[sampled].tolist() == [3.0] * int(sampled.sum()) and int(sampled.sum()) == 2 * (1 + 2)
    assert critic_rows(view.batch, GAE, {"b": GAE}) is view.batch


def test_inputs_are_there_for_the_estimators_that_read_them() -> None:
    groups = [group(0, "a", 1, 0), group(1, "b", 2, 0, greedy=0.5), group(2, "c", 1, 0), group(3, "d", 1, 0)]
    for number, members in ((2, groups[2].trajectories), (3, groups[3].trajectories)):
        for member in members:
            member.metrics |= {"early": float(member.member), "late": 2.0 * number}
    terms = {"terms": ["early", "late"], "whitened": False}
    own = {
        "b": REMAX,
        "c": Choice(name="multi_reward", args=terms),
        "d": Choice(name="multi_reward", args={**terms, "terms": ["early"]}),
    }
    batch = make_batch(groups, GRPO, own)
    rows = [int(number) for number in batch["group"]]
    assert batch["estimator"].tolist() == rows and batch["baseline"].tolist() == [0.5 * (number == 1) for number in rows]
    late = batch["terms"][:, 1].numpy()
    assert np.isnan(late[np.array(rows) != 2]).all() and set(late[np.array(rows) == 2]) == {4.0}
    view, found = advantages_of(groups, GRPO, own)
    assert broken_rows(view) == ""
    half = 2**-0.5
    expected = {(0, 0): half, (0, 1): -half, (1, 0): 1.5, (1, 1): -0.5, (2, 0): -half, (2, 1): half, (3, 0): -half, (3, 1): half}
    assert one(found) == pytest.approx(expected, abs=1e-5)


def test_a_run_without_estimators_of_its_own_has_the_batch_that_it_always_had() -> None:
    groups = [group(0, "a", 1, 0), group(1, "b", 2, 0)]
    assert set(make_batch(groups, GRPO).keys()) == set(
        collate([t for g in groups for t in g.scored()], groups=[0, 0, 1, 1]).keys()
    )


def config_of(**sections: Any) -> TrainConfig:
    envs = [{"id": "key_value"}, {"id": "sql", "limits": {"max_turns": 3, "max_turn_tokens": 100}, **sections.pop("sql", {})}]
    return TrainConfig.model_validate({"env": envs, "model": {"path": "m"}, **sections})


def test_what_estimators_need_is_asked_of_all_environments() -> None:
    gae = {"advantage": {"name": "gae"}}
    with pytest.raises(ConfigError, match=r'env\[1\] \(sql\): algorithm.advantage "gae" needs a critic'):
        check_learner(config_of(sql=gae))
    check_learner(config_of(sql=gae, critic={}))
    with pytest.raises(
        ConfigError, match=r'algorithm.advantage "grpo", "rloo" does not use a critic; use one of "gae", "gae_turns"'
    ):
        check_learner(config_of(sql={"advantage": {"name": "rloo"}}, critic={}))
    with pytest.raises(ConfigError, match=r'env\[1\] \(sql\): algorithm.advantage "remax" reads scores of the reward spec'):
        check_learner(config_of(sql={"advantage": {"name": "remax"}}, reward_model={"path": "r"}))
    assert own_advantages(config_of(sql=gae).envs) == {"sql": Choice(name="gae")}


def test_the_constant_length_is_what_an_episode_of_the_longest_environment_may_sample() -> None:
    norm, short = {"aggregate": "seq_mean_token_sum_norm"}, {"max_turns": 2, "max_turn_tokens": 50}
    for algorithm, rollout, expected in (
        (norm, {}, 16384),
        (norm, short, 300),
        (norm, {**short, "max_episode_tokens": 200}, 200),
        ({**norm, "length_norm": 7}, short, 7),
        ({}, short, None),
    ):
        assert config_of(algorithm=algorithm, rollout=rollout).settled_algorithm().length_norm == expected
