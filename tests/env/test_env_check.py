"""`env check`: the shelf passes, and each deliberately broken environment fails for its own reason."""

import pickle
import random
from dataclasses import replace
from typing import Any, ClassVar, Self

import pytest

from agentrl.config.schema import RewardConfig
from agentrl.env import Message, Task, Tool, ToolEnv, draw, task_rng, tool
from agentrl.env.base import StepResult
from agentrl.env.catalog import EnvRef, list_envs, make_scorer
from agentrl.env.check import CHECKS, check_all, share_interval
from agentrl.env.check_tools import Subject
from agentrl.reward import compile_spec, load_spec
from agentrl.utils.errors import EnvError, ToolError
from tests.conftest import PROOFS, proof
from tests.env.toyenvs import call

SPEC = {
    "agentrl_reward": 1,
    "name": "sum",
    "root": {"use": "number.close", "args": {"expect": {"$": "/task/gold/answer"}, "where": "answer", "which": "last"}},
}


class Sum(ToolEnv):
    """The sound one that the others break: look two numbers up and answer with their sum."""

    id = "broken/Sum-v0"
    order_free = True

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        print("Hello from a package that greets, as some do")
        self.seen: list[str] = []
        self.numbers: dict[str, int] = {}

    def make_task(self, rng_seed: int, split: str) -> Task:
        def propose(rng: random.Random) -> tuple[int, int]:
            return rng.randrange(100, 900), rng.randrange(100, 900)

        a, b = draw(task_rng(self.id, split, rng_seed), split, propose, str)
        gold = {"answer": str(a + b), "note": f"the sum of {a} and {b} is {a + b}"}
        return Task(f"{split}/{rng_seed}", rng_seed, split, {"numbers": {"a": a, "b": b}}, gold)

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", "add a and b")]

    async def setup(self, task: Task) -> None:
        self.seen = []
        self.numbers = dict(task.data["numbers"])

    def state(self) -> Any:
        return {"seen": list(self.seen)}

    @tool(read_only=True)
    async def look(self, key: str) -> int | None:
        """the number under a key"""
        self.seen.append(key)
        return self.numbers.get(key)

    def gold_turns(self, task: Task) -> list[Message]:
        return [call("look", key="a"), call("look", key="b"), Message("assistant", task.gold["answer"])]


class BadId(Sum):
    id = "sum"


class NoUserTurn(Sum):
    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", "add a and b")]


class Unseeded(Sum):
    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", f"add a and b, quickly! {random.random()}")]


class HashSeeded(Sum):
    """Right within one process, wrong across two: hash() of a text is salted."""

    def make_task(self, rng_seed: int, split: str) -> Task:
        return super().make_task(abs(hash(f"{rng_seed}")) % 10**9, split)


class SharedTasks(Sum):
    """Held-out tasks are the training tasks under another name."""

    def make_task(self, rng_seed: int, split: str) -> Task:
        task = super().make_task(rng_seed, "train")
        return Task(f"{split}/{rng_seed}", rng_seed, split, task.data, task.gold)


class WrongGold(Sum):
    order_free = False

    def gold_turns(self, task: Task) -> list[Message]:
        return [*super().gold_turns(task)[:-1], Message("assistant", "0")]


class FreeReward(Sum):
    """The spec below pays for stopping, which costs nothing."""


class OrderMatters(Sum):
    @tool(read_only=True)
    async def look(self, key: str) -> int | None:
        """the number under a key, from a on"""
        if not self.seen and key != "a":
            self.finish()
        self.seen.append(key)
        return self.numbers.get(key)


class Fragile(Sum):
    @tool(read_only=True)
    async def look(self, key: str) -> int | None:
        """the number under a key; falls over long ones"""
        self.seen.append(key)
        return self.numbers.get(key) if len(key) < 100 else 1 // 0


class GlobalState(Sum):
    board: ClassVar[list[str]] = []

    async def setup(self, task: Task) -> None:
        await super().setup(task)
        self.board.clear()

    @tool(read_only=True)
    async def look(self, key: str) -> str:
        """the number under a key, and how many looks there were"""
        self.board.append(key)
        return f"{self.numbers.get(key)} (look {len(self.board)})"


class ShallowFork(Sum):
    """The copy shares the list of looks."""

    def fork(self) -> Self:
        replay_env = super().fork()
        replay_env.__dict__["seen"] = self.seen
        return replay_env


class Forgetful(Sum):
    """A counter that lives outside the episode's attributes escapes snapshots."""

    shared = frozenset({"seen"})


class Swallows(Sum):
    """Turns every fault into an answer, so an outage looks like a bad policy."""

    async def astep(self, action: Any) -> StepResult:
        try:
            return await super().astep(action)
        except EnvError:
            return [], 0.0, True, False, {}


class NeverTornDown(Sum):
    async def aclose(self) -> None:
        self._env_open = False


class TellsInInfo(Sum):
    def _info(self) -> dict[str, Any]:
        return {**super()._info(), "hint": self.task.gold["note"]}


class TellsInPrompt(Sum):
    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", f"add a and b (it is {task.gold['answer']}, or 0)")]


class TellsInTool(Sum):
    @tool(read_only=True)
    async def look(self, key: str) -> str:
        """the number under a key"""
        self.seen.append(key)
        return f"{self.numbers.get(key)}; {self.task.gold['note'] if key not in 'ab' else ''}"


PAYS_FOR_STOPPING = {"agentrl_reward": 1, "name": "kind", "root": {"op": "max", "of": [SPEC["root"], {"use": "episode.stopped"}]}}

BROKEN = [
    (BadId, "contract", "Namespace/Name-v0"), (NoUserTurn, "contract", "user's turn"),
    (Unseeded, "same seed", "two different episodes"), (HashSeeded, "same seed elsewhere", "another process"),
    (SharedTasks, "splits apart", "of a task of train"), (WrongGold, "gold scores most", "gold scored 0"),
    (FreeReward, "idling scores nothing", "'do nothing' is paid in full on 12 of 12 tasks (75.8 to 100.0 % of all"),
    (OrderMatters, "free order", "scored"), (Fragile, "fuzzed calls", "ZeroDivisionError"),
    (GlobalState, "instances apart", "runs at the same time"), (ShallowFork, "fork", "changed its parent"),
    (Forgetful, "fork", "changed its parent"), (Swallows, "hang", "swallowed"), (Swallows, "crash", "swallowed"),
    (NeverTornDown, "teardown", "0 times"), (TellsInInfo, "no gold shown", "the sum of"),
    (TellsInPrompt, "no gold shown", "CANARY"), (TellsInTool, "no gold shown", "gold/note 'the sum of"),
]  # fmt: skip
# What must break along with it, because it is the same fault seen from another side.
ALONG = {HashSeeded: {"splits apart"}, Unseeded: {"same seed elsewhere", "instances apart"}, GlobalState: {"fork"},
         Swallows: {"hang", "crash", "teardown"}, TellsInInfo: {"contract"}}  # fmt: skip


class Builder:
    """A picklable reference, as EnvRef is for content on a shelf."""

    def __init__(self, cls: type[ToolEnv]) -> None:
        self.cls = cls

    def build(self) -> ToolEnv:
        return self.cls()


def subject(cls: type[ToolEnv], **more: Any) -> Subject:
    spec = PAYS_FOR_STOPPING if cls is FreeReward else SPEC
    return Subject(cls, compile_spec(spec), tasks=6, fuzz=120, **more)


class MistypedGold(WrongGold):
    """Its gold names an argument and a tool wrongly, and answers with what it then cannot know."""

    order_free = True

    def gold_turns(self, task: Task) -> list[Message]:
        turns = [call("look", key="a"), call("look", kye="b"), call("lok", key="b"), call("lok")]
        return [*turns, super().gold_turns(task)[-1]]


def test_a_gold_solution_that_fails_says_which_of_its_calls_were_refused() -> None:
    [finding] = check_all(subject(MistypedGold), ["gold scores most"])
    assert finding.ok is False and "gold scored 0" in finding.evidence
    said = "; 3 of its 4 tool calls ended in errors (lok 2, look 1), the first at turn 2 of look: "
    assert said in finding.evidence
    first = finding.evidence.partition(said)[2]
    assert "kye" in first and "lok" not in first
    [finding] = check_all(subject(MistypedGold), ["free order"])
    assert finding.ok is False and "; 3 of its 4 tool calls ended in errors (l" in finding.evidence
    [finding] = check_all(subject(WrongGold), ["gold scores most"])
    assert finding.ok is False and "tool calls" not in finding.evidence


@pytest.mark.parametrize(("cls", "check", "says"), BROKEN, ids=[f"{c.__name__}-{n}" for c, n, _ in BROKEN])
def test_each_broken_environment_fails_for_its_own_reason(cls: type[ToolEnv], check: str, says: str) -> None:
    elsewhere = check == "same seed elsewhere"
    findings = check_all(subject(cls, portable=portable(cls)), [check]) if elsewhere else check_all(subject(cls))
    failed = {finding.check: finding.evidence for finding in findings if finding.ok is False}
    assert check in failed and says in failed[check], failed
    assert set(failed) - {check} <= ALONG.get(cls, set()), failed


def portable(cls: type[ToolEnv]) -> bytes:
    """A pickle that another process can load: it runs this file to get at the class."""
    return pickle.dumps(_Elsewhere(cls.__name__))


class _Elsewhere:
    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        module = f"__import__('runpy').run_path({__file__!r})"
        return eval, (f"(lambda names: names['Builder'](names[{self.name!r}]))({module})",)


def test_the_sound_one_passes_everything() -> None:
    findings = check_all(subject(Sum, portable=portable(Sum)))
    assert [f.check for f in findings] == list(CHECKS)
    assert {f.check: f.evidence for f in findings if f.ok is not True} == {}


def test_what_gold_costs_does_not_fail_it() -> None:
    """Two lookups and an answer: 3 of 10 turns cost 0.06 of 1."""
    cost = {"use": "cost.turns", "weight": -0.2, "args": {"max": 10}}
    shaped = {**SPEC, "root": {"op": "sum", "of": [SPEC["root"], cost]}}
    found = check_all(Subject(Sum, compile_spec(shaped)), ["gold scores most", "free order"])
    assert [(item.ok, item.evidence) for item in found if item.ok is not True] == [] and len(found) == 2


class OneFree(Sum):
    """Twenty tasks, of which the eleventh pays who does nothing."""

    def task_count(self, split: str) -> int | None:
        return 20

    def make_task(self, rng_seed: int, split: str) -> Task:
        task = super().make_task(rng_seed, split)
        return replace(task, gold={**task.gold, "free": rng_seed == 11})


FREE = {
    "agentrl_reward": 1,
    "name": "kind",
    "root": {"op": "max", "of": [SPEC["root"], {"use": "episode.stopped", "when": {"$": "/task/gold/free", "eq": True}}]},
}


def test_a_single_task_that_pays_who_does_nothing_is_named() -> None:
    """Its mean, 0.05, would be within what luck is allowed."""
    some = Subject(OneFree, compile_spec(FREE), tasks=5, spec="rewards/kind.json")
    assert [f.ok for f in check_all(some, ["idling scores nothing"])] == [True]
    [found] = check_all(replace(some, every=True), ["idling scores nothing"])
    assert found.ok is False
    assert "'do nothing' is paid in full by rewards/kind.json on 1 of 20 tasks (0.9 to 23.6 % of all" in found.evidence
    assert "seed 11, train" in found.evidence
    [endless] = check_all(Subject(Sum, compile_spec(SPEC), tasks=5, every=True), ["idling scores nothing"])
    assert endless.ok is False and "infinitely many tasks" in endless.evidence


@pytest.mark.parametrize(("count", "of"), [(0, 20), (11, 114), (20, 20), (1, 7)])
def test_the_interval_of_a_share_ends_where_what_was_seen_is_two_standard_deviations_away(count: int, of: int) -> None:
    for share in share_interval(count, of):
        if 0 < share < 1:
            assert abs(count / of - share) == pytest.approx(1.959964 * (share * (1 - share) / of) ** 0.5)
        else:
            assert share == count / of


class LongName(Sum):
    """A gold call of a tool whose name is long enough to be no accident, and which errors name as well."""

    called = "look_up_what_is_under_a_key"

    def make_task(self, rng_seed: int, split: str) -> Task:
        task = super().make_task(rng_seed, split)
        return replace(task, gold={**task.gold, "calls": [{"name": self.called}]})

    @tool(read_only=True)
    async def look_up_what_is_under_a_key(self, key: str) -> str:
        """the number under a key"""
        raise ToolError("look_up_what_is_under_a_key knows a and b")


class AddedName(LongName):
    """Its tools come with the task, and its episode ends at the first call."""

    id, called = "tests/AddedName-v0", "look_up_what_the_task_is_about"

    async def setup(self, task: Task) -> None:
        await super().setup(task)
        self.toolbox.table = {item.name: item for item in self.toolbox}
        self.toolbox.add(Tool.from_schema(self.called, "", {"type": "object"}, self.over))

    async def over(self, **arguments: Any) -> str:
        self.finish()
        return "over"


@pytest.mark.parametrize("kind", [LongName, AddedName])
def test_the_name_of_an_offered_tool_is_no_secret(kind: type[ToolEnv]) -> None:
    [found] = check_all(subject(kind), ["no gold shown"])
    assert found.ok is True, found.evidence


def test_without_spec_or_gold_the_checks_say_so() -> None:
    class NoGold(Sum):
        def gold_turns(self, task: Task) -> list[Message]:
            raise NotImplementedError("later")

    outcome = {f.check: f for f in check_all(Subject(NoGold, None, tasks=4, fuzz=20))}
    assert outcome["gold scores most"].ok is False and "later" in outcome["gold scores most"].evidence
    assert outcome["idling scores nothing"].ok is None
    assert outcome["same seed"].ok is True, "sampled calls stand in for gold"


def _shelf() -> list[Any]:
    """All of the shelf; benchmarks, one of which starts processes in every episode, in `make proofs` where their source is."""
    lacking = "{}: no source of it here, see docs/benchmarks.md"
    return [
        pytest.param(
            entry,
            marks=[
                pytest.mark.skipif(entry.lacks_source(), reason=lacking.format(entry.name)),
                *([proof] if entry.suite else []),
            ],
            id=entry.name,
        )
        for entry in list_envs()
        if "tests/" not in entry.id
    ]


@pytest.mark.parametrize("entry", _shelf())
def test_every_environment_of_the_shelf_passes(entry: Any) -> None:
    path = entry.default_reward()
    assert path is not None, "every environment of the shelf names its reward spec"
    ref = EnvRef(entry.id)
    scorer = make_scorer(load_spec(path), RewardConfig(), ref)
    sizes = {"tasks": 12, "fuzz": 200} if PROOFS else {"tasks": 3, "fuzz": 24}
    checked = Subject(ref.build, scorer, portable=pickle.dumps(ref), **sizes)
    assert {f.check: f.evidence for f in check_all(checked) if f.ok is False} == {}


def test_no_check_is_idle() -> None:
    assert set(CHECKS) == {check for _, check, _ in BROKEN}
