"""configs/recipes/horizon: every stage is a task that fits the limits, each longer than the last, and success climbs them."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.load import load_config
from agentrl.env.catalog import EnvRef, find_config
from agentrl.rollout.mixtures import MixedTasks, parts_of
from agentrl.run.checks import check_config

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "recipes" / "horizon"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
LONGEST = {"key_value": 12, "service_desk": 200, "workspace": 200}


def recipe(name: str, *overrides: str) -> TrainConfig:
    return load_config(FOLDER / f"{name}.toml", list(overrides), find=find_config)


def stages(config: TrainConfig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = config.rollout.sampler.args["stages"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_stages_get_longer_and_their_gold_fits_the_turns(name: str) -> None:
    config = recipe(name)
    calls = []
    for params in stages(config):
        env = EnvRef.of(config).with_params(params).build()
        turns = env.gold_turns(env.make_task(3, "train"))
        calls.append(sum(len(turn.tool_calls) for turn in turns))
        low, high = params["calls"]
        assert low <= calls[-1] <= high and len(turns) <= config.rollout.max_turns
        env.close()
    assert calls == sorted(calls) and stages(config)[-1]["calls"][1] == LONGEST[name]


def drive(tasks: MixedTasks, groups: range, solved: Any) -> None:
    for index in groups:
        tasks.finish(index, solved(tasks.draw(index)), 100)
    tasks.update(groups.stop)


@pytest.mark.parametrize("name", NAMES)
def test_the_horizon_rises_with_success_alone_and_goes_on_after_a_resume(name: str) -> None:
    """Stage s begins after `window` groups of stage s - 1 with a mean success of the threshold; no failure moves it."""
    config = recipe(name)
    window = config.rollout.sampler.args["window"]

    def made() -> MixedTasks:
        return MixedTasks(parts_of(config), config.rollout.mixture, config.seed)

    tasks, at = made(), 0
    for stage in range(len(stages(config))):
        drive(tasks, range(at, at + 3 * window), lambda choice: 0.0)
        at += 3 * window
        assert tasks.metrics()["sampler/stage"] == stage and tasks.metrics()["sampler/stage_success"] == 0.0
        state, tasks = tasks.to_json(), made()
        tasks.load_json(state)
        before = tasks.draw(at).params
        again = made()
        again.load_json(state)
        assert again.draw(at).params == before
        tasks.forget(at)
        while tasks.metrics()["sampler/stage"] == stage and at < 100_000 and stage + 1 < len(stages(config)):
            drive(tasks, range(at + 1, at + 1 + window), lambda choice: 1.0)
            at += 1 + window
        at += 1
    assert tasks.metrics()["sampler/stage"] == len(stages(config)) - 1


def test_the_recipe_for_two_cores_passes_every_check_before_a_run() -> None:
    assert check_config(recipe("key_value", "engine=embedded", "cluster.backend=inline"), planned=True) == []
