"""Which task a group gets: middle success is preferred, stages advance, and a resume goes on exactly."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from agentrl.config import Choice, TrainConfig
from agentrl.engines.vllm.vllm_maker import VllmMaker
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.mixtures import TaskSource
from agentrl.rollout.samplers import GroupOutcome, TaskChoice, TaskSampler, make_sampler
from agentrl.run.assembly import RunStart
from agentrl.run.checks.rollout_checks import check_rollout
from agentrl.run.metrics import info_of
from agentrl.utils.errors import CallbackError, ConfigError
from agentrl.utils.search_path import give
from tests.players import only, tasks_of
from tests.rollout.conftest import LENGTH, FaultyEngine, collecting, resume, steps

ENV = EnvRef("key_value")
BUCKETS = Choice(name="success_weighted", args={"buckets": [{"calls": 2}, {"calls": 4}, {"calls": [6, 8]}]})
STAGES = Choice(name="staged", args={"stages": [{"calls": 2}, {"calls": [2, 4]}, {"calls": 6}], "threshold": 0.3,
                                     "window": 3, "review": 0.25})  # fmt: skip
UNIFORM = Choice(name="uniform")


def outcomes(bucket: str, *successes: float) -> list[GroupOutcome]:
    return [GroupOutcome(index, bucket, success) for index, success in enumerate(successes)]


def shares(sampler: TaskSampler, draws: int = 3000) -> dict[str, float]:
    counts = Counter(sampler.choose(7, index).bucket for index in range(draws))
    return {bucket: count / draws for bucket, count in counts.items()}


class Given(TaskSampler):
    """Asked in a test with one answer in place of a right one."""

    def __init__(self, **answers: Any) -> None:
        for name, answer in answers.items():
            setattr(self, name, answer)

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        return TaskChoice(np.int64(index))  # type: ignore[arg-type]


@pytest.mark.parametrize(("answers", "ask", "said"), [
    ({"choose": lambda seed, index: index}, "draw", "choose returned 3, expected a TaskChoice"),
    ({"choose": lambda seed, index: TaskChoice("a")}, "draw", "choose raised TypeError: 'str' object cannot be"),  # type: ignore[arg-type]
    ({"choose": lambda seed, index: {}["x"]}, "draw", "choose raised KeyError: 'x'"),
    ({"wants": lambda: "all"}, "draw", "wants returned 'all', expected a whole number or None"),
    ({"metrics": lambda: {"s": "x"}}, "metrics", "metrics returned {'s': 'x'}, expected a dict (each a number)"),
    ({"state": list}, "to_json", "state returned [], expected a dict"),
    ({"variants": lambda: None}, "variants", "variants returned None, expected a list"),
])  # fmt: skip
def test_a_sampler_that_answers_with_another_type_is_named(answers: dict[str, Any], ask: str, said: str) -> None:
    """By its name, and by the line of the user's file; it was a stack trace, or, as a metric, nothing."""
    source = TaskSource(ENV, Given(**answers), "given:mine", 1)
    with pytest.raises(CallbackError if "raised" in said else ConfigError) as error:
        getattr(source, ask)(*([3] if ask == "draw" else []))
    assert f"rollout.sampler 'given:mine': {said}" in str(error.value)
    assert __file__ in str(error.value) or "state" in answers
    assert type(TaskSource(ENV, Given(), "given:mine", 1).draw(3).seed) is int  # of numpy, which Gymnasium refuses
    with pytest.raises(
        ConfigError, match=r"rollout.sampler 'given:five': it made 5, expected a TaskSampler. Correct it at .*:\d"
    ):
        make_sampler(Choice(name=give(lambda: 5, "five")))


def test_weights_are_the_variance_of_the_reward() -> None:
    """By hand: no evidence p = .5, weight 1. All right over 18 groups without decay: p = 19/20, weight 4 x .95 x .05 =
    .19. Never right: p = 1/20, the same. With floor .5 both are lifted to it."""
    sampler = make_sampler(Choice(name="success_weighted", args={**BUCKETS.args, "decay": 1.0, "floor": 0.01}))
    sampler.observe(outcomes("calls=2", *[1.0] * 18) + outcomes("calls=[6, 8]", *[0.0] * 18))
    found = shares(sampler)
    assert found["calls=4"] == pytest.approx(1 / 1.38, abs=0.03)
    assert found["calls=2"] == pytest.approx(0.19 / 1.38, abs=0.03)
    row, of_all = sampler.metrics(), [0.19 / 1.38, 1 / 1.38, 0.19 / 1.38]
    assert row["calls=2/success"] == pytest.approx(0.95)
    assert [row[f"calls={calls}/share"] for calls in ("2", "4", "[6, 8]")] == pytest.approx(of_all)
    assert row["effective_arms"] == pytest.approx(np.exp(-sum(share * np.log(share) for share in of_all)))
    assert all(info_of(f"sampler/{key}") for key in row)
    lifted = make_sampler(Choice(name="success_weighted", args={**BUCKETS.args, "decay": 1.0, "floor": 0.5}))
    lifted.observe(outcomes("calls=2", *[1.0] * 18))
    assert shares(lifted)["calls=2"] == pytest.approx(0.5 / 2.5, abs=0.03)


def test_old_outcomes_fade() -> None:
    sampler = make_sampler(BUCKETS)
    sampler.observe(outcomes("calls=2", *[0.0] * 50, *[1.0] * 50))
    assert sampler.metrics()["calls=2/success"] > 0.9


def test_a_group_of_an_arm_that_is_gone_says_nothing() -> None:
    """It ran while the data was changed; the resumed run ended with a KeyError."""
    for sampler in (BUCKETS, STAGES):
        made = make_sampler(sampler)
        before = made.metrics()
        made.observe(outcomes("calls=9", 1.0))
        assert made.metrics() == before


def collector(renderer: Renderer, sampler: Choice, *, delay: float = 0.0, seed: int = 0, **rollout: Any) -> Collector:
    engine = FaultyEngine(renderer.stop_token_ids[0], max_delay=delay, seed=seed)
    return collecting(renderer, engine, LENGTH, **{"groups": 3, "group_size": 2, "max_turns": 2, "sampler": sampler, **rollout})


async def test_a_group_that_ran_at_the_checkpoint_gets_its_task_again(renderer: Renderer) -> None:
    first, again = (collector(renderer, STAGES, max_staleness=1) for _ in range(2))
    only(first).policy.engine.stuck = ("g1.", "g4.")  # type: ignore[attr-defined]
    await steps(first, 1)
    drawn = {(index, choice.seed) for index, choice in tasks_of(first).drawn.items()}
    await resume(first, again)
    tasks_of(again).sampler.observe(outcomes("0", 1.0, 1.0, 1.0))  # it would choose otherwise by now
    groups = await steps(again, 2)
    await again.close()
    assert {index for index, _ in drawn} >= {1, 4} and drawn <= {(group.index, group.task_seed) for group in groups}


def test_another_sampler_does_not_take_up_a_checkpoint(renderer: Renderer) -> None:
    state = collector(renderer, BUCKETS).to_json()
    with pytest.raises(ConfigError, match="written with 'success_weighted', but the config names 'uniform'"):
        collector(renderer, UNIFORM).load_json(state)


SAMPLERS: list[tuple[str, dict[str, Any], str]] = [
    ("weigthed", {}, "did you mean"), ("by_progress", {"buckets": [{"calls": 2}]}, "unknown name 'by_progress'"),
    ("staged", {}, "'stages' is required"), ("staged", {"stages": []}, "stages is empty"),
    ("staged", {"stages": [{"calls": 2}], "treshold": 0.5}, "did you mean 'threshold'"),
    ("staged", {"stages": [{"calls": 2}], "threshold": 1.5}, "less than or equal to 1"),
    ("staged", {"stages": [{"calls": 2}], "review": 1.0}, "argument review = 1.0: Input should be less than 1"),
    ("staged", {"stages": [{"calls": 2}, {"calls": 99}]}, "env.params = {'calls': 99}"),
    ("staged", {"stages": [{"cals": 2}]}, "cals"), ("success_weighted", {}, "set one of args.buckets"),
    ("success_weighted", {"pool": 3, "buckets": [{"calls": 2}]}, "set one of args.buckets"),
    ("success_weighted", {"buckets": [{"calls": 2}, {"calls": 2}]}, "the same"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "said"), [
    ({"rollout": {"colocate": True, "max_staleness": 1}}, "max_staleness = 0"),
    ({"rollout": {"colocate": True}, "model": {"path": "api:openai/x"}}, 'only engine = "embedded", "vllm" can free'),
    ({"rollout": {"colocate": True}, "engine": "embedded", "weights": {"lora": "adapter"}}, "weights.lora"),
    ({"rollout": {"filter_zero_variance": True}, "reward_model": {"path": "x"}}, "before [reward_model] has scored"),
    ({"rollout": {"filter_zero_variance": True}, "algorithm": {"advantage": {"name": "multi_reward"}}}, "may tell apart"),
    ({"rollout": {"context": {"name": "trunkate"}}}, "did you mean 'truncate'"),
    ({"rollout": {"context": {"name": "truncate", "args": {"kep": 1}}}}, "did you mean 'keep'"),
    ({"rollout": {"context": {"name": "compact", "args": {"summary_tokens": 0}}}}, "greater than or equal to 1"),
    ({"rollout": {"context": {"name": "keep_recent"}}}, "argument 'turns' is required"),
    ({"rollout": {"summary_model": "openai/x"}}, 'only rollout.context.name = "compact"'),
    *(({"rollout": {"sampler": {"name": name, "args": args}}}, said) for name, args, said in SAMPLERS),
])  # fmt: skip
def test_what_does_not_go_together_is_said_before_the_run(
    more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmMaker, "check_installed", lambda: None)  # whether vLLM is installed is not the question here
    config = TrainConfig.model_validate({"env": {"id": "key_value"}, **more})
    with pytest.raises(ConfigError) as caught:
        check_rollout(RunStart(config))
    assert said in str(caught.value)
