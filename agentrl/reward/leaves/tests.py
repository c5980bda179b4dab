"""`code.tests`: the tests of a task against the code that the policy wrote."""

from __future__ import annotations

import ast
from typing import Any, ClassVar

from agentrl.errors import SandboxError
from agentrl.python_source import module_of
from agentrl.reward.leaf import REF, Args, Context, Leaf, Reading, UnscorableError, object_schema, or_ref
from agentrl.reward.unit_tests.grade import GradeLimits, grade, require_tests
from agentrl.reward.values import brief
from agentrl.reward.view import View
from agentrl.trajectory import Json

MOST = 200_000
"""Characters of code, and of tests."""
_FENCE = "```"
_PYTHON = frozenset({"", "python", "python3", "py"})
_SECONDS = {"type": "number", "exclusiveMinimum": 0}


class CodeTests(Leaf):
    """Runs pytest on the task's tests, which import the policy's code; in a sandbox, the code in a process of its own."""

    kind: ClassVar[str] = "code.tests"
    formula: ClassVar[str] = (
        "1 if all tests pass, else 0 (credit=all), or the share that passes (credit=share); 0 without code, and if it ends or "
        "hangs; null if the tests cannot be run or the sandbox failed"
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "tests": or_ref({"type": "string", "minLength": 1, "maxLength": MOST}),
            "code": {**REF, "description": "a reference to the code; by default the last Python block of the answer"},
            "module": {
                "type": "string",
                "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,60}$",
                "description": "what tests import (solution)",
            },
            "credit": {"enum": ["all", "share"]},
            "seconds": {**_SECONDS, "maximum": 60, "description": "for one answer of the code"},
            "total_seconds": {**_SECONDS, "maximum": 80, "description": "for all tests"},
            "memory_mb": {"type": "integer", "minimum": 64, "maximum": 8192},
        },
        ("tests",),
    )
    example: ClassVar[dict[str, Any]] = {"tests": {"$": "/task/gold/tests"}, "credit": "share"}
    scopes: ClassVar[tuple[str, ...]] = ("episode",)

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        require_tests()
        seconds, total = float(args.get("seconds", 10.0)), float(args.get("total_seconds", 60.0))
        if seconds > total:
            raise ValueError(f"seconds ({seconds:g}) is more than total_seconds ({total:g})")
        self.limits = GradeLimits(seconds, total, int(args.get("memory_mb", 512)) << 20)

    def blocks(self) -> bool:
        return True

    def gold_fault(self, args: Args) -> str | None:
        return _fault(args["tests"])

    def read(self, view: View, args: Args) -> Reading:
        tests = args["tests"]
        if (fault := _fault(tests)) is not None:
            raise UnscorableError(fault)
        code = args["code"] if "code" in args else last_block(view.answer() or "")
        if not isinstance(code, str) or not code.strip():
            return Reading(0.0, {"why": "no code"})
        if len(code) > MOST:
            return Reading(0.0, {"why": f"code of {len(code)} characters; at most {MOST} are run"})
        try:
            found = grade(tests, code, args.get("module", "solution"), self.limits)
        except SandboxError as fault:
            raise UnscorableError(f"the sandbox failed: {fault}") from fault
        if found.fault is not None:
            raise UnscorableError(found.fault)
        if found.ended is not None:
            return Reading(0.0, {"why": brief(found.ended, 500)})
        share = found.passed / found.count
        value = share if args.get("credit", "all") == "share" else float(found.passed == found.count)
        return Reading(value, {"passed": found.passed, "tests": found.count, "failed": brief(found.why)})


def last_block(text: str) -> str | None:
    """The last block of Python in a text, or one that names no language; None if there is none that ends."""
    found, language, lines = None, None, list[str]()
    for line in text.splitlines(keepends=True):
        said = line.strip()
        if language is None and said.startswith(_FENCE):
            language, lines = said.removeprefix(_FENCE).strip().lower(), []
        elif language is not None and said == _FENCE:
            found = "".join(lines) if language in _PYTHON else found
            language = None
        else:
            lines.append(line)
    return found


def _fault(tests: Json) -> str | None:
    """Why these are no tests, as far as that is told without running them."""
    if not isinstance(tests, str):
        return f"the tests must be Python code, not {brief(tests, 80)!r}"
    if len(tests) > MOST:
        return f"the tests have {len(tests)} characters; at most {MOST}"
    try:
        tree = module_of(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        return f"the tests are no Python: {fault}"
    named = (node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    if not any(name.startswith("test") for name in map(str.lower, named)):
        return "there is no test in the tests: functions test_..., or classes Test... with such methods"
    return None
