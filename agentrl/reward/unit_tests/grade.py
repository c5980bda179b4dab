"""Run a task's tests against the code that a policy wrote, in this machine's sandbox.

Two processes: pytest with the tests (`runner.py`), and the policy's code (`policy.py`), which the tests call through a pipe by
plain data. What runs in one process with its tests can make each of them pass: patch pytest, end it with status 0, return objects
that equal everything. Here the code can only answer.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import marshal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.errors import DependencyError, SandboxError
from agentrl.plain_data import read_json
from agentrl.reward.unit_tests.runner import BEGUN
from agentrl.sandbox import ExecResult, SandboxSpec, chosen, require

HERE = Path(__file__).parent
PACKAGES = ("_pytest", "pytest", "py", "pluggy", "iniconfig", "packaging")
# Of pygments what pytest imports to color what nobody sees here.
PARTS = {
    "pygments": [
        "*.py", "filters/__init__.py", "styles/__init__.py", "styles/_mapping.py", "styles/default.py", "formatters/__init__.py",
        "formatters/_mapping.py", "formatters/terminal.py", "lexers/__init__.py", "lexers/_mapping.py", "lexers/diff.py",
        "lexers/python.py",
    ]
}  # fmt: skip
OWN = ("talk", "runner")
GRACE = 30.0
"""Seconds for what is no test: to start, to import pytest, to report."""
REPORT = 1 << 20


@dataclass(frozen=True, slots=True)
class GradeLimits:
    """Of a grading: `seconds` of one answer of the code, `total` of all tests together, bytes of `memory` of each process."""

    seconds: float = 10.0
    total: float = 60.0
    memory: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Graded:
    """`passed` of `count` tests; `why`: what each that failed says, by name; `ended`: why there is no report, or why no test
    could be collected because of the code; `fault`: why there is none because of the tests."""

    passed: int = 0
    count: int = 0
    why: dict[str, str] = field(default_factory=dict)
    ended: str | None = None
    fault: str | None = None


def require_tests() -> None:
    """Raises DependencyError without pytest, ResourceError without a sandbox on this machine."""
    if importlib.util.find_spec("pytest") is None:
        raise DependencyError("the leaf code.tests runs pytest: pip install 'agentrl[testing]'")
    require(chosen(None))


def grade(tests: str, code: str, module: str = "solution", limits: GradeLimits | None = None) -> Graded:
    """Run the tests, which import `module`, against the code. Blocks. Raises SandboxError if the sandbox failed."""
    work = _grade(tests, code, module, limits or GradeLimits())
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:  # a notebook's cell, in whose thread a loop runs
        return thread.submit(asyncio.run, work).result()


async def _grade(tests: str, code: str, module: str, limits: GradeLimits) -> Graded:
    provider = require(chosen(None))
    seconds = int(limits.total + GRACE)
    spec = SandboxSpec(memory=limits.memory, cpu_s=seconds, pids=64, file_size=1 << 24, disk=1 << 25)
    request = {"tests": tests, "code": code, "module": module, "seconds": limits.seconds, "total": limits.total}
    box = await provider.start(spec)
    try:
        argv = [box.python_path, "-P", "-S", "-s", "-B", "-X", "utf8", "-c", _source("boot")]
        text = json.dumps({**request, "program": _program(), "python": box.python_path}).encode()
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
    report = _report(done, said)
    if report is None:
        return Graded(ended=f"no report: the tests' process ended ({done.end}, status {done.code}) {done.stderr[-300:]}".strip())
    if report["fault"] is not None:
        return Graded(fault=f"the tests cannot be run: {report['fault'][-500:]}")
    if report["broken"] is not None:
        return Graded(ended=report["broken"][-500:])
    if not report["passed"]:
        return Graded(fault="there is no test in the tests: functions test_..., or classes Test... with such methods")
    names = {node: node.partition("::")[2] for node in report["passed"]}
    why = {names.get(node, node): text for node, text in report["why"].items()}
    return Graded(sum(report["passed"].values()), len(report["passed"]), why)


def _report(done: ExecResult, said: str) -> dict[str, Any] | None:
    if done.code != 0 or done.cut:
        return None
    try:
        found = read_json(said)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _source(name: str) -> str:
    return (HERE / f"{name}.py").read_text(encoding="utf-8")


@cache
def _program() -> str:
    """The program of the code's process, which has no archive: nothing of pytest is in it."""
    parts = {"talk": _source("talk"), "policy": _source("policy")}
    start = 'spaces["policy"]["main"](spaces["talk"]["Talk"](int(sys.argv[1]), int(sys.argv[2])))'
    run = "for name, text in parts.items(): exec(compile(text, name, 'exec'), spaces.setdefault(name, {'__name__': name}))"
    return f"import sys\nparts = {parts!r}\nspaces = {{}}\n{run}\n{start}\n"


@cache
def _archive() -> bytes:
    """What the tests' process imports, as `boot.py` reads it: for the Python that runs this one."""
    modules: dict[str, tuple[bool, bytes]] = {}
    for name in ("agentrl", "agentrl.reward", "agentrl.reward.unit_tests"):
        modules[name] = (True, marshal.dumps(compile("", name, "exec")))
    for name in OWN:
        modules[f"agentrl.reward.unit_tests.{name}"] = (False, marshal.dumps(compile(_source(name), name, "exec")))
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
