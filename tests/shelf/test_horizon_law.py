"""benchmarks/horizon_law.py: the faults of episodes written by hand, and a law recovered from episodes drawn from it."""

import math
from typing import Any

import numpy as np
import pytest

from benchmarks import horizon_law
from benchmarks.horizon_law import Episode

LAMPS: dict[str, Any] = {"name": "order", "arguments": {"item": "lamps", "quantity": 4}}
CANCEL: dict[str, Any] = {"name": "cancel_order", "arguments": {"number": 1234}}


def row(*turns: list[dict[str, Any]] | str, success: bool = False, gold: Any = (LAMPS, CANCEL)) -> dict[str, Any]:
    made = []
    for at, turn in enumerate(turns):
        text, calls = (turn, []) if isinstance(turn, str) else ("", [{"error": None, **call} for call in turn])
        made.append({"prompt_tokens": 100 * (at + 1), "message": {"content": text, "tool_calls": calls}})
    messages = [{"content": "Do the jobs."}, {"content": "1. Order 4 lamps. 2. Cancel the lamps."}]
    return {"task": {"gold": {"calls": list(gold)}}, "success": success, "messages": messages, "turns": made}


def other(call: dict[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    return [{"name": call["name"], "arguments": {**call["arguments"], **arguments}}]


@pytest.mark.parametrize(("turns", "good", "fault"), [
    ([[LAMPS], [CANCEL], "Done."], 2, "end"),  # all calls correct, and yet no success: the end was wrong
    ([[LAMPS], "Done."], 1, "stop"),
    ([[LAMPS]], 0, "stop"),  # cut by a limit after its only call
    (["Done."], 0, "stop"),
    ([other(LAMPS, quantity=5)], 0, "copy"),
    ([[LAMPS], other(CANCEL, number=99)], 1, "memory"),  # 1234 stands in no prompt
    ([[LAMPS], [{"name": "weather", "arguments": {}}]], 1, "choice"),
    ([[LAMPS], "<tool_call>{"], 1, "malformed"),
    ([[LAMPS], [CANCEL], [CANCEL]], 2, "end"),  # a call too many
])  # fmt: skip
def test_first_fault_of_an_episode(turns: list[Any], good: int, fault: str) -> None:
    found = horizon_law.episode(row(*turns))
    assert (found.calls, found.good, found.fault) == (2, good, fault)
    assert found.contexts == [100 * (at + 1) for at in range(good + 1)]


def test_a_success_has_no_fault_and_what_it_repaired_is_no_exposure() -> None:
    found = horizon_law.episode(row([LAMPS], other(CANCEL, number=99), [CANCEL], "Done.", success=True))
    assert found == Episode(2, [100, 300, 400], None)


def test_the_law_is_recovered_from_its_own_episodes_and_predicts_longer_ones() -> None:
    truth = {"copy": (math.log(0.03), 2.0), "end": (math.log(0.02), 0.0)}
    rng = np.random.default_rng(3)

    def rate(kind: str, tokens: float) -> float:
        a, b = truth[kind]
        return math.exp(a + b * math.log(tokens / 1000))

    def drawn(calls: int) -> Episode:
        contexts = [400 + 20 * calls + 60 * at for at in range(calls + 1)]
        for at in range(calls):
            if rng.random() > math.exp(-rate("copy", contexts[at])):
                return Episode(calls, contexts[: at + 1], "copy")
        return Episode(calls, contexts, "end" if rng.random() > math.exp(-rate("end", contexts[-1])) else None)

    short = [drawn(n) for n in (1, 2, 3, 5, 8) for _ in range(3000)]
    law, line = horizon_law.fit(short, growth=True), horizon_law.contexts(short)
    assert line == pytest.approx([400, 20, 60])
    assert law["copy"] == pytest.approx(truth["copy"], abs=0.35)
    for calls in (12, 20, 32):
        measured = np.mean([drawn(calls).fault is None for _ in range(3000)])
        assert horizon_law.predicted(law, line, calls) == pytest.approx(measured, abs=0.06)
    constant = horizon_law.fit(short, growth=False)
    exposed = sum(one.good + (one.fault == "copy") for one in short)
    assert math.exp(constant["copy"][0]) == pytest.approx(sum(one.fault == "copy" for one in short) / exposed)
