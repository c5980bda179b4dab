"""Fractions: sums and products of fractions, to be answered by a number in whatever form."""

import random
from fractions import Fraction

from agentrl.env import Message, Task, ToolEnv, draw, task_rng


class Fractions(ToolEnv):
    """One turn without tools; the gold answer is LaTeX, the policy's may be 5/6, 0.8333333 or a box."""

    id = "examples/Fractions-v0"
    reward = "../../math.json"
    summary = "add and multiply fractions"

    def make_task(self, rng_seed, split):
        def propose(rng: random.Random):
            a, b, c, d = (rng.randint(1, 9) for _ in range(4))
            return a, b + 1, c, d + 1, rng.choice("+*")

        a, b, c, d, sign = draw(task_rng(self.id, split, rng_seed), split, propose, str)
        result = Fraction(a, b) + Fraction(c, d) if sign == "+" else Fraction(a, b) * Fraction(c, d)
        gold = str(result) if result.denominator == 1 else rf"\frac{{{result.numerator}}}{{{result.denominator}}}"
        question = f"What is {a}/{b} {sign} {c}/{d}?"
        return Task(f"fractions/{split}/{rng_seed}", rng_seed, split, {"question": question}, {"answer": gold})

    def prompt(self, task):
        return [Message("user", task.data["question"])]

    def gold_turns(self, task):
        return [Message("assistant", rf"\boxed{{{task.gold['answer']}}}")]
