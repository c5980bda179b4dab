"""Define the `code.tests` leaf, which runs a task's tests against the policy's code in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import importlib.util
import json
import marshal
import re
import sys
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from agentrl.contrib.sandboxes.code_tests.runner import BEGUN
from agentrl.contrib.sandboxes.contract import ExecResult, SandboxSpec
from agentrl.contrib.sandboxes.sandbox_pool import require, sandbox_config
from agentrl.data.trajectory import Json
from agentrl.reward.leaf import LEAVES, REF, Args, Context, Leaf, Reading, View, object_schema, or_ref
from agentrl.reward.values import UnscorableError, brief
from agentrl.utils.errors import SandboxError, need_package
from agentrl.utils.parsing import module_of, read_json

# Two processes run in the sandbox: pytest with the tests (`runner.py`), and the policy's code (`policy.py`), which the tests
# call through pipes with plain data. Code in the process of its tests could make them all pass: patch pytest, exit with
# status 0, return objects that equal everything. Here it can only answer calls.

HERE = Path(__file__).parent
PACKAGES = ("_pytest", "pytest", "py", "pluggy", "iniconfig", "packaging")
# Modules of pygments that pytest imports to color its output, which nobody sees here.
PARTS = {
    "pygments": [
        "*.py", "filters/__init__.py", "styles/__init__.py", "styles/_mapping.py", "styles/default.py", "formatters/__init__.py",
        "formatters/_mapping.py", "formatters/terminal.py", "lexers/__init__.py", "lexers/_mapping.py", "lexers/diff.py",
        "lexers/python.py",
    ]
}  # fmt: skip
OWN = ("policy", "runner")
GRACE = 30.0
"""Seconds added to the tests' limit: to start, to import pytest, to report."""
REPORT = 1 << 20


@dataclass(frozen=True, slots=True)
class GradeLimits:
    """Limits of a grading: `seconds` per answer of the code, `total` seconds for all tests, bytes of `memory` per process."""

    seconds: float = 10.0
    total: float = 60.0
    memory: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Graded:
    """Result: `passed` of `count` tests; `why`: name of a failed test -> its message; `ended`: reason why the code left no
    report or broke the collection of tests; `fault`: reason in the tests themselves why there is no result."""

    passed: int = 0
    count: int = 0
    why: dict[str, str] = field(default_factory=dict)
    ended: str | None = None
    fault: str | None = None


def grade(tests: str, code: str, module: str = "solution", limits: GradeLimits | None = None) -> Graded:
    """Run the tests, which import `module`, against the code. Blocks. Raises SandboxError if the sandbox failed."""
    work = _grade(tests, code, module, limits or GradeLimits())
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:  # an event loop runs in this thread, for example in a notebook
        return thread.submit(asyncio.run, work).result()


async def _grade(tests: str, code: str, module: str, limits: GradeLimits) -> Graded:
    provider = require(sandbox_config(None))
    seconds = int(limits.total + GRACE)
    spec = SandboxSpec(memory=limits.memory, cpu_s=seconds, pids=64, file_size=1 << 24, disk=1 << 25)
    request = {"tests": tests, "code": code, "module": module, "seconds": limits.seconds, "total": limits.total}
    box = await provider.start(spec)
    try:
        argv = ["python3", "-P", "-S", "-s", "-B", "-X", "utf8", "-c", _source("boot")]
        text = json.dumps({**request, "program": _program(), "python": "python3"}).encode()
        done = await box.exec(argv, timeout=seconds, max_output=REPORT, stdin=_archive() + text)
    finally:
        await box.stop()
    return _read(done)


def _read(done: ExecResult) -> Graded:
    begun, _, said = done.stdout.partition("\n")
    if begun != BEGUN.decode().strip():
        if done.stderr.strip().startswith("another Python"):
            raise SandboxError(f"the sandbox has {done.stderr.strip()[:100]}; the tests need the one that runs agentrl")
        raise SandboxError(f"the tests' process did not begin ({done.end}, status {done.code}): {done.stderr.strip()[-300:]}")
    try:
        report: Any = read_json(said) if done.code == 0 and not done.cut else None
    except ValueError:
        report = None
    if not isinstance(report, dict):
        return Graded(ended=f"no report: the tests' process ended ({done.end}, status {done.code}) {done.stderr[-300:]}".strip())
    if report["fault"] is not None:
        return Graded(fault=f"the tests cannot be run: {report['fault'][-500:]}")
    if report["broken"] is not None:
        return Graded(ended=report["broken"][-500:])
    if not report["passed"]:
        return Graded(fault="there is no test in the tests. Define functions test_..., or classes Test... with such methods")
    names = {node: node.partition("::")[2] for node in report["passed"]}
    why = {names.get(node, node): text for node, text in report["why"].items()}
    return Graded(sum(report["passed"].values()), len(report["passed"]), why)


def _source(name: str) -> str:
    return (HERE / f"{name}.py").read_text(encoding="utf-8")


@cache
def _program() -> str:
    """Return the program of the process with the policy's code; pytest is not in it."""
    run = "exec(compile(text, 'policy', 'exec'), space)\nspace['main'](space['Talk'](int(sys.argv[1]), int(sys.argv[2])))"
    return f"import sys\ntext, space = {_source('policy')!r}, {{'__name__': 'policy'}}\n{run}\n"


@cache
def _archive() -> bytes:
    """Return the modules of the tests' process in the format of `boot.py`, compiled for this Python version."""
    modules: dict[str, tuple[bool, bytes]] = {}
    for name in ("agentrl", "agentrl.contrib", "agentrl.contrib.sandboxes", "agentrl.contrib.sandboxes.code_tests"):
        modules[name] = (True, marshal.dumps(compile("", name, "exec")))
    for name in OWN:
        modules[f"agentrl.contrib.sandboxes.code_tests.{name}"] = (False, marshal.dumps(compile(_source(name), name, "exec")))
    for name, path in _files():
        code = compile(path.read_bytes(), f"/archive/{name}", "exec", dont_inherit=True)
        modules[name] = (path.name == "__init__.py", marshal.dumps(code))
    body = marshal.dumps(modules)
    return importlib.util.MAGIC_NUMBER + len(body).to_bytes(4, "big") + body


def _files() -> Iterator[tuple[str, Path]]:
    for package, patterns in {**{name: ["**/*.py"] for name in PACKAGES}, **PARTS}.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        if not spec.origin.endswith("__init__.py"):
            yield package, Path(spec.origin)
            continue
        folder = Path(spec.origin).parent
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


# The `code.tests` leaf

MOST = 200_000
"""Maximum characters of the code, and of the tests."""
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)", re.DOTALL)
_LANGUAGE = re.compile(r"(python|py)?[0-9.]*")
_TAKEN = frozenset({*sys.stdlib_module_names, *PACKAGES, "pygments", "agentrl", "test_task"})
"""Modules that the tests' process itself imports; code with such a name would replace them."""
_SECONDS = {"type": "number", "exclusiveMinimum": 0}


@LEAVES.register("code.tests")
class CodeTests(Leaf):
    """Run pytest on the task's tests, which import the policy's code. Both run in a sandbox, in separate processes."""

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
        need_package("pytest", "the leaf code.tests runs pytest: pip install 'agentrl[testing]'")
        require(sandbox_config(None))
        seconds, total = float(args.get("seconds", 10.0)), float(args.get("total_seconds", 60.0))
        if seconds > total:
            raise ValueError(f"seconds ({seconds:g}) is more than total_seconds ({total:g})")
        if (module := args.get("module")) in _TAKEN:
            raise ValueError(f"module: {module!r} is a module that Python or pytest needs. Choose another name")
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
            raise UnscorableError("the environment has no state, but `code` refers to it")
        if not isinstance(code, str) or not code.strip():
            return Reading(0.0, {"why": "no code"})
        if len(code) > MOST:
            return Reading(0.0, {"why": f"code of {len(code)} characters; at most {MOST} are run"})
        # Leaves that differ in `credit` only share a grading, and so do repeated passes over the tree for a judge.
        key = hashlib.sha256(repr((self.kind, tests, code, self.args.get("module"), self.limits)).encode()).hexdigest()
        if key not in view.answers:
            try:
                view.answers[key] = grade(tests, code, self.args.get("module", "solution"), self.limits)
            except SandboxError as fault:
                raise UnscorableError(f"the sandbox failed: {fault}") from fault
        found: Graded = view.answers[key]
        if found.fault is not None:
            raise UnscorableError(found.fault)
        if found.ended is not None:
            return Reading(0.0, {"why": brief(found.ended, 500)})
        share = found.passed / found.count
        value = share if args.get("credit", "all") == "share" else float(found.passed == found.count)
        return Reading(value, {"passed": found.passed, "tests": found.count, "failed": brief(found.why)})


def last_block(text: str) -> str | None:
    """Return the last closed Markdown code block that names Python, else the last that names no language, or None. Fences have
    three or more ` or ~; the indent of the opening fence is removed."""
    found, opened, lines, language = dict[bool, str](), "", list[str](), ""
    indent = 0
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip())
        if not opened and fence is not None and "`" not in fence[3]:
            indent, opened, lines, language = len(fence[1]), fence[2], [], fence[3].strip().lower().lstrip("{.")
        elif opened and fence is not None and fence[2].startswith(opened) and not fence[3].strip():
            word = re.split(r"[\s:,}]", language, maxsplit=1)[0]
            if _LANGUAGE.fullmatch(word):
                found[bool(word)] = "".join(lines)
            opened = ""
        elif opened:
            kept = line.lstrip(" \t")
            lines.append(line[min(indent, len(line) - len(kept)) :])
    return found.get(True, found.get(False))  # a block without a name next to one of Python is mostly its output


def _fault(tests: Json) -> str | None:
    """Return the reason why `tests` cannot be tests, found without running them, or None."""
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
        return "there is no test in the tests. Define functions test_..., or classes Test... with such methods"
    return None
