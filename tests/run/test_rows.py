"""What a metrics row says of episodes, against sums by hand: terms, metrics, tools, stops, causes, lengths; null is never 0."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Message, StopReason, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.reward import compile_spec
from agentrl.rollout.player import combine_evaluations, summarize
from agentrl.run.display import PLAIN_DETAILS, Display
from agentrl.run.folder import RunFolder
from agentrl.run.outcomes import draw_curve, episode_values, group_values, kinds_of, points
from agentrl.run.run_log import RunLog, episodes_row, evaluation_row, shown_of, train_row

SPEC = {
    "agentrl_reward": 1,
    "name": "parts",
    "root": {"op": "sum", "of": [{"use": "number.close", "id": "right", "args": {"expect": {"$": "/task/gold/answer"}}},
     {"use": "cost.turns", "args": {"max": 9}}]},
    "metrics": [{"op": "mean", "id": "form", "of": [{"use": "calls.schema", "id": "inner", "missing": "skip"}]}],
}  # fmt: skip


def episode(
    reward: float | None,
    metrics: dict[str, float | None] | None = None,
    *,
    tokens: tuple[int, ...] = (4,),
    errors: tuple[str | None, ...] = (),
    stop: StopReason = StopReason.DONE,
    env: str = "",
    finish: str = "stop",
    success: bool | None = None,
    seconds: float | None = None,
) -> Trajectory:
    """One ledger per number in `tokens`, one turn with a call per item of `errors`."""
    ledgers = []
    for count in tokens:
        ledger = TokenLedger()
        ledger.append_context([1, 2], 0)
        ledger.append_sampled(np.arange(count), [-1.0] * count, [0] * count, 0)
        ledgers.append(ledger)
    calls = tuple(ToolCall("look", {}, id=str(n)) for n in range(len(errors)))
    results = [ToolResult(str(n), "look", "", error=error) for n, error in enumerate(errors)]
    turns = [Turn(0, Message("assistant", tool_calls=calls), results, finish=finish)]
    return Trajectory(
        "x", Task("t", 0), ledgers=ledgers, turns=turns, reward=reward, success=success, metrics=metrics or {}, stop=stop,
        env=env, truncated=stop is StopReason.MAX_TURNS, timings={} if seconds is None else {"episode_s": seconds},
    )  # fmt: skip


def test_terms_and_metrics_are_means_over_the_episodes_that_know_them() -> None:
    kinds = {"": {"right": "term", "never": "term", "form": "metric"}}
    played = [
        episode(1.0, {"right": 1.0, "form": 0.5}, success=True),
        episode(0.5, {"right": 0.0, "form": None}, success=False, tokens=(3, 5)),
        episode(0.0, {"right": None, "form": 1.0}, success=False),
        episode(None, {"form": None}, stop=StopReason.ENV_ERROR, tokens=(0,)),
        episode(None, {"right": 0.25, "form": 0.0}),  # the root is null although parts of it are known
    ]
    row = episode_values(played, kinds, trained=True)  # type: ignore[arg-type]
    assert row["reward"] == 0.5 and row["success"] == pytest.approx(1 / 3)
    assert (row["scored"], row["unscored"], row["unscored/env_error"], row["unscored/reward_spec"]) == (3, 2, 1, 1)
    assert row["term/right"] == pytest.approx((1.0 + 0.0 + 0.25) / 3) and row["n/term/right"] == 3
    assert row["metric/form"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert row["n/metric/form"] == 3, "as many as are scored, but not the same ones: said too"
    assert row["term/never"] is None and row["n/term/never"] == 0, "a mean over none is unknown: neither 0 nor NaN"
    assert "n/success" not in row and "n/reward" not in row, "over all that are scored"
    assert (row["tokens"], row["response_length/mean"], row["response_length/max"]) == (20, 4.0, 8), "over all ledgers"
    json.dumps(row, allow_nan=False)


def test_an_unscored_member_lowers_no_mean() -> None:
    played = [episode(1.0, {"right": 1.0}, success=True), episode(None, {}, stop=StopReason.ENGINE_ERROR)]
    row = episode_values(played, {"": {"right": "term"}}, trained=True)
    assert row["reward"] == row["success"] == row["term/right"] == 1.0
    assert row["stop/done"] == row["stop/engine_error"] == 0.5 and row["unscored/engine_error"] == 1
    none = episode_values([episode(None, {}, stop=StopReason.ENGINE_ERROR)], {"": {"right": "term"}}, trained=True)
    assert none["reward"] is none["success"] is none["term/right"] is none["tool_error_rate"] is None
    assert none["scored"] == 0 and "n/reward" not in none, "0 of 0 scored ones"


def test_tools_stops_and_lengths() -> None:
    played = [
        episode(1.0, errors=(None, "not_found", None), finish="tool_calls"),
        episode(0.0, errors=("bad_arguments",), stop=StopReason.MAX_TURNS, finish="length", tokens=(10,)),
        episode(0.0, stop=StopReason.MAX_TURNS),
    ]
    row = episode_values(played, {}, trained=True)
    assert row["tool_calls"] == pytest.approx(4 / 3) and row["tool_error_rate"] == 2 / 4, "over calls, not over episodes"
    assert row["n/tool_error_rate"] == 2, "the third one called nothing"
    assert row["stop/done"] == pytest.approx(1 / 3) and row["stop/max_turns"] == row["truncated"] == pytest.approx(2 / 3)
    assert row["response_length/cut"] == pytest.approx(1 / 3) and row["turns"] == row["turns_max"] == 1


def test_how_much_rewards_differ_within_groups() -> None:
    def group(*rewards: float | None) -> Group:
        return Group(0, 0, [episode(reward) for reward in rewards])

    found = group_values([group(1.0, 0.0, 0.0, None), group(0.5, 0.5)])
    assert found["reward_std"] == pytest.approx((np.std([1, 0, 0], ddof=1) + 0.0) / 2) and found["zero_variance"] == 0.5
    alone = group_values([group(1.0), group(0.0)])
    assert alone == {"reward_std": None, "zero_variance": 1.0, "thin_groups": 0.0}, (
        "one member has no spread, and teaches nothing"
    )
    lost = [None] * 5
    thin = group_values(
        [group(1.0, 0.0, 0.0, *lost), group(1.0, 0.0, None, None), group(*[1.0] * 4, *lost), group(1.0, 0.0, None)]
    )
    assert thin["thin_groups"] == 0.5, "3 of 8 and 2 of 4; not 4 of 9, nor 2 of 3"


def test_how_much_a_policy_repeats_itself() -> None:
    """Of one turn 17 of 20 tokens are equal: 4-grams of 14 places are one, and 3 places more begin others."""

    def said(text: str, tokens: list[int], task: str, *calls: ToolCall) -> Trajectory:
        ledger = TokenLedger()
        ledger.append_context([7] * 30, 0)  # what the policy did not say counts for nothing
        ledger.append_sampled(np.array(tokens), [-1.0] * len(tokens), [0] * len(tokens), 0)
        turn = Turn(0, Message("assistant", text, tool_calls=calls), sampled_tokens=len(tokens), ledger=0, end=len(ledger) - 1)
        return Trajectory("x", Task(task, 0), ledgers=[ledger], turns=[turn], reward=0.0, stop=StopReason.DONE)

    loop, plain = [5] * 17 + [1, 2, 3], [1, 2, 3, 4, 3, 2, 1, *range(100, 109)]
    row = episode_values([said("7 ", loop, "a"), said("7", plain, "b"), said("8", [5] * 15, "c")], {}, trained=True)
    assert row["repetition"] == 13 / (17 + 13), "15 tokens are too few to be looked at"
    assert row["same_answer"] == 2 / 3
    done, other = ToolCall("done", {"with": 1}), ToolCall("done", {"with": 2})
    row = episode_values([said("", [1], "a", done), said("", [1], "b", other), said("", [1], "b", other)], {}, trained=True)
    assert row["repetition"] is None and row["same_answer"] == 2 / 3, "calls are part of an answer"
    assert episode_values([said("7", plain, "a")] * 3, {}, trained=True)["same_answer"] is None, "all of one task"


def test_ids_are_terms_or_metrics_as_the_spec_says() -> None:
    scorer = compile_spec(SPEC)
    assert (scorer.terms, scorer.measures) == (["right"], ["form", "inner"])
    played = episode(None)
    played.task = Task("t", 0, gold={"answer": "3"})
    played.messages = [Message("assistant", "3")]
    score = scorer.score(played)
    assert score.metrics.keys() == {"right", "form", "inner"}, "every node with an id, also below a metric"
    kinds = kinds_of([SimpleNamespace(name="a", scorer=scorer)])  # type: ignore[list-item]
    assert kinds == {"a": {"right": "term", "form": "metric", "inner": "metric"}}
    scoped = {**SPEC, "root": {"op": "mean", "scope": "turn", "id": "whole", "of": [{"use": "calls.schema", "id": "part"}]}}
    assert compile_spec(scoped).terms == ["whole"], "a part has a value for each turn, and none for the episode"


def test_an_evaluation_of_two_environments_says_of_each_over_how_many() -> None:
    played = {
        "a": summarize([episode(1.0, {"right": 1.0}, env="a", success=True), episode(None, env="a", stop=StopReason.ENV_ERROR)]),
        "b": summarize([episode(None, {"other": 0.5}, env="b", success=False)]),  # compares members: success, and no reward
    }
    both = combine_evaluations(played, {"a": 3.0, "b": 1.0})
    row = evaluation_row(both, {"a": {"right": "term"}, "b": {"other": "metric"}}, 2.0)
    assert row["success"] == 0.75 and row["reward"] is None, "means over environments; that of b is unknown"
    assert (row["scored"], row["unscored"], row["time/eval_s"]) == (2, 1, 2.0)
    assert row["env/a/success"] == row["env/a/term/right"] == 1.0 and row["env/a/unscored/env_error"] == 1
    assert row["env/b/reward"] is None and row["env/b/n/reward"] == 0 and row["env/b/success"] == 0.0
    assert row["env/b/metric/other"] == 0.5 and "env/b/term/right" not in row and "env/a/metric/other" not in row
    assert row["term/right"] == 1.0 and row["n/term/right"] == 1, "together: over the episodes whose spec has it"


def test_a_row_of_an_update_and_its_readers_bear_null(tmp_path: Path) -> None:
    """From the groups to metrics.jsonl, the curve and a tracker; a number that is not finite is null in the file."""
    groups = [Group(0, 0, [episode(1.0, {"right": None}, seconds=2.0), episode(0.0, {"right": None}, seconds=4.0)])]
    session: Any = SimpleNamespace(
        config=SimpleNamespace(envs=("one",), rollout=SimpleNamespace(max_staleness=0)),
        envs=[SimpleNamespace(name="", scorer=SimpleNamespace(terms=["right"], measures=[]))],
        collector=SimpleNamespace(
            metrics=lambda: {"tokens_sampled": 12.0, "tokens_thrown": 4.0}, ledger=SimpleNamespace(counts=dict)
        ),
        player=SimpleNamespace(metrics=dict),
        services={},
        display=SimpleNamespace(took={"rollout": 4.0, "batch": 1.0, "update": 2.0, "publish": 0.5}),
    )
    update = {"loss": float("nan"), "grad_norm": float("inf"), "tokens_trained": 8.0}
    update |= {"sampler/seen": np.int64(3), "sampler/rate": np.float32("nan"), "sampler/by": np.array([1.0, np.nan])}  # a user's
    played = episodes_row(groups, kinds_of(session.envs), several=False)
    row = train_row(session, played, update)
    assert row["throughput/trained_tokens_per_s"] == 4.0
    assert (row["time/rollout_s"], row["time/publish_s"]) == (4.0, 0.5)
    assert (row["time/episode_s"], row["time/episode_max_s"], row["time/episode_env_s"]) == (3.0, 4.0, None)
    folder, seen = RunFolder(tmp_path), list[Any]()
    with Display() as display, RunLog(folder, display, []) as log:
        log.trackers = [SimpleNamespace(call=lambda what, *args: seen.append(args), finish=lambda *_: None, join=lambda _: None)]  # type: ignore[list-item]
        log.row("train", 1, row)
    assert "NaN" not in (text := folder.metrics.read_text()) and "Infinity" not in text
    [kept] = folder.read_metrics()
    assert kept["sampler/seen"] == 3 and kept["sampler/rate"] is None and '"sampler/by": [1.0, null]' in text
    assert kept["loss"] is kept["grad_norm"] is kept["term/right"] is kept["success"] is None and kept["reward"] == 0.5
    [(phase, step, numbers)] = seen
    assert (phase, step) == ("train", 1) and numbers["loss"] is None and numbers["n/term/right"] == 0
    assert points([kept], ("train",), "success") == []
    draw_curve([kept], tmp_path / "curve.png", "x")


def test_a_step_tells_the_display_what_the_row_says() -> None:
    row: dict[str, Any] = {
        "success": 0.5, "reward": None, "throughput/sampled_tokens_per_s": 10.0, "env/a/success": 1.0, "env/b/success": None,
        "term/x": 0.25, "metric/y": None, "unscored": 0, "engine/cache_hit": 0.9, "mismatch_max": 1e-6, "staleness_mean": 0.0,
        "kl_behaviour": 0.2, "kl_reference": 0.1, "tool_error_rate": 0.3,
    }  # fmt: skip
    said, details = shown_of(row, ["a", "b"])
    assert said == {"success": 0.5, "a": 1.0, "b": None, "reward": None, "tokens/s": 10.0}
    assert {key: value for key, value in details.items() if value is not None} == {
        "term/x": 0.25, "cache hit": 0.9, "mismatch max": 1e-6, "kl behaviour": 0.2,
        "kl to reference": 0.1, "tool error rate": 0.3,
    }  # fmt: skip
    assert details.keys() >= {*PLAIN_DETAILS}
    assert shown_of(row, ["a"])[0].keys() == {"success", "reward", "tokens/s"}


async def test_an_evaluation_says_why_its_first_unscored_episode_has_no_score(tmp_path: Path) -> None:
    lost = episode(None, stop=StopReason.ENV_ERROR)
    lost.error = "the service is down"
    # Of a split with fewer tasks than `eval.tasks`, each is played several times.
    found = summarize([episode(1.0, success=True), lost, episode(1.0, success=True), episode(None, stop=StopReason.CANCELLED)])
    folder, out = RunFolder(tmp_path), io.StringIO()
    folder.trajectories.mkdir()

    with Display(Console(file=out, width=200)) as display, RunLog(folder, display, []) as log:
        await log.evaluation("eval", 3, found, evaluation_row(found, {}, 1.0))
        await log.writes.wait()
        assert display._shown.held == (1.0, 3)
    assert out.getvalue().splitlines()[0] == (
        "[eval] held-out success 100.0 % over 1 tasks in 2 episodes (2 unscored, the first: t: env_error: the service is down)"
    )
    [row] = folder.read_metrics()
    assert row["success"] == 1.0 and row["unscored/env_error"] == row["unscored/cancelled"] == 1
