"""A finite pool of tasks is gone through without replacement, epoch by epoch, whatever is dropped, killed or resumed."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Choice
from agentrl.contrib.toolkit.taskdata import load_tasks
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.engine import derive
from agentrl.rollout.mixtures import MixedTasks, Part, TaskSource
from agentrl.rollout.samplers import make_sampler
from agentrl.utils.errors import EnvError
from tests.players import tasks_of
from tests.rollout.conftest import LENGTH, FaultyEngine, collecting, resume, steps

KEY_VALUE = EnvRef("key_value", {"calls": 2, "set_share": 0.0, "max_value": 1, "keys": 4})  # a few dozen tasks in all


def of_file(folder: Path, count: int, weight: float = 1.0) -> EnvRef:
    pytest.importorskip("mcp")
    rows = [{"prompt": f"question {n}", "gold": {"answer": n}, "split": "train", "weight": 1.0} for n in range(count)]
    rows[0]["weight"] = weight
    rows.append({"prompt": "held out", "gold": {"answer": "x"}, "split": "heldout"})
    (file := folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return EnvRef("mcp", {"tasks": str(file)})


def source(env: EnvRef, seed: int = 7, name: str = "uniform", **args: Any) -> TaskSource:
    return TaskSource(env, make_sampler(Choice(name=name, args=args)), name, seed)


def drawn(tasks: TaskSource, indices: range) -> list[str]:
    """What the policy would see of each group's task."""
    env = tasks.env.build()
    return [json.dumps(env.make_task(tasks.draw(index).seed, "train").data, sort_keys=True) for index in indices]


def test_each_task_of_a_file_is_seen_once_an_epoch_in_another_order(tmp_path: Path) -> None:
    env = of_file(tmp_path, 500)
    seen = drawn(source(env), range(1500))
    epochs = [seen[start : start + 500] for start in (0, 500, 1000)]
    assert [len(set(epoch)) for epoch in epochs] == [500, 500, 500]
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
    assert drawn(source(env), range(1490, 1500)) == seen[1490:], "an order hangs on run seed and epoch, not on what came before"
    assert drawn(source(env, seed=8), range(500)) != epochs[0]


def test_tasks_of_other_weight_are_drawn_by_weight_as_ever(tmp_path: Path) -> None:
    """400 draws of ten rows, the first with the weight of nine: half of them, in expectation 200 +- 10."""
    tasks = source(of_file(tmp_path, 10, weight=9.0))
    counts = Counter(drawn(tasks, range(400)))
    assert max(counts.values()) == pytest.approx(200, abs=40) and tasks.draw(0).seed == derive(7, "task", 0)


def test_a_task_file_names_every_row_by_a_seed_below_its_number(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "data": {"n": n}, "gold": {}, "weight": 1 + n, "split": "train"} for n in range(50)]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tasks = load_tasks(tmp_path / "t.jsonl")
    assert [tasks.task(seed, "train").id for seed in range(50)] == [f"r{n}" for n in range(50)]
    assert tasks.count("train") is None and tasks.count("heldout") == 0


def test_an_endless_environment_keeps_fresh_seeds() -> None:
    tasks = source(EnvRef("key_value"))
    assert [tasks.draw(index).seed for index in range(3)] == [derive(7, "task", index) for index in range(3)]
    assert tasks.metrics() == {}


def test_a_pool_skips_doubles_and_says_where_there_are_no_more(caplog: pytest.LogCaptureFixture) -> None:
    env = KEY_VALUE.build()
    content = [json.dumps(env.make_task(seed, "train").data, sort_keys=True) for seed in range(5000)]
    there = len(set(content))
    assert there < 500
    with caplog.at_level(logging.WARNING):
        tasks = source(KEY_VALUE, pool=500)
        seen = drawn(tasks, range(2 * there))
    assert Counter(seen) == dict.fromkeys(set(content), 2)
    assert f"{there} different tasks, not the 500" in caplog.text
    said = list[str]()
    mixed = MixedTasks([Part("kv", KEY_VALUE, Choice(name="uniform", args={"pool": 500}))], Choice(name="fixed"), 7)
    mixed.fill_pools(["kv"], said.append)  # at the start of a run, whose user reads it
    assert len(said) == 1 and said[0] in caplog.text and mixed.sources["kv"].pool == tasks.pool
    small, firsts = source(KEY_VALUE, pool=10), sorted(content.index(text) for text in list(dict.fromkeys(content))[:10])
    assert len(set(drawn(small, range(10)))) == 10 and sorted(small.pool) == firsts


@pytest.mark.parametrize("count", [0, -1, "many", 2.5])
def test_a_number_of_tasks_that_is_none_is_refused_by_name(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 and below would make the tasks endless without a word."""
    monkeypatch.setattr(type(KEY_VALUE.build().unwrapped), "task_count", lambda self, split: count)
    with pytest.raises(EnvError, match=rf"KeyValue-v0: task_count\('train'\) returned {count!r}; expected 1 or more"):
        source(KEY_VALUE).draw(0)


def test_all_tasks_are_those_of_the_training_split(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"train": 3, "heldout": 5}
    monkeypatch.setattr(type(KEY_VALUE.build().unwrapped), "task_count", lambda self, split: counts[split])
    tasks = source(KEY_VALUE)
    assert sorted(tasks.draw(index).seed for index in range(3)) == list(tasks.pool) == [0, 1, 2]


def test_another_pool_than_the_checkpoints_is_warned_of_and_none_goes_on_with_one(caplog: pytest.LogCaptureFixture) -> None:
    drawn(before := source(KEY_VALUE, pool=4), range(1))
    for size, said in ((4, False), (3, True)):
        drawn(after := source(KEY_VALUE, pool=size), range(1))
        caplog.clear()
        after.load_json(before.to_json())
        assert (f"a pool of 4 tasks, now there are {size}" in caplog.text) is said
    tasks = source(KEY_VALUE, pool=4)
    tasks.load_json(json.loads(json.dumps(source(EnvRef("key_value")).to_json())))
    assert len({tasks.draw(index).seed for index in range(4)}) == 4 and tasks.metrics()["sampler/epoch"] == 1.0


def test_arms_of_success_weighted_are_the_different_tasks() -> None:
    tasks = source(KEY_VALUE, name="success_weighted", pool=10)
    seeds = Counter(tasks.draw(index).seed for index in range(2000))
    assert set(seeds) == set(tasks.pool) and len(seeds) == 10
    late = max(tasks.pool)
    tasks.finish(next(i for i in range(2000) if tasks.draw(i).seed == late), 1.0)
    tasks.update()
    weights = [tasks.sampler.weight(str(seed)) for seed in tasks.pool if seed != late]  # type: ignore[attr-defined]
    assert tasks.sampler.weight(str(late)) < min(weights)  # type: ignore[attr-defined]
    state = json.loads(json.dumps(tasks.to_json()))
    again = source(KEY_VALUE, name="success_weighted", pool=10)
    again.load_json(state)
    assert again.sampler.state() == tasks.sampler.state() == {str(late): [1.0, 1.0]}


def collector(renderer: Renderer, *, seed: int, pool: int, fail: float = 0.0, **rollout: Any) -> Collector:
    engine = FaultyEngine(renderer.stop_token_ids[0], max_delay=0.003, seed=seed, fail=fail)
    rollout = {"groups": 3, "group_size": 2, "max_turns": 1, "retries": 0, **rollout}
    return collecting(renderer, engine, LENGTH, sampler=Choice(name="uniform", args={"pool": pool}), **rollout)


@pytest.mark.parametrize("eta", [0, 2])
async def test_a_killed_run_goes_on_in_the_epoch_without_a_repetition_or_a_gap(renderer: Renderer, eta: int) -> None:
    """12 tasks, 3 groups an update: four updates are an epoch, whether or not the run is killed after the third."""

    first, again = (collector(renderer, seed=seed, pool=12, max_staleness=eta) for seed in (1, 2))
    groups = await steps(first, 3)
    await resume(first, again)
    groups += await steps(again, 5)
    await again.close()
    seeds = [group.task_seed for group in sorted(groups, key=lambda group: group.index)]
    if eta == 0:
        assert [Counter(seeds[:12]), Counter(seeds[12:])] == [Counter(range(12))] * 2
    assert len(seeds) == 24 and set(seeds) == set(range(12)) and max(Counter(seeds).values()) <= 2 + (eta > 0)


async def test_the_task_of_a_dropped_group_comes_again_in_the_next_epoch(renderer: Renderer) -> None:
    """Failed and filtered groups are replaced by the next task: no task is drawn twice in an epoch of 12."""
    collect = collector(renderer, seed=3, pool=12, fail=0.2, filter_zero_variance=True, max_filtered=2.0)
    groups = await steps(collect, 4)
    drawn = [tasks_of(collect).sampler.choose(0, index).seed for index in range(collect.ledger.total)]
    await collect.close()
    counts = collect.ledger.counts()
    assert counts["failed"] > 0 and counts["filtered"] > 0 and len(drawn) > 12
    assert sorted(drawn[:12]) == list(range(12)) and len(set(drawn[12:24])) == len(drawn[12:24])
    assert all(group.task_seed == drawn[group.index] for group in groups)
