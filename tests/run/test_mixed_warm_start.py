"""The warm start over several environments: whose transcripts there are, and that each has to reach its own gate."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster.worker import Mesh
from agentrl.config.load import config_from
from agentrl.config.schema import ModelConfig
from agentrl.data.trajectory import Task, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.run import sft
from agentrl.utils.processor import TINY
from tests.config.observed import Course, renderer

ENVS: list[dict[str, Any]] = [
    {"id": "key_value", "name": "a", "weight": 3.0, "sft": {"params": {"calls": 2}, "gate": 0.25, "gate_params": {"calls": 4}}},
    {"id": "function_calling", "name": "b", "sft": {"params": {"kinds": ["missing"]}, "teacher": {"abstain": 0.0}}},
    {"id": "sql", "name": "c", "weight": [[0, 0.0], [9, 1.0]]},
]
SFT = {"min_steps": 12, "max_steps": 35, "gate_every": 10, "gate": 0.75, "gate_tasks": 4, "teacher": {"stop": 0.0}}


def config_of(**more: Any) -> Any:
    return config_from({"env": ENVS, "model": {"init": {}}, "sft": {**SFT, **more}, "engine": "embedded"})


def session_of(config: Any) -> Any:
    policy = SimpleNamespace(renderer=renderer())
    scorer = SimpleNamespace(terms=[], measures=[])
    parts = [SimpleNamespace(name=env["name"], env=EnvRef(env["id"]), policy=policy, scorer=scorer) for env in ENVS]
    return SimpleNamespace(config=config, envs=parts)


def warm_up(course: Course, source: Any, patch: pytest.MonkeyPatch, evaluated: Any = None) -> None:
    """Runs the warm start with the transcripts of `source`."""
    course.session.envs = session_of(course.session.config).envs
    patch.setattr("agentrl.run.session.run_tasks", evaluated or course.evaluated)
    patch.setattr(sft, "transcripts_of", lambda session: source)
    course.session.folder.warm_start.mkdir(exist_ok=True)  # which a real actor writes
    asyncio.run(sft.warm_start(course.session, course.run_log, course.interrupt))


def test_transcripts_are_of_the_environments_that_take_part_by_their_weights() -> None:
    """3 to 1 at step 0, and none of the third, whose weight begins later; each by its own teacher and parameters."""
    source = sft.transcripts_of(session_of(config_of()))
    rows = [*asyncio.run(source.take(0, 10)), *asyncio.run(source.take(10, 10))]
    assert Counter(row.env_id for row in rows) == {"agentrl/KeyValue-v0": 15, "agentrl/FunctionCalling-v0": 5}
    assert len({row.task.id for row in rows}) == 20, "no transcript comes twice"
    for row in rows:
        if row.env_id == "agentrl/KeyValue-v0":
            assert len(row.turns) == 3  # two calls and the answer: env.sft.params
        else:
            assert row.turns[0].message.content.startswith("MISSING ")  # it never abstains: env.sft.teacher
    again = sft.transcripts_of(session_of(config_of()))
    assert [row.task.id for row in asyncio.run(again.take(5, 5))] == [row.task.id for row in rows[5:10]]
    named = sft.transcripts_of(session_of(config_of(envs=["b"])))
    assert {row.env_id for row in asyncio.run(named.take(0, 3))} == {"agentrl/FunctionCalling-v0"}


@pytest.mark.parametrize(("found", "ends"), [
    ({"a": [0.25], "b": [0.75]}, (20, "")),  # their own gates
    ({"a": [1.0, 1.0, 1.0], "b": [0.5, 0.5, 0.75]}, (35, "")),  # a mean of 0.75 is not enough
    ({"a": [None, None, None], "b": [1.0] * 3}, (35, "unknown in a, as 4 of 4 episodes were not scored after 35 steps")),
    ({"a": [0.0, 0.0, 0.0], "b": [1.0, 1.0, 1.0]}, (35, "greedy success 0.0 < sft.gate=0.25 in a after 35 steps")),
])  # fmt: skip
def test_the_gate_is_of_each(
    found: dict[str, list[float | None]], ends: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(config_of(), tmp_path)
    asked, said = [], []
    answers = {name: iter(values) for name, values in found.items()}

    async def evaluated(player: Any, env: str, pairs: list[Any], **keys: Any) -> list[Trajectory]:
        asked.append((env, len(pairs), keys))
        rate = next(answers[env])
        right = [None if rate is None else number < 4 * rate for number in range(4)]
        return [Trajectory("x", Task("t", 0), success=one, env=env) for one in right]

    async def take(first: int, count: int) -> list[Any]:
        return [course.member] * count

    course.run_log.row = lambda phase, step, values: said.append((phase, step, values))
    text = ""
    try:
        warm_up(course, SimpleNamespace(skipped=0, take=take), monkeypatch, evaluated)
    except sft.AgentrlError as problem:
        text = str(problem)
    rows = [(step, values) for phase, step, values in said if phase == "gate"]
    assert rows[-1][0] == ends[0] and (ends[1] in text if ends[1] else not text)
    assert [step for step, _ in rows] == [20, 30, 35][: len(rows)], "from min_steps on, each gate_every, and at max_steps"
    first = {name: values[0] for name, values in found.items()}
    # A success that nobody knows is not 0, neither of an environment nor of all.
    mean = None if None in first.values() else sum(value or 0.0 for value in first.values()) / 2
    told = {"success": mean, **{f"env/{name}/success": value for name, value in first.items()}}
    assert told.items() <= rows[0][1].items() and rows[0][1]["scored"] == 4 * sum(value is not None for value in first.values())
    for (env, count, keys), name, params in zip(asked, ("a", "b"), ({"calls": 4}, {}), strict=False):
        assert (env, count) == (name, 4)
        assert {"params": params, "split": "train", "temperature": 0.0, "seed": 0}.items() <= keys.items()


@pytest.mark.parametrize(
    ("size", "calls"), [(TINY + 1.0, ["0", "4", "8"]), (TINY, ["0 4 8"])], ids=["a step a call", "the steps of a tiny model"]
)
def test_transcripts_are_written_while_the_actors_compute(
    size: float, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the next call, none beyond a gate; each step has its own, in order, and is shown."""
    monkeypatch.setattr(ModelConfig, "size", lambda self: size)
    course, events = Course(config_of(batch=4, min_steps=3, gate_every=3, gate=0.25), tmp_path), list[str]()
    source = SimpleNamespace(skipped=0)

    async def arun(method: Any, *args: Any) -> Any:
        if method.__name__ != "sft_steps":
            return None
        steps = len(args[0]["counts"])
        events.append(f"begin {len(args[0])} rows of {steps}")
        for _ in range(3):
            await asyncio.sleep(0)
        events.append("end")
        return [{"loss": 1.0}] * steps

    async def take(first: int, count: int) -> list[Any]:
        events.append(f"write {first}")
        source.skipped = first
        return [course.member] * count

    rows: list[tuple[str, int, float | None]] = []
    course.session.actors = SimpleNamespace(arun=arun, in_processes=course.session.actors.in_processes, mesh=Mesh.of(None, 1))
    course.run_log.row = lambda phase, step, values: rows.append((phase, step, values.get("transcripts_skipped")))
    source.take = take
    warm_up(course, source, monkeypatch)
    written = [[f"write {first}" for first in call.split()] for call in calls]
    expected = [*written[0]]
    for of, after in zip(written, [*written[1:], []], strict=True):
        expected += [f"begin {4 * len(of)} rows of {len(of)}", *after, "end"]
    assert events == expected
    assert rows[:3] == [("sft", 1, 0.0), ("sft", 2, 4.0), ("sft", 3, 8.0)], (
        "a row counts the transcripts left out up to its own step"
    )
