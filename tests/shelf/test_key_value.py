"""The key-value store: generator, splits, gold, teacher."""

import json
import random
from typing import Any

import numpy as np
import pytest

from agentrl.data.trajectory import Message
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef


def build(**params: Any) -> ToolEnv:
    return EnvRef("key_value", params).build()


def play(env: ToolEnv, seed: int, policy: Any = None, split: str = "train") -> bool:
    """One episode by the gold turns or a policy; True if answer and state are right."""
    observation, _ = env.reset(seed=seed, options={"split": split})
    gold = iter(env.gold_turns(env.task))
    act = policy.act if policy else lambda _: next(gold, None)
    while (message := act(observation)) is not None:
        observation, _, over, _, _ = env.step(message)
    assert over
    record = env.trajectory
    return record.turns[-1].message.content == env.task.gold["answer"] and record.state == env.task.gold["state"]


@pytest.mark.parametrize("calls", [2, 3, 4, 5, 10, 11, 20, 50])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_gold_solves_every_task_in_the_promised_number_of_calls(calls: int, split: str) -> None:
    env = build(calls=calls, set_share=0.5, list_share=0.2)
    for seed in range(20):
        assert play(env, seed, split=split)
        assert len(list(env.trajectory.calls())) == calls
        assert 1 <= int(env.task.gold["answer"]) <= 99
        assert all(result is not None and result.error is None for _, _, result in env.trajectory.calls())


def test_the_mix_holds_what_it_says() -> None:
    env = build(calls=[2, 9], set_share=0.4, list_share=0.2)
    golds = [env.make_task(seed, "train").gold for seed in range(2000)]
    assert abs(sum(bool(g["sets"]) for g in golds) / 2000 - 0.4) < 0.05
    assert abs(sum(g["listed"] for g in golds) / 2000 - 0.2) < 0.04
    assert {len(g["calls"]) for g in golds} == set(range(2, 10))
    assert any(set(g["sets"]) & set(g["reads"]) for g in golds), "stored keys are never reported"


def fingerprint(task: Any) -> str:
    gold = task.gold
    values = sorted((key, gold["state"]["store"][key]) for key in gold["reads"])
    return json.dumps([sorted(gold["sets"].items()), values, gold["listed"]])


def test_train_and_held_out_share_no_content() -> None:
    env = build(calls=[2, 4], set_share=0.2)
    train = {fingerprint(env.make_task(seed, "train")) for seed in range(3000)}
    held = {fingerprint(env.make_task(seed, "heldout")) for seed in range(1000)}
    assert len(train) > 500 and len(held) > 100
    assert not train & held


def test_tasks_are_the_same_in_every_process() -> None:
    """A literal, so that a change of the generator or of Python's hashing shows."""
    task = build(calls=4, set_share=0.0).make_task(7, "train")
    assert build(calls=4, set_share=0.0).make_task(7, "train") == task
    assert task.data["goal"] == "report f + i"


def test_the_answer_hangs_on_what_the_tools_say() -> None:
    """The same prompt occurs with different answers, so nobody can learn to answer without looking."""
    env = build(calls=2)
    answers: dict[str, set[str]] = {}
    for seed in range(500):
        task = env.make_task(seed, "train")
        answers.setdefault(env.prompt(task)[-1].content, set()).add(task.gold["answer"])
    assert min(len(values) for values in answers.values()) >= 5


def test_prompts_and_schemas_stay_short() -> None:
    """A tiny model has to read them: the bytes of a two-item episode, schemas apart, stay below 800."""
    env = build(calls=4, set_share=0.0)
    env.reset(seed=1)
    for message in env.gold_turns(env.task):
        env.step(message)
    text = "".join(m.content + "".join(json.dumps([c.name, c.arguments]) for c in m.tool_calls) for m in env.trajectory.messages)
    assert len(text) < 300
    assert len(json.dumps(env.trajectory.tools)) < 1000


# -- the teacher ----------------------------------------------------------------------------------


def success(tasks: int = 600, params: dict[str, Any] | None = None, **teacher: Any) -> float:
    env, rng = build(**(params or {"calls": [2, 4], "set_share": 0.0})), random.Random(1)
    won = 0
    for seed in range(tasks):
        env.reset(seed=seed)
        won += play(env, seed, env.teacher(env.task, rng, **teacher))
    return won / tasks


def test_a_perfect_teacher_solves_everything() -> None:
    for params in ({"calls": [2, 4]}, {"calls": [2, 20], "set_share": 0.3, "list_share": 0.3}):
        assert success(200, params, wrong=0.0, malformed=0.0, stop=0.0) == 1.0
        assert success(200, params, wrong=0.0, malformed=0.2, stop=0.0) == 1.0, "a malformed call is made again"


def test_the_default_teacher_is_as_imperfect_as_asked() -> None:
    """About .8^3 of one-item tasks; two items also survive the early stop: .8^5 x .45."""
    assert abs(success(params={"calls": 2}) - 0.54) < 0.07
    assert abs(success(params={"calls": 4, "set_share": 0.0}) - 0.18) < 0.06
    assert success(wrong=0.0, malformed=0.0, stop=1.0, params={"calls": 4, "set_share": 0.0}) == 0.0


def test_malformed_turns_are_raw_text_that_no_parser_reads() -> None:
    env, rng = build(calls=2), random.Random(0)
    env.reset(seed=0)
    first = env.teacher(env.task, rng, wrong=0.0, malformed=1.0).act([])
    assert isinstance(first, Message) and not first.tool_calls and first.content.startswith("<tool_call>")
    observation = env.step(first)[0]
    assert json.loads(observation[0].content)["error"] == "malformed_call"
    assert [call.arguments for _, call, _ in env.trajectory.calls()] == [None]


def test_the_teacher_needs_only_random() -> None:
    """The trainer may pass Python's or numpy's generator."""
    env = build(calls=4, set_share=0.0)
    env.reset(seed=0)
    assert play(env, 0, env.teacher(env.task, np.random.default_rng(0), wrong=0.0, malformed=0.0, stop=0.0))
