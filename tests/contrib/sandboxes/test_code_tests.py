"""`code.tests`: what tests find of code, and code that would rather pass than be right."""

import asyncio
import json
import math
import os
import threading
import time

import pytest

from agentrl.config.schema import RewardConfig, SandboxConfig
from agentrl.contrib.math_equal import leaf as math_leaf
from agentrl.contrib.sandboxes.code_tests import grade as grading
from agentrl.contrib.sandboxes.code_tests.grade import Graded, GradeLimits, grade, last_block
from agentrl.contrib.sandboxes.local import LocalSandbox
from agentrl.reward import compile_spec, make_context
from agentrl.run.assembly import RunStart
from agentrl.run.checks import check_config
from agentrl.run.checks.rollout_checks import check_assembly
from agentrl.utils.errors import ConfigError, RewardSpecError, SandboxError
from tests.conftest import proof
from tests.contrib.sandboxes.code_fakes import FAKES
from tests.contrib.sandboxes.code_programs import PROGRAMS
from tests.e2e.inside import config_of
from tests.reward.reward_episodes import episode, leaf, spec

TESTS = """
from solution import add

def test_small(): assert add(1, 2) == 3
def test_zero(): assert add(0, 0) == 0
def test_large(): assert add(10**20, 1) == 10**20 + 1
def test_close(): assert abs(add(0.1, 0.2) - 0.3) < 1e-9
"""
RIGHT = "def add(a, b):\n    return a + b\n"


def scored(answer, tests=TESTS, **args):
    return compile_spec(spec(leaf("code.tests", {"tests": {"$": "/task/gold/tests"}, **args}))).score(
        episode(answer, task_gold={"tests": tests})
    )


def block(code):
    return f"Here it is:\n\n```python\n{code}\n```\nDone."


def test_the_share_that_passes_or_all_of_them():
    half = "def add(a, b):\n    return a + b if a < 5 and isinstance(a, int) else None\n"
    assert scored(block(RIGHT)).value == 1.0
    share = scored(block(half), credit="share")
    assert share.value == 0.5 and share.evidence["root"]["evidence"]["passed"] == 2
    assert set(share.evidence["root"]["evidence"]["failed"]) == {"test_large", "test_close"}
    assert scored(block(half)).value == 0.0
    assert scored("I would write a loop.").value == 0.0 and scored("").value == 0.0


RICH = """
import pytest
from solution import Empty, Stack, apply, fill, greet, pairs

@pytest.fixture
def stack():
    made = Stack()
    made.push(1)
    made.push(2)
    return made

def test_object(stack):
    assert len(stack) == 2 and stack.pop() == 2 and list(stack) == [1] and 1 in stack and isinstance(stack, Stack)

def test_own_error():
    with pytest.raises(LookupError, match="nothing"):
        Stack().pop()
    with pytest.raises(Empty):
        Stack().pop()

@pytest.mark.parametrize("n", [1, 3])
def test_many(n): assert pairs(n) == {i: (i, {i}) for i in range(n)}

def test_in_place():
    given = [1]
    fill(given)
    assert given == [1, 2]

def test_callback(): assert apply(lambda x: x * 2, [1, 2]) == [2, 4]

def test_printed(capsys):
    greet()
    assert capsys.readouterr().out == "hello\\n"

class TestMore:
    def test_equal(self): assert Stack() == Stack() and Stack() != 3

    def test_attributes(self):
        made = Stack()
        made.name = "mine"
        assert (made.name, made.number, made.code, made.items) == ("mine", 7, "x", [])
"""
GOOD = """
class Empty(LookupError): pass
class Stack:
    number, code = 7, "x"
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise Empty("nothing there")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, other): return self.items == other.items
def pairs(n): return {i: (i, {i}) for i in range(n)}
def fill(given): given.append(2)
def apply(f, items): return [f(x) for x in items]
def greet(): print("hello")
"""


def test_tests_use_what_pytest_has_and_code_has_objects_errors_and_output():
    found = grade(RICH, GOOD)
    assert (found.passed, found.count) == (9, 9), found


SOON = ("leaves with status 0", "patches pytest", "writes a conftest", "equals everything", "reads the tests' memory")


@pytest.mark.parametrize("name", [name if name in SOON else pytest.param(name, marks=proof) for name in FAKES])
def test_code_cannot_make_a_test_pass(name):
    code = FAKES[name]
    found = grade(TESTS, code, limits=GradeLimits(5.0, 20.0))
    assert found.fault is None and found.passed == 0, found


QUICK = (
    "unittest's subTest, wrong", "hangs where any exception is expected", "exits where that is expected", "a UnicodeDecodeError",
    "an object that contains everything", "a list by keyword", "standard output alone", "annotations are values",
    "a module that the sandbox lacks", "a wrong parametrize", "skipped by pytest.skip",
)  # fmt: skip


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=proof) for name in PROGRAMS])
def test_right_code_is_paid_wrong_code_is_not_and_a_fault_of_the_tests_is_null(name):
    tests, code, owed = PROGRAMS[name]
    found = scored(block(code), tests, seconds=5)
    assert found.value == owed, found.evidence["root"]


@pytest.mark.parametrize("code", [
    "import time\ndef add(a, b):\n    if a: time.sleep(100)\n    return 0",
    pytest.param("def add(a, b):\n    while a: pass\n    return 0", marks=proof),
])  # fmt: skip
def test_code_that_hangs_fails_that_test_and_the_others_go_on(code):
    began = time.monotonic()
    found = grade(TESTS, code, limits=GradeLimits(1.0, 20.0))
    assert found.passed == 1 and found.count == 4, "add(0, 0)"
    assert any("no answer within 1.0 s" in text for text in found.why.values()), found.why
    assert time.monotonic() - began < 30


def test_code_that_ends_three_times_is_started_anew_each_time():
    """After the second time what the tests had imported was no longer found, and right answers failed."""
    tests = "import pytest\nfrom solution import f\n@pytest.mark.parametrize('n', range(7))\ndef test_n(n): assert f(n) == n\n"
    found = grade(tests, "import os\ndef f(n):\n    if n % 2: os._exit(1)\n    return n")
    assert (found.passed, found.count) == (4, 7) and set(found.why) == {"test_n[1]", "test_n[3]", "test_n[5]"}, found


@pytest.mark.parametrize(("tests", "word"), [
    ("def test_a(: pass", "no Python"), ("x = 1", "no test in the tests"), (3, "must be Python code"),
    ("import nowhere_to_be_found\ndef test_a(): pass", "cannot be run"), ("class TestNothing: pass", "no test in the tests"),
])  # fmt: skip
def test_tests_that_are_none_are_null_and_say_so(tests, word):
    found = scored(block(RIGHT), tests)
    assert found.value is None and word in found.evidence["root"]["unscored"], found.evidence


def test_a_sandbox_that_fails_is_no_reward_of_0(monkeypatch):
    def fails(*args):
        raise SandboxError("no folder for a sandbox: no space left on device")

    monkeypatch.setattr(grading, "grade", fails)
    found = scored(block("def add(a, b): return 0"))
    assert found.value is None and "no space left" in found.evidence["root"]["unscored"]


def test_a_sandbox_in_which_nothing_begins_is_no_reward_of_0(monkeypatch):
    source, made = grading._source, grading._archive()
    monkeypatch.setattr(grading, "_source", lambda name: "raise SystemExit('no room')" if name == "boot" else source(name))
    with pytest.raises(SandboxError, match=r"the tests' process did not begin \(error, status 1\): no room"):
        grade(TESTS, RIGHT)
    monkeypatch.undo()
    monkeypatch.setattr(grading, "_archive", lambda: b"\0\0\r\n" + made[4:])
    with pytest.raises(SandboxError, match="another Python, 3"):
        grade(TESTS, RIGHT)


def test_many_failures_are_a_report_too(monkeypatch):
    """Of 100 failures each says 300 characters, and a report that is too long is none."""
    monkeypatch.setattr(grading, "REPORT", 20_000)
    given = "@pytest.mark.parametrize('n', range(200))\ndef test_n(n): assert n % 2 == 0, 'x' * 400"
    found = scored(block(RIGHT), f"import pytest\nfrom solution import add\n{given}", credit="share")
    assert found.value == 0.5, found.evidence


@proof
def test_the_local_sandbox_keeps_them_apart_too(monkeypatch):
    monkeypatch.setattr(grading, "sandbox_config", lambda config: SandboxConfig(provider="local"))
    assert grade(RICH, GOOD).passed == 9
    assert [name for name, code in FAKES.items() if grade(TESTS, code, limits=GradeLimits(5.0, 20.0)).passed] == []


def test_which_block_is_the_code():
    assert last_block(f"```py\na = 1\n```\n{block('b = 2')}") == "b = 2\n"
    assert last_block("```\nc = 3\n```") == "c = 3\n" and last_block("```json\n{}\n```") is None and last_block("no") is None
    assert last_block("```python\nopen") is None
    assert last_block(f"```json\n{{}}\n```\nso\n{block('d = 4')}") == "d = 4\n", "what ends a block begins none"
    for label in ("text", ""):
        assert last_block(f"{block('e = 5')}\nIt prints:\n```{label}\nout\n```") == "e = 5\n", "an output is not the code"
    assert last_block("1. So:\n   ```python\n   def f():\n     return 1\n   ```\n") == "def f():\n  return 1\n", "as in a list"
    for before, after in (
        ("```python3.11", "```"), ("```py title='a'", "```"),
        ("``` {.python}", "```"), ("~~~python", "~~~"), ("````Python", "````"),
        ("```python", "````"), ("\t```", "\t```"),
    ):  # fmt: skip
        assert last_block(f"{before}\ng = 6\n{after}\n") == "g = 6\n", before
    assert last_block("````\n```\nin it\n```\n````") == "```\nin it\n```\n"
    assert last_block("```pyton\ng\n```") is None and last_block("```python g```") is None
    assert scored("```python\n" * 80_000).value == 0.0, "no text takes so long that its policy has no reward"
    assert scored("```json\n{}\n```").value == 0.0


def test_code_in_a_file_of_the_environment():
    args = {"tests": TESTS, "code": {"$": "/episode/state/files/mine.py"}, "module": "mine"}
    args["tests"] = TESTS.replace("solution", "mine")
    scorer = compile_spec(spec(leaf("code.tests", args)))
    assert scorer.score(episode("done", state={"files": {"mine.py": RIGHT}})).value == 1.0
    assert scorer.score(episode("done", state={"files": {"mine.py": ""}})).value == 0.0
    for none in ({"files": {}}, {}, {"files": {"mine.py": None}}):
        assert scorer.score(episode("done", state=none)).value == 0.0, "who writes no file would else leave the group"
    assert scorer.score(episode("done")).value is None, "an environment without a state is not the policy's fault"


def test_an_episode_is_graded_once_whatever_asks(monkeypatch):
    """By leaves of other credit, by success, and on each pass while a judge is asked."""
    graded = []
    monkeypatch.setattr(grading, "grade", lambda *given: graded.append(given) or Graded(1, 2))
    one = leaf("code.tests", {"tests": TESTS})
    share = leaf("code.tests", {"tests": TESTS, "credit": "share"})
    judge = leaf("judge", {"model": "openai/a-2026-01-01", "prompt": "{answer}"})
    root = {"op": "mean", "of": [share, judge]}
    pytest.importorskip("agentrl.contrib.judges")
    both = {**spec(root), "metrics": [{**one, "id": "all"}], "success": one}
    scorer = compile_spec(both, context=make_context(RewardConfig())).assuming(lambda _: True)
    score = scorer.score(episode(block(RIGHT)))
    assert (score.value, score.success, len(graded)) == (0.75, False, 1)
    scorer.score(episode(block(RIGHT)))
    assert len(graded) == 2, "another episode is graded by itself"


@pytest.mark.parametrize("mark", ["skip", "xfail", "parametrize('n', [])"])
def test_what_no_code_can_pass_is_not_counted(mark):
    """A task with such a test could not be solved."""
    extra = f"@pytest.mark.{mark}\ndef test_more({'n' if 'n' in mark.partition('(')[2] else ''}): assert add(1, 1) == 3\n"
    assert scored(block(RIGHT), f"import pytest\n{TESTS}\n{extra}", credit="share").evidence["root"]["evidence"]["tests"] == 4
    alone = scored(block(RIGHT), f"import pytest\nfrom solution import add\n{extra}")
    assert alone.value is None and "there is no test" in alone.evidence["root"]["unscored"]


def test_a_run_whose_spec_may_take_longer_than_its_scoring_is_refused(tmp_path):
    """What hangs as long as its limits let it would have no reward, in place of 0."""
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'agentrl[math]'")
    more = leaf("code.tests", {"tests": "def test_x(): pass", "total_seconds": 50})
    same = leaf("code.tests", {"tests": TESTS, "credit": "share"})
    parts = [leaf("code.tests", {"tests": TESTS}), same, more, leaf("math.equal", {"expect": "1"})]
    (tmp_path / "s.json").write_text(json.dumps(spec({"op": "mean", "of": parts})))
    sure = ["health.lint=false", f"env.reward={tmp_path / 's.json'}"]
    math_s = 5 * 8 / min(4, os.cpu_count())
    with pytest.raises(
        ConfigError, match=rf"^rollout\.env_timeout = 120 s: .* {170 + math_s:g} s .*/root/of/2 80 s.*raise it to"
    ):
        check_config(config_of(tmp_path, "r", *sure, "rollout.env_timeout=120"))
    with pytest.raises(ConfigError, match=r"rollout\.env_timeout"):
        check_assembly(RunStart(config_of(tmp_path, "r", *sure, "rollout.env_timeout=120")))
    check_assembly(RunStart(config_of(tmp_path, "r", *sure, f"rollout.env_timeout={math.ceil(170 + math_s)}")))


def test_arguments():
    for args, word in (
        ({"tests": "x", "seconds": 9, "total_seconds": 2}, "more than total_seconds"),
        ({"tests": "x", "module": "a-b"}, "module"),
        *(({"tests": "x", "module": name}, f"'{name}' is a module that") for name in ("pytest", "sys", "test_task", "json")),
    ):
        with pytest.raises(RewardSpecError, match=word):
            compile_spec(spec(leaf("code.tests", args)))


def test_no_answer_in_time_all_together_and_a_fault_behind_a_test_are_no_passes():
    """What is left at the end of `total` fails, and the report is of all; a test whose fixture fails behind it did not pass."""
    after = "import pytest\n@pytest.fixture\ndef late():\n    yield\n    raise ValueError\ndef test_late(late): pass\n"
    began = time.monotonic()
    slow = "import time\ndef add(a, b):\n    if a: time.sleep(100)\n    return 0"
    more = "@pytest.mark.parametrize('n', range(20))\ndef test_many(n): assert add(1, n) == 1 + n\n"
    found = grade(after + TESTS + more, slow, limits=GradeLimits(1.5, 2.0))
    assert found.passed <= 1 and found.count == 25 and "test_late" in found.why, found  # add(0, 0), if the machine is quick
    assert time.monotonic() - began < 25, "and not 1.5 s for each, nor their process ended from outside"


def test_code_without_end_is_not_run():
    found = scored(block(RIGHT + "#" * 200_000))
    assert found.value == 0.0 and "characters; at most 200000 are run" in found.evidence["root"]["evidence"]["why"]


def test_what_a_grading_took_is_given_back(monkeypatch):
    """A sandbox for each of a thousand episodes."""
    stopped, whole = [], LocalSandbox.stop

    async def stop(self):
        stopped.append(self)
        await whole(self)

    monkeypatch.setattr(grading, "sandbox_config", lambda config: SandboxConfig(provider="local"))
    monkeypatch.setattr(LocalSandbox, "stop", stop)
    assert grade("def test_x(): pass", RIGHT).passed == 1
    assert len(stopped) == 1


@pytest.mark.parametrize("one", ["code.tests", "math.equal"])
async def test_an_event_loop_turns_while_others_grade(one, monkeypatch):
    """Both wait for another process: on the loop, no episode would go on meanwhile."""
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'agentrl[math]'")
    waits = threading.Event()
    monkeypatch.setattr(grading, "grade", lambda *given: waits.wait(20) and Graded(1, 1))
    monkeypatch.setattr(math_leaf, "ask", lambda request: {"right": waits.wait(20)})
    args = {"tests": TESTS} if one == "code.tests" else {"expect": "1"}
    scoring = asyncio.ensure_future(compile_spec(spec(leaf(one, args))).ascore(episode(block(RIGHT))))
    await asyncio.sleep(0.05)
    assert not scoring.done()
    waits.set()
    assert (await scoring).value == 1.0


async def test_where_an_event_loop_runs_already():
    """A notebook's cell: `Scorer.score` blocks there, and `ascore` does not."""
    scorer = compile_spec(spec(leaf("code.tests", {"tests": TESTS})))
    assert scorer.score(episode(block(RIGHT))).value == 1.0
    assert (await scorer.ascore(episode(block("def add(a, b): return 0")))).value == 0.0
