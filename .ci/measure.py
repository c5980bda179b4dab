"""Measure the size of agentrl and the plainness of its words, and hold both to .ci/budgets.json.

    python .ci/measure.py            print the figures
    python .ci/measure.py --check    name every figure above its budget; exit code 1 if there is one (`make lint`)
    python .ci/measure.py --lower    write the figures that fell into the budgets
    python .ci/measure.py --step     print what one GRPO update enters, traced
    python .ci/measure.py --message FILE    check the subject of a commit message

Budgets only fall: a change that needs more room removes something first.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.data.trajectory import Trajectory

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = ROOT / ".ci" / "budgets.json"
Function = ast.FunctionDef | ast.AsyncFunctionDef
QUESTION = re.compile(r"(what|who|whom|whose|which|where|whether|how|when|if)\b", re.IGNORECASE)
DIALECT = re.compile(
    r"\b(told|beside|somebody|mends?|mended|lest|as of|so many|of others|wherefrom|whereof|of which|of whom|thereof|is none|"
    r"are none|"
    r"what (?:is|was|are|were|has|had|becomes?|became|does|did|goes|went) )",
    re.IGNORECASE,
)
PARTICIPLE = re.compile(r"_?[a-z]+(ed|en)|_?(told|fed|spent|given|shown|seen|made|sent|kept|held|left|lost|taken)")
ARTICLE = re.compile(r"(a|an|the|what|who|of|that|whether|where|if|when|which|it|its|this|these|no|each|every)\b", re.IGNORECASE)


def listed(*patterns: str) -> list[Path]:
    """List existing files that git tracks."""
    out = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in out.splitlines() if (path := ROOT / name).is_file()]


@cache
def sources() -> dict[str, tuple[str, ast.Module]]:
    """Map each file of the library to its text and syntax tree."""
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in listed("agentrl/*.py")}
    return {name: (text, ast.parse(text)) for name, text in texts.items()}


def all_functions() -> Iterator[Function]:
    for _, tree in sources().values():
        yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def is_contrib(path: str) -> bool:
    return path.startswith("agentrl/contrib/")


def top_level_imports() -> dict[str, set[str]]:
    """Map each module to the modules of agentrl that it imports at import time."""
    names = {re.sub(r"\.__init__$", "", path[:-3].replace("/", ".")): path for path in sources()}
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        tree = sources()[path][1]
        lazy = [
            node
            for node in ast.walk(tree)
            if isinstance(node, Function) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
        inside = {id(child) for node in lazy for child in ast.walk(node)}
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in inside:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (parts & names.keys()) or {node.module or ""}
        graph[module] = {name for name in found if name in names and name != module}
    return graph


def import_depth(graph: dict[str, set[str]]) -> int:
    """Count the modules on the longest chain of imports."""
    sys.setrecursionlimit(10_000)
    known: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in known:
            known[name] = 1 + max((depth(other) for other in graph[name]), default=0)
        return known[name]

    return max(map(depth, graph))


def words_in(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def config_keys() -> int:
    """Count the config keys that hold a value."""
    sys.path.insert(0, str(ROOT))
    from agentrl.config.keys import all_keys

    return sum(not key.section for key in all_keys())


def figures() -> dict[str, int]:
    """Return all figures by name. Lines and files are also counted per room."""
    files = sources()
    lines = {path: text.count("\n") for path, (text, _) in files.items()}
    core = [path for path in files if not is_contrib(path)]
    every = list(all_functions())
    used = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for _, tree in files.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    tiny = [f for f in every if re.match(r"_[^_]", f.name) and (f.end_lineno or 0) - f.lineno < 6 and used[f.name] == 1]
    graph = top_level_imports()
    strings = [
        node.value
        for _, tree in files.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    docstrings = [ast.get_docstring(n) or "" for _, tree in files.values() for n in ast.walk(tree) if isinstance(n, documented)]
    pages = [path.read_text(encoding="utf-8") for path in listed("*.md")]
    found = {
        "lines": sum(lines.values()),
        "core lines": sum(lines[path] for path in core),
        "core characters": sum(len(files[path][0]) for path in core),
        "core files": len(core),
        "contrib files": len(files) - len(core),
        "functions": len(every),
        "small private functions with one caller": len(tiny),
        "longest import chain": import_depth(graph),
        "names at the top": len({path.split("/")[1] for path in files}),
        "config keys": config_keys(),
        "test lines": sum(path.read_text(encoding="utf-8").count("\n") for path in listed("tests/*.py")),
        "words of docs": words_in(listed("docs/*.md")),
        "words of the README": words_in([ROOT / "README.md"]),
        "docstrings that open with a question word": sum(bool(QUESTION.match(text)) for text in docstrings),
        "hard words in strings": sum(len(DIALECT.findall(text)) for text in strings),
        "hard words in pages": sum(len(DIALECT.findall(text)) for text in pages),
        "functions named by a participle": sum(bool(PARTICIPLE.fullmatch(f.name)) for f in every),
        "imports of contrib by the core": sum(
            name.startswith("agentrl.contrib")
            for module, names in graph.items()
            if not module.startswith("agentrl.contrib")
            for name in names
        ),
    }
    for room in sorted({path.split("/")[1] for path in files if path.count("/") > 1}):
        inside = [path for path in files if path.startswith(f"agentrl/{room}/")]
        found[f"lines of {room}"], found[f"files of {room}"] = sum(lines[path] for path in inside), len(inside)
    return found


def traced_step() -> dict[str, list[str]]:
    """Return the functions that the third of three small updates enters, by file, in order of their first call."""
    sys.path.insert(0, str(ROOT))
    import agentrl

    entered: dict[str, dict[str, None]] = {}
    steps: list[dict[str, list[str]]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{ROOT}/agentrl/") and frame.f_code.co_name != "<module>":
            entered.setdefault(name.removeprefix(f"{ROOT}/"), {})[frame.f_code.co_qualname] = None

    def end_step(row: Mapping[str, object], _: object) -> None:
        steps.append({file: list(names) for file, names in entered.items()})
        entered.clear()
        if len(steps) == 2:  # not earlier, since tracing the imports would take 20 s; other threads trace themselves
            sys.setprofile(profile)

    def reward(episode: Trajectory) -> float:
        return 1.0 / (1 + sum(turn.sampled_tokens for turn in episode.turns))

    changes: dict[str, Any] = {
        "steps": 3, "sft": False, "cluster.backend": "inline", "engine": "embedded", "stop_at_success": False,
        "rollout.groups": 2, "rollout.group_size": 4, "eval.tasks": 2, "eval.every": 0, "checkpoint.every": 1000,
        "health.lint": False,
        "env.reward": agentrl.give(reward),
    }  # fmt: skip
    threading.setprofile(profile)
    try:
        with tempfile.TemporaryDirectory() as out:
            agentrl.train("quickstart", name="traced", out=out, on_step=end_step, **changes)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return steps[2]


def check_message(text: str) -> str | None:
    """Return the problem with a commit's subject, or None."""
    subject = text.partition("\n")[0]
    if len(subject) > 72:
        return f"commit subject: {len(subject)} characters. Use at most 72; the reason goes into the body."
    if ARTICLE.match(subject):
        return f"commit subject: opens with {subject.split()[0]!r}. Open with a verb in the imperative: Add, Fix, Remove."
    return None


def main(words: list[str]) -> int:
    """Run the command line and return the exit code."""
    if words[:1] == ["--message"]:
        problem = check_message(Path(words[1]).read_text(encoding="utf-8"))
        print(problem or "", end="\n" if problem else "")
        return int(problem is not None)
    if words == ["--step"]:
        step = traced_step()
        print(
            json.dumps(
                {"files of a step": len(step), "functions of a step": sum(map(len, step.values())), "entered": step}, indent=1
            )
        )
        return 0
    found = figures()
    budgets: dict[str, int] = json.loads(BUDGETS.read_text()) if BUDGETS.is_file() else {}
    above = [
        f"{name}: {value:,}, budget {budgets.get(name, 0):,}" for name, value in found.items() if value > budgets.get(name, 0)
    ]
    if words == ["--check"]:
        print("\n".join(above) or "every figure is within its budget (.ci/budgets.json)")
        return int(bool(above))
    if words == ["--lower"]:
        lower = {name: min(value, budgets.get(name, value)) for name, value in found.items()}
        steps = {name: value for name, value in budgets.items() if name.endswith("of a step")}
        BUDGETS.write_text(json.dumps(lower | steps, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
