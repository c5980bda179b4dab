"""Functions: write a function of one number, to be tried by tests that the policy never sees."""

import random

from agentrl.env import Message, Task, ToolEnv, draw, task_rng

TESTS = """
import pytest
from solution import f

@pytest.mark.parametrize("x, y", {pairs})
def test_value(x, y):
    assert f(x) == y
"""


class Functions(ToolEnv):
    """One turn without tools: the answer has a block of Python in it."""

    id = "examples/Functions-v0"
    reward = "../../unit_tests.json"
    summary = "write a function that passes its tests"

    def make_task(self, rng_seed, split):
        def propose(rng: random.Random):
            return rng.randint(2, 9), rng.choice("+-"), rng.randint(1, 9)

        a, sign, b = draw(task_rng(self.id, split, rng_seed), split, propose, str)
        formula = f"{a} * x {sign} {b}"
        pairs = [(x, a * x + (b if sign == "+" else -b)) for x in (0, 1, 7, -3)]
        gold = {"code": f"def f(x):\n    return {formula}\n", "tests": TESTS.format(pairs=pairs)}
        return Task(f"functions/{split}/{rng_seed}", rng_seed, split, {"formula": formula}, gold)

    def prompt(self, task):
        return [Message("user", f"Write a function f of x that returns {task.data['formula']}.")]

    def gold_turns(self, task):
        return [Message("assistant", f"```python\n{task.gold['code']}```")]
