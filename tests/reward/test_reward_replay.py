"""Gold replays: once for a task, however many members its group has; a replay environment's fault is null, never 0."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from agentrl.data.trajectory import Task
from agentrl.env import tool
from agentrl.reward import Context, compile_spec
from agentrl.reward.replays import Replays
from agentrl.utils.errors import ToolError
from tests.reward.reward_episodes import Counter, call, episode, gold, leaf, spec, value

REPLAY = {"replay": {"$": "/task/gold/calls"}}
WANT = {"calls": gold(call("add", x=2), call("add", x=3))}


class ReplayEnvs:
    """Builds Counters and keeps them."""

    def __init__(self) -> None:
        self.built: list[Counter] = []

    def __call__(self, task: Task) -> Counter:
        self.built.append(Counter(task))
        return self.built[-1]


def member(total: int, **task: object):
    trajectory = episode([(call("add", x=total), str(total))], "end", state={"total": total}, task_gold=WANT)
    trajectory.task = replace(trajectory.task, **task)
    return trajectory


def scorer_of(envs, root=None, **more):
    return compile_spec(spec(root or leaf("state.match", REPLAY)), context=Context(replay_env=envs, **more))


def test_a_group_replays_its_gold_once():
    envs = ReplayEnvs()
    scorer = scorer_of(envs)
    assert [scorer.score(member(total)).value for total in (5, 4, 5, 6)] == [1, 0, 1, 0]
    assert len(envs.built) == 1 and envs.built[0].closed
    assert scorer.score(member(4, gold={"calls": 3})).value is None


@pytest.mark.parametrize(
    "other", [{"id": "t1"}, {"seed": 1}, {"split": "test"}, {"data": {"start": 1}}, {"gold": {"calls": WANT["calls"][:1]}}]
)
def test_another_task_has_its_own_replay(other):
    envs = ReplayEnvs()
    scorer = scorer_of(envs)
    scorer.score(member(5))
    scorer.score(member(5, **other))
    assert len(envs.built) == 2


def test_gold_calls_are_made_under_their_names_as_they_are():
    """A server, say, may spell its tool decomposed, in which names are not compared."""
    decomposed = "an\u0303adir"

    class Spelled(Counter):
        async def setup(self, task: Task) -> None:
            await super().setup(task)
            add = self.toolbox.table["add"]
            self.toolbox.table = {**self.toolbox.table, decomposed: replace(add, name=decomposed)}

    trajectory = episode("end", state={"total": 5}, task_gold={"calls": gold(call(decomposed, x=5))})
    assert scorer_of(Spelled).score(trajectory).value == 1


def test_two_leaves_share_one_replay():
    envs = ReplayEnvs()
    root = {"op": "all", "of": [leaf("state.match", REPLAY), leaf("results.contains", REPLAY)]}
    assert scorer_of(envs, root).score(member(5)).value == 0  # the answer "2" was never got
    assert len(envs.built) == 1


def test_a_replay_environment_that_breaks_is_null_closed_and_tried_again():
    class Broken(Counter):
        async def astep(self, action):
            raise OSError("the database went away")

    built: list[Counter] = []

    def replay_env(task: Task) -> Counter:
        built.append(Broken(task) if not built else Counter(task))
        return built[-1]

    scorer = scorer_of(replay_env)
    score = scorer.score(member(5))
    assert score.value is None
    assert "the replay environment failed: OSError: the database went away" in score.evidence["root"]["unscored"]
    assert built[0].closed
    assert scorer.score(member(5)).value == 1


def test_a_replay_environment_that_cannot_be_built_is_null():
    def replay_env(task: Task) -> Counter:
        raise RuntimeError("no memory")

    assert "no memory" in scorer_of(replay_env).score(member(5)).evidence["root"]["unscored"]


def test_kept_replays_are_bounded_and_those_asked_for_last_stay():
    envs = ReplayEnvs()
    scorer = scorer_of(envs, replays=Replays(most=2))
    for name in "abacab":
        assert scorer.score(member(5, id=name)).value == 1
    assert len(envs.built) == 4  # a, b, c, and b again: a was asked for before c came, so b had to go
    small = Replays(most_bytes=40)
    scorer = scorer_of(envs, replays=small)
    for name in "abc":
        scorer.score(member(5, id=name))
    assert len(small) == 2  # each holds a state of 17 bytes and the answers "2" and "5"


def test_threads_that_ask_for_one_replay_wait_for_it_and_a_fault_is_forgotten():
    began, tries = threading.Event(), []

    class Fails(Counter):
        async def astep(self, action):
            tries.append(1)
            raise OSError("no")

    kinds = [Fails, Fails, Counter]
    scorer = scorer_of(lambda task: (began.wait(5), kinds.pop(0)(task))[1])
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(scorer.score, member(5)) for _ in range(4)]
        began.set()
        assert sorted(str(item.result().value) for item in waiting) == ["1.0", "1.0", "None", "None"]
    assert len(tries) == 2


def test_a_copy_of_what_is_kept_begins_empty():
    kept = Replays(most=3)
    scorer_of(ReplayEnvs(), replays=kept).score(member(5))
    assert len(kept) == 1
    for other in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert len(other) == 0


# -- what is compared ------------------------------------------------------------------------------


class Refuses(Counter):
    """Takes no more than 2."""

    @tool(inline=True)
    def add(self, x: int) -> str:
        """adds"""
        if x > 2:
            raise ToolError("no")
        self.total += x
        return str(self.total)


@pytest.mark.parametrize("root", [leaf("state.match", REPLAY), leaf("results.contains", REPLAY)])
def test_gold_that_a_replay_environment_refuses_is_no_gold(root):
    """The text of the refusal would be what an episode is expected to have read."""
    found = scorer_of(Refuses, root).score(member(5))
    assert found.value is None
    assert "refused gold call 2 of 2, add: tool_error: " in str(found.evidence)


def test_what_the_policy_tried_in_vain_is_replayed_all_the_same():
    """In round 0 the policy's call is refused, and so it is in the replay; the state is compared."""
    rounds = [gold(call("add", x=2))]
    trajectory = episode([(call("add", x=9), "no")], "end", task_gold={"rounds": rounds}, state={"total": 9})
    args = {"replay": {"$": "/task/gold/rounds"}, "by": "hash"}
    assert value("state.match", args, trajectory, Context(replay_env=Refuses), scope="round", reduce="all") == 0


def test_results_contains_replay_by_round_wants_only_the_answers_of_that_round():
    """Gold answers: "1" in round 0, "3" in round 1. The policy gets "0" in round 0 and "3" in round 1."""
    rounds = {"rounds": [gold(call("add", x=1)), gold(call("add", x=2))]}

    def found(reduce, *turns):
        args, made = {"replay": {"$": "/task/gold/rounds"}}, episode(*turns, task_gold=rounds)
        return value("results.contains", args, made, Context(replay_env=Counter), scope="round", reduce=reduce)

    turns = [(call("add", x=0), "0")], "user: more", [(call("add", x=3), "3")], "end"
    assert (found("last", *turns), found("all", *turns)) == (1, 0)
    got_before = [(call("add", x=3), "3"), (call("add", x=-2), "1")], "user: more", "end"
    assert found("all", *got_before) == 1
    came_later = "wait", "user: more", [(call("add", x=1), "1"), (call("add", x=2), "3")]
    assert found("mean", *came_later) == 0.5


def test_a_replay_environment_is_reset_with_the_tasks_seed_and_the_missing_answers_are_named():
    """Gold answers: "2" and "5". The policy got "5" alone."""
    asked = []

    class Seeded(Counter):
        async def areset(self, *, seed=None, options=None):
            asked.append((seed, options["task"].seed))
            return await super().areset(seed=seed, options=options)

    found = scorer_of(Seeded, leaf("results.contains", REPLAY)).score(member(5, seed=11))
    assert found.value == 0 and found.evidence["root"]["evidence"] == {"expected": 2, "missing": ["2"]} and asked == [(11, 11)]


def test_a_task_without_gold_calls_asks_for_no_answers():
    """What was asked and answered besides takes nothing from the whole share."""
    trajectory = episode([(call("add", x=1), "1")], "end", task_gold={"calls": []})
    for credit in ({}, {"credit": "partial"}):
        assert value("results.contains", {**REPLAY, **credit}, trajectory, Context(replay_env=Counter)) == 1


def test_results_contains_replay_is_a_multiset():
    context, args = Context(replay_env=Counter), REPLAY
    want = {"calls": gold(call("add", x=1), call("add", x=0))}  # answers "1", "1"
    twice = episode([(call("add", x=1), "1"), (call("add", x=0), "1")], task_gold=want)
    once = episode([(call("add", x=1), "1")], task_gold=want)
    assert value("results.contains", args, twice, context) == 1
    assert value("results.contains", args, once, context) == 0
    assert value("results.contains", {**args, "credit": "partial"}, once, context) == 0.5
