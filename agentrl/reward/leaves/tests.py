"""`code.tests`: the tests of a task against the code that the policy wrote."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Hashable
from typing import Any, ClassVar

from agentrl.errors import SandboxError
from agentrl.python_source import module_of
from agentrl.reward.leaf import REF, Args, Context, Leaf, Reading, UnscorableError, object_schema, or_ref
from agentrl.reward.unit_tests.grade import GRACE, PACKAGES, Graded, GradeLimits, grade, require_tests
from agentrl.reward.values import brief
from agentrl.reward.view import View
from agentrl.trajectory import Json

MOST = 200_000
"""Characters of code, and of tests."""
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)", re.DOTALL)
_LANGUAGE = re.compile(r"(python|py)?[0-9.]*")
_TAKEN = frozenset({*sys.stdlib_module_names, *PACKAGES, "pygments", "agentrl", "test_task"})
"""Modules that the tests' process has already; by such a name the code would stand in their place."""
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
    optional: ClassVar[frozenset[str]] = frozenset({"code"})

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        require_tests()
        seconds, total = float(args.get("seconds", 10.0)), float(args.get("total_seconds", 60.0))
        if seconds > total:
            raise ValueError(f"seconds ({seconds:g}) is more than total_seconds ({total:g})")
        if (module := args.get("module")) in _TAKEN:
            raise ValueError(f"module: {module!r} is a module of Python's or pytest's own, which the tests need; another name")
        self.limits = GradeLimits(seconds, total, int(args.get("memory_mb", 512)) << 20)

    def blocks(self) -> bool:
        return True

    def longest(self) -> tuple[Hashable, float] | None:
        key = json.dumps([self.kind, {name: value for name, value in self.args.items() if name != "credit"}], sort_keys=True)
        return key, self.limits.total + GRACE

    def gold_fault(self, args: Args) -> str | None:
        return _fault(args["tests"])

    def read(self, view: View, args: Args) -> Reading:
        tests = args["tests"]
        if (fault := _fault(tests)) is not None:
            raise UnscorableError(fault)
        code = args["code"] if "code" in args else last_block(view.answer() or "")
        if (
            code is None
            and view.trajectory.state is None
            and str(self.args.get("code", {}).get("$")).startswith("/episode/state")
        ):
            raise UnscorableError("the environment has no state, in which the code was to be")
        if not isinstance(code, str) or not code.strip():
            return Reading(0.0, {"why": "no code"})
        if len(code) > MOST:
            return Reading(0.0, {"why": f"code of {len(code)} characters; at most {MOST} are run"})
        found = self._graded(view, tests, code)
        if found.fault is not None:
            raise UnscorableError(found.fault)
        if found.ended is not None:
            return Reading(0.0, {"why": brief(found.ended, 500)})
        share = found.passed / found.count
        value = share if args.get("credit", "all") == "share" else float(found.passed == found.count)
        return Reading(value, {"passed": found.passed, "tests": found.count, "failed": brief(found.why)})

    def _graded(self, view: View, tests: str, code: str) -> Graded:
        """The grading, which leaves of other `credit` share, and each pass over the tree while a judge is asked."""
        key = hashlib.sha256(repr((self.kind, tests, code, self.args.get("module"), self.limits)).encode()).hexdigest()
        if key not in view.answers:
            try:
                view.answers[key] = grade(tests, code, self.args.get("module", "solution"), self.limits)
            except SandboxError as fault:
                raise UnscorableError(f"the sandbox failed: {fault}") from fault
        found: Graded = view.answers[key]
        return found


def last_block(text: str) -> str | None:
    """The last block of Python in a text, or one that names no language, as Markdown has them: between fences of three or more
    ` or ~, indented as the first of them is. None if there is none that ends."""
    found, opened, lines, language = None, "", list[str](), ""
    indent = 0
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip())
        if not opened and fence is not None and "`" not in fence[3]:
            indent, opened, lines, language = len(fence[1]), fence[2], [], fence[3].strip().lower().lstrip("{.")
        elif opened and fence is not None and fence[2].startswith(opened) and not fence[3].strip():
            word = re.split(r"[\s:,}]", language, maxsplit=1)[0]
            found = "".join(lines) if _LANGUAGE.fullmatch(word) else found
            opened = ""
        elif opened:
            kept = line.lstrip(" \t")
            lines.append(line[min(indent, len(line) - len(kept)) :])
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
