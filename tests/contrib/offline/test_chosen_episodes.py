"""Which episodes of runs are trained on and paired: tasks told apart, branches of others, rows that are damaged."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image as Pictures

from agentrl.config.schema import DataConfig
from agentrl.contrib.offline.data_run import _load
from agentrl.contrib.offline.prepare import Preparation, chat_of, filter_episode, pairs
from agentrl.contrib.offline.store import About, RowPlace, RowStore, rows_of, sources
from agentrl.data.images import Image
from agentrl.data.token_ledger import PromptIds, TokenLedger
from agentrl.data.trajectory import Message, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.warm_start import transcript
from agentrl.trainer.checkpoint import Checkpoints
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import CheckpointError, ConfigError
from tests.contrib.offline.test_layouts import parquet
from tests.trainer.test_checkpoints import writing

TOKENIZER = packaged_tokenizer(512)
RENDERER = make_renderer(TOKENIZER)


@pytest.fixture(scope="module")
def whole() -> Trajectory:
    """An episode of several turns."""
    one = asyncio.run(transcript(EnvRef("key_value").build(), RENDERER, 3, teacher={}))
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


def written(folder: Path, rows: list[dict[str, Any]], longest: int = 4096, seed: int = 0, **data: Any) -> tuple[About, RowStore]:
    file = folder / "episodes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(**{"path": [str(file)], "heldout": 0.0, **data})
    about = Preparation(config, RENDERER, TOKENIZER, longest).write(folder / "store", seed)
    return about, RowStore(folder / "store")


def talk(subject: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{subject}?"}, {"role": "assistant", "content": "!"}]


def test_a_branch_rendered_anew_trains_none_of_its_parents_turns(whole: Trajectory, tmp_path: Path) -> None:
    branch = branch_of(whole, 2, 1, 0.5)
    chat = chat_of(branch)
    own = [trained for message, trained in zip(chat.messages, chat.trained, strict=True) if message.role == "assistant"]
    assert own == [False, False, *[True] * (len(whole.turns) - 2)]
    _, store = written(tmp_path, [whole.to_json(), branch.to_json()], rerender=True)
    one, two = store.load(store.train)
    after = (whole.ledgers[0].turns >= 2) & whole.ledgers[0].sampled
    assert one.sampled_tokens == whole.sampled_tokens and two.sampled_tokens == int(after.sum()) < one.sampled_tokens


def test_turns_that_an_episode_was_given_are_context_if_they_are_rendered_anew(whole: Trajectory) -> None:
    assert chat_of(replace(whole, given=2)).trained == chat_of(replace(whole, parent=0, branch_turn=2)).trained
    assert chat_of(replace(whole, given=1, parent=0, branch_turn=2)).trained.count(True) == len(whole.turns) - 2
    opening = next(place for place, message in enumerate(whole.messages) if message.role == "assistant")
    history = [Message("assistant", "What do you need?"), Message("user", "This.")]  # a task's own, not the policy's
    messages = [*whole.messages[:opening], *history, *whole.messages[opening:]]
    for given in (0, 1):
        begun = chat_of(replace(whole, messages=messages, given=given))
        own = [trained for message, trained in zip(begun.messages, begun.trained, strict=True) if message.role == "assistant"]
        assert own == [False] * (1 + given) + [True] * (len(whole.turns) - given)


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


def rewarded(whole: Trajectory, *rewards: float, **changed: Any) -> list[dict[str, Any]]:
    return [replace(whole, reward=reward, seed=number, **changed).to_json() for number, reward in enumerate(rewards)]


def sides(folder: Path, rows: list[dict[str, Any]], **data: Any) -> list[tuple[float, float]]:
    """The rewards of each pair's episodes."""
    found = [filter_episode(RowPlace(folder, n), row, DataConfig(path=["x"], **data), Counter()) for n, row in enumerate(rows)]
    made = pairs([one for one in found if one is not None], DataConfig(path=["x"], **data), Counter())
    return [(better.reward, worse.reward) for better, worse in made]


def test_pairs_are_the_best_with_the_worst_then_the_next_of_both(whole: Trajectory, tmp_path: Path) -> None:
    rows = rewarded(whole, 0.25, 1.0, 0.5, 0.0, 0.75)
    assert sides(tmp_path, rows, loss="dpo") == [(1.0, 0.0)]
    assert sides(tmp_path, rows, loss="dpo", per_task=9) == [(1.0, 0.0), (0.75, 0.25)], "the middle one has nobody"
    assert sides(tmp_path, rows, loss="dpo", per_task=9, margin=0.5) == [(1.0, 0.0), (0.75, 0.25)], "at least so much"
    assert sides(tmp_path, rows, loss="dpo", per_task=9, margin=0.51) == [(1.0, 0.0)]
    about, _ = written(tmp_path, rewarded(whole, 1.0, 0.0), loss="dpo")
    assert about.examples == 1 and about.passed == {}, "what was left out is not said of nothing"
    assert sides(tmp_path, rewarded(whole, 0.5), loss="dpo", margin=1e-9) == []


@pytest.mark.parametrize("apart", [{"given": 2}, {"env": "other"}], ids=str)
def test_episodes_that_begin_elsewhere_or_are_of_another_environment_are_no_pair(
    apart: dict[str, Any], whole: Trajectory, tmp_path: Path
) -> None:
    assert sides(tmp_path, rewarded(whole, 1.0) + rewarded(whole, 0.0, **apart), loss="dpo") == []


def test_the_best_of_each_task_keep_the_files_order_and_a_bound_is_within(whole: Trajectory, tmp_path: Path) -> None:
    rows = rewarded(whole, 0.5, 0.25, 1.0, 0.5)
    for number, row in enumerate(rows):  # told apart by their lengths
        row["ledgers"] = [ledger.to_packed_json() for ledger in cut(whole, number)]
    _, store = written(tmp_path, rows, per_task=3)
    assert [sum(map(len, one.ledgers)) for one in store.load(store.train)] == [len(cut(whole, number)[0]) for number in (0, 2, 3)]
    about, _ = written(tmp_path, rows, min_reward=0.5)
    assert about.examples == 3 and about.passed == {"below data.min_reward = 0.5": 1}
    rows = [replace(whole, success=success, seed=n).to_json() for n, success in enumerate((True, None, False))]
    assert written(tmp_path, rows, success=True)[0].examples == 1, "what is not known has not solved its task"


def cut(whole: Trajectory, number: int) -> list[TokenLedger]:
    """The ledger with so many tokens of context more."""
    ledger = TokenLedger.from_json(whole.ledgers[0].to_json())
    ledger.append_context([5] * number, len(whole.turns) - 1)
    return [ledger]


def test_lines_without_anything_do_not_move_the_others(whole: Trajectory, tmp_path: Path) -> None:
    rows = rewarded(whole, 0.5, 1.0)
    (tmp_path / "spaced.jsonl").write_text("\n  \r\n".join(json.dumps(row) for row in rows) + "\n\n")
    config = DataConfig(path=[str(tmp_path / "spaced.jsonl")] * 2, heldout=0.0)
    about = Preparation(config, RENDERER, TOKENIZER, 4096).write(tmp_path / "store", 0)
    assert (about.examples, about.rows) == (2, 2), "a file that is named twice is read once"


def test_hidden_files_and_evaluations_of_a_run_are_not_read(tmp_path: Path) -> None:
    played = ["step_000002", "step_000001", "after_000002"]
    for name in (*(f"run/trajectories/{name}.jsonl" for name in played),
                 "more/b/c.jsonl", "more/a.parquet", "more/.hidden.jsonl", "more/.cache/x.jsonl", "more/notes.txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(file.relative_to(tmp_path)) for file in sources([str(tmp_path / "run"), str(tmp_path / "more")])]
    assert found == [
        "run/trajectories/step_000001.jsonl", "run/trajectories/step_000002.jsonl", "more/a.parquet", "more/b/c.jsonl",
    ]  # fmt: skip
    for empty in ("", "  "):  # which is not the working directory
        with pytest.raises(ConfigError, match=r"data\.path: .*is empty"):
            sources([empty])


def test_a_table_row_is_named_by_its_number_and_has_no_field_that_is_null(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "?", "tool_calls": None}, {"role": "assistant", "content": "!", "weight": None}]
    rows = [{"messages": [*said, {"role": "user", "content": None}]}, {"messages": said}]
    found = list(rows_of(parquet(tmp_path / "a.parquet", rows)))
    assert [str(place) for place, _ in found] == [f"{tmp_path}/a.parquet:1", f"{tmp_path}/a.parquet:2"]
    plain = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    assert [row for _, row in found] == [{"messages": [*plain, {"role": "user"}]}, {"messages": plain}]


def test_a_row_may_be_as_long_as_it_may_and_a_share_of_bad_rows_as_large(whole: Trajectory, tmp_path: Path) -> None:
    most = len(whole.ledgers[0])
    assert written(tmp_path, [whole.to_json()], longest=most)[0].tokens == most
    with pytest.raises(ConfigError, match=f"{most} tokens, and a row, which is never cut, may have {most - 1}"):
        written(tmp_path, [whole.to_json()], longest=most - 1)
    assert written(tmp_path, [*[whole.to_json()] * 3, {"text": "x"}], max_bad=0.25)[0].examples == 3
    with pytest.raises(ConfigError, match=r"1 of 4 rows cannot be used \(25.0%\), and data.max_bad = 0.24"):
        written(tmp_path, [*[whole.to_json()] * 3, {"text": "x"}], max_bad=0.24)
    with pytest.raises(ConfigError, match=r"in 1 rows:\n.*:1: data.loss = "):  # all bad, and not called empty
        written(tmp_path, [{"query": "q"}], max_bad=1.0)


def test_a_pair_is_left_out_if_either_side_is_too_long(whole: Trajectory, tmp_path: Path) -> None:
    long = replace(whole, ledgers=cut(whole, 50))
    most = len(whole.ledgers[0])
    for better, worse in ((whole, long), (long, whole)):
        rows = [replace(better, reward=1.0).to_json(), replace(worse, reward=0.0).to_json()]
        with pytest.raises(ConfigError, match=f"{most + 50} tokens, and a row"):
            written(tmp_path, rows, loss="dpo", longest=most)


@pytest.mark.parametrize(
    "more",
    [
        [({"tool_calls": [{"id": name, "function": {"name": "f", "arguments": "{}"}}]},) for name in "ab"],
        [({"content": "!"}, {"role": "user", "content": text}) for text in "ab"],
    ],
    ids=["ids of calls", "what follows the answer"],
)
def test_a_pair_that_differs_in_nothing_that_the_model_is_shown_is_a_bad_row(more: list[Any], tmp_path: Path) -> None:
    chosen, rejected = ([{"role": "assistant", **answer}, *after] for answer, *after in more)
    row = {"prompt": talk(0)[:1], "chosen": chosen, "rejected": rejected, "tools": [{"name": "f"}]}
    with pytest.raises(ConfigError, match=r"1 of 1 rows cannot be used.*\n.*chosen and rejected are equal to the model"):
        written(tmp_path, [row], loss="dpo")


def test_a_ledger_without_a_sampled_token_is_no_row(whole: Trajectory, tmp_path: Path) -> None:
    bare = whole.ledgers[0].fork(9)
    about, store = written(tmp_path, [replace(whole, ledgers=[bare, *whole.ledgers, bare]).to_json()])
    assert [len(ledger) for ledger in store.load([0])[0].ledgers] == [len(whole.ledgers[0])] == [about.tokens]


def test_a_summary_after_the_last_turn_stays_and_the_conversation_that_ends_the_episode_is_last(
    whole: Trajectory, tmp_path: Path
) -> None:
    ledger, other, end = TokenLedger.from_json(whole.ledgers[0].to_json()), TokenLedger(), len(whole.turns)
    for one, turn in ((ledger, end), (other, 0)):
        one.append_context([5], turn)
        one.append_sampled([6], [-1.0], [0], turn)
    rewrites = [{"turn": end, "ledger": 1, "tokens": 9, "added": []}]
    _, store = written(tmp_path, [replace(whole, ledgers=[ledger, other], rewrites=rewrites).to_json()])
    assert [len(one) for one in store.load([0])[0].ledgers] == [2, len(whole.ledgers[0]) + 2]


def test_a_token_that_the_tokenizer_lacks_is_another_tokenizers(whole: Trajectory, tmp_path: Path) -> None:
    """In the prompt, which no message of the policy's says."""
    ledger = whole.ledgers[0].to_json()
    for token in (len(TOKENIZER), -1):
        changed = {**ledger, "token_ids": [token, *ledger["token_ids"][1:]]}
        with pytest.raises(ConfigError, match="sampled with another one"):
            written(tmp_path, [{**whole.to_json(), "ledgers": [changed]}])


def test_of_a_task_all_episodes_are_held_out_or_none_and_the_seed_says_which(whole: Trajectory, tmp_path: Path) -> None:
    tasks = [replace(whole.task, seed=n) for n in range(8)]
    rows = [one for task in tasks for given in (0, 2) for one in rewarded(whole, 1.0, task=task, given=given)]
    assert written(tmp_path, rows, per_task=1)[0].examples == 8
    held = {}
    for seed in range(4):
        about, store = written(tmp_path, rows, heldout=0.3, seed=seed)
        assert (about.tasks, len(about.heldout), len(store.heldout)) == (8, 3, 6)
        assert sorted(n // 2 for n in store.heldout) == sorted(about.heldout * 2)
        held[seed] = tuple(about.heldout)
    assert len(set(held.values())) > 1


def test_each_epoch_has_every_example_once_in_an_order_of_its_own(whole: Trajectory, tmp_path: Path) -> None:
    _, store = written(tmp_path, rewarded(whole, *[1.0] * 7))
    assert store.steps(3) == 3
    epochs = [[n for step in range(3) for n in store.drawn(3 * epoch + step, 3, 5).tolist()] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    assert [store.drawn(n, 3, 5).tolist() for n in range(9)] == [store.drawn(n, 3, 5).tolist() for n in range(9)]
    assert [n for step in range(3) for n in store.drawn(step, 3, 6).tolist()] != epochs[0]


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "text": (lambda row: {**row, "reward": "0.5"}, "reward: expected a number"),
    "list": (lambda row: {**row, "reward": [1]}, "reward: expected a number"),
    "nan": (lambda row: {**row, "reward": float("nan")}, "reward: expected a number"),
    "true": (lambda row: {**row, "reward": True}, "reward: expected a number"),
    "no turns": (lambda row: {**row, "turns": []}, "its tokens belong to turns that are missing"),
    "fewer turns": (lambda row: {**row, "turns": row["turns"][:-1]}, "its tokens belong to turns that are missing"),
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


def test_tokens_that_were_sampled_beside_images_are_refused_and_its_messages_are_not(whole: Trajectory, tmp_path: Path) -> None:
    image = Image.of(Pictures.new("RGB", (28, 28), "red"))
    ledger = TokenLedger.from_json(whole.ledgers[0].to_json())
    ledger.append_context(PromptIds([5], [image]), 9)
    row = replace(whole, ledgers=[ledger]).to_json()
    with pytest.raises(ConfigError, match=r"sampled with images, which \[data\] cannot store; set data\.rerender=true"):
        written(tmp_path, [row, row])
    assert written(tmp_path, [row], rerender=True)[0].examples == 1


def test_episodes_in_parquet_are_refused_with_the_way_out(whole: Trajectory, tmp_path: Path) -> None:
    row = {"task": {"id": "a", "seed": 1}, "env_id": "kv", "reward": 1.0, "ledgers": [{"token_ids": "AA=="}]}
    config = DataConfig(path=[str(parquet(tmp_path / "episodes.parquet", [row]))])
    with pytest.raises(ConfigError, match="episodes are read from JSON lines"):
        Preparation(config, RENDERER, TOKENIZER, 4096).write(tmp_path / "store", 0)


@pytest.mark.parametrize(
    "key", [{"success": True}, {"min_reward": 0.5}, {"per_task": 2}, {"rerender": True}, {"margin": 0.5}], ids=str
)
def test_what_chooses_among_episodes_is_refused_if_there_are_none(key: dict[str, Any], whole: Trajectory, tmp_path: Path) -> None:
    chat = {"messages": talk("")}
    with pytest.raises(ConfigError, match=f"data.{next(iter(key))} applies to recorded episodes, and none of the 2 rows is one"):
        written(tmp_path, [chat, chat], **key)
    assert written(tmp_path, [chat, whole.to_json()], **key)[0].examples == 2


@pytest.mark.parametrize(("share", "tasks", "held"), [(0.07, 100, 7), (0.05, 40, 2), (0.05, 41, 3), (0.5, 3, 2), (0.9, 2, 1)])
def test_the_share_that_is_held_out_is_rounded_up_from_what_it_says(share: float, tasks: int, held: int, tmp_path: Path) -> None:
    """0.07 of 100 is 7.000000000000001 in floating point, and 7 tasks."""
    about, _ = written(tmp_path, [{"messages": talk(n)} for n in range(tasks)], heldout=share)
    assert len(about.heldout) == held


def test_a_conversation_that_stands_twice_is_held_out_whole_and_by_what_it_says(tmp_path: Path) -> None:
    """Not by its place: whichever way the path is spelled and its keys are written."""
    said = [talk(n) for n in range(20)]
    dumped = [[{**message, "name": None, "weight": None} for message in messages] for messages in said]
    more = [{"role": "user", "content": "thanks"}, {"role": "assistant", "content": "-", "weight": 0}]
    file, alone = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    rows = [*said, *dumped, *([*messages, *more] for messages in said)]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    alone.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said[::-1]))

    def held(path: Path, count: int) -> set[str]:
        data = DataConfig(path=[str(path)], heldout=0.25)
        about = Preparation(data, RENDERER, TOKENIZER, 4096).write(tmp_path / "store", 0)
        assert (about.tasks, len(about.heldout), about.examples) == (20, 5, count)
        store = RowStore(tmp_path / "store")
        return {TOKENIZER.decode(one.ledgers[0].ids()) for one in store.load(store.heldout)}

    first = held(file, 60)
    assert first == held(tmp_path / ".." / tmp_path.name / "a.jsonl", 60) == held(alone, 20) and len(first) == 5


@pytest.mark.parametrize("name", ["token_ids.bin", "sampled.bin", "ledgers.npy", "tasks.npy"])
def test_data_of_another_content_is_refused(whole: Trajectory, tmp_path: Path, name: str) -> None:
    """Of a copy that was cut short, or zeros after a power cut: sizes are as they were, and the run went on with it."""
    written(tmp_path, [whole.to_json()])
    file = tmp_path / "store" / name
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"the data of this run is .* damaged: .*{name}: not as written.*; start over"):
        RowStore(tmp_path / "store")


async def test_a_run_goes_on_from_a_checkpoint_that_was_moved_aside(tmp_path: Path) -> None:
    """A kill between the two renames with which a checkpoint takes the place of one of the same step."""
    checkpoints, loaded = Checkpoints(tmp_path / "checkpoints", keep=3), []
    for step in (1, 2):
        with writing(checkpoints, step) as folder:
            (folder / "driver.json").write_text(json.dumps({"step": step}))
    folder.with_name("step_000002").rename(folder.with_name(".old_step_000002"))

    async def load(*given: object) -> None:
        loaded.append(given[1])

    parts = {"display": None, "folder": SimpleNamespace(rewind=loaded.append), "run_log": SimpleNamespace(rewound=loaded.append)}
    objective = SimpleNamespace(group=SimpleNamespace(arun=load))
    run: Any = SimpleNamespace(checkpoints=checkpoints, objective=objective, **parts)
    assert await _load(run) == 2 and [str(one).rpartition("/checkpoints/")[2] for one in loaded[:1]] == ["step_000002/actor"]
