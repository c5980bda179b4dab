"""`math.equal`: what counts as equal, what a hostile answer costs, and gold that nobody can read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.load import config_from
from agentrl.contrib.math_equal import leaf as equality
from agentrl.reward import compile_spec
from agentrl.run import checks
from agentrl.run.checks.reward_checks import check_gold
from agentrl.utils.errors import ConfigError, DependencyError, RewardSpecError
from tests.conftest import proof
from tests.reward.reward_episodes import call, episode, leaf, spec, value
from tests.run.starts import scored

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'agentrl[math]'")
from agentrl.contrib.math_equal import worker
from tests.waits import until

ASKED = {"gold": ["4"], "answer": "4", "seconds": 5, "strict": True, "boxed": False}


def said(answer, expect, **args):
    return value("math.equal", {"expect": expect, **args}, episode(answer))


@pytest.mark.parametrize(
    ("answer", "expect", "wanted"),
    [("It is 1,234.", 1234, 1), (r"so \boxed{\frac{1}{2}}", 0.5, 1), ("22 zeros: 10000000000000000000000", 1e22, 1),
     ("50%", 0.5, 1), ("It is 7", ["6", 7], 1), ("It is 5", ["6", 7], 0), ("41", 42, 0)],
)  # fmt: skip
def test_gold_may_be_a_number_or_several(answer, expect, wanted):
    """Gold as text: RIGHT and WRONG, below."""
    assert said(answer, expect) == wanted


def test_of_a_text_the_boxed_answer_counts_and_several_are_a_set():
    assert said(r"We get \boxed{4}. The final answer is 5.", "4") == 1, "the box, wherever the word answer stands"
    assert said(r"\boxed{3} or \boxed{4} or \boxed{5}", "4") == 0, "no spraying"
    assert said("It is 4", "4", boxed=True) == 0 and said(r"\boxed{4}", "4", boxed=True) == 1
    assert said("It is 4", "4", boxed=False) == 1
    assert value("math.equal", {"expect": "4"}, episode("4", [call("f")])) == 0, "the last turn is a call, so there is no answer"


SOON = {"a tower of powers": "9**9**9**9", "a megabyte": r"\boxed{" + "x+" * 500_000 + "4}", "half a character": "\ud800 4**9",
        "a long expansion": r"\boxed{(x+1)^{20000}}"}  # fmt: skip
LONG = {
    "a tower in latex": r"\boxed{9^{9^{9^{9}}}}", "factorials": r"\boxed{((((9!)!)!)!)}",
    "all memory": r"\boxed{2^{2^{40}} + 3^{10^{12}}}",
    "a long sum": r"\boxed{\sum_{n=1}^{100000000} \sin(n)}",
    "two thousand brackets": r"\boxed{" + "(" * 2000 + "4" + ")" * 2000 + "}",
    "a row of dollars": "$" * 50_000, "boxes": r"\boxed{" * 3000,
}  # fmt: skip


@pytest.mark.parametrize(
    "answer", [*SOON.values(), *(pytest.param(answer, marks=proof) for answer in LONG.values())], ids=[*SOON, *LONG]
)
def test_a_hostile_answer_is_wrong_soon(answer):
    began = time.monotonic()
    found = compile_spec(spec(leaf("math.equal", {"expect": ["4", "x^2+1"], "seconds": 1}))).score(episode(answer))
    assert found.value == 0.0, found.evidence
    assert time.monotonic() - began < 40, "seconds: 1, on a busy machine"
    assert said("4", "4") == 1, "and the next one is scored"


def test_gold_that_breaks_the_reader_is_not_the_answers_fault(monkeypatch):
    def read(text):
        raise KeyError(text) if "gold" in text else AttributeError(text)

    monkeypatch.setattr(worker, "read", read)
    assert worker.answer({**ASKED, "gold": ["$gold$ 1"]}) == {"unread": "$gold$ 1"}


def _workers():
    return [w._process.pid for w in list(equality.IDLE.queue) if w is not None]


def test_scoring_works_in_threads_which_the_library_alone_does_not():
    """math-verify's own limit is an alarm: in a thread it raises."""
    from math_verify import parse

    found = []
    scorer = compile_spec(spec(leaf("math.equal", {"expect": "1/2"})))

    def work():
        with pytest.raises(ValueError, match="threaded"):
            parse("1/2")
        found.append(scorer.score(episode(r"$0.50$")).value)

    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert found == [1.0] * 3
    assert len(_workers()) <= min(4, os.cpu_count())


@pytest.mark.parametrize(("how", "overdue", "why", "again"), [
    (signal.SIGKILL, None, "ended with status -9", 4), (signal.SIGSTOP, -5.9, "a busy machine", 1),
])  # fmt: skip
def test_a_process_that_somebody_else_ends_and_a_machine_without_time_are_no_reward_of_0(monkeypatch, how, overdue, why, again):
    assert said("4", "4") == 1
    for pid in _workers():
        os.kill(pid, how)
    if overdue:
        monkeypatch.setattr(equality, "OVERDUE", overdue)
    found = compile_spec(spec(leaf("math.equal", {"expect": "4"}))).score(episode("4"))
    assert found.value is None and why in found.evidence["root"]["unscored"]
    monkeypatch.undo()
    assert [said("4", "4") for _ in range(again)][-1] == 1


def test_the_processes_have_a_gigabyte_and_none_of_this_ones_variables(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    with closing(equality.Process()) as process:
        assert process.ask(ASKED)["right"]
        limits = Path(f"/proc/{process._process.pid}/limits").read_text()
        assert "Max address space         1073741824" in limits
        assert b"sk-secret" not in Path(f"/proc/{process._process.pid}/environ").read_bytes()


@pytest.mark.parametrize("gold", ["", "the cat sat", "yes", "$", [], [""], True, {"a": 1}])
def test_gold_that_is_no_mathematics_is_null_and_says_so(gold):
    scorer = compile_spec(spec(leaf("math.equal", {"expect": {"$": "/task/gold/answer"}})))
    score = scorer.score(episode("yes", task_gold={"answer": gold}))
    assert score.value is None, score.evidence
    assert score.evidence["root"]["unscored"]


def test_not_strict_forgives_names():
    assert [said(r"\boxed{y+1}", "x+1", strict=strict) for strict in (True, False)] == [0, 1]


def test_a_process_has_its_seconds_for_each_answer_and_not_for_all_together():
    """Right answers behind many others would be wrong."""
    ticks = os.sysconf("SC_CLK_TCK")
    with closing(equality.Process()) as process:
        assert os.getsid(process._process.pid) != os.getsid(0), "Ctrl-C is not for it"
        used, asked = 0.0, 0
        while used < 2.0:  # of which one at its start
            answer = rf"\boxed{{{asked}+x+4-{asked}}}"
            assert process.ask({**ASKED, "gold": ["x+4"], "answer": answer, "seconds": 1})["right"], asked
            asked += 1
            used = sum(map(int, Path(f"/proc/{process._process.pid}/stat").read_text().split()[13:15])) / ticks


def test_processes_end_with_the_one_that_started_them():
    """Also if it is killed, so that nothing of its own can end them."""
    program = (
        "import os\nfrom agentrl.contrib.math_equal.leaf import Process\n"
        "print(Process()._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    pid = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()
    assert until(lambda: not Path(f"/proc/{pid}").exists())


def test_arguments():
    for args, word in (
        ({"expect": []}, "expect"),
        ({"expect": "4", "seconds": 0}, "seconds"),
        ({"expect": "4", "boxes": 1}, "boxes"),
    ):
        with pytest.raises(RewardSpecError, match=word):
            compile_spec(spec(leaf("math.equal", args)))


def test_without_the_package_the_spec_says_what_to_install(monkeypatch):
    monkeypatch.setattr("agentrl.utils.errors.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"pip install 'agentrl\[math\]'"):
        compile_spec(spec(leaf("math.equal", {"expect": "4"})))


def test_a_process_that_a_large_one_starts_is_not_taken_for_a_large_one():
    """Its peak begins with that of the one that started it: it would be replaced after every answer, at 0.3 s each."""
    large = bytes(range(256)) * (600 << 12)
    with closing(equality.Process()) as process:
        assert len(large) > 512 << 20 and not process.ask(ASKED)["worn"]


RIGHT = [
    ("It is 5 million.", "5000000"), ("5000000", "5 million"), ("2,500,000", r"2.5\text{ million}"), ("minus 5", "-5"),
    ("5 hundredths", "0.05"), (r"\boxed{5 \text{ thousand}}", "5000"), ("**5** million people", "5000000"), ("5k", "5k"),
    ("The answer is 42.", "42"), ("It is 1,234.", "1234"), (r"so \boxed{\frac{1}{2}}", "0.5"), ("$0.75$", r"\frac{3}{4}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"), (r"$\sqrt{8}$", r"2\sqrt{2}"), (r"\boxed{2, 1}", r"\{1, 2\}"), (r"\boxed{x=5}", "5"),
    ("22 zeros: 10000000000000000000000", "10000000000000000000000"), ("50%", "0.5"), (r"\boxed{[0,1)}", "[0,1)"),
    ("It is 7", "7"), (r"\boxed{4}. The final answer is 5.", "4"), ("5", "5 apples"), ("It is 1 1/2", "1 1/2"),
    ("1.5", "1 1/2"), (r"\boxed{3/2}", "1 1/2"), (r"\boxed{1\frac12}", "1 1/2"), ("1000000", "1 000 000"),
    ("1,000,000", "1 000 000"), (r"\boxed{5\sqrt{2}}", "5√2"), ("7.0710678", "5√2"), ("5√2", "5√2"), ("1000", "10³"),
    (r"\boxed{10^3}", "10³"), ("1/3", r"0.\overline{3}"), (r"\boxed{0.333333}", r"0.\overline{3}"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", '\\begin{pmatrix}\n1&2\\\\\n3&4\n\\end{pmatrix}'),
    (r"\boxed{\begin{pmatrix}a&b\\c&d\end{pmatrix}}", r"\begin{pmatrix}a&b\\c&d\end{pmatrix}"), ("$18.90", r"\$18.90"),
    ("18.9", r"\$18.90"), (r"\boxed{\$18.90}", r"\$18.90"), (r"\boxed{\infty}", "infinity"),
    (r"\boxed{1.6\times 10^{-19}}", "1.6e-19"), ("1.6e-19", r"1.6\times10^{-19}"), (r"\boxed{5}", "x=5"),
    (r"\boxed{x=5}", "x=5"), (r"\boxed{5\text{ cm}}", "5"), (r"\boxed{5}", "5 cm"), (r"\boxed{50\%}", "50"),
    (r"\boxed{12.5\%}", "12.5%"), ("12.5", "12.5%"), ("0.125", "12.5%"), ("0.8333333", "5/6"), ("0.666666", "2/3"),
    ("0.666667", "2/3"), (r"\frac{\pi}{2}", r"\frac{\pi}{2}"), ("1.570796", r"\frac{\pi}{2}"),
    (r"\boxed{\frac{1+\sqrt5}{2}}", r"\frac{1+\sqrt{5}}{2}"), ("1.618034", r"\frac{1+\sqrt{5}}{2}"),
    (r"\boxed{\frac{\sqrt{5}+1}{2}}", r"\frac{1+\sqrt{5}}{2}"),
    (r"\boxed{\frac12+\frac{\sqrt5}{2}}", r"\frac{1+\sqrt{5}}{2}"), (r"\boxed{\ln 2}", r"\ln 2"), ("0.693147", r"\ln 2"),
    (r"\boxed{e^2}", "e^2"), (r"\boxed{2^{100}}", "2^{100}"), ("1267650600228229401496703205376", "2^{100}"),
    (r"\boxed{y=2x+1}", "y=2x+1"), (r"\boxed{\{1, 2\}}", "1, 2"), (r"\boxed{1 \text{ and } 2}", "1, 2"),
    ("The answer is 3 + 4 = 7.", "7"), (r"\boxed{9/10+6/2=3.9}", "3.9"),
    (r"\boxed{(-\infty,2]\cup[3,\infty)}", r"(-\infty,2]\cup[3,\infty)"), (r"\boxed{A}", "A"), ("The answer is $A$.", "A"),
    (r"\boxed{\text{A}}", "A"), (r"\boxed{-5}", "−5"), ("−5", "-5"), ("The answer is **42**.", "42"),
    (r"\boxed{\frac{5}{1}}", r"\frac{5}{1}"), (r"\boxed{5}", r"\frac{5}{1}"), (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\dfrac{1}{2}}", r"\frac12"), (r"\boxed{\frac{\sqrt2}{2}}", r"\frac{1}{\sqrt{2}}"), (r"\boxed{3+4i}", "3+4i"),
    (r"\boxed{4i+3}", "3+4i"), (r"\boxed{\pm 5}", "±5"), (r"\boxed{5,-5}", "±5"), (r"\boxed{x\in[0,1)}", "[0,1)"),
    (r"\boxed{\pi/4 \approx 0.785}", r"\frac{\pi}{4}"), (r"\[ x = 5 \]", "5"), (r"x is \(5\).", "5"),
    ("**Answer:** 5 cm", "5"), ("Answer: 5 apples. I counted 3 times.", "5"), (r"\boxed{2x}", "2x"), (r"\boxed{x+x}", "2x"),
    (r"\boxed{\text{Area}=5}", "5"), (r"\boxed{5}.", "5.0"), (r"\boxed{\tan x}", r"\frac{\sin x}{\cos x}"), ("答案是5。", "5"),
    (r"\boxed{6.02\times10^{23}}", "6.02e23"), (r"\boxed{x=1, x=2}", "x=1 or x=2"), (r"\boxed{1,2}", "x=1 or x=2"),
    (r"\boxed{\frac{3}{4}}", "3:4"), (r"\boxed{(1,2)}", "(1,2)"), ("5/6", "5/6"), ("The answer is 5/6", "5/6"),
    ("-3/4", r"-\frac34"), (r"$-\frac{3}{4}$", "-0.75"), (r"\boxed{10,\!080}", "10080"), ("1080", r"1,\! 080"),
    (r"\boxed{\frac{3}{4}}", "0.75"), (r"\boxed{-\frac{1}{2}}", "-1/2"), (r"\boxed{\frac{-1}{2}}", "-1/2"),
    (r"\boxed{2\pi}", "2π"), (r"\boxed{\frac{3\pi}{4}}", r"\frac{3}{4}\pi"), (r"\boxed{\sqrt{3}-1}", r"\sqrt{3}-1"),
    (r"\boxed{-1+\sqrt{3}}", r"\sqrt{3}-1"), (r"$$\boxed{42}$$", "42"), (r"Thus \(\boxed{42}\).", "42"),
    (r"\boxed{42.0}", "42"), (r"\boxed{\text{B}}", "B"), (r"The final answer is $\frac{1}{2}$", "1/2"),
    ("answer: -7", "-7"), ("So the answer is x = -7.", "-7"), ("= 12", "12"), (r"\boxed{1\,234}", "1234"),
    (r"\boxed{1,234}", "1234"), (r"\boxed{(3, 4)}", "(3,4)"), (r"\boxed{\left(3,4\right)}", "(3,4)"),
    (r"\boxed{x \le 5}", r"x\leq 5"), (r"\boxed{x\in(-\infty,5]}", r"(-\infty,5]"), (r"\boxed{\emptyset}", r"\emptyset"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\boxed{\begin{bmatrix} 1 \\ 2 \end{bmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\boxed{12\text{ square meters}}", "12"), (r"\boxed{\$5}", "5"), (r"\boxed{5\$}", "5"), (r"\boxed{5 €}", "5"),
    (r"\boxed{5 dollars}", r"\$5"), (r"\boxed{0.05}", r"5\%"), (r"\boxed{x^2-1}", "(x-1)(x+1)"),
    (r"\boxed{f(x)=2x}", "f(x)=2x"), (r"\boxed{2x}", "f(x)=2x"), (r"\boxed{y = 2x}", "2x"),
    (r"\boxed{\log_2 3}", r"\log_2 3"), (r"\boxed{120^\circ}", r"120^\circ"), (r"\boxed{10!}", "10!"), ("3628800", "10!"),
    (r"\boxed{7\frac{1}{2}}", "7.5"), (r"\boxed{\frac{15}{2}}", "7½"), (r"\boxed{e}", "e"), (r"\boxed{i}", "i"),
    (r"\boxed{2i}", "2i"), (r"\boxed{-2-i}", "-2-i"), (r"The answer is \frac{1}{2}.", "1/2"),
    ("The answer is 3√2", "3√2"), ("It equals π/4.", "π/4"), (r"\boxed{\sqrt[3]{4}}", r"\sqrt[3]{4}"),
    (r"\boxed{2^{1/3}}", r"\sqrt[3]{2}"), (r"\boxed{3:2}", "3:2"), (r"\boxed{11:30}", "11:30"),
    (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}"), (r"\boxed{x = 2 \text{ or } x = 3}", "2, 3"),
    (r"\boxed{2 \text{ and } 3}", r"\{2,3\}"), (r"\boxed{\frac{x}{2}}", "x/2"), (r"\boxed{3x+2}", "2+3x"),
    (r"\boxed{x=3+4=7}", "7"), (r"\boxed{f(x)=2x+1}", "2x+1"), (r"\boxed{\frac{1}{3} = 0.333}", "0.333"),
    (r"\boxed{y+x=7}", "x+y=7"), (r"$\boxed{28}\%$", "0.28"), (r"\boxed{28\text{ percent}}", "0.28"),
    (r"\boxed{3+2i}", r"3+2\mathrm{i}"), (r"\boxed{a+b\text{i}}", "a+bi"), (r"\boxed{\pi\mathrm{e}^x}", r"\pi e^{x}"),
    (r"\boxed{3:4:5}", "3:4:5"), (r"\boxed{x=3, y=4}", "(3,4)"), (r"\boxed{b>a>c}", "c<a<b"),
    (r"\boxed{Evelyn}", r"\text{Evelyn}"),
    ("<answer>17</answer>", "17"), ("<answer>Ann</answer>", r"\text{Ann}"), ("The answer is (C).", "C"), ("It is 3 : 4.", "3:4"),
    (r"\boxed{x \approx 1.41}", "1.41"), (r"\boxed{\approx 1.41}", "1.41"), (r"\boxed{\angle ABC = 10^\circ}", "10"),
    ("20", r"20\mathrm{~m} / \mathrm{s}"), (r"\boxed{9.8\text{ m/s}^2}", r"9.8\mathrm{m/s^2}"), (r"\boxed{5\mathrm{\,cm}}", "5"),
    (r"\boxed{\varnothing}", r"\emptyset"), (r"$\boxed{5}$ million", "5e6"), (r"So \boxed{3}. But no, it is \boxed{5}", "5"),
    (r"\boxed{(2, 500)}", "(2,500)"), (r"\boxed{(3,\infty)}", "x>3"), (r"\boxed{(-\infty,\infty)}", r"\mathbb{R}"),
    (r"\boxed{5\text{ kilometers}}", "5 km"), (r"\boxed{5\text{ kilometers per hour}}", "5 km/h"), (r"\boxed{5}", "5 meters"),
    (r"\boxed{a^2b}", "a^{2}b"), (r"\boxed{\pm\sqrt{2}}", r"\pm\sqrt2"), (r"\boxed{\$1{,}234.50}", "1234.5"),
]  # fmt: skip
"""An answer and the gold that it equals."""
WRONG = [
    ("It is 5 million.", "5"), ("5 thousand", "5"), ("**5** million", "5"), ("$5$ billion", "5"), (r"\boxed{5} million", "5"),
    ("5 dozen", "5"), ("5 hundred dollars", "5"), ("5 tenths", "5"), ("minus 5", "5"), ("5 squared", "5"), ("5000", "5k"),
    ("The answer is 41.", "42"), (r"\boxed{x^2+1}", "x^2+2x+1"), (r"\boxed{(0,1)}", "[0,1)"), (r"\boxed{y}", "x"),
    (r"\boxed{5}", r"3+2\mathrm{i}"), (r"\boxed{2}", r"2\mathrm{e}"), (r"\boxed{0.15}", "3:4:5"), (r"\boxed{y=3, x=4}", "(3,4)"),
    (r"\boxed{A:B:C=1:3:2}", "A:B:C=1:2:3"), (r"\boxed{a<c<b}", "c<a<b"), (r"\boxed{y=2x-3}", "2x-y+3=0"),
    ("It is 3 : 4.", "4"), ("The answer is A, B.", "A"), (r"\boxed{5\mathrm{m^2}}", r"5\mathrm{m^3}"),
    (r"\boxed{3\text{ hours}}", "3 days"), (r"\boxed{5 cents}", "5 dollars"), (r"\boxed{3}, not \boxed{5}", "5"),
    (r"\boxed{Evelyn or Ann}", r"\text{Evelyn}"), (r"$\boxed{5}$ million", "5"), (r"So \boxed{3}. But no, it is \boxed{5}", "3"),
    ("I do not know", "42"), ("", "42"), (r"\boxed{3} or \boxed{4} or \boxed{5}", "4"), (r"\boxed{9/10 + 6/2}", "3.9"),
    (r"\boxed{\frac{9}{10}+\frac62}", r"\frac{39}{10}"), ("What is 9/10 + 6/2?", "3.9"), ("9/10 + 6/2", "39/10"),
    (r"\boxed{1/2 * 2/3}", "1/3"), (r"\boxed{2^{10}}", "1024"), (r"\boxed{12/4}", "3"), (r"\boxed{\frac{2}{4}}", "1/2"),
    (r"\boxed{\sqrt{16}}", "4"), (r"\boxed{5!}", "120"), (r"\boxed{\binom{5}{2}}", "10"), (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{\int_0^1 x dx}", "1/2"), (r"\boxed{\frac{d}{dx}x^2}", "2x"), (r"\boxed{\int 2x dx}", "x^2"),
    (r"\boxed{\sum_{n=1}^{10} n}", "55"), (r"\boxed{x+1=6}", "x=5"), (r"\boxed{x+1=6}", "5"), (r"\boxed{\sin(\pi/6)}", "1/2"),
    (r"\boxed{\gcd(4,6)}", "2"), (r"\boxed{\sqrt{2}+\sqrt{2}}", r"2\sqrt{2}"), (r"\boxed{\sqrt2\cdot\sqrt3}", r"\sqrt{6}"),
    (r"\boxed{|-5|}", "5"), (r"\boxed{17 \mod 5}", "2"), (r"\boxed{3\times4}", "12"), (r"\boxed{3\times 10^2}", "300"),
    (r"\boxed{\{1+1,3\}}", r"\{2,3\}"),
    (r"\boxed{\begin{pmatrix}1&1\\0&1\end{pmatrix}\begin{pmatrix}1&1\\0&1\end{pmatrix}}",
     r"\begin{pmatrix}1&2\\0&1\end{pmatrix}"),
    (r"\boxed{\begin{pmatrix}1+1&2\\0&1\end{pmatrix}}", r"\begin{pmatrix}2&2\\0&1\end{pmatrix}"),
    (r"\boxed{[0,2]\cap[1,3]}", "[1,2]"), ("1", "1 1/2"), ("0", "1 000 000"), ("1", "1 000 000"), ("5", "5√2"), ("2", "5√2"),
    ("10", "10³"), ("103", "10³"), ("0", r"0.\overline{3}"), ("4", '\\begin{pmatrix}\n1&2\\\\\n3&4\n\\end{pmatrix}'),
    ("0", "1.6e-19"), ("1.7e-19", "1.6e-19"), ("1.6e-19", "0"), (r"\boxed{}", "0"), (r"5 \boxed{}", "5"), ("0.5%", "0.5"),
    (r"\boxed{y=5}", "x=5"), (r"\boxed{4 or 5}", "5"), ("4 or 5", "5"), (r"\boxed{1 1/2}", "1"), (r"\boxed{1 1/2}", "2"),
    (r"\boxed{10:30}", "30"), (r"\boxed{5 million}", "5"), (r"\boxed{5\text{ km}}", "5 m"),
    (r"\boxed{5\text{ km}}", r"5\text{ m}"), (r"\boxed{7 R 2}", "7"), (r"\boxed{101_2}", "101"),
    (r"\boxed{1,2,\ldots,10}", "1,2,10"), (r"\boxed{2}", "2t"), (r"\boxed{0.333...}", "0.333"), (r"\boxed{12 \div 4}", "3"),
    (r"\boxed{3.0 \cdot 2}", "6"), (r"\boxed{1e-7}", "0"), (r"\boxed{0.00001235}", "0.00001234"), (r"\boxed{-(-5)}", "5"),
    (r"\boxed{\det\begin{pmatrix}1&2\\3&4\end{pmatrix}}", "-2"), (r"\boxed{\lim_{x\to0}\frac{\sin x}{x}}", "1"),
    (r"\boxed{x}", "1"), (r"\boxed{\max(3,4)}", "4"), (r"\boxed{5-3}", "2"), (r"\boxed{5 \cdot 1}", "5"),
    (r"\boxed{5+0}", "5"), (r"\boxed{1/2+1/3}", "5/6"), (r"\boxed{(3+4i)+(1-2i)}", "4+2i"), (r"\boxed{i^2}", "-1"),
    (r"\boxed{e^{0}}", "1"), (r"\boxed{\cos 0}", "1"), (r"\boxed{4^{3/2}}", "8"), (r"\boxed{25\% \cdot 80}", "20"),
    (r"\boxed{25\% of 80}", "20"), (r"\boxed{0.5+0.4}", "0.9"), (r"\boxed{3(4)}", "12"), (r"\boxed{2(x+1)=10}", "4"),
    (r"\boxed{6/2}", "3.0"), (r"\boxed{1.5/2}", "0.75"), (r"\boxed{((9)/(10))+((6)/(2))}", "3.9"),
    (r"\boxed{\frac{9}{10}+3=\frac{9}{10}+3}", "3.9"), (r"\boxed{\sqrt{3^2+4^2}}", "5"),
    (r"\boxed{\lfloor 3.7 \rfloor}", "3"), (r"\boxed{5\approx 4}", "4"), ("4, 5 or 6", "6"), ("$4$ or $5$", "5"),
    (r"\boxed{9/10 + 6/2 = }", "3.9"), (r"\boxed{What is 9/10 + 6/2?}", "3.9"),
    (r"\boxed{\frac{9}{10}\times\frac{6}{2}}", "2.7"), (r"\boxed{9 \div 3}", "3"), (r"\boxed{9:3}", "3"),
    (r"\boxed{\sqrt[3]{27}}", "3"), (r"\boxed{1+1=2=3}", "2"), (r"\boxed{100\%\cdot 3}", "3"), (r"\boxed{3\%+2\%}", "5%"),
    (r"\boxed{2.5e1+1}", "26"), (r"\boxed{\text{the answer to 3+4}}", "7"), (r"\boxed{3^2}", "9"), (r"\boxed{3²}", "9"),
    (r"\boxed{\left(\frac{1}{2}\right)^2}", "1/4"), (r"\boxed{0.5^2}", "0.25"), (r"\boxed{\sqrt{0.25}}", "0.5"),
    (r"\boxed{1/(1/2)}", "2"), (r"\boxed{\frac{\frac{1}{2}}{3}}", "1/6"), (r"\boxed{\frac{1}{2}/3}", "1/6"),
    (r"\boxed{1.0/4}", "0.25"), (r"\boxed{x=3+4}", "7"), (r"\boxed{7,7,8}", "7"), (r"\boxed{\{7\}, 8}", "7"),
    (r"\boxed{6<7<8}", "7"), (r"\boxed{x>6}", "7"), (r"\boxed{7 \text{ or so, maybe } 8}", "7"), ("7 or 8", "7"),
    (r"\boxed{2\cdot x}", "2"), (r"\boxed{\sin^2 1+\cos^2 1}", "1"), (r"\boxed{e^{i\pi}}", "-1"),
    (r"\boxed{\ln e^3}", "3"), (r"\boxed{-\frac{6}{4}}", "-3/2"), (r"\boxed{1 2/4}", "1.5"), (r"\boxed{\Re(3+4i)}", "3"),
    (r"\boxed{|3+4i|}", "5"), (r"\boxed{\arctan 1}", r"\frac{\pi}{4}"), (r"\boxed{\int_0^\pi \sin x dx}", "2"),
    (r"\boxed{\prod_{k=1}^3 k}", "6"), (r"\boxed{\frac{d}{dx}\left(x^3\right)}", "3x^2"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}^2}", r"\begin{pmatrix}7&10\\15&22\end{pmatrix}"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}2\\4\end{pmatrix}"),
    (r"\boxed{(1+1,3)}", "(2,3)"), (r"\boxed{2x+3x}", "5"), (r"\boxed{2,000}", "2"), (r"\boxed{5.000001}", "5"),
    (r"\boxed{1000001}", "1000000"), (r"\boxed{3.14}", "π"), (r"\boxed{50}", "0.5"), (r"\boxed{5 dozen}", "5"),
    (r"\boxed{5\times}", "5"), (r"\boxed{5}\boxed{6}", "5"), (r"\boxed{5 6}", "56"), (r"\boxed{5, 6}", "6"),
    ("x", r"\text{xy}"), (r"\boxed{2x=7}", "7"), (r"\boxed{3=7}", "7"), (r"\boxed{x=3, y=7}", "7"), (r"\boxed{-x=7}", "7"),
    (r"\boxed{2y=7}", "y=7"), (r"\boxed{y^2=2x+1}", "2x+1"), (r"\boxed{7}", "x+y=7"), (r"\boxed{2500}", "(2,500)"),
    (r"\boxed{5\text{ meters}}", "5 kilometers"), (r"\boxed{5\text{ meters}}", "5 km"), (r"\boxed{5\text{ m/s}}", "5 km/h"),
    (r"\boxed{20^\circ F}", r"20^\circ C"), ("6", "5 apples"),
]  # fmt: skip
"""An answer that is another one, a part, a copy of the question, a guess of several, or not worked out."""
UNREAD = [
    "", "$", "the cat sat", "n/a", "N/A", "None", "yes", "5 and a half", "2 3", "1.234.567", "101_2",
    "6 R 2", "2024-05-06", "0.333...", r"1,2,\ldots,10", "about 5", "5 or more", "more than 5", "5 (five)", r"\frac{1}", "3 +",
    "#",
]  # fmt: skip


def compared(answer, gold, **more):
    return worker.answer({**ASKED, "gold": [gold], "answer": answer, **more})


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_a_right_answer_is_paid(answer, gold):
    found = compared(answer, gold)
    assert found.get("right"), found
    assert compared(rf"\boxed{{{gold}}}", gold)["right"], "what a script of the task's own would answer"


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_a_wrong_answer_is_not(answer, gold):
    assert compared(answer, gold).get("right") is False


@pytest.mark.parametrize("gold", UNREAD)
def test_gold_of_which_a_part_could_be_read_is_refused(gold):
    assert compared(None, gold) == {"unread": gold}


def test_a_box_is_asked_for_and_not_empty():
    for answer in ("5", r"\boxed{} 5", r"\boxed{ }", r"5 \boxed"):
        assert not compared(answer, "5", boxed=True)["right"], answer
    assert compared(r"\boxed{5}", "5", boxed=True)["right"]


def test_evidence_says_how_both_were_read():
    scorer = compile_spec(spec(leaf("math.equal", {"expect": "1 1/2"})))
    found = scorer.score(episode(r"\boxed{0.\overline{3}}")).evidence["root"]["evidence"]
    assert (found["expected_as"], found["said"], found["said_as"]) == (["3/2"], r"0.\overline{3}", "1/3")
    assert scorer.score(episode(r"\boxed{3/4+3/4}")).evidence["root"]["evidence"]["why"] == "not worked out"


# -- before a run

ENV = """
from pathlib import Path

from agentrl.env import Message, ToolEnv
from agentrl.contrib.toolkit.taskdata import load_tasks


class Sheet(ToolEnv):
    id = "test/Sheet-v0"
    reward = "reward.json"
    summary = "questions of a file"

    def __init__(self, **base):
        super().__init__(**base)
        self.tasks = load_tasks(Path(__file__).with_name("tasks.jsonl"))

    def task_count(self, split):
        return self.tasks.count(split)

    def make_task(self, rng_seed, split):
        return self.tasks.task(rng_seed, split)

    def prompt(self, task):
        return [Message("user", task.data["q"])]

    def gold_turns(self, task):
        return [Message("assistant", str(task.gold["answer"]))]
"""
ROOT = {"use": "math.equal", "args": {"expect": {"$": "/task/gold/answer"}}}


def run(path: Path, changed: dict[str, Any], root: dict[str, Any] = ROOT, whole: bool = False) -> None:
    """The checks on twenty tasks, of which some are changed."""
    home = path / "envs" / "sheet"
    home.mkdir(parents=True, exist_ok=True)
    (home / "env.py").write_text(ENV)
    rows = [{"id": f"t{n}", "split": "heldout" if n > 15 else "train", "data": {"q": f"{n} + 1"}, "gold": {"answer": str(n + 1)}}
            for n in range(20)]  # fmt: skip
    rows = [{**row, **changed.get(row["id"], {})} for row in rows]
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {"agentrl_reward": 1, "name": "math", "root": root}
    (home / "reward.json").write_text(json.dumps(table))
    (path / "tiny.toml").write_text((Path(__file__).parents[3] / "examples/tiny.toml").read_text().replace("./graded", "graded"))
    env = {"id": "sheet", "reward": "envs/sheet/reward.json", "params": {}}
    sft = {"teacher": {}, "params": {}, "gate_params": {}}
    config = config_from({"name": "x", "env": env, "sft": sft, "model": {"init": {"layers": 1, "hidden": 32}}}, [])
    if whole:
        checks.check_config(config)
    check_gold(scored(config, compile_spec(table)))


def test_the_task_is_named_of_either_split_and_before_any_episode(here: Path) -> None:
    run(here, {}, whole=True)
    # Not one of the first three tasks, whose gold solutions are played before a run.
    broken: dict[str, Any] = {"t11": {"gold": {"answer": "no idea"}}}
    with pytest.raises(
        ConfigError, match=r"task 't11' of the split 'train': at /root of .*'no idea' is no mathematics .* Correct the task"
    ):
        run(here, broken, whole=True)
    with pytest.raises(ConfigError, match=r"task 't18' of the split 'heldout'"):
        run(here, {"t18": {"gold": {"answer": ""}}})
    with pytest.raises(ConfigError, match=r"task 't5' .*resolves to nothing"):
        run(here, {"t5": {"gold": {"result": "6"}}})


def test_what_an_episode_may_do_without_is_not_asked(here: Path) -> None:
    broken: dict[str, Any] = {"t11": {"gold": {"answer": "no idea"}}}
    other = {"use": "text.equals", "args": {"expect": {"$": "/task/gold/answer"}}}
    run(here, broken, {**ROOT, "missing": 0})
    run(here, broken, {"op": "any", "of": [other, {**ROOT, "when": {"$": "/task/gold/answer", "ne": "no idea"}}]})
    with pytest.raises(ConfigError, match="at /root/of/1 of"):
        run(here, broken, {"op": "any", "of": [other, ROOT]})
