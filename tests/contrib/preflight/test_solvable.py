"""Room for the gold solution: against the real loop at exactly these limits, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from agentrl.contrib.agents.run_checks import Scripted
from agentrl.contrib.preflight import solvable
from agentrl.contrib.preflight.solvable import OFF, check_solvable, survey_lines, survey_of
from agentrl.data.trajectory import StopReason
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.run.assembly import renderer_of, tokenizer_of
from agentrl.run.checks import RunStart
from agentrl.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OFF)
    monkeypatch.setattr(solvable, "_surveys", {})
    monkeypatch.setattr(solvable, "TASKS", 8)
    monkeypatch.setattr(solvable, "SOLVABLE_SECONDS", 60.0)  # a busy machine must not leave tasks out


def config(**changes: Any) -> TrainConfig:
    table: dict[str, Any] = {
        "env": {"id": "key_value", "params": {"calls": [2, 10]}},
        "model": {"init": {}},
        "rollout": {"max_turns": 12, "max_turn_tokens": 64, "max_episode_tokens": 600},
        "engine": "embedded",
        "eval": {"tasks": 6},
    }
    for key, value in changes.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    return config_from(table)


@pytest.mark.parametrize("env", ["key_value", "workspace"])
async def test_an_episode_with_exactly_what_is_needed_succeeds_and_with_less_of_anything_does_not(env: str) -> None:
    wide = {"max_turns": 60, "max_turn_tokens": 900, "max_episode_tokens": 4000}
    one = config(env={"id": env, "params": {}}, rollout=wide, eval={"tasks": 1})
    ref, renderer = EnvRef.of(one.the_env, one.tools), renderer_of(one.model, tokenizer_of(one.model))
    need = survey_of(one).parts[-1].needs[0]
    scorer = make_scorer(find_spec(ref, None), one.reward, ref)
    turns, turn_tokens, episode_tokens, context = (
        need.needs[key] for key in ("rollout.max_turns", "rollout.max_turn_tokens", "rollout.max_episode_tokens", "the context")
    )
    exact = Limits(turns, turn_tokens, episode_tokens, 60, 60, context)

    async def played(limits: Limits) -> Any:
        built = ref.build()
        gold = Scripted(renderer, built.gold_turns(built.make_task(need.seed, "heldout")))
        return await run_episode(built, Policy(gold, renderer), EpisodeSpec(need.seed, "heldout", 0, 0, "x"), limits, scorer)

    whole = await played(exact)
    assert (whole.stop, whole.success) == (StopReason.DONE, True)
    assert whole.horizon == need.horizon == sum(len(turn.message.tool_calls) for turn in whole.turns)
    assert (await played(replace(exact, max_turns=turns - 1))).stop is StopReason.MAX_TURNS
    less = await played(replace(exact, max_turn_tokens=turn_tokens - 1))
    assert "length" in {turn.finish for turn in less.turns} and {turn.finish for turn in whole.turns} == {"stop"}, "a turn is cut"
    assert (await played(replace(exact, max_episode_tokens=episode_tokens - 1))).stop is StopReason.MAX_TOKENS
    assert (await played(replace(exact, context=context - 1))).stop is StopReason.CONTEXT_FULL


def test_too_many_tasks_without_room_are_refused_by_name() -> None:
    one = config(rollout={"max_turns": 8})
    with pytest.raises(ConfigError) as refused:
        check_solvable(RunStart(one, {}))
    text = str(refused.value)
    assert "key_value/train/" in text and "(seed " in text and "of rollout.max_turns = 8" in text
    assert "Set rollout.max_turns to at least 11" in text and "health.max_unsolvable = 1" in text
    over = {need.horizon for part in survey_of(one).parts for need in part.needs if need.over}
    assert over == {n for part in survey_of(one).parts for need in part.needs if (n := need.horizon) > 7}, "calls and an answer"
    check_solvable(RunStart(config(rollout={"max_turns": 8}, health={"max_unsolvable": 1.0}), {}))
    check_solvable(RunStart(config(rollout={"max_turns": 11}), {}))


@pytest.mark.parametrize(
    ("limit", "needs"),
    [({"max_turn_tokens": 13}, "max_turn_tokens = 13"), ({"max_episode_tokens": 150}, "max_episode_tokens = 150")],
)
def test_tokens_are_those_of_the_runs_own_renderer(limit: dict[str, int], needs: str) -> None:
    with pytest.raises(ConfigError, match=f"of rollout.{needs}"):
        check_solvable(RunStart(config(rollout=limit), {}))


def test_each_kind_of_tasks_counts_by_itself_so_a_stage_beyond_the_limits_is_named() -> None:
    stages = [{"calls": [2, 4]}, {"calls": [4, 6]}, {"calls": [18, 20]}]
    staged = {"max_turns": 12, "sampler": {"name": "staged", "args": {"stages": stages}}}
    with pytest.raises(ConfigError, match=r"^100% of the tasks of calls = \[18, 20\] \(8 of 8"):
        check_solvable(RunStart(config(rollout=staged, env={"params": {"calls": [2, 4]}}), {}))
    few = config(rollout={"max_turns": 10}, health={"max_unsolvable": 0.9})
    check_solvable(RunStart(few, {}))
    shares = [part.share for part in survey_of(few).parts]
    assert 0.05 < max(shares) < 0.9, "as many as were asked for"


def test_an_environment_that_is_only_evaluated_has_its_held_out_tasks_alone() -> None:
    stages = {"name": "staged", "args": {"stages": [{"calls": [2, 4]}, {"calls": [4, 6]}]}}
    trained = {"name": "short", "id": "key_value", "params": {"calls": [2, 4]}}
    asked = {"name": "long", "id": "key_value", "params": {"calls": 10}}
    kinds = ["calls = [2, 4]", "calls = [4, 6]", "held-out"]
    for weight, found in ((0.0, ["held-out"]), ([[0, 0.0], [4, 0.0]], ["held-out"]), ([[0, 0.0], [4, 1.0]], kinds), (1.0, kinds)):
        both = config(rollout={"sampler": stages}, env=[trained, {**asked, "weight": weight}])
        short, long = (survey_of(one) for one in both.each())
        assert [part.name for part in short.parts] == kinds
        assert [part.name for part in long.parts] == found, weight
        assert [one.rollout.sampler.name for one in both.each()] == ["staged", "staged" if found == kinds else "uniform"]


def test_the_table_is_by_horizon_and_a_run_that_may_start_still_names_its_tasks() -> None:
    lines = survey_lines(RunStart(config(rollout={"max_turns": 4}, health={"max_unsolvable": 1.0}), {}))
    rows = {line.split()[0]: line for line in lines[2:] if not line.startswith("  no room")}
    assert lines[0].startswith("room for the gold solutions of key_value, played in ") and "held-out: 6 of 6 tasks" in lines[0]
    assert rows["2"].endswith("100%") and rows["9-12"].endswith("0%") and "11 of 4" in rows["9-12"]
    named = [line for line in lines if line.startswith("  no room: ")]
    assert len(named) == 5 and "and " in lines[-1] and lines[-1].endswith(" more")


def test_what_cannot_be_played_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(one: TrainConfig) -> str:
        check_solvable(RunStart(one, {}))
        (line,) = survey_lines(RunStart(one, {}))
        return line

    assert "the environment is at http://127.0.0.1:9" in told(config(env={"url": "http://127.0.0.1:9"}))
    assert "an agent plays" in told(config(agent={"url": "http://127.0.0.1:9"}))
    monkeypatch.setattr(solvable, "SOLVABLE_SECONDS", -1.0)
    assert "there was no time for one" in told(config(seed=3))
    monkeypatch.setenv(OFF, "0")
    assert f"{OFF} = 0" in told(config(seed=4))


def test_gold_that_fails_in_one_task_is_said_and_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    real = solvable.transcript

    async def failing(env: Any, renderer: Any, seed: int, split: str) -> Any:
        if split == "heldout" and seed == 2:
            raise RuntimeError("the server of task 2 is gone")
        return await real(env, renderer, seed, split)

    monkeypatch.setattr(solvable, "transcript", failing)
    assert "1 could not be played (RuntimeError: the server of task 2 is gone)" in survey_lines(RunStart(config(), {}))[0]

    async def none(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(solvable, "transcript", none)
    [line] = survey_lines(RunStart(config(seed=1), {}))
    assert line == "gold solutions of key_value are not played before the start: it has no gold solutions"


def test_dry_run_and_train_print_it_and_refuse_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"engine": "embedded", "cluster.backend": "inline", "sft": "false", "trackers": "[]", "out": tmp_path, "steps": 1,
            "eval.tasks": 2, "rollout.groups": 1, "rollout.group_size": 2, "rollout.max_turn_tokens": 24,
            "health.idle_updates": 99, "model.init.layers": 1, "model.init.hidden": 16}  # fmt: skip
    small = [f"{key}={value}" for key, value in keys.items()]
    assert main(["train", "quickstart", "--dry-run", *small]) == 0
    assert "room for the gold solutions of key_value, played in" in capsys.readouterr().out
    assert main(["train", "quickstart", *small, "name=r"]) in (0, 1)
    assert "room for the gold solutions of key_value, played in" in capsys.readouterr().out
    for more in (["--dry-run"], ["name=s"]):
        assert main(["train", "quickstart", *more, *small, "rollout.max_turns=4"]) == 2
        assert "Set rollout.max_turns to at least 5" in capsys.readouterr().err
    assert not (tmp_path / "s").exists(), "refused before anything is written"
