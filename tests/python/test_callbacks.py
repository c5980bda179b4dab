"""Callbacks and the filter of groups: when they are called, what they change, and what they raise."""

from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.config import Choice
from agentrl.rollout.collector import Acceptance
from agentrl.run.api.base import config_of
from agentrl.run.callbacks import Callback, Callbacks, Functions
from agentrl.run.checks import check_config
from agentrl.trainer.update_hooks import UpdateHook, call_hook, prepare_batch
from agentrl.utils.errors import CallbackError, ConfigError, StalledError
from tests.conftest import proof
from tests.python import table

PLUGIN = """
from agentrl.rollout.collector import FILTERS
from agentrl.run.callbacks import CALLBACKS, Callback
from agentrl.trainer.update_hooks import UpdateHook

@FILTERS.register("above")
def above(group, *, least: float) -> bool:
    return sum(member.reward for member in group.trajectories) / len(group.trajectories) > least

@CALLBACKS.register("to_file")
class ToFile(Callback, UpdateHook):
    def __init__(self, *, path: str):
        self.path = path

    def change_advantages(self, view):
        return view.with_tokens(advantages=0 * view.tokens("advantages")), {self.path: 1.0}

    async def on_step(self, row, session):
        with open(self.path, "a") as file:
            file.write(f"{row['step']} {row['groups_refused']:g} {session.collector.version}\\n")
"""


def mean(group: agentrl.Group) -> float:
    return sum(member.reward or 0.0 for member in group.trajectories) / len(group.trajectories)


def trained(run: agentrl.RunRecord) -> dict[int, list[float]]:
    """The mean rewards of the groups of each update."""
    found: dict[int, list[float]] = {}
    for step in range(1, 4):
        rewards = [episode.reward or 0.0 for episode in run.episodes("train", step)]
        found[step] = [sum(rewards[i : i + 4]) / 4 for i in range(0, len(rewards), 4)]
    return found


def test_a_group_is_shown_then_asked_about_and_what_is_refused_is_replaced(tmp_path: Path) -> None:
    seen: list[float] = []
    rows: list[dict[str, Any]] = []
    more = table(out=str(tmp_path), **{"checkpoint.every": 1})
    run = agentrl.train(
        more,
        on_step=lambda row, session: rows.append(dict(row)),
        on_group=lambda g: seen.append(mean(g)),
        accept=lambda g: mean(g) > 0.45,
    )
    refused = [value for value in seen if value <= 0.45]
    assert len(seen) == 4 + len(refused) and refused  # the filter had something to do
    assert [row["step"] for row in rows] == [1, 2] and sum(row["groups_refused"] for row in rows) == len(refused)
    assert rows[-1]["groups/refused"] == len(refused) and rows[-1]["groups/trained"] == 4
    assert all(value > 0.45 for step in (1, 2) for value in trained(run)[step])


@proof
def test_a_resumed_run_asks_about_the_same_groups_again(tmp_path: Path) -> None:
    def accept(group: agentrl.Group) -> bool:
        return mean(group) > 0.45

    run = agentrl.train(table(out=str(tmp_path)), accept=accept)
    two = agentrl.train(table(steps=1, name="two", out=str(tmp_path)), accept=accept)
    two = agentrl.train(resume=two.path, steps=2)
    assert {step: trained(two)[step] for step in (1, 2)} == {step: trained(run)[step] for step in (1, 2)}
    with pytest.raises(ConfigError, match=r"rollout.accept.name was .*accept.*, is unset"):
        agentrl.train(resume=two.path, steps=3, overrides={"rollout.accept": None})


def test_callbacks_and_a_filter_by_name_from_a_config(here: Path) -> None:
    (here / "plugins").mkdir()
    (here / "plugins" / "mine.py").write_text(PLUGIN)
    more = {
        "rollout.accept": {"name": "above", "args": {"least": 0.45}},
        "callbacks": [{"name": "to_file", "args": {"path": path}} for path in ("seen", "also")],
    }
    run = agentrl.train(table(out="runs", **more))
    rows = [row for row in run.metrics if row["phase"] == "train"]
    assert (here / "seen").read_text() == "".join(f"{row['step']} {row['groups_refused']:g} {row['step']}\n" for row in rows)
    assert sum(row["groups_refused"] for row in rows) > 0 and all(value > 0.45 for value in trained(run)[1])
    assert [(row["seen"], row["also"], row["grad_norm"]) for row in rows] == [(1.0, 1.0, 0.0)] * 2, "of one name"
    for key, value, message in [
        ("rollout.accept", {"name": "abov"}, "rollout.accept: unknown name 'abov'; did you mean 'above'"),
        ("rollout.accept", {"name": "above"}, "argument 'least' is required"),
        ("callbacks", [{"name": "to_file", "args": {"pat": "x"}}], "unknown argument 'pat'; did you mean 'path'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_config(config_of(table(**{**more, key: value})))


def stop(row: Any, session: Any) -> None:
    raise RuntimeError("enough")


class Half:
    """No `on_group`."""

    def on_step(self, row: Any, session: Any) -> None: ...


async def test_what_a_callback_raises_names_it() -> None:
    def peek(group: agentrl.Group) -> None:
        raise KeyError("x")

    async def leaves(group: agentrl.Group) -> None:
        raise SystemExit(3)

    async def undecided(group: agentrl.Group) -> Any:
        return "yes"

    group = agentrl.Group(0, 0)
    with pytest.raises(ConfigError, match=r"callbacks 'given:Half': it made .*Half.*, expected a Callback. Correct it at .*:\d+"):
        Callbacks([Choice(name=agentrl.give(Half))])
    for call, message in [
        (Callbacks([], [Functions(stop)]).call("on_step", {}, None), "callback on_step 'stop' raised RuntimeError: enough"),
        (Callbacks([], [Functions(None, peek)]).call("on_group", group), "callback on_group '.*peek' raised KeyError: 'x'"),
        (Callbacks([], [Functions(None, leaves)]).call("on_group", group), "callback on_group '.*leaves' raised SystemExit: 3"),
        (
            Acceptance(Choice(name=agentrl.give(undecided)))(group),
            "rollout.accept 'given:undecided' returned 'yes', expected True",
        ),
    ]:
        with pytest.raises(CallbackError, match=message):
            await call


class Silent(Callback, UpdateHook):
    """Its methods forget to return."""

    async def prepare(self, batch: Any, groups: Any, envs: Any) -> Any: ...
    def change_advantages(self, view: Any) -> Any: ...
    def draw(self, step: int, fresh: int) -> Any: ...
    def teacher_rows(self, view: Any, most: int) -> Any: ...
    def note_group(self, group: Any, choice: Any) -> None:
        raise KeyError("x")


def test_a_method_of_a_callback_that_no_run_calls_is_named() -> None:
    """It was never called, without a word."""
    with pytest.raises(TypeError, match=r"Odd\.on_stpe: no run calls it; did you mean 'on_step'\?"):
        type("Odd", (Callback,), {"on_stpe": lambda self, row, session: None})
    assert type("Fine", (Callback,), {"on_group": lambda self, group: None, "once": lambda self: None})


async def test_a_hook_of_updates_that_answers_nothing_is_named() -> None:
    for method, count in ((UpdateHook.change_advantages, 1), (UpdateHook.draw, 2), (UpdateHook.teacher_rows, 2)):
        with pytest.raises(ConfigError, match=rf"update hook Silent: {method.__name__} returned None, expected .*\.py:\d+"):
            call_hook(Silent(), method, *[0] * count)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="update hook Silent: prepare returned None, expected the batch"):
        await prepare_batch(Silent(), {}, [], [])  # type: ignore[arg-type]
    with pytest.raises(CallbackError, match="update hook Silent: note_group raised KeyError: 'x'"):
        call_hook(Silent(), UpdateHook.note_group, None, None)  # type: ignore[arg-type]


@proof
def test_what_a_callback_raises_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="callback on_step 'stop' raised RuntimeError: enough"):
        agentrl.train(table(name="a", out=str(tmp_path)), on_step=stop)
    assert agentrl.load_run(tmp_path / "a").summary["status"] == "failed"  # type: ignore[index]


def test_refusing_everything_is_said_and_ends_the_session(capsys: pytest.CaptureFixture[str]) -> None:
    def never(group: agentrl.Group) -> bool:
        return False

    quick = {"rollout": {"groups": 1, "group_size": 2, "max_turns": 1, "max_turn_tokens": 1}, "rollout.accept": never}
    with (
        agentrl.session(table(**quick), quiet=False) as loop,
        pytest.raises(StalledError, match=r"'given:never' refused all of the last 33 groups \(limit 32\)"),
    ):
        loop.policy.collect()
    said = capsys.readouterr().out
    assert [f"has refused {count} groups for update 0" in said for count in (8, 16, 32)] == [True, True, True]
