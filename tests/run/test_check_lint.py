"""A reward spec is tried before the run: what makes it pointless is refused with its place, what is suspicious is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.run.checks import check_config
from agentrl.run.checks import reward_checks as lint
from agentrl.run.checks.reward_checks import check_lint, check_success
from agentrl.utils.errors import ConfigError
from tests.run.own_spec import RIGHT, with_spec
from tests.run.starts import scored, scorer_of

TYPO = {"use": "number.close", "args": {"expect": {"$": "/task/gold/anwser"}}}
NEVER = {"use": "text.equals", "args": {"expect": "never"}}
ALWAYS = {"use": "calls.none", "args": {"names": ["erase"]}}
MARK = {"use": "judge", "args": {"model": "openai/j-2026-01-01", "prompt": "{transcript}"}}


@pytest.fixture(autouse=True)
def time_for_every_probe_on_a_loaded_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint, "LINT_SECONDS", {"start": 60.0, "dry run": 60.0})


def notes(config: TrainConfig) -> list[str]:
    return check_lint(scored(config))


def test_a_typo_in_a_pointer_is_refused_before_the_run(tmp_path: Path) -> None:
    """No episode gets a reward, or all get the same, if what is missing counts as 0."""
    with pytest.raises(ConfigError, match=r"'mine'.*'/task/gold/anwser' resolves to nothing"):
        check_config(with_spec(tmp_path, {"op": "mean", "of": [RIGHT, TYPO]}))
    zero = {**TYPO, "missing": 0}
    with pytest.raises(
        ConfigError,
        match=r"/root: an empty answer earns 0 in each of 59 tasks.*agentrl reward lint \S+/mine\.json --env .*health\.lint",
    ):
        check_config(with_spec(tmp_path, zero))
    assert check_config(with_spec(tmp_path, zero, health={"lint": False})) == []
    part = notes(with_spec(tmp_path, {"op": "mean", "of": [RIGHT, zero]}))
    assert "reward spec 'mine' at /root/of/1: number.close is 0 in every probe, good or bad" in part


@pytest.mark.parametrize(("root", "says"), [
    (ALWAYS, r"/root: an empty answer earns 1 in each of 59 tasks, as much as the gold solution"),
    ({"op": "product", "of": [RIGHT, {**NEVER, "weight": 2}]}, r"/root/of/1: 'product' does not use weights"),
    ({"op": "gate", "if": RIGHT, "gte": 2.0, "then": RIGHT, "else": NEVER}, r"/root: `if` reaches at most 1, below gte 2"),
])  # fmt: skip
def test_a_spec_that_cannot_teach_or_cannot_do_what_it_says_is_refused_with_its_place(
    tmp_path: Path, root: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        notes(with_spec(tmp_path, root))


def test_what_is_suspicious_is_said_and_not_refused(tmp_path: Path) -> None:
    (never,) = notes(with_spec(tmp_path, {"op": "mean", "of": [{**RIGHT, "weight": 3}, {**NEVER, "weight": 1}]}))[-1:]
    assert never == "reward spec 'mine' at /root/of/1: text.equals is 0 in every probe, good or bad"
    floor = notes(with_spec(tmp_path, {"op": "mean", "of": [RIGHT, ALWAYS]}))
    assert "reward spec 'mine' at /root: an empty answer earns 0.5; it should earn nothing" in floor
    assert notes(with_spec(tmp_path, RIGHT)) == []
    # What only a model spends is not judged by scripts: they sample no tokens, so gold and an empty answer cost the same.
    assert notes(with_spec(tmp_path, {"use": "cost.tokens", "args": {"max": 100}})) == []


def test_a_spec_with_a_judge_is_tried_on_what_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said holds if the judge says the best of everything and if it says the worst; it is not asked."""
    monkeypatch.setattr("agentrl.contrib.judges.client.Judge.ask", lambda *_: pytest.fail("a judge was asked"))
    judged = "not judged, since that would call a model; what else is said holds in any case"
    assert notes(with_spec(tmp_path, {"op": "all", "of": [RIGHT, MARK]})) == [f"reward spec 'mine' at /root/of/1: {judged}"]
    with pytest.raises(ConfigError, match=r"'mine': the gold solution of task .* is not a success"):
        config = with_spec(tmp_path, {"op": "all", "of": [NEVER, MARK]}, {"op": "all", "of": [NEVER, MARK]})
        check_success(scored(config))
    typo = {"op": "mean", "of": [MARK, TYPO]}
    with pytest.raises(ConfigError, match=r"'mine': /root: the gold solution could not be scored: .*'/task/gold/anwser'"):
        notes(with_spec(tmp_path, typo))
    # Doing nothing is paid if the judge says the best of it, and may not be: no finding.
    assert [line.partition(": ")[2] for line in notes(with_spec(tmp_path, MARK))] == [judged]
    paid = {"op": "any", "of": [ALWAYS, MARK]}
    with pytest.raises(ConfigError, match=r"/success: an empty answer is a success in each of 59 tasks"):
        notes(with_spec(tmp_path, paid, paid))
    monkeypatch.setattr(lint, "probe_episodes", lambda *args, **more: pytest.fail("an episode was scored"))
    own = {"python": "m:f", "tools": "own"}
    assert "tools of its own" in notes(with_spec(tmp_path, RIGHT, agent=own))[-1]
    assert "http://127.0.0.1:9" in notes_of_remote(tmp_path)


def notes_of_remote(folder: Path) -> str:
    config = with_spec(folder, RIGHT)
    there = config.model_copy(update={"env": config.env.model_copy(update={"url": "http://127.0.0.1:9"})})
    return check_lint(scored(there, scorer_of(config)))[-1]


def test_a_dry_run_takes_time_for_enough_tasks_or_says_for_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint, "LINT_SECONDS", {"start": -1.0, "dry run": 60.0})
    start = scored(with_spec(tmp_path, TYPO))
    assert check_lint(start) == [], "what gold is paid is then for `check_success` alone"
    with pytest.raises(ConfigError, match="the gold solution could not be scored"):
        check_lint(replace(start, planned=True))
    monkeypatch.setattr(lint, "LINT_SECONDS", {"dry run": -1.0})
    [line] = check_lint(replace(start, planned=True))
    assert "'mine' was tried on 0 tasks of key_value in -1 s: what none of them shows, fewer than 100% of all do" in line
    assert f"agentrl reward lint {tmp_path / 'mine.json'} --env key_value --tasks 59 tries more" in line


IDLE = """
from agentrl.env import Message, Task, ToolEnv

class Idle(ToolEnv):
    id = "test/Idle-v0"
    summary = "has no gold"

    def make_task(self, rng_seed, split):
        return Task(f"idle/{rng_seed}", rng_seed, split, {}, {"answer": "1"})

    def prompt(self, task):
        return [Message("user", "begin")]
"""


def test_without_gold_a_success_that_idling_always_has_is_refused(here: Path) -> None:
    (here / "envs" / "idle").mkdir(parents=True)
    (here / "envs" / "idle" / "env.py").write_text(IDLE)
    idle = {"id": "idle", "reward": str(here / "mine.json")}
    with pytest.raises(ConfigError, match="/success: an empty answer is a success in each of 59 tasks"):
        notes(with_spec(here, RIGHT, ALWAYS, env=idle))
    assert notes(with_spec(here, RIGHT, RIGHT, env=idle)) == []  # no gold: that nothing is ever right says nothing
