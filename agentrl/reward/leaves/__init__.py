"""The leaf kinds of a reward spec, by name."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.reward.judge import JudgeLeaf
from agentrl.reward.leaf import Leaf
from agentrl.reward.leaves.answer import (
    CostCalls,
    CostSeconds,
    CostTokens,
    CostTurns,
    CostUsd,
    EpisodeStopped,
    FormatRegex,
    MathEqual,
    NumberClose,
    PythonFunction,
    TextContains,
    TextEquals,
)
from agentrl.reward.leaves.calls import CallsMatch, CallsNone, CallsSchema
from agentrl.reward.leaves.state import ResultsContains, StateAssert, StateMatch, StateNumber
from agentrl.reward.unit_tests.grade import CodeTests

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
