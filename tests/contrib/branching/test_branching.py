"""Episodes that branch off others (`rollout.branch`): turns, state, what counts as sampled, and failures."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from agentrl.cli.main import main
from agentrl.config import RolloutConfig
from agentrl.config.load import config_from
from agentrl.config.schema import BranchConfig, Choice, RewardConfig
from agentrl.contrib.branching import advantage, values
from agentrl.contrib.branching.checks import check_branch
from agentrl.contrib.branching.trees import Forest, TreeScript, plant_trees
from agentrl.contrib.branching.values import ValueScript, measure_values
from agentrl.data.rows import collate
from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from agentrl.render.template import make_renderer
from agentrl.reward import compile_spec, load_spec
from agentrl.rollout.collector import GroupRun
from agentrl.rollout.context import make_context_policy
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy
from agentrl.rollout.player import Job, LocalPlayer, Player, RunEnv
from agentrl.rollout.samplers import TaskChoice
from agentrl.run import evaluate
from agentrl.run.checks import RunStart
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ConfigError, EngineError
from tests.algorithm.oracles.advantages import Out, empty, flat_same, never, scored, std
from tests.algorithm.oracles.batches import Row
from tests.algorithm.oracles.test_oracles import BLOCKS, ORACLE, check_advantages, each
from tests.algorithm.test_docs_numbers import documented, group_of
from tests.players import Script
from tests.rollout import test_workers as workers
from tests.rollout.conftest import until

RENDERER = make_renderer(packaged_tokenizer(4096))
REF = EnvRef("key_value", {"calls": 6, "set_share": 0.0})
WIDE = Limits(20, 64, 2000, 60, 60, 4096)
FIXED = BranchConfig(at="depth", turns=[1, 3], roots=1)


@pytest.fixture(autouse=True, scope="module")
def shelf() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_PATH", str(Path(__file__).parents[2] / "rollout" / "patient"))
        yield


class Told(Script):
    """Each episode, by its key, samples its own turns one after the other, each with the log probability of its tokens."""

    def __init__(self, turns: dict[str, list[tuple[Message, float]]]) -> None:
        self.says, self.asked = {key: list(said) for key, said in turns.items()}, list[tuple[str, list[int]]]()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        self.asked.append((request_key, list(token_ids)))
        said, logprob = self.says[request_key].pop(0)
        ids = RENDERER.assistant(said)
        return Generation(ids, [logprob] * len(ids), [3] * len(ids), "stop")


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def store(*values: int, at: Sequence[float] = ()) -> list[tuple[Message, float]]:
    """A turn for each value, which is stored under "a"."""
    return [(call("set", key="a", x=value), at[n] if at else -0.5) for n, value in enumerate(values)]


OVER = (Message("assistant", "7"), -0.5)


def player_of(engine: Engine, ref: EnvRef = REF, spec: str = "key_value_exact", limits: Limits = WIDE, **how: Any) -> LocalPlayer:
    scorer = make_scorer(find_spec(ref, spec), RewardConfig(), ref)
    return LocalPlayer([RunEnv("kv", ref, Policy(engine, RENDERER, **how), scorer, limits)])


def gold_of(task_seed: int) -> list[tuple[Message, float]]:
    env = REF.build()
    return [(turn, -0.5) for turn in env.gold_turns(env.make_task(task_seed, "train"))]


async def played(
    config: BranchConfig,
    turns: dict[str, list[tuple[Message, float]]],
    ref: EnvRef = REF,
    spec: str = "key_value_exact",
    limits: Limits = WIDE,
    context: Choice = Choice(name="stop"),
    engine: type[Told] = Told,
    **job: Any,
) -> tuple[dict[str, Trajectory], Told]:
    """The episodes of a tree by key: "r" and "b0", "b1" ..., each of one attempt."""
    says = engine(turns)
    player = player_of(says, ref, spec, limits, context=make_context_policy(context))
    keys = [key for key in turns if key != "r"]
    branches = tuple((EpisodeSpec(7, "train", n + 1, n + 1, key),) for n, key in enumerate(keys))
    script = TreeScript(config, branches)
    found = await player.play(Job("kv", EpisodeSpec(7, "train", 0, 0, "r", **job), script=script), Watch())
    names = {0: "r", **{n + 1: key for n, key in enumerate(keys)}}
    return {names[trajectory.member]: trajectory for trajectory in found}, says


async def test_a_branch_goes_on_from_the_state_before_its_turn_and_shares_nothing_after() -> None:
    found, engine = await played(
        FIXED, {"r": [*store(1, 2, 3, 4), OVER], "b0": [*store(20), OVER], "b1": [*store(40), (call("get", key="a"), -1.0), OVER]}
    )
    root, first, second = found["r"], found["b0"], found["b1"]
    assert [(t.parent, t.branch_turn, len(t.turns)) for t in (root, first, second)] == [(None, 0, 5), (0, 1, 3), (0, 3, 6)]
    assert [t.state["store"]["a"] for t in (root, first, second)] == [4, 20, 40]
    assert second.turns[4].results[0].value == 40
    assert first.turns[0].message == root.turns[0].message and second.turns[2].message == root.turns[2].message
    for branch, turn in ((first, 1), (second, 3)):
        (ledger,), (whole,) = branch.ledgers, root.ledgers
        begins = int((whole.sampled & (whole.turns == turn)).argmax())
        assert ledger.ids()[:begins] == whole.ids()[:begins], "token for token what its parent saw before that turn"
        assert not ledger.sampled[:begins].any() and ledger.sampled[begins], "of which none is its own"
        assert set(ledger.versions[:begins]) == {-1} and not ledger.logprobs[:begins].any()
        assert dict(engine.asked)[f"b{turn // 2}"][:begins] == whole.ids()[:begins]
        assert [t.ledger for t in branch.turns] == [-1] * turn + [0] * (len(branch.turns) - turn)
        assert Trajectory.from_json(json.loads(json.dumps(branch.to_json()))) == branch
    assert not {"parent", "branch_turn"} & root.to_json().keys(), "the rows of all other episodes stay as they are"


async def test_what_the_turns_before_earned_is_in_a_branchs_reward_and_on_a_token_that_it_sampled() -> None:
    gold = gold_of(7)
    found, _ = await played(
        FIXED, {"r": gold, "b0": gold[1:], "b1": [(Message("assistant", "wrong"), -0.5)]}, spec="key_value_turns"
    )
    assert [found[key].reward for key in ("r", "b0")] == pytest.approx([1.0, 1.0])
    assert found["b1"].reward == pytest.approx(0.5 * 3 / 6), "three of six gold calls, made by its parent"
    for trajectory in found.values():
        batch = collate([trajectory])
        rewards, sampled = batch["rewards"].values(), batch["sampled"].values()
        assert float(rewards.sum()) == pytest.approx(trajectory.reward) and not rewards[~sampled].any()


@pytest.mark.parametrize(("config", "turns"), [
    (BranchConfig(at="entropy", roots=1), [4, 1]), (BranchConfig(at="entropy", roots=1, width=2), [4, 4]),
    (BranchConfig(at="failure", roots=1), [2, 5]), (BranchConfig(at="depth", roots=1), [3, 5]),
    (BranchConfig(at="depth", roots=1, width=2), [4, 4]), (BranchConfig(at="depth", roots=1, turns=[3, 6]), [3, 6]),
    (BranchConfig(at="depth", roots=1, turns=[3, 9]), [3]), (BranchConfig(at="depth", roots=1, turns=[9, 3]), [3]),
    (BranchConfig(at="depth", roots=1, turns=[1, 3], width=2), [1, 3, 1]),
], ids=str)  # fmt: skip
async def test_where_an_episode_branches(config: BranchConfig, turns: list[int]) -> None:
    """Eight turns; turn 4 was the least expected, then turns 0 and 1; turns 2 and 5 call what is not there."""
    said = store(*range(8), at=[-3.0, -2.0, -0.1, -0.1, -4.0, -1.0, -0.2, -0.2])
    said[2] = call("nothing"), -0.1
    said[5] = call("nothing"), -1.0
    said[7] = Message("assistant", "7"), -0.2
    found, _ = await played(config, {"r": said, **{f"b{n}": [OVER] for n in range(max(2, len(turns)))}})
    branches = [trajectory for key, trajectory in found.items() if key != "r"]
    assert [trajectory.branch_turn for trajectory in branches] == turns
    assert all(len(trajectory.turns) == trajectory.branch_turn + 1 for trajectory in branches)


async def test_an_episode_of_one_turn_and_one_that_failed_have_no_branches() -> None:
    assert list((await played(FIXED, {"r": [OVER], "b0": [], "b1": []}))[0]) == ["r"]
    found, _ = await played(BranchConfig(at="failure", roots=1), {"r": [*store(1, 2), OVER], "b0": []})
    assert list(found) == ["r"]
    late = Limits(20, 64, 2000, 60, 60, 4096, env_timeout=60)
    cut, _ = await played(
        FIXED, {"r": [*store(1, 2)], "b0": [], "b1": []}, limits=late, ref=EnvRef("patient", REF.params), given=99
    )
    assert [t.stop for t in cut.values()] == [StopReason.ENV_ERROR]


async def test_a_branch_that_fails_is_unscored_and_its_siblings_are_none_the_worse() -> None:
    said = [(Message("assistant", "well"), -0.5)]
    turns = {"r": [*said * 4, OVER], "b0": [*said, OVER], "b1": [*said, OVER], "b2": [*said, OVER]}
    config = BranchConfig(at="depth", turns=[2], roots=1, width=3)
    found, _ = await played(config, turns, EnvRef("patient", {**REF.params, "broken": [1]}))
    done, failed = (StopReason.DONE, 0.0), (StopReason.ENV_ERROR, None)
    assert [(t.stop, t.reward) for t in found.values()] == [done, done, failed, done]
    assert found["b1"].cause == {"blame": "infrastructure"} and "this copy is broken" in str(found["b1"].error)
    said_to = [[m.content for m in found[key].messages if m.role == "user"][1:] for key in ("r", "b0", "b2")]
    assert said_to[1] == said_to[2] == said_to[0][:3], "chance too is in the state, and no copy draws from another's"


async def test_the_first_turn_that_is_sampled_after_given_ones_has_no_branch() -> None:
    """A branch there would be an episode of its own: it begins at the beginning, as another draw from the same prompt."""
    config = BranchConfig(at="depth", turns=[2, 3], roots=1)
    found, _ = await played(config, {"r": [*store(1, 2, 3), OVER], "b0": [OVER], "b1": [OVER]}, given=2)
    assert found["r"].given == 2 and [(t.member, t.branch_turn) for t in found.values()] == [(0, 0), (2, 3)]


class Failing(Told):
    """Cannot say what is asked after the turns that it was told."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        if not self.says[request_key]:
            raise EngineError("no more")
        return await super().generate(token_ids, sampling, request_key)


class Stuck(Told):
    """Waits where it was told no turn."""

    waits = False

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        if not self.says[request_key]:
            self.waits = True
            await asyncio.sleep(3600)
        return await super().generate(token_ids, sampling, request_key)


async def test_a_tree_that_is_cancelled_tells_what_was_sampled_in_it() -> None:
    """By the root and a branch that have ended, and in the turn of a branch that has not."""
    turns = {"r": [*store(1, 2, 3, 4), OVER], "b0": [OVER], "b1": store(9)}
    engine, watch = Stuck(turns), Watch()
    script = TreeScript(FIXED, tuple((EpisodeSpec(7, "train", n, n, f"b{n - 1}"),) for n in (1, 2)))
    task = asyncio.create_task(player_of(engine).play(Job("kv", EpisodeSpec(7, "train", 0, 0, "r"), script=script), watch))
    await until(lambda: engine.waits and not engine.says["b0"] and not watch.waiting().count("b0"))
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and watch.cut == sum(len(RENDERER.assistant(said)) for of in turns.values() for said, _ in of)


async def test_a_root_that_fails_after_turns_with_forks_is_alone_and_its_forks_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_now, closed = list[Any](), list[Any]()
    fork, close = ToolEnv.fork, ToolEnv.aclose

    def forked(self: ToolEnv) -> ToolEnv:
        open_now.append(fork(self))
        return open_now[-1]  # type: ignore[no-any-return]

    async def ended(self: ToolEnv) -> None:
        closed.append(self)
        await close(self)

    monkeypatch.setattr(ToolEnv, "fork", forked)
    monkeypatch.setattr(ToolEnv, "aclose", ended)
    found, _ = await played(FIXED, {"r": store(1, 2, 3, 4), "b0": [OVER], "b1": [OVER]}, engine=Failing)
    assert [(key, t.stop.infrastructure) for key, t in found.items()] == [("r", True)]
    assert len(open_now) == 2 and all(any(one is other for other in closed) for one in open_now)


async def test_a_branch_that_fails_is_tried_again_from_the_same_fork() -> None:
    said = (Message("assistant", "well"), -0.5)
    engine_turns = {"r": [said] * 4 + [OVER], "b0": [said, OVER], "b0'": [said, OVER]}
    config, ref = BranchConfig(at="depth", turns=[2], roots=1), EnvRef("patient", {**REF.params, "broken": [0]})
    attempts = tuple(EpisodeSpec(7, "train", 1, 1, key) for key in ("b0", "b0'"))
    player = player_of(Told(engine_turns), ref, context=make_context_policy(Choice(name="stop")))
    job = Job("kv", EpisodeSpec(7, "train", 0, 0, "r"), script=TreeScript(config, (attempts,)))
    found = await player.play(job, Watch())
    assert [(t.member, t.stop, t.branch_turn) for t in found] == [
        (0, StopReason.DONE, 0), (1, StopReason.ENV_ERROR, 2), (1, StopReason.DONE, 2),
    ]  # fmt: skip


async def test_limits_count_what_a_branch_was_given() -> None:
    turns = {"r": store(*range(9)), "b0": store(*range(9)), "b1": store(*range(9))}
    found, _ = await played(FIXED, turns, limits=Limits(6, 64, 2000, 60, 60, 4096))
    assert [(t.stop, len(t.turns)) for t in found.values()] == [(StopReason.MAX_TURNS, 6)] * 3
    most = found["r"].tokens - 20
    short, _ = await played(FIXED, turns, limits=Limits(6, 64, most, 60, 60, 4096))
    assert {t.stop for t in short.values()} == {StopReason.MAX_TOKENS} and all(t.tokens <= most for t in short.values())


async def test_of_several_ledgers_a_branch_has_those_in_which_it_sampled() -> None:
    """A conversation that outgrows the context loses its oldest turns, so an episode has several ledgers."""
    said, limits = [(call("get", key="a" * 30), -0.5)] * 12, Limits(12, 64, 4000, 60, 60, 300)
    recent = Choice(name="keep_recent", args={"turns": 2})
    config = BranchConfig(at="depth", turns=[10], roots=1)
    found, _ = await played(config, {"r": said, "b0": said[10:]}, limits=limits, context=recent)
    root, branch = found["r"], found["b0"]
    assert len(root.ledgers) > 2 and len(root.rewrites) == len(root.ledgers) - 1
    first = root.turns[10].ledger
    assert [ledger.ids() for ledger in branch.ledgers] == [ledger.ids() for ledger in root.ledgers[first:]], "it says the same"
    assert [turn.ledger for turn in branch.turns[10:]] == [turn.ledger - first for turn in root.turns[10:]]
    assert [made["ledger"] for made in branch.rewrites] == [
        made["ledger"] - first for made in root.rewrites if made["ledger"] >= first
    ]
    mine = [(ledger.sampled & (ledger.turns >= 10)).tolist() for ledger in root.ledgers[first:]]
    assert [ledger.sampled.tolist() for ledger in branch.ledgers] == mine
    assert collate([root, branch])["trajectory"].tolist() == [0] * len(root.ledgers) + [1] * len(branch.ledgers)
    tight = Limits(12, 64, sum(map(len, root.ledgers)) - 130, 60, 60, 300)
    both, _ = await played(config, {"r": said, "b0": said[10:]}, limits=tight, context=recent)
    assert [t.stop for t in both.values()] == [StopReason.MAX_TOKENS] * 2, (
        "what it was given counts, also in ledgers that it left"
    )


REFUSED = {
    "roots=8": "so none would branch; set roots below 8",
    "roots=1 rollout.max_episodes=7": "a root and its branches are 8 episodes at once, and rollout.max_episodes = 7",
    "turns=[2]": 'turns are read with at = "depth" alone, and at = "entropy"',
    "at='depth',turns=[2,16]": r"turns = \[2, 16\] are counted from 0, and rollout.max_turns = 16",
    "at='depth',roots=2,turns=[2,2]": r"turns = \[2, 2\] names one twice",
    "at='depth',roots=4,turns=[2,3]": "a root has 1 branches, 1 a turn, so only the first 1 are used",
    "roots=2 algorithm.advantage.name=gigpo": '"gigpo" compares members as if none shared its beginning.*tree',
    "roots=2 algorithm.advantage.name=gae": '"gae" compares members',
    "roots=2 algorithm.kl={coef=0.1,where='reward'}": 'algorithm.kl.where = "reward" would charge',
    "roots=2 algorithm.experience={}": "algorithm.experience keeps whole episodes",
    "roots=2 rollout.oversample_members=1.5": "rollout.oversample_members drops the members that end last",
    "roots=2 rollout.context.name=compact": "a summary is sampled before the turn",
    "roots=2 agent.command=['x']": r"\[agent\]",
}


@pytest.mark.parametrize(("words", "why"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_right_with_branches_is_refused_by_name(words: str, why: str) -> None:
    first, *more = words.split()
    base = {"env": {"id": "key_value"}, "algorithm": {"advantage": {"name": "tree"}}}
    with pytest.raises(ConfigError, match=rf"^rollout.branch \(key_value\): .*{why}"):
        check_branch(RunStart(config_from(base, [f"rollout.branch={{{first}}}", *more]), {}))


def test_an_environment_that_cannot_be_forked_is_refused_with_what_it_says() -> None:
    base = {"env": {"id": "patient"}, "algorithm": {"advantage": {"name": "tree"}}}
    check_branch(RunStart(config_from(base, ["rollout.branch={}"]), {}))
    with pytest.raises(
        ConfigError, match=r"environment tests/Patient-v0 cannot be forked: TypeError: Patient\.held cannot be copied"
    ):
        check_branch(RunStart(config_from(base, ["rollout.branch={}", "env.params.holds=true"]), {}))


def test_branches_are_dealt_out_evenly() -> None:
    assert plant_trees(range(8), 3) == {0: [3, 6], 1: [4, 7], 2: [5]}
    assert plant_trees(range(3), 4) == {0: [], 1: [], 2: []}


@pytest.mark.parametrize("at", ["entropy", "depth", "failure"])
async def test_groups_are_whole_and_the_same_wherever_they_are_played_with_faults_too(
    at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request in ten fails: roots and branches are played again; a branch whose root has no place begins at the beginning."""
    config = RolloutConfig(
        groups=2, group_size=5, max_turns=4, retries=1, stall_timeout=20.0, branch=BranchConfig(at=at, roots=2)
    )
    monkeypatch.setattr(workers, "CONFIG", config)
    ref = EnvRef("patient", {"calls": 6, "set_share": 0.0})

    def make(engine: Engine) -> list[RunEnv]:
        spec = compile_spec(load_spec(ref.default_reward()))
        return [RunEnv("p", ref, Policy(engine, RENDERER), spec, Limits.of(config, 2048))]

    runs = [
        (await workers.updates(make, workers.SeededEngine(RENDERER.stop_token_ids[0], fail=0.1), n, count=2))[0] for n in (0, 2)
    ]
    assert runs[0] == runs[1]
    members = [member for update in runs[0] for row in update for member in row["trajectories"]]
    assert [member["member"] for member in members] == [0, 1, 2, 3, 4] * 4
    parents = Counter(member.get("parent") for member in members)
    assert parents[None] >= 8 and set(parents) <= {None, 0, 1}
    if at != "failure":  # nothing is called here, so nothing fails
        assert len(members) - parents[None] > 6
    else:
        assert parents[None] == 20


def ended(spec: EpisodeSpec, failed: bool = False) -> Trajectory:
    stop = StopReason.ENGINE_ERROR if failed else StopReason.DONE
    return Trajectory("", Task(spec.key, 0), member=spec.member, stop=stop)


class Made(Player):
    """Plays by a rule: `fails` says which attempt of a key faults; `most`: how many were open at once."""

    def __init__(self, fails: Callable[[str], bool] = lambda key: False) -> None:
        self.fails, self.open, self.most, self.trees = fails, 0, 0, list[str]()

    async def held(self, count: int) -> None:
        self.open += count
        self.most = max(self.most, self.open)
        for _ in range(5):
            await asyncio.sleep(0)
        self.open -= count

    async def play(self, job: Job, watch: Watch) -> list[Trajectory]:
        if not isinstance(job.script, TreeScript):
            await self.held(1)
            return [ended(job.spec)]
        self.trees.append(job.spec.key)
        await self.held(1 + len(job.script.branches))
        if self.fails(job.spec.key):
            return [ended(job.spec, True)]
        found = [ended(job.spec)]
        for attempts in job.script.branches:
            for spec in attempts:
                found.append(ended(spec, self.fails(spec.key)))
                if not self.fails(spec.key):
                    break
        return found


class Run(GroupRun):
    """A group of one retry that writes down what it is told."""

    def job(self, member: int, attempt: int) -> Job:
        return Job("kv", EpisodeSpec(0, "train", 0, member, f"m{member}.a{attempt}"))

    def count(self, trajectory: Trajectory, attempt: int) -> bool:
        last = not trajectory.stop.infrastructure or attempt == 1
        self.collector.told.append((trajectory.task.id, attempt, last))  # type: ignore[attr-defined]
        if last:
            self.collector.ends.append(trajectory.member)  # type: ignore[attr-defined]
        return last


def group(player: Made, slots: asyncio.Semaphore) -> Any:
    config = SimpleNamespace(retries=1)
    collector: Any = SimpleNamespace(player=player, slots=slots, watch=Watch(), config=config, told=[], ends=[])
    return Run(collector, 0, TaskChoice(0))


async def grown(
    player: Made, size: int, roots: int, slots: int
) -> tuple[list[Trajectory], list[tuple[str, int, bool]], list[int]]:
    run = group(player, asyncio.Semaphore(slots))
    async with asyncio.timeout(10):
        found = await Forest(BranchConfig(roots=roots))(run, range(size))
    return found, run.collector.told, run.collector.ends


@pytest.mark.parametrize("slots", [3, 4, 6, 20])
async def test_no_more_episodes_are_open_than_there_are_slots_and_all_come_to_an_end(slots: int) -> None:
    player = Made()
    found, _, over = await grown(player, 9, 3, slots)
    assert [trajectory.member for trajectory in found] == sorted(over) == list(range(9))
    assert player.most == min(slots // 3, 3) * 3, "a tree of three takes three from the start, and none waits without need"


async def test_two_trees_that_wait_for_slots_do_not_have_half_of_them_each() -> None:
    """All slots are taken, and come free one after the other while both trees wait."""
    slots, player, play = asyncio.Semaphore(4), Made(), Forest(BranchConfig(roots=1))
    run, gates = group(player, slots), [asyncio.Event() for _ in range(4)]

    async def single(gate: asyncio.Event) -> None:
        async with slots:
            await gate.wait()

    singles = [asyncio.create_task(single(gate)) for gate in gates]
    await asyncio.sleep(0)
    both = [asyncio.ensure_future(play(run, [0, 1, 2])), asyncio.ensure_future(play(run, [3, 4, 5]))]
    for gate in gates:
        for _ in range(3):
            await asyncio.sleep(0)
        gate.set()
    async with asyncio.timeout(10):
        assert [[one.member for one in found] for found in await asyncio.gather(*both)] == [[0, 1, 2], [3, 4, 5]]
        await asyncio.gather(*singles)
    assert player.most == 3


async def test_who_gives_up_waiting_gives_back_what_it_had_and_no_more() -> None:
    slots, player, play = asyncio.Semaphore(2), Made(), Forest(BranchConfig(roots=1))
    run = group(player, slots)
    async with slots:
        tree = asyncio.ensure_future(play(run, [0, 1]))  # waits for the second of its two
        for _ in range(3):
            await asyncio.sleep(0)
        assert slots.locked()
        tree.cancel()
        await asyncio.wait([tree])
        async with asyncio.timeout(10), slots:
            assert slots.locked() and not player.trees
    async with asyncio.timeout(10):
        assert len(await play(run, [2, 3])) == 2


@pytest.mark.parametrize(
    ("fails", "size", "roots", "trees", "stay", "told"),
    [
        (["m0.a0"], 4, 2, ["m0.a0", "m0.a1", "m1.a0"], ["m0.a1", "m1.a0", "m2.a0", "m3.a0"], "m0.a0 m0.a1 m1.a0 m2.a0 m3.a0"),
        (["m1.a0", "m2.a0", "m2.a1"], 3, 1, ["m0.a0"], ["m0.a0", "m1.a1", "m2.a1"], "m0.a0 m1.a0 m1.a1 m2.a0 m2.a1"),
        (["m0.a0", "m0.a1"], 3, 1, ["m0.a0", "m0.a1"], ["m0.a1", "m1.a0", "m2.a0"], "m0.a0 m0.a1 m1.a0 m2.a0"),
    ],
    ids=["a root, played again with its branches", "branches", "a root for good, whose branches begin at the beginning"],
)
async def test_each_attempt_is_told_with_its_number_and_the_last_one_stays(
    fails: list[str], size: int, roots: int, trees: list[str], stay: list[str], told: str
) -> None:
    player = Made(lambda key: key in fails)
    found, said, over = await grown(player, size, roots, 8)
    assert sorted(player.trees) == trees and sorted(over) == list(range(size))
    assert [(one.task.id, one.stop.infrastructure) for one in found] == [(key, key in fails) for key in stay]
    attempts = [(key, int(key[-1]), key not in fails or key[-1] == "1") for key in told.split()]
    assert sorted(said) == attempts and (roots > 1 or said == attempts), "trees are played side by side"


ARGUMENTS: dict[str, dict[str, list[Any]]] = {
    "tree": {"local": [0.0, 0.3, 1.0], "share": [0.0, 0.5, 1.0], "eps": [1e-6, 1e-3, 1.0]}
}


@dataclass
class Segment:
    """What one member sampled from turn `start` to turn `stop`; `after`: what goes on from there, that member first."""

    member: int
    start: int
    stop: float
    reward: float
    after: list[Segment]

    def worth(self) -> float:
        return mean_of([segment.worth() for segment in self.after]) if self.after else self.reward


def mean_of(values: list[float]) -> float:
    """NaN is not known."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def tree(rows: list[Row], local: float = 0.5, share: float = 0.0, eps: float = 1e-6) -> Out:
    out, exact = empty(rows), never(rows)
    for members in scored(rows).values():
        first = {member: rows[numbers[0]] for (_, member), numbers in members.items()}
        rewards = [row.reward for row in first.values()]

        def grown(member: int, start: int, first: dict[int, Row] = first) -> Segment:
            turns = sorted({row.branch_turn for row in first.values() if row.parent == member and row.branch_turn > start})
            reward = first[member].reward if member in first else math.nan
            if not turns:
                return Segment(member, start, math.inf, reward, [])
            others = [m for m, row in first.items() if row.parent == member and row.branch_turn == turns[0]]
            return Segment(member, start, turns[0], reward, [grown(m, turns[0]) for m in (member, *others)])

        def put(segment: Segment, place: float, portion: float, whole: float, members: Any = members, std_: float = 0.0) -> None:
            value = segment.worth() - (1 - local) * whole - local * place
            for key, numbers in members.items():
                for n in numbers if key[1] == segment.member else ():
                    row = rows[n]
                    at = np.maximum(row.turns, row.branch_turn)
                    mine = row.mask & (at >= segment.start) & (at < segment.stop)
                    out[n][mine] = 0.0 if math.isnan(value) else portion**share * value / (std_ + eps)
            known = sum(not math.isnan(other.worth()) for other in segment.after)
            for other in segment.after:
                put(other, segment.worth(), portion / max(known, 1), whole, members, std_)

        absent = {row.parent for row in first.values()} - {-1, *first}
        roots = [grown(member, 0) for member in [*(m for m, row in first.items() if row.parent < 0), *absent]]
        whole = mean_of([segment.worth() for segment in roots])
        for segment in roots:
            put(segment, whole, 1.0, whole, members, std(rewards))
        for n in itertools.chain(*members.values()):
            exact[n][:] = flat_same(rewards)
    return Out(out, exact)


@ORACLE
@given(block=BLOCKS)
def test_it_is_what_the_page_says(block: range) -> None:
    each(block, lambda seed: check_advantages("tree", seed, sys.modules[__name__]))


def test_the_example_of_the_manual_and_its_defaults() -> None:
    turns, parent, before = torch.tensor([0, 1, 1, 0]), torch.tensor([-1, 0, -1]), torch.tensor([0, 1, 0])
    found = advantage.tree(group_of([1, 0, 0], [2, 1, 1], turns=turns, parent=parent, branch_turn=before))
    assert found.advantages.tolist() == pytest.approx(documented("tree"), abs=1e-4)
    defaults = {p.name: p.default for p in inspect.signature(advantage.tree).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert defaults == {"local": 0.5, "share": 0.0, "eps": 1e-6}


async def test_the_value_of_a_turn_is_the_share_of_its_scored_continuations_that_succeed() -> None:
    gold = gold_of(7)
    says: dict[str, list[tuple[Message, float]]] = {
        "r": [gold[0], OVER],
        "r.v0.0": gold, "r.v0.1": [OVER], "r.v0.2": [gold[0], OVER],
        "r.v1.0": gold[1:], "r.v1.1": gold[1:], "r.v1.2": [],
    }  # fmt: skip
    player = player_of(Failing(says))
    spec = EpisodeSpec(7, "train", 0, 0, "r")
    script = ValueScript(spec, 3, 20)
    assert {"r.v0.2", "r.v1.2"} < {one.key for one in script.specs()} and len({one.seed for one in script.specs()}) == 60
    [root] = await player.play(Job("kv", spec, script=script), Watch())
    assert [turn.value for turn in root.turns] == [pytest.approx(1 / 3), 1.0] and root.success is False
    assert Trajectory.from_json(json.loads(json.dumps(root.to_json()))) == root
    [alone] = await player_of(Told({"r": [gold[0], OVER]})).play(Job("kv", spec), Watch())
    assert all("value" not in turn for turn in alone.to_json()["turns"]), "the rows of all other episodes stay as they are"
    assert [turn.message for turn in alone.turns] == [turn.message for turn in root.turns]


@pytest.mark.parametrize("words", [
    "rollout.context.name=compact", "agent.command=['x']", "env.params.holds=true", "model.path=policy:gold",
    "model.path=api:openai/some-model",
])  # fmt: skip
def test_values_of_episodes_that_cannot_be_forked_are_refused(words: str) -> None:
    why = "a script or a model behind an API cannot go on from a fork" if "model" in words else ".*leave one of the two out"
    with pytest.raises(ConfigError, match=f"^--values: {why}"):
        measure_values(RunStart(config_from({"env": {"id": "patient" if "holds" in words else "key_value"}}, [words])), 4)


async def test_a_fork_that_fails_leaves_its_continuation_unscored_and_the_episode_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand: of two continuations of turn 0 one succeeds; of turn 1 the first cannot be forked, and the other succeeds."""
    gold = gold_of(7)
    says = {"r": [gold[0], OVER], "r.v0.0": gold, "r.v0.1": [OVER], "r.v1.1": gold[1:]}
    kind = type(REF.build())
    fork, failed = kind.fork, list[int]()

    def sometimes(self: ToolEnv) -> ToolEnv:
        if len(self.trajectory.turns) == 1 and self.trajectory.turns[0].ledger >= 0 and asyncio.current_task() is not played:
            failed.append(1)
            if len(failed) == 1:
                raise OSError("no more connections")
        return fork(self)

    monkeypatch.setattr(kind, "fork", sometimes)
    player = player_of(Told(says))
    spec = EpisodeSpec(7, "train", 0, 0, "r")
    played = asyncio.current_task()
    [root] = await player.play(Job("kv", spec, script=ValueScript(spec, 2, 20)), Watch())
    assert [turn.value for turn in root.turns] == [0.5, 1.0] and root.stop is StopReason.DONE and failed == [1, 1]


def test_values_are_checked_once_and_their_continuations_count_as_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of max_episodes = 8, two tasks with four continuations each are open at once; the check forks one episode before them."""
    forked, asked = [], []
    plain = values.fork_obstacle
    monkeypatch.setattr(values, "fork_obstacle", lambda start: forked.append(1) or plain(start))

    async def run_tasks(player: Any, env: str, pairs: Any, **how: Any) -> None:
        asked.append((how["max_episodes"], how["script"](EpisodeSpec(7, "train", 0, 0, "r")).samples))

    monkeypatch.setattr(evaluate, "run_tasks", run_tasks)
    model = tmp_path / "model"
    assert main(["init-model", str(model), "--layers", "1", "--hidden", "32", "--heads", "2"]) == 0
    words = ["-n", "2", "--values", "4", "--out", str(tmp_path / "out"), "rollout.max_episodes=8"]
    assert main(["rollout", "key_value", "--model", str(model), *words]) == 0
    assert (asked, forked) == ([(2, 4)], [1])
