"""The leaf kinds of a reward spec, by name."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.reward.leaf import Leaf
from agentrl.reward.leaves.calls import CallsNone, CallsSchema
from agentrl.reward.leaves.calls_match import CallsMatch
from agentrl.reward.leaves.episode import (
    CostCalls,
    CostSeconds,
    CostTokens,
    CostTurns,
    CostUsd,
    EpisodeStopped,
)
from agentrl.reward.leaves.judge import JudgeLeaf
from agentrl.reward.leaves.math import MathEqual
from agentrl.reward.leaves.python import PythonFunction
from agentrl.reward.leaves.results import ResultsContains
from agentrl.reward.leaves.state import StateAssert, StateMatch, StateNumber
from agentrl.reward.leaves.tests import CodeTests
from agentrl.reward.leaves.text import FormatRegex, NumberClose, TextContains, TextEquals

LEAVES: Mapping[str, type[Leaf]] = {
    leaf.kind: leaf
    for leaf in (
        CallsMatch,
        CallsSchema,
        CallsNone,
        StateMatch,
        StateAssert,
        StateNumber,
        ResultsContains,
        TextContains,
        TextEquals,
        NumberClose,
        MathEqual,
        CodeTests,
        FormatRegex,
        EpisodeStopped,
        CostTurns,
        CostTokens,
        CostCalls,
        CostUsd,
        CostSeconds,
        JudgeLeaf,
        PythonFunction,
    )
}
