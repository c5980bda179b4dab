"""`math.equal`: what counts as equal, what a hostile answer costs, and gold that nobody can read."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from reward_episodes import call, episode, leaf, spec, value

from agentrl.errors import DependencyError, RewardSpecError
from agentrl.reward import compile_spec, equality
from tests.conftest import proof

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'agentrl[math]'")


def said(answer, expect, **args):
    return value("math.equal", {"expect": expect, **args}, episode(answer))


EQUAL = [
    ("The answer is 42.", "42", 1), ("It is 1,234.", 1234, 1), (r"so \boxed{\frac{1}{2}}", 0.5, 1),
    (r"$0.75$", r"\frac{3}{4}", 1),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1), (r"$\sqrt{8}$", r"2\sqrt{2}", 1), (r"\boxed{2, 1}", r"\{1, 2\}", 1),
    (r"\boxed{x=5}", "5", 1), ("22 zeros: 10000000000000000000000", 1e22, 1),
    ("50%", 0.5, 1), (r"\boxed{[0,1)}", "[0,1)", 1), ("It is 7", ["6", 7], 1),
    ("The answer is 41.", "42", 0), (r"\boxed{x^2+1}", "x^2+2x+1", 0), (r"\boxed{(0,1)}", "[0,1)", 0), (r"\boxed{y}", "x", 0),
    ("I do not know", "42", 0), ("", "42", 0),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expect", "wanted"), EQUAL)
def test_what_is_equal(answer, expect, wanted):
    assert said(answer, expect) == wanted


def test_of_a_text_the_boxed_answer_counts_and_several_are_a_set():
    assert said(r"We get \boxed{4}. The final answer is 5.", "4") == 1, "the box, wherever the word answer stands"
    assert said(r"\boxed{3} or \boxed{4} or \boxed{5}", "4") == 0, "no spraying"
    assert said("It is 4", "4", boxed=True) == 0 and said(r"\boxed{4}", "4", boxed=True) == 1
    assert said("It is 4", "4", boxed=False) == 1
    assert value("math.equal", {"expect": "4"}, episode("4", [call("f")])) == 0, "the last turn is a call, so there is no answer"


SOON = {"a tower of powers": "9**9**9**9", "a megabyte": r"\boxed{" + "x+" * 500_000 + "4}", "half a character": "\ud800 4**9"}
LONG = {
    "a tower in latex": r"\boxed{9^{9^{9^{9}}}}", "factorials": r"\boxed{((((9!)!)!)!)}",
    "all memory": r"\boxed{2^{2^{40}} + 3^{10^{12}}}",
    "a long sum": r"\boxed{\sum_{n=1}^{100000000} \sin(n)}",
    "two thousand brackets": r"\boxed{" + "(" * 2000 + "4" + ")" * 2000 + "}",
    "a row of dollars": "$" * 50_000, "boxes": r"\boxed{" * 3000,
}  # fmt: skip


def hostile(answer):
    began = time.monotonic()
    found = compile_spec(spec(leaf("math.equal", {"expect": "4", "seconds": 1}))).score(episode(answer))
    assert found.value == 0.0, found.evidence
    assert time.monotonic() - began < 40, "seconds: 1, on a busy machine"
    assert said("4", "4") == 1, "and the next one is scored"


@pytest.mark.parametrize("answer", SOON.values(), ids=SOON)
def test_a_hostile_answer_is_wrong_soon(answer):
    hostile(answer)


@proof
@pytest.mark.parametrize("answer", LONG.values(), ids=LONG)
def test_other_hostile_answers_are_wrong_soon(answer):
    hostile(answer)


def test_gold_that_breaks_the_reader_is_not_the_answers_fault(monkeypatch):
    from agentrl.reward import equality_worker

    def parse(text, *args, **more):
        raise KeyError(text) if "gold" in text else AttributeError(text)

    monkeypatch.setattr(equality_worker, "parse", parse)
    asked = {"gold": ["$gold$ 1"], "answer": "2", "seconds": 1, "strict": True}
    assert equality_worker.answer(asked) == {"unread": "$gold$ 1"}


def _workers():
    return [w._process.pid for w in list(equality._workers(os.getpid())._idle.queue) if w is not None]


def test_scoring_works_in_threads_which_the_library_alone_does_not():
    """math-verify's own limit is an alarm: in a thread it raises."""
    from math_verify import parse

    found = []
    scorer = compile_spec(spec(leaf("math.equal", {"expect": "1/2"})))

    def work():
        with pytest.raises(ValueError, match="threaded"):
            parse("1/2")
        found.append(scorer.score(episode(r"$\frac{2}{4}$")).value)

    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert found == [1.0] * 3
    assert len(_workers()) <= min(equality.MOST, os.cpu_count())


def test_a_process_that_somebody_else_ends_is_no_reward_of_0():
    assert said("4", "4") == 1
    for pid in _workers():
        os.kill(pid, signal.SIGKILL)
    found = compile_spec(spec(leaf("math.equal", {"expect": "4"}))).score(episode("4"))
    assert found.value is None and "ended with status -9" in found.evidence["root"]["unscored"]
    assert [said("4", "4") for _ in range(4)][-1] == 1


def test_the_processes_have_a_gigabyte_and_none_of_this_ones_variables(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    worker = equality._Worker()
    try:
        assert worker.ask({"gold": ["4"], "answer": "4", "seconds": 5, "strict": True})["right"]
        limits = Path(f"/proc/{worker._process.pid}/limits").read_text()
        assert "Max address space         1073741824" in limits
        assert b"sk-secret" not in Path(f"/proc/{worker._process.pid}/environ").read_bytes()
    finally:
        worker.end()


@pytest.mark.parametrize("gold", ["", "the cat sat", "yes", "$", [], [""], True, {"a": 1}])
def test_gold_that_is_no_mathematics_is_null_and_says_so(gold):
    score = compile_spec(spec(leaf("math.equal", {"expect": {"$": "/task/gold/answer"}}))).score(
        episode("yes", task_gold={"answer": gold})
    )
    assert score.value is None, score.evidence
    assert score.evidence["root"]["unscored"]


def test_not_strict_forgives_names():
    assert [said(r"\boxed{y+1}", "x+1", strict=strict) for strict in (True, False)] == [0, 1]


def test_gold_with_a_number_is_read_whatever_words_stand_beside_it():
    assert said("5", "5 apples") == 1 and said("6", "5 apples") == 0


def test_a_process_has_its_seconds_for_each_answer_and_not_for_all_together():
    """Right answers behind many others would be wrong."""
    worker = equality._Worker()
    ticks = os.sysconf("SC_CLK_TCK")
    try:
        assert os.getsid(worker._process.pid) != os.getsid(0), "Ctrl-C is not for it"
        used, asked = 0.0, 0
        while used < 2.0:  # of which one at its start
            assert worker.ask({"gold": ["4"], "answer": f"{asked}+4-{asked}", "seconds": 1, "strict": True})["right"], asked
            asked += 1
            used = sum(map(int, Path(f"/proc/{worker._process.pid}/stat").read_text().split()[13:15])) / ticks
    finally:
        worker.end()


def test_a_machine_without_time_is_no_wrong_answer(monkeypatch):
    class Late(equality._Worker):
        def ask(self, request):
            raise TimeoutError

    for worker in list(equality._workers(os.getpid())._idle.queue):
        if worker is not None:
            monkeypatch.setattr(worker, "ask", lambda request: (_ for _ in ()).throw(TimeoutError))
    monkeypatch.setattr(equality, "_Worker", Late)
    found = compile_spec(spec(leaf("math.equal", {"expect": "4"}))).score(episode("4"))
    assert found.value is None and "a busy machine" in found.evidence["root"]["unscored"]


def test_arguments():
    for args, word in (
        ({"expect": []}, "expect"),
        ({"expect": "4", "seconds": 0}, "seconds"),
        ({"expect": "4", "boxes": 1}, "boxes"),
    ):
        with pytest.raises(RewardSpecError, match=word):
            compile_spec(spec(leaf("math.equal", args)))


def test_without_the_package_the_spec_says_what_to_install(monkeypatch):
    monkeypatch.setattr(equality, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"pip install 'agentrl\[math\]'"):
        compile_spec(spec(leaf("math.equal", {"expect": "4"})))


def test_a_process_that_a_large_one_starts_is_not_taken_for_a_large_one():
    """Its peak begins with that of the one that started it: it would be replaced after every answer, at 0.3 s each."""
    large = bytes(range(256)) * (600 << 12)
    worker = equality._Worker()
    try:
        assert len(large) > 512 << 20
        assert not worker.ask({"gold": ["4"], "answer": "4", "seconds": 5, "strict": True})["worn"]
    finally:
        worker.end()
