"""The graded call reward of ToolRL (Qian et al. 2025, arXiv 2504.13958, section 3.3), scaled to [0, 1]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.reward import assign
from agentrl.reward.gold import GoldCall
from agentrl.reward.leaf import Reading
from agentrl.reward.values import Rule, same
from agentrl.trajectory import ToolCall


def graded(made: Sequence[ToolCall], gold: Sequence[GoldCall], rule: Rule, how: str) -> Reading:
    """R_max / S_max of the paper; `scale: [-3, 3]` makes its R_correct = 6 R_max / S_max - 3 of it.

    r_name = |names made and expected| / |names made or expected| (as multisets), r_param = sum over the
    expected calls of the Jaccard index of the parameter names, r_value = number of parameters with the
    right value, S_max = 1 + |G| + sum of |keys(G_j)|. Calls pair with calls of the same name only.
    """
    names_made, names_gold = Counter(call.name for call in made), Counter(call.name for call in gold)
    either = sum((names_made | names_gold).values())
    if either == 0:
        return Reading(1.0, {"made": 0, "expected": 0})
    name = sum((names_made & names_gold).values()) / either
    pairs = _pairs(made, gold, rule, how)
    keys = sum(_key_score(made[i], gold[j]) for i, j in pairs)
    values = sum(_value_score(made[i], gold[j], rule) for i, j in pairs)
    top = 1.0 + len(gold) + sum(len(call.arguments) for call in gold)
    evidence = {
        "made": len(made),
        "expected": len(gold),
        "pairs": [list(pair) for pair in pairs],
        "r_name": name,
        "r_param": keys,
        "r_value": values,
        "s_max": top,
    }
    return Reading((name + keys + values) / top, evidence)


def _pairs(made: Sequence[ToolCall], gold: Sequence[GoldCall], rule: Rule, how: str) -> assign.Pairs:
    weights = [
        [
            _key_score(call, wanted) + _value_score(call, wanted, rule) if call.name == wanted.name else 0.0
            for wanted in gold
        ]
        for call in made
    ]
    if how == "optimal":
        return assign.optimal(weights)
    free = list(range(len(made)))
    pairs: assign.Pairs = []
    for j in range(len(gold)):  # each expected call in turn takes the best call left, the first among equals
        best = max(free, key=lambda i: weights[i][j], default=-1)
        if best >= 0 and weights[best][j] > 0:
            pairs.append((best, j))
            free.remove(best)
    return sorted(pairs)


def _key_score(call: ToolCall, gold: GoldCall) -> float:
    if call.arguments is None:
        return 0.0
    either = set(call.arguments) | set(gold.arguments)
    return len(set(call.arguments) & set(gold.arguments)) / len(either) if either else 1.0


def _value_score(call: ToolCall, gold: GoldCall, rule: Rule) -> int:
    made = call.arguments or {}
    return sum(1 for key, value in gold.arguments.items() if key in made and same(made[key], value, rule))
