"""`agentrl reward`: lint finds seeded faults, explain shows why, score and diff read recorded episodes."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest

from agentrl.cli import reward as command
from agentrl.cli.main import build_parser, main
from agentrl.config.schema import RewardConfig
from agentrl.data.trajectory import Message, Task, ToolCall
from agentrl.env import ToolEnv, tool
from agentrl.env.catalog import EnvRef
from agentrl.reward import Context, compile_spec, load_spec
from agentrl.reward.explain import score_file
from agentrl.reward.leaf import LEAVES
from agentrl.reward.lint import copied_question, lint_probes, lint_spec, probe_episodes
from agentrl.reward.nodes import GROUP_LEAVES
from agentrl.reward.spec import kinds
from tests.reward.reward_episodes import SHELF, call, episode, gold, leaf, spec

KEY_VALUE = "agentrl/KeyValue-v0"
ONE = leaf("episode.stopped")
ANSWER = leaf("number.close", {"expect": {"$": "/task/gold/answer"}, "which": "last"})
CALLS = {"expect": {"$": "/task/gold/calls"}}


@pytest.fixture
def reward(agentrl):
    return partial(agentrl, "reward")


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def record(path, *trajectories):
    path.write_text("".join(json.dumps(trajectory.to_json()) + "\n" for trajectory in trajectories))
    return path


# -- lint without an environment -------------------------------------------------------------------


RIGHT = {**ANSWER, "id": "right"}


@pytest.mark.parametrize(("root", "code", "at"), [
    ({**ONE, "weight": 2}, "dead-weight", "/root"),
    ({"op": "sum", "of": [{**ONE, "weight": 0}, ANSWER]}, "dead-weight", "/root/of/0"),
    ({"op": "product", "of": [{**ONE, "weight": 2}, ANSWER]}, "dead-weight", "/root/of/0"),
    ({"op": "gate", "if": ONE, "gte": 1.5, "then": ANSWER}, "unreachable-gate", "/root"),
    ({"op": "gate", "if": ONE, "gte": 0, "then": ANSWER}, "unreachable-gate", "/root"),
    ({**ONE, "scale": [0.5, 0.5]}, "constant-output", "/root"),
    ({"op": "sum", "of": [{**ONE, "clip": [2, 3]}, ANSWER]}, "constant-output", "/root/of/0"),
    ({"op": "product", "of": [{**ONE, "scale": [0, 0]}, ANSWER]}, "constant-output", "/root/of/0"),
    ({"op": "all", "of": [{**ONE, "scale": [0, 0.5]}, ANSWER]}, "never-true", "/root/of/0"),
    ({"op": "max", "of": [{**ONE, "scale": [0, 0.5]}, {**ANSWER, "scale": [0.5, 1]}]}, "never-decides", "/root/of/0"),
    ({"op": "min", "of": [{**ONE, "scale": [0.5, 1]}, {**ANSWER, "scale": [0, 0.5]}]}, "never-decides", "/root/of/0"),
    ({**ONE, "clip": [-1, 2]}, "dead-clip", "/root"),
    ({**ONE, "missing": "skip"}, "dead-missing", "/root"),
    (leaf("cost.turns", {"max": 3}), "no-success", "/root"),
    ({"id": "right", "gte": 2}, "unreachable-gate", "/success"), ({**ONE, "scale": [0, 0.5]}, "never-true", "/success"),
    ({**ONE, "weight": 2}, "dead-weight", "/success"),
])  # fmt: skip
def test_lint_of_a_spec_alone(root, code, at):
    found = lint_spec(compile_spec(spec(RIGHT, success=root) if at == "/success" else spec(root)))
    assert (code, at) in {(item.code, item.at) for item in found}


def test_lint_of_an_unpinned_judge():
    def codes(model):
        node = leaf("judge", {"model": model, "prompt": "{answer}"})
        return [(item.level, item.code) for item in lint_spec(command._Options(None, RewardConfig()).scorer(spec(node)))]

    assert codes("openai/gpt-4o") == [("warning", "unpinned-judge")]
    assert codes("openai/gpt-4o-2024-08-06") == []


@pytest.mark.parametrize("name", sorted(path.stem for path in SHELF.glob("*.json") if path.stem != "schema"))
def test_the_shelf_is_clean(name):
    options = command._Options(EnvRef(KEY_VALUE), RewardConfig())
    assert lint_spec(options.scorer(load_spec(SHELF / f"{name}.json"))) == []


# -- lint on probe episodes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probes():
    return probe_episodes(EnvRef(KEY_VALUE).build, 3)


def findings(root, probes):
    scorer = compile_spec(spec(root), context=Context(replay_env=lambda task: EnvRef(KEY_VALUE).build()))
    return [(item.level, item.code) for item in lint_probes(scorer, probes, True)]


def test_probes_are_what_they_say(probes):
    assert {kind: len(rows) for kind, rows in probes.items()} == dict.fromkeys(
        ("gold", "empty", "silent", "question", "spam", "listing", "mute", "padded", "shuffled"), 3
    )
    for row, gold_episode in enumerate(probes["gold"]):
        count = len(list(gold_episode.calls()))
        assert gold_episode.terminated
        assert gold_episode.turns[-1].message.content == gold_episode.task.gold["answer"]
        assert len(list(probes["padded"][row].calls())) == 3 * count
        assert len(list(probes["shuffled"][row].calls())) == count
        assert not probes["silent"][row].turns
        assert len(list(probes["spam"][row].calls())) == 12
        assert gold_episode.task.data["goal"] in probes["question"][row].turns[0].message.content


def test_a_spec_that_pays_the_question_is_found():
    """A comparison that computes what it reads: the question in a box was worth as much as its answer, and lint said nothing."""
    copied = copied_question([Message("user", "What is 9/10 + 6/2?")])
    assert copied == "What is 9/10 + 6/2?\n\\boxed{9/10 + 6/2}"
    scorer = compile_spec(spec(leaf("text.contains", {"expect": "9/10"})))
    found = lint_probes(scorer, {"gold": [episode("9/10")], "question": [episode(copied)]})
    assert "the question, copied as the answer, is a success" in next(f.message for f in found if f.code == "cheap-success")


@pytest.mark.parametrize(("root", "code"), [
    ({"op": "sum", "of": [ANSWER, leaf("calls.none")]}, "do-nothing-floor"),
    ({"op": "mean", "of": [ANSWER, leaf("text.equals", {"expect": "never"})]}, "gold-below-maximum"),
    ({"op": "mean", "of": [ANSWER, leaf("text.equals", {"expect": "never"})]}, "gold-no-success"),
    (leaf("group.rank", {"of": leaf("text.equals", {"expect": "never"})}, scope="group"), "gold-no-success"),
    (leaf("text.equals", {"expect": {"$": "/task/gold/anser"}}), "gold-unscored"),
    (leaf("number.close", {"expect": {"$": "/task/gold/answer"}, "which": "any"}), "cheap-success"),
    ({"op": "max", "of": [ANSWER, leaf("calls.none")]}, "cheap-success"),
    (leaf("number.close", {"expect": {"$": "/task/gold/answer"}, "which": "any"}), "spam-passes"),
    (leaf("calls.match", {**CALLS, "compare": "superset"}), "permissive-match"),
    (leaf("calls.match", {**CALLS, "order": "ordered"}), "order-matters"),
    (leaf("calls.none", scope="call", reduce="min", scale=[1, 0]), "escapes-scoring"),
    ({"op": "product", "of": [ANSWER, leaf("calls.none", {"names": ["erase"]})]}, "never-varies"),
    ({"op": "gate", "if": leaf("calls.none", {"names": ["get"]}), "gte": 1, "then": leaf("calls.none"), "else": ANSWER},
     "do-nothing-floor"),
    ({"op": "gate", "if": leaf("text.equals", {"expect": "never"}), "gte": 1, "then": leaf("calls.none"), "else": ANSWER},
     "gate-never-opens"),
])  # fmt: skip
def test_lint_finds_what_is_wrong(root, code, probes):
    assert code in dict(map(reversed, findings(root, probes)))


@pytest.mark.parametrize(("root", "found"), [
    (ANSWER, []), (leaf("calls.match", CALLS), []), (leaf("state.match", {"replay": {"$": "/task/gold/calls"}}), []),
    ({"op": "sum", "of": [ANSWER, leaf("cost.turns", {"max": 10}, weight=-0.2)]}, [("warning", "gold-below-maximum")]),
    (leaf("group.rank", {"of": ANSWER}), [("warning", "not-probed")]),
])  # fmt: skip
def test_lint_finds_nothing_else(root, found, probes):
    """A sound spec has no findings, what gold costs is no error, and a spec that compares members is not probed."""
    assert findings(root, probes) == found


def test_lint_and_explain_say_what_decides_success(tmp_path, reward):
    shaped = write(tmp_path / "shaped.json", spec({"op": "sum", "of": [ANSWER, leaf("cost.turns", {"max": 10}, weight=-0.2)]}))
    own = write(tmp_path / "own.json", spec(ANSWER, success={"use": "calls.none", "id": "quiet"}))
    file = record(tmp_path / "rows.jsonl", episode([call("f")], "7", task_gold={"answer": 7, "calls": []}))
    for path, line in ((shaped, "success is decided by the task part of /root: {"), (own, "success is decided by /success\n")):
        assert line in reward("lint", path).out
    for path, line in ((shaped, "success: yes, by the task part of /root"), (own, "success: no, by /success")):
        assert line in reward("explain", path, file).out
    unknown = write(tmp_path / "unknown.json", spec(ANSWER, success=leaf("text.equals", {"expect": {"$": "/task/gold/other"}})))
    assert "success: could not be scored, by /success\n" in reward("explain", unknown, file).out
    out = reward("score", shaped, file)
    assert json.loads(out.out)["success"] is True and "success 1 of 1" in out.err


def test_lint_command(tmp_path, reward):
    assert "0 findings" in reward("lint", SHELF / "key_value.json", "--env", KEY_VALUE, "--tasks", 2).out
    bad = write(tmp_path / "bad.json", spec({"op": "sum", "of": [ANSWER, leaf("calls.none")]}))
    found = json.loads(reward("lint", bad, "--env", KEY_VALUE, "--tasks", 2, "calls=2", "--json", code=1).out)["findings"]
    assert "do-nothing-floor" in [item["code"] for item in found]


def test_replays_on_a_real_environment(tmp_path, reward):
    root = leaf("state.match", {"replay": {"$": "/task/gold/calls"}, "by": "hash"})
    state = write(tmp_path / "state.json", spec(root))
    rows = record(tmp_path / "t.jsonl", episode("7", task_gold=TWO))
    assert "name it with --env ID" in reward("score", state, rows, code=2).err
    ref = EnvRef(KEY_VALUE)
    compiled = compile_spec(state, context=Context(replay_env=lambda task: ref.build()))
    probes = probe_episodes(ref.build, 2)
    assert [compiled.score(t).value for t in probes["gold"]] == [1, 1]
    assert [compiled.score(t).value for t in probes["padded"]] == [0, 0]


# -- explain, score, diff --------------------------------------------------------------------------

GET = [call("get", key="a")]
TWO = {"answer": "7", "calls": gold(call("get", key="a"))}
SHORT = spec(leaf("cost.turns", {"max": 4}, scale=[1, 0]))
RANK = spec(leaf("group.rank", {"of": leaf("cost.turns", {"max": 9})}))


def test_explain(tmp_path, reward):
    file = record(tmp_path / "t.jsonl", episode("8", task_gold=TWO), episode([call("get", key="a")], "7", task_gold=TWO))
    text = reward("explain", SHELF / "dense_gated.json", file, "--row", 2).out
    assert "dense_gated: 1" in text
    assert "number.close [success]" in text
    assert "emitted at turns: turn 0: 0.5; at the end: 0.5" in text
    assert "skipped x 0.5  calls.match [turns]" in text  # the answer's turn makes no call
    other = write(tmp_path / "same.json", spec(leaf("text.equals", {"expect": {"$": "/task/gold/answer"}})))
    assert 'text=8, expected=["7"]' in reward("explain", other, file).out
    tree = json.loads(reward("explain", SHELF / "dense_gated.json", file, "--json").out)
    assert tree["value"] == 0
    assert tree["evidence"]["root"]["if"]["evidence"]["said"] == ["8"]


def test_score_keeps_the_order_in_parallel_too(tmp_path, reward):
    file = record(tmp_path / "t.jsonl", *(episode(str(i % 3), task_gold={**TWO, "answer": "1"}) for i in range(150)))
    alone = reward("score", SHELF / "key_value.json", file)
    reward("score", SHELF / "key_value.json", file, "--workers", 2, "--out", tmp_path / "out.jsonl")
    assert alone.out == (tmp_path / "out.jsonl").read_text()
    scored = [json.loads(line) for line in alone.out.splitlines()]
    assert [row["value"] for row in scored] == [float(i % 3 == 1) for i in range(150)]
    assert "150 of 150 episodes scored, mean 0.3333" in alone.err


def test_score_of_a_group_spec_compares_the_episodes_of_a_task(tmp_path, reward):
    file = record(tmp_path / "t.jsonl", *(episode(*["x"] * count) for count in (1, 2, 3)))
    scored = reward("score", write(tmp_path / "rank.json", RANK), file).out.splitlines()
    assert [json.loads(line)["value"] for line in scored] == [0, 0.5, 1]


def test_diff(tmp_path, reward):
    """By the answer rows 1 and 2 tie and row 3 is last; by turns row 2 (two turns) falls behind."""
    file = record(tmp_path / "t.jsonl", *(episode(*said, task_gold=TWO) for said in (["7"], [GET, "7"], ["8"])))
    short = write(tmp_path / "short.json", spec(leaf("cost.turns", {"max": 9}, scale=[1, 0])))
    changed = json.loads(reward("diff", SHELF / "key_value.json", short, file, "--json").out)["changed"]
    assert [(item["row"], item["rank_a"], item["rank_b"]) for item in changed] == [(2, 1, 3), (3, 3, 1)]
    assert "0 of 3 episodes change rank" in reward("diff", SHELF / "key_value.json", SHELF / "key_value.json", file).out


def test_episodes_of_two_tasks_of_one_name_are_not_ranked_together(tmp_path, reward):
    """Two tasks of the same id, in two environments of one class or with other gold: an episode of each has no rank."""
    rows = [episode("7", task_gold=TWO), episode(GET, "7", task_gold=TWO)]
    short, ranks = write(tmp_path / "short.json", SHORT), write(tmp_path / "rank.json", RANK)
    for apart in ("env", "gold"):
        other = replace(rows[1], env="b") if apart == "env" else replace(rows[1], task=replace(rows[1].task, gold={"answer": 7}))
        file = record(tmp_path / "t.jsonl", rows[0], other)
        found = json.loads(reward("diff", SHELF / "key_value.json", short, file, "--json").out)
        assert (found["changed"], found["tasks"], found["tasks_of_one_episode"]) == ([], 2, 2)
        assert [json.loads(line)["value"] for line in reward("score", ranks, file).out.splitlines()] == [None, None]


def test_a_difference_by_rounding_is_no_rank(tmp_path, reward):
    """0.1 + 0.2 is above 0.3 as doubles; whole weights give the same values without a difference."""
    said = [leaf("text.contains", {"expect": word}) for word in "abc"]
    tenths, whole = (
        {"op": "sum", "of": [{**one, "weight": w * by} for one, w in zip(said, (0.3, 0.1, 0.2), strict=True)]} for by in (1, 10)
    )
    specs = [write(tmp_path / f"{n}.json", spec(root)) for n, root in enumerate((tenths, {**whole, "scale": [0, 0.1]}))]
    file = record(tmp_path / "t.jsonl", episode("a"), episode("b c"))
    found = json.loads(reward("diff", *specs, file, "--json").out)
    assert (found["changed"], found["values"]) == ([], [])


def test_an_environment_s_own_spec_is_replayed_on_it_in_each_command():
    for argv in (["score", "key_value", "t"], ["diff", "key_value", "x.json", "t"], ["diff", "x.json", "key_value", "t"]):
        assert command._options(build_parser().parse_args(["reward", *argv])).env == EnvRef("key_value")


def test_the_name_of_an_environment_is_its_own_spec_wherever_that_lies(here, reward):
    assert main(["env", "new", "todo"]) == 0
    rows = record(here / "t.jsonl", episode("7", task_gold=TWO))
    for word in ("todo", "my/Todo-v0", KEY_VALUE):
        reward("explain", word, rows)
        assert "success is decided by" in reward("lint", word, "-n", 1).out
    assert "'tod' is neither a file nor an environment nor a spec on the shelf" in reward("lint", "tod", code=2).err


def test_diff_of_one_episode_a_task_says_what_changes_in_value_and_success(tmp_path, reward):
    """There are no ranks: by the answer they are worth 1, 1, 0, by what four turns cost 3/4, 2/4, 3/4."""
    rows = [episode(*said, task_gold=TWO) for said in (["7"], [GET, "7"], ["8"])]
    for number, row in enumerate(rows):
        row.task = replace(row.task, id=f"t/{number}")
    file = record(tmp_path / "t.jsonl", *rows)
    short = write(tmp_path / "short.json", SHORT)
    found = json.loads(reward("diff", SHELF / "key_value.json", short, file, "--json").out)
    assert found["changed"] == [] and (found["tasks"], found["tasks_of_one_episode"]) == (3, 3)
    assert [(v["row"], v["value_a"], v["value_b"]) for v in found["values"]] == [(3, 0, 0.75), (2, 1, 0.5), (1, 1, 0.75)]
    said = reward("diff", SHELF / "key_value.json", short, file).out
    assert "0 of 3 episodes change rank" in said and "3 of 3 episodes change value (mean 0.6667 -> mean 0.6667)" in said
    assert "3 of 3 tasks have one episode, so no rank" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "contains no trajectory"), ("{}\n", ":1: not a trajectory"), ("junk\n", ":1: not a trajectory"),
     ("[1]\n", ":1: not a trajectory"), ('{"task": 3}\n', ":1: not a trajectory")],
)  # fmt: skip
def test_files_that_hold_no_trajectories(tmp_path, content, message, reward):
    (tmp_path / "bad.jsonl").write_text(content)
    assert message in reward("score", SHELF / "key_value.json", tmp_path / "bad.jsonl", code=2).err


@pytest.mark.parametrize(("where", "value", "said"), [
    ("turns.0.message.tool_calls.0.arguments", '{"key": "a"}', r"ToolCall.arguments = '.*expected dict or null"),
    ("turns.0.message.tool_calls.0.arguments", [1], "expected dict or null"),
    ("turns.0.message.reasoning", 5, "Message.reasoning = 5; expected str or null"),
    ("turns.0.sampled_tokens", "7", "expected int"), ("turns.0.index", {}, "expected int"),
    ("turns.0", 3, "not subscriptable"),
    ("turns.0.results.0.seconds", "1 s", "expected float"), ("turns.0.results.0.content", None, "expected str"),
    ("task.id", [7], "id = .7., seed = 0; expected a text"), ("task.seed", [1], "whole number"),
    ("messages", {"a": 1}, "mapping"),
    ("success", "yes", "Trajectory.success = 'yes'; expected bool or null"), ("reward", "1", "expected float"),
])  # fmt: skip
def test_a_row_with_a_value_of_another_type_is_named_and_not_scored(tmp_path, where, value, said, reward):
    """OpenAI's arguments as text, say, ended a scoring with an AttributeError; other values counted as something else."""
    row = episode([call("get", key="a")], "7", task_gold=TWO).to_json()
    row["turns"][0]["results"] = [{"call_id": "", "name": "get", "content": "7"}]
    *path, last = [int(key) if key.isdecimal() else key for key in where.split(".")]
    inner = row
    for key in path:
        inner = inner[key]
    inner[last] = value
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    found = reward("score", SHELF / "exact_calls.json", tmp_path / "t.jsonl", code=2).err
    assert re.search(rf":1: not a trajectory .*{said}", found)


def test_a_bad_row_in_a_worker_is_named(tmp_path, reward):
    file = record(tmp_path / "t.jsonl", *[episode("7", task_gold=TWO)] * 130)
    with file.open("a") as handle:
        handle.write("junk\n")
    assert "t.jsonl:131: not a trajectory" in reward("score", SHELF / "key_value.json", file, "--workers", 2, code=2).err


@pytest.mark.parametrize(("argv", "message"), [
    (["lint", "key_valu"], "key_value"), (["lint", "none.json"], "cannot be read"),
    (["lint", "key_value", "--env", "agentrl/KeyVal-v0"], "KeyValue"), (["lint", "rewards/judge.json", "calls=2"], "--env"),
    (["lint", "key_value", "--env", KEY_VALUE, "calls="], "calls"), (["lint", "key_value", "cals=2"], "calls"),
    (["score", "key_value", "none.jsonl", "calls=2"], "calls=2: key_value replays no gold calls"),
    (["score", "bfcl_multi_turn", "none.jsonl", "--env", KEY_VALUE, "cals=2"], "calls"),
    (["score", "key_value", "none.jsonl"], "cannot be read"), (["explain", "key_value", "t.jsonl", "--row", 2], "has 1 rows"),
    (["explain", "key_value", "t.json", "--row", 2], "--row: t.json is one episode. Leave it out"),
])  # fmt: skip
def test_mistakes_on_the_command_line(argv, message, here, reward):
    shutil.copy(record(here / "t.jsonl", episode("7")), here / "t.json")
    assert message in reward(*argv, code=2).err


def test_leaves_documents_every_kind_and_its_examples_are_valid(reward):
    text = reward("leaves").out
    for kind in kinds():
        assert f"\n{kind}\n" in f"\n{text}"
    for kind, entry in {**LEAVES, **GROUP_LEAVES}.items():
        assert load_spec(spec(leaf(kind, entry.example)))["root"]["use"] == kind


def test_progress_counts_every_row(tmp_path):
    file, seen = record(tmp_path / "t.jsonl", *[episode("7", task_gold=TWO)] * 150), []
    score_file(lambda: compile_spec(SHELF / "key_value.json"), file, 1, seen.append)
    assert sum(seen) == 150 and len(seen) > 1


def test_explain_compares_an_episode_with_the_others_of_its_task(tmp_path, reward):
    rank = write(tmp_path / "rank.json", spec(leaf("group.rank", {"of": leaf("cost.turns", {"max": 4})})))
    rows = record(tmp_path / "rows.jsonl", episode("a"), episode([call("f")], "b"), episode([call("f")], [call("f")], "c"))
    first, total, *_ = reward("explain", rank, rows, "--row", 2).out.splitlines()
    assert first == "t0, member 0, 2 turns, stopped: done, recorded reward unscored"
    assert total == "test: 0.5"
    alone = record(tmp_path / "alone.jsonl", episode("a"))
    assert "scored alone, without its group" in reward("explain", rank, alone).out


def test_score_says_why_episodes_are_unscored(tmp_path, reward):
    root = leaf("number.close", {"expect": {"$": "/task/gold/anser"}}, when={"$": "/task/gold/part", "eq": 1})
    rows = record(tmp_path / "rows.jsonl", episode("a"), episode("b", task_gold={"part": 1}), episode("c"))
    said = reward("score", write(tmp_path / "s.json", spec(root)), rows).err
    assert "0 of 3 episodes scored, no value" in said
    assert "unscored: 2 x `when` reads /task/gold/part, which does not exist" in said
    assert "unscored: 1 x '/task/gold/anser' resolves to nothing" in said
    files = {tmp_path / "none" / "x.jsonl": "there is no folder", rows: "also an input", tmp_path / "s.json": "also an input"}
    for out, why in files.items():
        assert why in reward("score", tmp_path / "s.json", rows, "--out", out, code=2).err


def test_a_path_into_the_shelf_is_found_from_any_folder(here, reward):
    assert "key_value_exact" in reward("lint", "rewards/key_value_exact.json").out
    assert "mine.json" in reward("lint", "mine.json", code=2).err


def test_lint_without_an_environment_says_what_it_could_not_try(reward):
    """A spec that replays is looked at as any other; only scoring with it needs somewhere to replay."""
    said = reward("lint", "tau_bench").out
    assert "tau_bench: 0 findings; reward within [0, 1] (what it replays, gold and spam: not tried; --env ID does)" in said
    assert "name it with --env ID" in reward("score", "tau_bench", SHELF / "tau_bench.json", code=2).err


class Shop(ToolEnv):
    """Calls `prices`, then names the price of one of three things."""

    id = "tests/Shop-v0"
    tasks: int | None = None

    def task_count(self, split: str) -> int | None:
        return self.tasks

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"t{rng_seed}", rng_seed, split, {"price": 10 + rng_seed}, {"answer": str(10 + rng_seed)})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", "What does it cost?")]

    @tool
    async def prices(self) -> str:
        """what things cost"""
        return f"a {self.task.data['price']}, b 200, c 300"

    def gold_turns(self, task: Task) -> list[Message]:
        return [Message("assistant", "", (ToolCall("prices", {}, "c"),)), Message("assistant", task.gold["answer"])]


class Large(Shop):
    tasks = 1000


class Small(Shop):
    tasks = 4


@pytest.mark.parametrize(("which", "found"), [("any", True), ("last", False)])
def test_an_answer_that_lists_everything_is_a_hole_where_it_is_paid(which: str, found: bool) -> None:
    scorer = compile_spec(spec(leaf("number.close", {"expect": {"$": "/task/gold/answer"}, "which": which})))
    holes = [item for item in lint_probes(scorer, probe_episodes(Shop, 20)) if "lists all" in item.message]
    assert [(item.level, "in 20 of 20 tasks" in item.message) for item in holes] == ([("error", True)] if found else [])


def test_tasks_of_a_finite_split_are_spread_over_it() -> None:
    """The first tasks of a sorted suite are all of one family."""
    found = probe_episodes(Large, 5)["gold"]
    assert [episode.task.seed for episode in found] == [0, 200, 400, 600, 800]
    assert [episode.task.seed for episode in probe_episodes(Small, 5)["gold"]] == [0, 1, 2, 3, 4]


def test_a_word_too_much_is_no_environment(reward):
    assert "unrecognized arguments: key_value" in reward("lint", "my.json", "--tasks", "5", "key_value", code=2).err
