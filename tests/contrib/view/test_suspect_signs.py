"""Signs of reward hacking, and what a run is suspected of, against numbers counted by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.contrib.view.features import features_of, gold_distances, judge_values, normal, repetition
from tests.contrib.view.test_api import client
from tests.run.made_folders import episode, run_folder


def gold(said: str, done: list[Any], **wanted: Any) -> tuple[float | None, float | None]:
    made = [{"name": name, "arguments": arguments} for name, arguments in done]
    turns = [{"message": {"content": "", "tool_calls": made}}, {"message": {"content": said, "tool_calls": []}}]
    return gold_distances({"task": {"gold": wanted}, "turns": turns})


@pytest.mark.parametrize(
    "said, answer, distance",
    [
        ("The total is 12.", "12", 0.0),
        ("The total is 120.", "12", 1.0),
        ("New   york", "new York", 0.0),
        ("a and c", ["a", "b", "c", "d"], 0.5),
        ("", 7, 1.0),
        ("x", {"form": "own"}, None),
        ("x", None, None),
        ("x", "?!", None),
    ],
)
def test_how_far_an_answer_is_from_the_gold(said: str, answer: Any, distance: float | None) -> None:
    assert gold(said, [], answer=answer)[0] == distance


@pytest.mark.parametrize(
    "wanted, made, distance",
    [
        ([{"name": "get", "arguments": {"key": "a"}}], [("get", {"key": "a"})], 0.0),
        ([{"name": "get", "arguments": {"key": "a"}}] * 2, [("get", {"key": "a"})], 0.5),
        ([{"name": "get", "arguments": {"key": ["a", "b"]}}], [("get", {"key": "b", "more": 1})], 0.0),
        ([{"get": {"key": ["a", ""]}}], [("get", {})], 0.0),
        ([[{"name": "a"}], [{"name": "b"}, {"name": "c"}]], [("c", {}), ("a", {})], 1 / 3),
        ([{"name": "get", "arguments": {"key": "a"}}], [("get", None)], 1.0),
        ([], [("get", {})], None),
        (["get a"], [], None),
    ],
)
def test_how_far_calls_are_from_the_gold(wanted: Any, made: list[Any], distance: float | None) -> None:
    assert gold("", made, calls=wanted)[1] == pytest.approx(distance)


def said(*texts: str) -> dict[str, Any]:
    return {"turns": [{"message": {"content": text, "tool_calls": []}} for text in texts]}


def test_repetition_within_a_turn_and_of_turns() -> None:
    words = [f"w{n}" for n in range(30)]
    assert repetition(said(" ".join(words))) == 0.0
    assert repetition(said("go on " * 20)) == pytest.approx(1 - 2 / 37)  # 40 words, 37 4-grams, 2 of them distinct
    assert repetition(said("go on " * 5)) == 0.0, "a short text repeats itself by chance"
    assert repetition(said("a", "a", "a")) == 0.0
    assert repetition(said("a", "b", "a", "a")) == 0.5


def test_how_far_a_judge_is_from_the_rest() -> None:
    def row(*leaves: Any) -> dict[str, Any]:
        nodes = [{"node": kind, "at": f"/root/of/{n}", "value": value, "weight": w} for n, (kind, value, w) in enumerate(leaves)]
        return {"evidence": {"root": {"node": "sum", "at": "/root", "value": 1, "of": nodes}}}

    assert judge_values(row(("judge", 1.0, 1), ("text.equals", 0.0, 1), ("state.match", 0.5, 1)))[:2] == (0.75, 1.0)
    assert judge_values(row(("judge", 1.0, 1), ("cost.tokens", 0.0, -1)))[0] is None, "a cost says nothing about success"
    assert judge_values(row(("judge", 0.25, 1), ("judge", 0.75, 1)))[:2] == (0.5, 0.5)
    for evidence in (row(("judge", None, 1), ("text.equals", 0.0, 1))["evidence"], None, {"unscored": "x"}):
        assert judge_values({"evidence": evidence}) == (None, None, "")


@pytest.mark.parametrize(
    "text, same",
    [
        ("timeout after 30.5 s at 0x7f3a", "timeout after N s at HEX"),
        ("no key 'k1' in \"store\"", "no key '...' in '...'"),
        ("task 3f2a9c1d-aa12 failed\n\n twice", "task HEX failed twice"),
        ("deadbeef is a word", "deadbeef is a word"),
    ],
)
def test_error_texts_lose_what_differs(text: str, same: str) -> None:
    assert normal(text) == same
    assert len(normal("x " * 500)) == 160


def test_only_what_decides_is_a_failed_term() -> None:
    """Of a reward that takes either of two ways: a way that was not taken is no reason if the other one was."""

    def row(one: float, other: float, rest: float) -> dict[str, Any]:
        ways = [{"node": "text.equals", "at": "/a", "id": "a", "value": one}, {"node": "state.match", "at": "/b", "value": other}]
        either = {"node": "any", "at": "/root/of/0", "value": max(one, other), "of": ways}
        clean = {"node": "format.regex", "at": "/c", "id": "clean", "value": rest}
        skipped = {"node": "calls.match", "at": "/d", "value": None, "skipped": "when"}
        tree = {"node": "all", "at": "/root", "value": min(max(one, other), rest), "of": [either, clean, skipped]}
        made = episode(1, reward=min(max(one, other), rest)).to_json()
        return {**made, "evidence": {"root": tree}}

    def reasons(*values: float) -> set[str]:
        return {reason for kind, reason in features_of(row(*values)).failures}

    assert reasons(0.0, 1.0, 0.0) == {"clean (format.regex) below 0.5"}
    assert reasons(0.0, 0.0, 1.0) == {"a (text.equals) below 0.5", "/b (state.match) below 0.5"}
    assert reasons(1.0, 0.0, 1.0) == set()


def test_the_constant_of_a_success_by_id_is_a_reason_only_alone() -> None:
    """`"success": {"id": ...}` is a gate between 1 and 0: its 0 is told if nothing else of the reward was missed."""

    def reasons(answer: float) -> set[str]:
        leaf = {"node": "text.equals", "at": "/root", "id": "answer", "value": answer}
        zero = {"node": "constant", "at": "/success/else", "value": 0.0}
        gate = {"node": "gate", "at": "/success", "value": 0.0, "if": {**leaf, "at": "/success/if"}, "else": zero}
        evidence = {"root": leaf, "success": {"by": "/success", "node": gate}}
        made = episode(1, reward=answer).to_json()
        return {reason for kind, reason in features_of({**made, "success": False, "evidence": evidence}).failures}

    assert reasons(0.0) == {"answer (text.equals) below 0.5"}
    assert reasons(0.7) == {"/success/else (constant) below 0.5"}


def grown(step: int, tokens: int, success: float) -> dict[str, Any]:
    return {"phase": "train", "step": step, "tokens": tokens, "scored": 90, "unscored": 10, "success": success}


def test_what_a_run_is_suspected_of(tmp_path: Path) -> None:
    judged = [{"node": "judge", "at": "/root/of/1", "value": 0.0, "id": "judge", "evidence": {"score": 0}}]
    rows = [episode(1), episode(2, said="nothing"), episode(3, key="wrong"), episode(4, reward=0.25, said="no")]
    rows += [episode(5, said="5 go " * 20), episode(6, leaves=judged)]
    train = [grown(n, tokens=100 * (10 + 2 * n), success=0.5) for n in range(1, 10)]
    run_folder(tmp_path / "r", {"step_000009": [episode(7, tokens=9), episode(8)], "step_000001": rows}, train)
    asking = client(tmp_path)
    found = {one["kind"]: one for one in asking.ask("/runs/r/suspects")}
    assert set(found) == {"gold_far", "repeated_text", "judge_disagreement", "length_growth"}
    far = {one["id"]: one["why"] for one in found["gold_far"]["episodes"]}
    assert far == {
        "step_000001.1": "reward 1: 100% of the gold answer is not in the last text",
        "step_000001.2": "reward 1: 100% of the gold calls were not made",
    }, "a low reward with gold far away is as it should be"
    assert [one["id"] for one in found["repeated_text"]["episodes"]] == ["step_000001.4"]
    assert [one["id"] for one in found["judge_disagreement"]["episodes"]] == ["step_000001.5"]
    # Thirds: 1000 + 200 n tokens per 100 episodes; n = 1..3 makes 14 each, n = 7..9 makes 26.
    assert found["length_growth"]["value"] == pytest.approx(26 / 14)
    assert [one["id"] for one in found["length_growth"]["episodes"]] == ["step_000009.0", "step_000009.1"]
    assert "14 to 26" in found["length_growth"]["why"]
    shown = {row["id"]: row["suspects"] for row in asking.ask("/runs/r/episodes?step=1")["rows"]}
    assert shown["step_000001.1"] == ["gold_far"] and shown["step_000001.0"] == shown["step_000001.3"] == []
    assert shown["step_000001.5"] == ["judge_disagreement"]


@pytest.mark.parametrize("most, suspected, lost", [(3.0, [], False), (1.0, ["step_000001.0"], False), (3.0, [], True)])
def test_a_high_reward_is_one_near_the_maximum_of_the_spec(tmp_path: Path, most: float, suspected: list[str], lost: bool) -> None:
    """A reward of 1 without the gold answer: all that a spec of one point pays, and a third of what one of three points pays."""
    spec = {"use": "text.contains", "args": {"expect": "x"}}
    scaled = {"agentrl_reward": 1, "name": "s", "root": {"op": "sum", "of": [{**spec, "weight": most}]}}
    (tmp_path / "spec.json").write_text(json.dumps(scaled))
    members = [episode(1, said="nothing", env="key_value"), episode(2, reward=0.25, env="key_value")]
    config = run_folder(tmp_path / "r", {"step_000001": members}).config
    envs = '[[env]]\nid = "does_not_load"\n[[env]]' if lost else "[env]"
    config.write_text(config.read_text().replace("[env]", envs) + f'reward = "{tmp_path / "spec.json"}"\n')
    asking = client(tmp_path)
    found = [one for one in asking.ask("/runs/r/suspects") if one["kind"] == "gold_far"]
    assert [example["id"] for one in found for example in one["episodes"]] == suspected
    assert all(f"the spec's maximum ({most:g})" in one["why"] for one in found)
    rows = {row["id"]: row["suspects"] for row in asking.ask("/runs/r/episodes?step=1")["rows"]}
    assert [ident for ident, signs in rows.items() if "gold_far" in signs] == suspected


def test_a_judge_that_judges_equal_episodes_otherwise(tmp_path: Path) -> None:
    def one(seed: int, member: int, value: float, said: str) -> Any:
        leaf = {"node": "judge", "at": "/root/of/1", "value": value, "id": "judge", "evidence": {}}
        made = episode(seed, member, 0.5, said=said)
        made.evidence = {"root": {"node": "sum", "at": "/root", "value": 1, "of": [leaf]}}
        return made

    equal = [one(1, 0, 0.9, "1 a"), one(1, 1, 0.25, "1 a")]
    others = [one(1, 2, 0.1, "1 b"), one(2, 0, 0.9, "2 a"), one(2, 1, 0.5, "2 a")]  # another answer; another task; 0.4 apart
    for value in (0.9, 0.1):  # of one id and another content
        others.append(one(1, 0, value, "1 c"))
        others[-1].task = replace(others[-1].task, id="t/shared", data={"n": value})
    run_folder(tmp_path / "r", {"step_000001": [*equal, *others]})
    [found] = client(tmp_path).ask("/runs/r/suspects")
    assert (found["kind"], found["value"]) == ("judge_disagreement", 2)
    assert {one["id"]: one["why"] for one in found["episodes"]} == {
        "step_000001.0": "judged 0.9, and an equal episode of the task otherwise",
        "step_000001.1": "judged 0.25, and an equal episode of the task otherwise",
    }


def test_growth_with_success_is_no_suspicion(tmp_path: Path) -> None:
    run_folder(tmp_path / "r", {"step_000001": [episode(1)]}, [grown(n, 100 * n, success=0.1 * n) for n in range(1, 10)])
    assert client(tmp_path).ask("/runs/r/suspects") == []
