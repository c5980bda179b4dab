"""Snapshot, restore and fork of the toy; those of the shelf are forked by `env check` (test_env_check.py)."""

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.env import ToolEnv
from tests.env.toyenvs import Notes, call


def observe(env: ToolEnv) -> Any:
    return env.trajectory.to_json()


def test_a_fork_and_its_parent_go_separate_ways() -> None:
    env = Notes()
    env.reset(seed=0)
    env.step(call("write", text="both"))
    replay_env = env.fork()
    assert observe(replay_env) == observe(env) and replay_env.task is not None
    before = observe(env)
    replay_env.step(call("write", text="replay_env"))
    assert observe(env) == before
    env.step(call("write", text="parent"))
    assert replay_env.notes == ["both", "replay_env"] and env.notes == ["both", "parent"]
    # The replay environment's tools are bound to the replay environment.
    assert replay_env.toolbox._owner is replay_env and env.toolbox._owner is env


def test_what_two_environments_share_is_shared_by_their_forks_too() -> None:
    outer, inner = Notes(), Notes()
    outer.inner, inner.outer, outer.db = inner, outer, {"a": []}  # type: ignore[attr-defined]
    inner.db = outer.db  # type: ignore[attr-defined]
    forked: Any = outer.fork()
    assert forked.inner.db is forked.db is not outer.db and forked.inner.outer is forked  # type: ignore[attr-defined]
    assert forked.inner is not inner


def test_restore_goes_back_any_number_of_times() -> None:
    env = Notes()
    env.reset(seed=0)
    env.step(call("write", text="a"))
    snapshot = env.snapshot()
    before = observe(env)
    for text in ("b", "c"):
        env.step(call("write", text=text))
        env.extra = text  # type: ignore[attr-defined]
        env.restore(snapshot)
        assert observe(env) == before and "extra" not in vars(env)
    assert env.step(call("write", text="d"))[0][0].content == "2"


def test_a_snapshot_travels_to_another_environment_and_through_pickle() -> None:
    env, other = Notes(), Notes()
    env.reset(seed=0)
    env.step(call("write", text="a"))
    env.toolbox.remove("quit")
    env.itself = env  # type: ignore[attr-defined]
    other.restore(copy.deepcopy(env.snapshot()))
    assert vars(other)["itself"] is other
    other.step(call("write", text="b"))
    assert env.notes == ["a"] and other.notes == ["a", "b"] and "quit" not in other.toolbox
    assert pickle.loads(pickle.dumps(env.trajectory)) == env.trajectory
    with pytest.raises(ValueError, match="does not fit"):
        other.restore(Strange().snapshot())


class Strange(Notes):
    id = "tests/Strange-v0"
    shared = frozenset({"handle"})


def test_what_cannot_be_copied_is_named() -> None:
    env, strange = Notes(), Strange()
    for one in (env, strange):
        one.reset(seed=0)
        one.handle = (x for x in ())  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Notes\.handle"):
        env.fork()
    assert strange.fork().handle is strange.handle  # type: ignore[attr-defined]


@given(st.lists(st.sampled_from(["a", "b", "no"]), max_size=6), st.integers(0, 6), st.lists(st.text(max_size=3), max_size=4))
@settings(max_examples=60, deadline=None)
async def test_a_fork_equals_a_replay(script: list[str], at: int, rest: list[str]) -> None:
    """Forking after some turns and playing on gives what playing everything in a fresh one gives."""

    env = Notes()
    await env.areset(seed=1)
    for text in script[:at]:
        await env.astep(call("write", text=text))
    replay_env = env.fork()
    for text in script[at:]:
        await env.astep(call("write", text=text))
    for text in rest:
        await replay_env.astep(call("write", text=text))
    fresh = Notes()
    await fresh.areset(seed=1)
    for text in script[:at] + rest:
        await fresh.astep(call("write", text=text))
    assert replay_env.trajectory.messages == fresh.trajectory.messages
    assert replay_env.state() == fresh.state()
