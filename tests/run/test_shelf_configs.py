"""Configs of the shelf pass a run's checks; each stage of recipes/horizon is longer than the last."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import TrainConfig, load_config
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, Trajectory, Turn
from agentrl.env.catalog import EnvRef, find_config
from agentrl.rollout.mixtures import MixedTasks, parts_of
from agentrl.run.checks import check_config
from tests.run.starts import scorer_of

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_a_config_of_the_shelf_can_run(path: Path) -> None:
    assert all(note.startswith("reward spec") for note in check_config(load_config(path)))


def differing(frozen: Any, resolved: Any, key: str = "") -> list[str]:
    """Keys of `frozen` that `resolved` has otherwise; a key that is new since is no difference."""
    if isinstance(frozen, dict) and isinstance(resolved, dict) and key.split(".")[-1] not in ("args", "params", "teacher"):
        return [found for name in frozen for found in differing(frozen[name], resolved.get(name), f"{key}.{name}")]
    return [] if frozen == resolved else [f"{key}: {frozen!r} is now {resolved!r}"]


@pytest.mark.parametrize("name", ["quickstart", "ppo", "dapo"])
def test_what_a_config_of_the_shelf_resolves_to_is_frozen(name: str) -> None:
    """Their figures stand in the docs: no default that moves may change them."""
    frozen = json.loads((ROOT / "tests" / "config" / "shelf_resolved.json").read_text())[name]
    assert differing(frozen, load_config(ROOT / "configs" / f"{name}.toml").model_dump(mode="json")) == []


def answered(text: str, tokens: int) -> Trajectory:
    ledger = TokenLedger()
    ledger.append_context([5], 0)
    ledger.append_sampled([6] * tokens, [-1.0] * tokens, [0] * tokens, 0)
    message = Message("assistant", text)
    turn = Turn(0, message, ledger=0, end=tokens, sampled_tokens=tokens)
    return Trajectory("KeyValue-v0", Task("t", 0, gold={"answer": "7"}), messages=[message], turns=[turn], ledgers=[ledger])


@pytest.mark.parametrize(("tokens", "penalty"), [(3, 0.0), (96, 0.0), (104, -0.25), (112, -0.5), (128, -1.0), (500, -1.0)])
def test_overlong_answers_are_punished_softly(tokens: int, penalty: float) -> None:
    """(L_max - L_cache - length) / L_cache between the two, L_max = 128, L_cache = 32 (DAPO, equation 13)."""
    config = load_config(ROOT / "configs" / "dapo.toml")
    scorer = scorer_of(config)
    assert scorer.range[1] == 1.0
    assert scorer.score(answered("7", tokens)).value == pytest.approx(1 + penalty)
    assert scorer.score(answered("8", tokens)).value == pytest.approx(penalty)


# Recipes of horizons

FOLDER = ROOT / "configs" / "recipes" / "horizon"
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
        env = EnvRef.of(config.the_env, config.tools).with_params(params).build()
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
