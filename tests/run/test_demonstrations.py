"""Gold solutions of tasks at which a whole group failed (`algorithm.demonstrations`): which, their tokens, and where refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import Choice
from agentrl.config.load import config_from
from agentrl.data.schedule import ORIGIN, SHOWN
from agentrl.data.trajectory import Group, Task, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.context import Stop
from agentrl.rollout.episode import Policy
from agentrl.rollout.samplers import TaskChoice
from agentrl.rollout.warm_start import gold_transcript
from agentrl.run.api.steps import session
from agentrl.run.checks.env_checks import check_demonstrations
from agentrl.run.session import MEMBER, Demonstrations
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ConfigError
from tests.e2e.inside import config_of as run_of
from tests.e2e.inside import execute, updates

SHORT = Path(__file__).parents[1] / "e2e/short.json"


def config_of(*overrides: str) -> Any:
    base = {"env": {"id": "key_value", "params": {"calls": 3}}, "model": {"init": {"context": 4096}}}
    return config_from({**base, "algorithm": {"demonstrations": {}}}, list(overrides))


class Part:
    """What a demonstration reads of a `RunEnv`."""

    name = "key_value"

    def __init__(self) -> None:
        self.env = EnvRef.of(config_of())
        self.policy = Policy.__new__(Policy)
        object.__setattr__(self.policy, "renderer", make_renderer(packaged_tokenizer(4096)))
        object.__setattr__(self.policy, "context", Stop())
        self.limits = SimpleNamespace(episode_timeout=60.0, max_turn_tokens=64, context=4096)


def group(index: int, *successes: bool | None) -> Group:
    members = [
        Trajectory("key_value", Task("t", 1), member=n, success=s, reward=None if s is None else 0.5)
        for n, s in enumerate(successes)
    ]
    return Group(index, 1, members, env="key_value")


def choice(seed: int, calls: int) -> TaskChoice:
    return TaskChoice(seed, {"calls": calls}, env="key_value")


async def test_the_gold_of_failed_groups_is_shown_up_to_so_many_episodes() -> None:
    """Those with the lowest numbers, each the gold of its own task with its own parameters; a group in which one succeeded, or
    in which nobody's success is known, shows none."""
    part: Any = Part()
    shows = Demonstrations([part], episodes=2, longest=2000)
    for index, successes in ((9, (False, False)), (3, (False, None)), (5, (False, True)), (1, (None, None)), (7, (False, False))):
        shows.note_group(group(index, *successes), choice(seed=100 + index, calls=2 + index % 4))
    rows, metrics = await shows.take()
    assert rows is not None
    assert rows["group"].tolist() == [3, 7] and set(rows["member"].tolist()) == {MEMBER} and set(rows[ORIGIN].tolist()) == {SHOWN}
    for row, index in enumerate((3, 7)):
        env = part.env.with_params({"calls": 2 + index % 4}).build()
        gold = await gold_transcript(env, part.policy.renderer, 100 + index, "train")
        assert rows["token_ids"][row].tolist() == gold.ledgers[0].token_ids.tolist()
        assert rows["sampled"][row].tolist() == gold.ledgers[0].sampled.tolist()
    sampled = float(rows["sampled"].values().sum())
    assert metrics == {"demonstrations/episodes": 2.0, "demonstrations/skipped": 0.0, "demonstrations/tokens": sampled}
    assert await shows.take() == (None, {"demonstrations/episodes": 0.0, "demonstrations/skipped": 0.0}), "each is shown once"


async def test_tools_that_fail_by_chance_do_not_fail_in_a_gold_solution() -> None:
    """The policy plays with a wrapper that answers no call; what is shown is the solution."""
    shown = []
    for wrappers in ([], [Choice(name="tool_faults", args={"rate": 1.0})]):
        part: Any = Part()
        part.env = replace(part.env, wrappers=wrappers)
        shows = Demonstrations([part], episodes=1, longest=2000)
        shows.note_group(group(0, False), choice(5, 4))
        rows, _ = await shows.take()
        assert rows is not None
        shown.append(rows["token_ids"][0].tolist())
    assert shown[0] == shown[1]


async def test_what_does_not_fit_into_a_row_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    part: Any = Part()
    lengths = {}
    for calls in (2, 6):
        env = part.env.with_params({"calls": calls}).build()
        lengths[calls] = (await gold_transcript(env, part.policy.renderer, 5, "train")).tokens
    shows = Demonstrations([part], episodes=1, longest=lengths[6] - 1)
    shows.note_group(group(1, False), choice(5, 6))
    shows.note_group(group(2, False), choice(5, 2))
    rows, metrics = await shows.take()
    assert rows is not None and rows["group"].tolist() == [2] and metrics["demonstrations/skipped"] == 1
    assert f"the task of group 1 is left out: its gold solution has {lengths[6]} tokens" in caplog.text


async def test_a_gold_solution_that_hangs_is_left_out_when_an_episode_would_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that never answers, in one of two tasks: the update waits for as long as for an episode, and has the other."""
    part: Any = Part()
    part.limits.episode_timeout = 0.3
    real = ToolEnv.astep

    async def hangs(env: Any, message: Any) -> Any:
        return await (asyncio.Event().wait() if len(env.task.gold["calls"]) == 6 else real(env, message))

    monkeypatch.setattr(ToolEnv, "astep", hangs)
    shows = Demonstrations([part], episodes=2, longest=2000)
    shows.note_group(group(0, False, False), choice(5, 6))
    shows.note_group(group(1, False, False), choice(6, 4))
    async with asyncio.timeout(20):
        rows, metrics = await shows.take()
    assert rows["group"].tolist() == [1] and metrics["demonstrations/skipped"] == 1
    assert "group 0 is left out: its gold solution was not played within rollout.episode_timeout = 0.3 s" in caplog.text


def test_without_gold_or_elsewhere_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    check_demonstrations(config, EnvRef.of(config))
    elsewhere = config_of("env.url=http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"algorithm\.demonstrations \(key_value\): env\.url = .*elsewhere"):
        check_demonstrations(elsewhere, EnvRef.of(elsewhere))
    agent = config_of("agent.url=http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"algorithm\.demonstrations \(key_value\): \[agent\]: .* prompts of its own"):
        check_demonstrations(agent, EnvRef.of(agent))
    monkeypatch.setattr(type(EnvRef.of(config).build()), "horizon", lambda *_: None)
    with pytest.raises(ConfigError, match=r"algorithm\.demonstrations \(key_value\): its tasks have no gold solution"):
        check_demonstrations(config, EnvRef.of(config))


@pytest.mark.parametrize("name", ["experience", "demonstrations"])
def test_a_step_wise_loop_refuses_what_it_would_not_add(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{name}: a step-wise loop chooses its batches itself"):
        session("quickstart", overrides={f"algorithm.{name}": {}})


def test_the_tasks_of_groups_that_a_filter_drops_are_shown_too(tmp_path: Path) -> None:
    """Three groups were replaced because nobody solved them, and so were their three replacements not: four are shown."""
    filtered = ["rollout.filter_zero_variance=true", "rollout.max_filtered=1.0", "env.reward=key_value_exact"]
    (row,) = updates(execute(tiny(tmp_path, "filtered", "steps=1", "algorithm.demonstrations={}", *filtered)))
    assert row["groups_filtered"] == 3 and row["success"] == 0
    assert row["demonstrations/episodes"] == 4 and row["demonstrations/nll"] > 3 and row["advantage_zero"] == 1
    assert row["grad_norm"] > 0.01


def test_beside_a_bound_on_staleness_and_adapters_each_keeps_its_own_age(tmp_path: Path) -> None:
    """`max_staleness` counts an update's own tokens alone; kept ones are older, up to `max_age`."""
    digit = tmp_path / "digit.json"
    success = {"use": "format.regex", "args": {"pattern": "[0-9]", "match": "search"}}
    digit.write_text(json.dumps(json.loads(SHORT.read_text()) | {"name": "digit", "success": success}))
    more = ["rollout.max_staleness=1", "algorithm.experience={rare=1.0,share=1.0,max_age=3}", "model.lora={rank=2}"]
    rows = updates(execute(tiny(tmp_path, "stale", "steps=5", f"env.reward={digit}", *more)))
    assert max(row["staleness_max"] for row in rows) <= 1
    ages = [row["experience/age_max"] for row in rows if row["experience/episodes"]]
    assert 1 < max(ages) <= 3
    assert all(row["episodes_trained"] == row["scored"] == 12 for row in rows)
    assert any(row["experience/episodes"] for row in rows)


def tiny(out: Path, name: str, *more: str) -> Any:
    model = "model.init={layers=1,hidden=32,mlp=32,heads=2,kv_heads=1,head_dim=16}"
    return run_of(out, name, model, "health.lint=false", "health.preflight=false", "health.max_unsolvable=1", *more)


def test_what_has_failed_since_the_last_update_is_in_the_checkpoint_and_is_shown_after_a_resume(tmp_path: Path) -> None:
    """Under a bound on staleness groups end while the weights are published: one that fails then is in no update yet."""
    words = ["rollout.max_staleness=1", "env.reward=key_value_exact", "algorithm.demonstrations={episodes=9}"]
    run = execute(tiny(tmp_path, "stale", "steps=2", "checkpoint.every=1", *words))
    owed = json.loads((run / "checkpoints/step_000002/driver.json").read_text())["demonstrations"]
    rows = updates(execute(tiny(tmp_path, "stale", "steps=3", "checkpoint.every=1", *words), resumed=True))
    shown = [row["demonstrations/episodes"] for row in rows]
    assert shown[2] >= len(owed)  # 3 or 6 of them
    # Every group fails, and those that an update trains have all ended: 9 in three updates, and at most 6 are ahead of these.
    assert 9 <= sum(shown) <= 15, (shown, owed)
