"""Episodes that begin after gold calls (`rollout.start`): ledger, pay, schedule, and refusals by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Choice
from agentrl.config.load import config_from
from agentrl.config.schema import RewardConfig, StartConfig
from agentrl.data.rows import collate
from agentrl.data.trajectory import Message, StopReason, ToolCall, Trajectory
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from agentrl.render.template import make_renderer
from agentrl.reward import Scorer
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.rollout.mixtures import MixedTasks, Part
from agentrl.rollout.starts import GoldStart, StartOutcome, prefix_of
from agentrl.run.assembly import RunStart
from agentrl.run.checks.env_checks import check_start
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ConfigError
from tests.players import Script
from tests.rollout.conftest import trained

REF = EnvRef("key_value", {"calls": 6, "set_share": 0.0})
WIDE = Limits(20, 64, 900, 60, 60, 4096)


def scorer_of(spec: str) -> Scorer:
    return make_scorer(find_spec(REF, spec), RewardConfig(), REF)


async def played(given: int, limits: Limits = WIDE, spec: str = "key_value_exact") -> tuple[Trajectory, Script]:
    """The gold solution of task 7, of which the engine samples all but the first `given` calls."""
    env, renderer = REF.build(), make_renderer(packaged_tokenizer(4096))
    gold = env.gold_turns(env.make_task(7, "train"))
    engine = Script([renderer.assistant(turn) for turn in gold[given:]])
    policy = Policy(engine, renderer)
    return await run_episode(env, policy, EpisodeSpec(7, "train", 0, 0, "x", given), limits, scorer_of(spec)), engine


async def test_given_calls_stand_in_the_ledger_as_context_and_success_is_of_the_whole_task() -> None:
    (whole, _), (begun, engine) = await played(0), await played(4)
    assert (begun.success, begun.stop, begun.given, begun.horizon) == (True, StopReason.DONE, 4, 6)
    assert len(begun.turns) == 7 and [turn.ledger for turn in begun.turns] == [-1] * 4 + [0] * 3
    (all_sampled,), (ledger,) = whole.ledgers, begun.ledgers
    assert ledger.ids() == all_sampled.ids(), "token for token what the policy would have written"
    assert ledger.turns.tolist() == all_sampled.turns.tolist()
    mine = all_sampled.sampled & (all_sampled.turns >= 4)
    assert ledger.sampled.tolist() == mine.tolist(), "and none of it is the policy's before turn 4"
    assert set(ledger.logprobs[~ledger.sampled]) == {0.0} and set(ledger.versions[~ledger.sampled]) == {-1}
    assert engine.prompts[0] == ledger.ids()[: int(mine.argmax())], "the first prompt holds the given turns and their answers"
    assert Trajectory.from_json(json.loads(json.dumps(begun.to_json()))).given == 4
    assert "given" not in whole.to_json(), "the rows of all other episodes stay as they are"


async def test_what_the_given_turns_earned_is_not_paid_to_the_policy_also_when_it_is_scored_again() -> None:
    (whole, _), (begun, _) = await played(0, spec="key_value_turns"), await played(4, spec="key_value_turns")
    earned = [turn.reward or 0.0 for turn in whole.turns]
    assert whole.reward == pytest.approx(1.0) and sum(earned[:4]) > 0.1
    assert begun.reward == pytest.approx(1.0 - sum(earned[:4]))
    assert [turn.reward or 0.0 for turn in begun.turns] == [0.0] * 4 + earned[4:]
    rewards, sampled = collate([begun])["rewards"].values(), collate([begun])["sampled"].values()
    assert float(rewards.sum()) == pytest.approx(begun.reward) and not rewards[~sampled].any()
    assert scorer_of("key_value_turns").score(Trajectory.from_json(begun.to_json())).value == begun.reward


async def test_one_given_call_is_given() -> None:
    begun, engine = await played(1)
    assert (begun.success, begun.given, len(begun.turns), len(engine.prompts)) == (True, 1, 7, 6)


async def test_a_prefix_without_room_ends_the_episode_by_name_and_gold_that_ends_it_is_a_fault() -> None:
    whole, _ = await played(0)
    few, _ = await played(4, Limits(20, 64, whole.tokens // 2, 60, 60, 4096))
    assert (few.stop, few.success) == (StopReason.MAX_TOKENS, False) and few.tokens <= whole.tokens // 2
    short, _ = await played(4, Limits(3, 64, 900, 60, 60, 4096))
    assert (short.stop, short.given) == (StopReason.MAX_TURNS, 3), "given turns count among max_turns"
    tight, _ = await played(4, Limits(20, 64, 900, 60, 60, whole.tokens // 2))
    assert tight.stop is StopReason.CONTEXT_FULL

    class Ends(type(REF.build())):  # type: ignore[misc]
        def gold_turns(self, task: Any) -> list[Message]:
            return [Message("assistant", "over"), *super().gold_turns(task)]

    renderer = make_renderer(packaged_tokenizer(4096))
    spec = EpisodeSpec(7, "train", 0, 0, "x", 2)
    fault = await run_episode(Ends(calls=6), Policy(Script([]), renderer), spec, WIDE, scorer_of("key_value_exact"))
    assert (fault.stop, fault.reward) == (StopReason.ENV_ERROR, None) and "ended the episode" in str(fault.error)


def test_a_prefix_is_of_whole_turns() -> None:
    call = ToolCall("get", {"key": "a"})
    turns = [Message("assistant", *said) for said in (("hello",), ("", (call,)), ("", (call, call)), ("end",))]
    assert [len(list(prefix_of(turns, n))) for n in range(4)] == [0, 2, 2, 3], "a turn of two calls is not torn apart"


def test_more_is_left_once_the_window_of_a_horizon_mostly_succeeds() -> None:
    start = GoldStart(StartConfig(left=2, step=3, threshold=0.5, window=2, whole=0.0), REF)

    def given() -> dict[int, int]:
        return {horizon: start._given_turns(horizon) for horizon in (1, 6, 10)}

    assert given() == {1: 0, 6: 4, 10: 8}
    start.observe([StartOutcome(0, 6, 4, 1.0)])
    start.observe([StartOutcome(1, 6, 4, 0.0)])
    assert given() == {1: 0, 6: 1, 10: 8}, "0.5 over two groups, and of six calls alone"
    start.observe([StartOutcome(2, 6, 4, 1.0), StartOutcome(3, 6, 4, 1.0)])
    assert given()[6] == 1, "groups that began where the last ones did say nothing of the new place"
    again = GoldStart(StartConfig(left=2, step=3, threshold=0.5, window=2, whole=0.0), REF)
    start.observe([StartOutcome(4, 6, 1, 1.0), StartOutcome(5, 10, 8, 0.0)])
    assert given() == {1: 0, 6: 1, 10: 8}, "one group is no window of two, whatever the last place ended with"
    again.load(json.loads(json.dumps(start.state())))
    for one in (start, again):
        one.observe([StartOutcome(6, 6, 1, 0.0), StartOutcome(7, 10, 8, 1.0)])
    assert again.state() == start.state() and start.metrics() == {"left/6": 6.0, "left/10": 5.0}
    assert given() == {1: 0, 6: 0, 10: 5}


def tasks(**start: Any) -> MixedTasks:
    config = StartConfig(**{"left": 2, "step": 2, "threshold": 0.5, "window": 1, "whole": 0.25, **start})
    stages = {"stages": [{"calls": 4}, {"calls": 6}], "window": 2, "threshold": 0.5, "review": 0.0}
    return MixedTasks([Part("kv", REF, Choice(name="staged", args=stages), 1.0, config)], Choice(name="fixed"), 5)


def test_the_share_whole_of_the_groups_begins_at_the_beginning() -> None:
    for whole in (0.1, 0.8):
        found = [tasks(whole=whole).draw(index).given == 0 for index in range(150)]
        assert sum(found) / 150 == pytest.approx(whole, abs=0.1)


def test_choices_are_resumed_to_the_digit_and_the_curriculum_learns_from_whole_tasks_alone() -> None:
    one, metrics = tasks(), list[dict[str, float]]()
    for step in range(3):
        choices = {index: one.draw(index) for index in range(8 * step, 8 * step + 8)}
        assert {choice.horizon for choice in choices.values()} <= {4, 6}
        if step == 0:
            assert {choice.given for choice in choices.values()} == {0, 2}, "of four calls; some begin at the beginning"
            other = tasks()
            other.load_json(json.loads(json.dumps(one.to_json())))
            assert [other.draw(index) for index in range(8)] == list(choices.values())
        for index, choice in choices.items():
            one.finish(index, 1.0 if choice.given else 0.0, 10)
        one.update(step + 1)
        metrics.append(one.metrics())
    assert [row["sampler/stage"] for row in metrics] == [0.0] * 3, "begun near the end and won is no whole task won"
    assert metrics[0]["sampler/left/4"] == 4.0
    resumed = tasks()
    resumed.load_json(json.loads(json.dumps(one.to_json())))
    assert [resumed.draw(index) for index in range(24, 40)] == [one.draw(index) for index in range(24, 40)]


def test_whole_groups_teach_sampler_and_mixture_and_the_others_where_to_begin_alone() -> None:
    """Whole tasks are won and those begun later are lost: the stage ends, and the place stays."""
    one = tasks(whole=0.5, window=2)
    choices = {index: one.draw(index) for index in range(12)}
    for index, choice in choices.items():
        one.finish(index, 0.0 if choice.given else 1.0, 10)
    told = {outcome.index: outcome.success for outcome in one._outcomes}
    assert told == {index: None if choice.given else 1.0 for index, choice in choices.items()} and len(set(told.values())) == 2
    one.update(1)
    assert one.metrics()["sampler/stage"] == 1.0 and "sampler/left/4" not in one.metrics()


def test_the_place_is_that_of_the_groups_in_their_order_however_late_they_end_and_across_a_checkpoint() -> None:
    """The last two groups are those with the highest numbers, not those that ended last."""
    wins = {0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0, 4: 1.0, 5: 0.5}
    states = []
    for order in (list(wins), list(reversed(wins))):
        one = tasks(whole=0.0, window=2, threshold=0.9)
        for index in wins:
            one.draw(index)
        for index in order[:3]:
            one.finish(index, wins[index], 10)
        other = tasks(whole=0.0, window=2, threshold=0.9)
        other.load_json(json.loads(json.dumps(one.to_json())))
        for each in (one, other):
            for index in order[3:]:
                each.finish(index, wins[index], 10)
            each.update(1)
            states.append(each.to_json()["start"])
    assert states == [{"left": {}, "recent": {"4": [1.0, 0.5]}}] * 4


def starting(changes: Any = ()) -> RunStart:
    return RunStart(config_from({"env": {"id": "key_value"}, "model": {"init": {}}, "rollout": {"start": {}}, **dict(changes)}))


@pytest.mark.parametrize(("changes", "said"), [
    ({"env": {"id": "key_value", "url": "http://127.0.0.1:9"}}, "env.url"),
    ({"agent": {"url": "http://127.0.0.1:9"}}, "an agent that plays by itself"),
    ({"rollout": {"start": {}, "context": {"name": "compact"}}}, "rollout.context = 'compact'"),
    ({"env": {"id": "key_value", "wrappers": [{"name": "tool_faults"}]}}, "tools fail at random"),
])  # fmt: skip
def test_what_cannot_begin_after_gold_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout.start \(key_value\)(.|\n)*{re.escape(said)}"):
        check_start(starting(changes))


@pytest.mark.parametrize(
    ("name", "value", "said"), [("user_models", ("a model",), "its user is a model"), ("horizon", None, "no gold solution")]
)
def test_an_environment_with_a_model_for_a_user_or_without_gold_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, said: str
) -> None:
    check_start(starting())
    monkeypatch.setattr(type(REF.build()), name, lambda *_: value)
    with pytest.raises(ConfigError, match=rf"^rollout.start \(key_value\): .*{said}.*; leave rollout.start out"):
        check_start(starting())


def test_a_run_from_a_config_begins_groups_together_and_says_what_they_were_given(tmp_path: Path) -> None:
    rows = trained(tmp_path, """steps = 2
        trajectories_every = 1
        env = { params = { calls = [6, 8], set_share = 0.0 } }
        rollout = { groups = 2, group_size = 2, max_turns = 10, max_turn_tokens = 6, start = { left = 2, whole = 0.4 } }
        eval = { tasks = 2 }
        checkpoint = { every = 1 }""")  # fmt: skip
    seen: dict[int, set[int]] = {}
    for step, row in enumerate((row for row in rows if row["phase"] == "train"), 1):
        lines = (tmp_path / "r" / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()
        members = [Trajectory.from_json(json.loads(line)) for line in lines]
        for t in members:
            seen.setdefault(t.task.seed, set()).add(t.given)
            assert t.given in (0, (t.horizon or 0) - 2) and all(t.ledgers[0].turns[t.ledgers[0].sampled] >= t.given)
        assert row.get("given", 0.0) == sum(t.given for t in members) / len(members)
    assert len(seen) == 4 and all(len(of) == 1 for of in seen.values()), "all members of a group begin at the same place"
    assert any(given > 0 for of in seen.values() for given in of)
    assert all("given" not in row for row in rows if row["phase"] != "train"), "evaluations begin at the beginning"
