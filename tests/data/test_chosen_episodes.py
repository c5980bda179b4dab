"""Which episodes of runs are trained on and paired: tasks told apart, branches of others, rows that are damaged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.catalog import EnvRef
from agentrl.config.schema import DataConfig
from agentrl.data.prepare import Preparation
from agentrl.data.rendered import chat_of
from agentrl.data.store import About, RowStore
from agentrl.errors import ConfigError
from agentrl.render import make_renderer
from agentrl.train.tokenizer import packaged_tokenizer
from agentrl.trajectory import Trajectory
from agentrl.warm_start import transcript

TOKENIZER = packaged_tokenizer(512)
RENDERER = make_renderer(TOKENIZER)


@pytest.fixture(scope="module")
def whole() -> Trajectory:
    """An episode of five turns."""
    one = asyncio.run(transcript(EnvRef("key_value").build(), RENDERER, 3, {}))
    one.env, one.reward, one.success = "kv", 1.0, True
    return one


def branch_of(root: Trajectory, turn: int, member: int, reward: float) -> Trajectory:
    """As a run records it: all messages, and of the tokens those before `turn` as context. Here it ends with that turn's."""
    [ledger] = root.ledgers
    begins = int((ledger.sampled & (ledger.turns == turn)).argmax())
    own = ledger.fork(begins)
    ids = ledger.token_ids[ledger.sampled & (ledger.turns == turn)].tolist()
    own.append_sampled(ids, [-1.0] * len(ids), [0] * len(ids), turn)
    return replace(root, ledgers=[own], member=member, reward=reward, parent=root.member, branch_turn=turn)


def written(folder: Path, rows: list[dict[str, Any]], **data: Any) -> tuple[About, RowStore]:
    file = folder / "episodes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=[str(file)], heldout=0.0, **data)
    about = Preparation(config, RENDERER, TOKENIZER, 4096).write(folder / "store", 0)
    return about, RowStore(folder / "store")


def test_a_branch_rendered_anew_trains_none_of_its_parents_turns(whole: Trajectory, tmp_path: Path) -> None:
    branch = branch_of(whole, 2, 1, 0.5)
    chat = chat_of(branch)
    assert [trained for message, trained in zip(chat.messages, chat.trained, strict=True) if message.role == "assistant"] == [
        False,
        False,
        *[True] * (len(whole.turns) - 2),
    ]
    _, store = written(tmp_path, [whole.to_json(), branch.to_json()], rerender=True)
    one, two = store.load(store.train)
    after = (whole.ledgers[0].turns >= 2) & whole.ledgers[0].sampled
    assert one.sampled_tokens == whole.sampled_tokens and two.sampled_tokens == int(after.sum()) < one.sampled_tokens


def test_a_branch_is_no_side_of_a_dpo_pair_and_may_be_one_for_a_reward_model(whole: Trajectory, tmp_path: Path) -> None:
    """Of a branch only the end is sampled, of its root all: their sums of log probabilities are not of the same turns."""
    other = replace(whole, member=2, reward=0.2)
    rows = [one.to_json() for one in (whole, branch_of(whole, 2, 1, 0.0), other)]
    for loss, sides, left in (("dpo", (1.0, 0.2), 1), ("reward", (1.0, 0.0), 0)):
        about, store = written(tmp_path, rows, loss=loss)
        assert about.examples == 1
        assert [len(t.ledgers[0]) for t in store.load([0])] == [
            len(next(Trajectory.from_json(row) for row in rows if row["reward"] == side).ledgers[0]) for side in sides
        ]
        assert sum(count for why, count in about.passed.items() if "rollout.branch" in why) == left


def test_tasks_of_one_id_and_seed_that_say_other_things_are_not_compared(whole: Trajectory, tmp_path: Path) -> None:
    """As tasks of two runs with other env.params have them: the same seed, another task."""
    harder = replace(whole, task=replace(whole.task, data={**whole.task.data, "items": 9}), reward=0.0)
    with pytest.raises(ConfigError, match="nothing to train on"):
        written(tmp_path, [whole.to_json(), harder.to_json()], loss="dpo")
    about, _ = written(tmp_path, [whole.to_json(), harder.to_json()], per_task=1)
    assert (about.examples, about.tasks) == (2, 2)


def test_what_was_left_out_is_not_said_of_nothing(whole: Trajectory, tmp_path: Path) -> None:
    about, _ = written(tmp_path, [whole.to_json(), replace(whole, reward=0.0).to_json()], loss="dpo")
    assert about.examples == 1 and about.passed == {}


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "text": (lambda row: {**row, "reward": "0.5"}, "reward: expected a number"),
    "list": (lambda row: {**row, "reward": [1]}, "reward: expected a number"),
    "nan": (lambda row: {**row, "reward": float("nan")}, "reward: expected a number"),
    "true": (lambda row: {**row, "reward": True}, "reward: expected a number"),
    "no turns": (lambda row: {**row, "turns": []}, "its tokens are of turns that it does not have"),
    "fewer turns": (lambda row: {**row, "turns": row["turns"][:-1]}, "its tokens are of turns that it does not have"),
}


@pytest.mark.parametrize("how", DAMAGED)
@pytest.mark.parametrize("more", [{}, {"min_reward": 0.0}, {"loss": "dpo"}], ids=str)
def test_a_damaged_episode_is_named(how: str, more: dict[str, Any], whole: Trajectory, tmp_path: Path) -> None:
    damage, said = DAMAGED[how]
    rows = [damage(whole.to_json()), {**damage(whole.to_json()), "member": 1}]
    if more.get("loss") == "dpo" and "turns" in how:
        rows[1]["reward"] = 0.0
    with pytest.raises(ConfigError) as problem:
        written(tmp_path, rows, **more)
    assert "episodes.jsonl:1" in str(problem.value) and said in str(problem.value)


def test_episodes_in_parquet_are_refused_with_the_way_out(whole: Trajectory, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    row = {"task": {"id": "a", "seed": 1}, "env_id": "kv", "reward": 1.0, "ledgers": [{"token_ids": "AA=="}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "episodes.parquet")
    config = DataConfig(path=[str(tmp_path / "episodes.parquet")])
    with pytest.raises(ConfigError, match="episodes are read from JSON lines"):
        Preparation(config, RENDERER, TOKENIZER, 4096).write(tmp_path / "store", 0)


@pytest.mark.parametrize(("share", "tasks", "held"), [(0.07, 100, 7), (0.05, 40, 2), (0.05, 41, 3), (0.5, 3, 2), (0.9, 2, 1)])
def test_the_share_that_is_held_out_is_rounded_up_from_what_it_says(share: float, tasks: int, held: int, tmp_path: Path) -> None:
    """0.07 of 100 is 7.000000000000001 in floating point, and 7 tasks."""
    file = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    file.write_text((json.dumps(row) + "\n") * tasks)
    about = Preparation(DataConfig(path=[str(file)], heldout=share), RENDERER, TOKENIZER, 4096).write(tmp_path / "store", 0)
    assert len(about.heldout) == held
