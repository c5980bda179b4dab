"""Episodes that branch off others (`rollout.branch`): at which turns, with which state, what counts as sampled, and what becomes
of a branch that fails."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RolloutConfig
from agentrl.config.load import config_from
from agentrl.config.schema import BranchConfig, Choice, RewardConfig
from agentrl.contrib.branching.checks import check_branch
from agentrl.contrib.branching.trees import TreeScript, plant_trees
from agentrl.data.rows import collate
from agentrl.data.trajectory import Message, StopReason, ToolCall, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from agentrl.render.template import make_renderer
from agentrl.reward import compile_spec, load_spec
from agentrl.rollout.context import make_context_policy
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy
from agentrl.rollout.player import Job, LocalPlayer, RunEnv
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ConfigError, EngineError
from tests.rollout import test_workers as workers

RENDERER = make_renderer(packaged_tokenizer(4096))
REF = EnvRef("key_value", {"calls": 6, "set_share": 0.0})
WIDE = Limits(20, 64, 2000, 60, 60, 4096)
FIXED = BranchConfig(at="depth", turns=[1, 3], roots=1)


@pytest.fixture(autouse=True, scope="module")
def shelf() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_PATH", str(Path(__file__).parents[2] / "rollout" / "patient"))
        yield


class Told(Engine):
    """Each episode, by its key, samples its own turns one after the other, each with the log probability of its tokens."""

    def __init__(self, turns: dict[str, list[tuple[Message, float]]]) -> None:
        self.turns, self.prompts = {key: list(said) for key, said in turns.items()}, list[tuple[str, list[int]]]()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        self.prompts.append((request_key, list(token_ids)))
        said, logprob = self.turns[request_key].pop(0)
        ids = RENDERER.assistant(said)
        return Generation(ids, [logprob] * len(ids), [3] * len(ids), "stop")

    async def start(self) -> None: ...

    async def abort(self, request_key: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None: ...


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def store(*values: int, at: Sequence[float] = ()) -> list[tuple[Message, float]]:
    """A turn for each value, which is stored under "a"."""
    return [(call("set", key="a", x=value), at[n] if at else -0.5) for n, value in enumerate(values)]


OVER = (Message("assistant", "7"), -0.5)


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
    policy = Policy(says, RENDERER, context=make_context_policy(context))
    scorer = make_scorer(find_spec(ref, spec), RewardConfig(), ref)
    player = LocalPlayer([RunEnv("kv", ref, policy, scorer, limits)])
    keys = [key for key in turns if key != "r"]
    branches = tuple((EpisodeSpec(7, "train", n + 1, n + 1, key),) for n, key in enumerate(keys))
    script = TreeScript(config, branches)
    found = await player.play_all(Job("kv", EpisodeSpec(7, "train", 0, 0, "r", **job), script=script), Watch())
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
        assert dict(engine.prompts)[f"b{turn // 2}"][:begins] == whole.ids()[:begins]
        assert [t.ledger for t in branch.turns] == [-1] * turn + [0] * (len(branch.turns) - turn)
        assert Trajectory.from_json(json.loads(json.dumps(branch.to_json()))) == branch
    assert not {"parent", "branch_turn"} & root.to_json().keys(), "the rows of all other episodes stay as they are"


async def test_what_the_turns_before_earned_is_in_a_branchs_reward_and_on_a_token_that_it_sampled() -> None:
    env = REF.build()
    gold = [(turn, -0.5) for turn in env.gold_turns(env.make_task(7, "train"))]
    found, _ = await played(
        FIXED, {"r": gold, "b0": gold[1:], "b1": [(Message("assistant", "wrong"), -0.5)]}, spec="key_value_turns"
    )
    assert [found[key].reward for key in ("r", "b0")] == pytest.approx([1.0, 1.0])
    assert found["b1"].reward == pytest.approx(0.5 * 3 / 6), "three of six gold calls, made by its parent"
    for trajectory in found.values():
        batch = collate([trajectory])
        rewards, sampled = batch["rewards"].values(), batch["sampled"].values()
        assert float(rewards.sum()) == pytest.approx(trajectory.reward) and not rewards[~sampled].any()


@pytest.mark.parametrize(
    ("config", "turns"),
    [
        (BranchConfig(at="entropy", roots=1), [4, 1]),
        (BranchConfig(at="entropy", roots=1, width=2), [4, 4]),
        (BranchConfig(at="failure", roots=1), [2, 5]),
        (BranchConfig(at="depth", roots=1), [3, 5]),
        (BranchConfig(at="depth", roots=1, width=2), [4, 4]),
        (BranchConfig(at="depth", roots=1, turns=[3, 6]), [3, 6]),
        (BranchConfig(at="depth", roots=1, turns=[3, 9]), [3]),
        (BranchConfig(at="depth", roots=1, turns=[9, 3]), [3]),
    ],
    ids=str,
)
async def test_where_an_episode_branches(config: BranchConfig, turns: list[int]) -> None:
    """Eight turns; turn 4 was the least expected, then turns 0 and 1; turns 2 and 5 call what is not there."""
    said = store(*range(8), at=[-3.0, -2.0, -0.1, -0.1, -4.0, -1.0, -0.2, -0.2])
    said[2] = call("nothing"), -0.1
    said[5] = call("nothing"), -1.0
    said[7] = Message("assistant", "7"), -0.2
    found, _ = await played(config, {"r": said, "b0": [OVER], "b1": [OVER]})
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
    assert [(t.stop, t.reward) for t in found.values()] == [
        (StopReason.DONE, 0.0),
        (StopReason.DONE, 0.0),
        (StopReason.ENV_ERROR, None),
        (StopReason.DONE, 0.0),
    ]
    assert found["b1"].cause == {"blame": "infrastructure"} and "this copy is broken" in str(found["b1"].error)
    said_to = [[m.content for m in found[key].messages if m.role == "user"][1:] for key in ("r", "b0", "b2")]
    assert said_to[1] == said_to[2] == said_to[0][:3], "chance too is in the state, and no copy draws from another's"


async def test_three_branches_of_two_a_turn_leave_at_two_turns_in_turn() -> None:
    turns = {"r": [*store(1, 2, 3, 4), OVER], "b0": [OVER], "b1": [OVER], "b2": [OVER]}
    found, _ = await played(BranchConfig(at="depth", turns=[1, 3], roots=1, width=2), turns)
    assert [t.branch_turn for key, t in found.items() if key != "r"] == [1, 3, 1]


async def test_the_first_turn_that_is_sampled_after_given_ones_has_no_branch() -> None:
    """A branch there would be an episode of its own: it begins at the beginning, as another draw from the same prompt."""
    config = BranchConfig(at="depth", turns=[2, 3], roots=1)
    said = {"r": [*store(1, 2, 3), OVER], "b0": [OVER], "b1": [OVER]}
    ref = EnvRef("key_value", {"calls": 6, "set_share": 0.0})
    found, _ = await played(config, said, ref, given=2)
    assert found["r"].given == 2 and [(t.member, t.branch_turn) for t in found.values()] == [(0, 0), (2, 3)]


class Failing(Told):
    """Cannot say what is asked after the turns that it was told."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        if not self.turns[request_key]:
            raise EngineError("no more")
        return await super().generate(token_ids, sampling, request_key)


async def test_a_root_that_fails_after_turns_with_forks_is_alone_and_its_forks_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_now = list[Any]()
    fork = ToolEnv.fork

    def forked(self: ToolEnv) -> ToolEnv:
        made = fork(self)
        open_now.append(made)
        return made

    closed = list[Any]()
    close = ToolEnv.aclose

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
    policy = Policy(Told(engine_turns), RENDERER, context=make_context_policy(Choice(name="stop")))
    player = LocalPlayer([RunEnv("kv", ref, policy, make_scorer(find_spec(ref, "key_value_exact"), RewardConfig(), ref), WIDE)])
    job = Job("kv", EpisodeSpec(7, "train", 0, 0, "r"), script=TreeScript(config, (attempts,)))
    found = await player.play_all(job, Watch())
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
    "roots=2 rollout.grow=2.0": "rollout.grow looks at members that were drawn independently",
    "roots=2 rollout.oversample_members=1.5": "rollout.oversample_members drops the members that end last",
    "roots=2 rollout.context.name=compact": "a summary is sampled before the turn",
    "roots=2 agent.command=['x']": r"\[agent\]",
}


@pytest.mark.parametrize(("words", "why"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_right_with_branches_is_refused_by_name(words: str, why: str) -> None:
    first, *more = words.split()
    base = {"env": {"id": "key_value"}, "algorithm": {"advantage": {"name": "tree"}}}
    with pytest.raises(ConfigError, match=rf"^rollout.branch \(key_value\): .*{why}"):
        check_branch(config_from(base, [f"rollout.branch={{{first}}}", *more]), REF)


def test_an_environment_that_cannot_be_forked_is_refused_with_what_it_says() -> None:
    config = config_from({"env": {"id": "patient"}, "algorithm": {"advantage": {"name": "tree"}}}, ["rollout.branch={}"])
    check_branch(config, EnvRef("patient"))
    with pytest.raises(
        ConfigError, match=r"environment tests/Patient-v0 cannot be forked: TypeError: Patient\.held cannot be copied"
    ):
        check_branch(config, EnvRef("patient", {"holds": True}))


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
