"""`rollout.temperature` as points: what each update gets, and beside what it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.envs import check_temperatures, one_temperature, scheduled_temperature
from agentrl.run.assembly import RunStart
from agentrl.run.checks.rollout_checks import check_rollout
from agentrl.utils.errors import ConfigError

POINTS = [[2, 1.3], [8, 0.7]]


def config_of(temperature: Any, **sections: Any) -> TrainConfig:
    rollout = {"temperature": temperature, **sections.pop("rollout", {})}
    return TrainConfig.model_validate({"env": {"id": "key_value"}, "model": {"path": "m"}, "rollout": rollout, **sections})


def test_only_points_change_with_the_updates() -> None:
    rollout, plain = config_of(POINTS).rollout, config_of(0.9).rollout
    assert [scheduled_temperature(rollout, step) for step in (0, 5, 99)] == pytest.approx([1.3, 1.0, 0.7])
    assert (scheduled_temperature(plain, 5), one_temperature(plain, "a rollout")) == (None, 0.9)


@pytest.mark.parametrize(("temperature", "more", "message"), [
    ([[4, 1.0], [4, 0.7]], {},
     r"rollout.temperature: expected points \[step, temperature\] with ascending steps, got \[4, 4\]"),
    ([], {}, r"ascending steps, got \[\]"),
    ([[0, 1.0], [9, 0.001]], {}, r"rollout.temperature = 0.001: expected 0 \(greedy\) or at least 0.01"),
    (POINTS, {"rollout": {"max_staleness": 2}}, r"rollout.max_staleness = 2 trains tokens that earlier updates' episodes"),
    (POINTS, {"algorithm": {"experience": {}}}, r"algorithm.experience trains episodes of earlier updates"),
])  # fmt: skip
def test_points_that_no_update_could_follow_are_refused(temperature: Any, more: dict[str, Any], message: str) -> None:
    config, plain = config_of(temperature, **more), config_of(0.9, **more)
    with pytest.raises(ConfigError, match=message):
        check_temperatures(config.rollout, config.eval, config.algorithm.experience is not None)
    if more:
        check_temperatures(plain.rollout, plain.eval, plain.algorithm.experience is not None)


def test_without_updates_one_number_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"a rollout has no updates; give one number, such as rollout.temperature=0.7"):
        one_temperature(config_of(POINTS).rollout, "a rollout")


def test_one_number_is_0_or_at_least_what_vllm_samples_at() -> None:
    for rollout, evaluation in ((0.0, 0.01), (0.01, 0.0)):
        check_rollout(RunStart(config_of(rollout, eval={"temperature": evaluation})))
    for rollout, evaluation, section in ((0.0099, 0.0, "rollout"), (1.0, 0.0099, "eval")):
        with pytest.raises(ConfigError, match=rf"^{section}.temperature = 0.0099: expected 0 .*at least 0\.01"):
            check_rollout(RunStart(config_of(rollout, eval={"temperature": evaluation})))
