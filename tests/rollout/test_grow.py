"""A group whose members all score the same grows, and nothing else of it changes: from a config, with its neighbours."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RolloutConfig, load_config
from agentrl.config.load import config_from
from agentrl.data.trajectory import Group
from agentrl.render.base import Renderer
from agentrl.rollout.group_ledger import alike
from agentrl.run.loop import make_batch
from agentrl.run.plan import Planner
from tests.rollout.conftest import resume, trained
from tests.rollout.test_spent import made, rows_of

SIZE, GROW, MOST = 2, 2.5, 5


async def groups_of(renderer: Renderer, updates: int = 4, **more: Any) -> tuple[list[Group], list[dict[str, float]], Any]:
    engine, collect = made(renderer, **{"group_size": SIZE, "groups": 3, **more})
    rows, batches = await rows_of(collect, updates)
    await collect.close()
    return [group for groups in batches for group in groups], rows, engine


def said(group: Group) -> list[tuple[int, float | None, list[int]]]:
    return [(t.member, t.reward, t.ledgers[0].token_ids.tolist()) for t in group.trajectories]


async def test_groups_grow_by_their_size_until_scores_differ_or_they_are_as_large_as_they_may_be(renderer: Renderer) -> None:
    """Against a run whose groups have 5 members from the start: the first 2, 4 or 5 of them, whichever differ first."""
    large, _, _ = await groups_of(renderer, 10, group_size=MOST)
    grown, rows, engine = await groups_of(renderer, 10, grow=GROW)
    assert [group.index for group in grown] == [group.index for group in large] == list(range(30))
    for whole, group in zip(large, grown, strict=True):
        count = next((n for n in (2, 4) if len({t.reward for t in whole.trajectories[:n]}) > 1), MOST)
        assert said(group) == said(whole)[:count]
    sizes = [len(group.trajectories) for group in grown]
    assert set(sizes) == {2, 4, 5}, sizes
    assert [row["members_grown"] for row in rows] == [sum(sizes[at : at + 3]) - 6 for at in range(0, 30, 3)]
    assert sum(row["tokens_sampled"] for row in rows) == sum(engine.gave.values()), "what it costs is counted"


async def test_the_filter_sees_a_group_once_it_is_grown(renderer: Renderer) -> None:
    plain, before, _ = await groups_of(renderer, filter_zero_variance=True)
    grown, after, _ = await groups_of(renderer, grow=GROW, filter_zero_variance=True)
    filtered = [sum(row["groups_filtered"] for row in rows) for rows in (before, after)]
    assert 0 <= filtered[1] < filtered[0], filtered
    assert not any(alike(group) for group in [*plain, *grown])
    assert max(len(group.trajectories) for group in grown) > SIZE and {len(group.trajectories) for group in plain} == {SIZE}


async def test_a_resume_grows_the_same_groups(renderer: Renderer) -> None:
    whole, rows, _ = await groups_of(renderer, grow=GROW, filter_zero_variance=True)

    groups, found = list[Group](), list[dict[str, float]]()
    options: dict[str, Any] = {"group_size": SIZE, "groups": 3, "grow": GROW, "filter_zero_variance": True, "max_delay": 0.003}
    _, collect = made(renderer, **options)
    for _ in range(4):
        row, batches = await rows_of(collect, 1)
        groups, found = groups + batches[0], found + row
        first, (_, collect) = collect, made(renderer, seed=5, **options)
        await resume(first, collect)
    await collect.close()
    assert [said(group) for group in groups] == [said(group) for group in whole] and found == rows


@pytest.mark.parametrize("options", [{"fail": 0.3, "retries": 0}, {"greedy": True}, {"max_staleness": 2, "max_delay": 0.003},
                                     {"odd": True}, {"oversample": 1.5}])  # fmt: skip
async def test_next_to_faults_greedy_episodes_staleness_refusals_and_spare_groups(
    renderer: Renderer, options: dict[str, Any]
) -> None:
    groups, _, _ = await groups_of(renderer, grow=GROW, **options)
    assert len({group.index for group in groups}) == 12
    for group in groups:
        numbers = [t.member for t in group.trajectories]
        assert numbers == list(range(len(numbers))) and len(numbers) in (2, 4, 5)
        assert (len(numbers) == MOST) >= alike(group), "one whose members are alike is as large as it may be"
        if "odd" in options:
            assert group.index % 2 == 0
        if len(numbers) > 2:
            first = Group(0, 0, group.trajectories[: 4 if len(numbers) == MOST else 2], group.baseline)
            assert alike(first), "and none grew that had something to say"


async def test_a_batch_knows_which_rows_are_compared(renderer: Renderer) -> None:
    groups, _, _ = await groups_of(renderer, 2, grow=GROW)
    batch = make_batch(groups, config_from({"env": {"id": "key_value"}}).algorithm.advantage)
    assert Counter(batch["group"].tolist()) == {group.index: len(group.trajectories) for group in groups}
    assert len(batch) > SIZE * len(groups)


def test_a_run_from_a_config_grows_and_plans_for_it(tmp_path: Path) -> None:
    """No group has anything to say, so each is as large as it may be."""
    rows = trained(tmp_path, """steps = 2
        trajectories_every = 1
        eval = { tasks = 1 }
        rollout = { groups = 2, group_size = 2, grow = 2.0, max_turns = 2, max_turn_tokens = 6 }""")  # fmt: skip
    for row in (row for row in rows if row["phase"] == "train"):
        assert row["scored"] == 8 and row["members_grown"] == 4
        assert len((tmp_path / "r" / "trajectories" / f"step_{row['step']:06d}.jsonl").read_text().splitlines()) == 8
    plan = Planner(load_config(tmp_path / "r" / "config.toml")).batches()
    assert (plan.episodes, plan.grown, plan.tokens) == (4, 8, 8 * plan.episode_tokens)
    assert RolloutConfig().grow == 1.0
