"""Features of `agentrl.contrib` are optional: without a folder of it everything else works as before."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import proof

ROOT = Path(__file__).resolve().parents[1]
CONTRIB = ROOT / "agentrl" / "contrib"
FOLDERS = sorted(path.name for path in CONTRIB.iterdir() if (path / "__init__.py").is_file())
COMMANDS = {"gpu_tests": ["test"], "hub": ["push", "pull"], "view": ["view", "runs", "show"]}  # these leave with a folder
RUN = [
    "train", "quickstart", "steps=1", "sft=false", "cluster.backend=inline", "engine=embedded", "eval.tasks=2",
    "rollout.groups=2", "rollout.group_size=2", "trackers=[]", "stop_at_success=false", "health.lint=false",
]  # fmt: skip
IMPORTS = """
import importlib, pkgutil, sys
import agentrl
for module in pkgutil.walk_packages(agentrl.__path__, "agentrl."):
    if "vllm" not in module.name and not module.name.startswith(("agentrl.contrib.titan", "agentrl.__main__")):
        importlib.import_module(module.name)
assert not any(name.startswith("agentrl.contrib.GONE") for name in sys.modules)
"""


SUITE = ["algorithm", "cli", "config", "env", "render", "reward", "rollout", "shelf", "tool"]  # in minutes
USED = ("judges", "mcp", "sandboxes", "suites", "toolkit", "users")  # by environments, tools and rewards of the shelf


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@contextlib.contextmanager
def without(tree: Path, name: str, kept: Path) -> Iterator[list[str]]:
    """The tree without a folder and its tests; yields the other tests that name the folder, which cannot run."""
    gone = (f"agentrl/contrib/{name}", f"tests/contrib/{name}")
    for number, path in enumerate(gone):
        shutil.move(tree / path, kept / str(number))
    try:
        files = (tree / "tests").rglob("*.py")
        yield [str(file.relative_to(tree)) for file in files if f"contrib.{name}" in file.read_text()]
    finally:
        for number, path in enumerate(gone):
            shutil.move(kept / str(number), tree / path)


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # tests start `python`
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *words], cwd=tree, env=variables, capture_output=True, text=True, timeout=1500)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_says_how_it_enters_and_where_its_tests_are(name: str) -> None:
    text = (CONTRIB / name / "README.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    rows = dict(cells)
    assert {"enters by", "extras", "tests", "manual"} <= rows.keys()
    assert all(list(ROOT.glob(path)) for path in rows["tests"].split(", ")), rows["tests"]


def test_the_published_schema_is_what_its_command_writes(tmp_path: Path) -> None:
    """Here, since it has the leaves of contrib."""
    assert run(ROOT, "-m", "agentrl", "reward", "schema", "--out", str(tmp_path / "schema.json")).returncode == 0
    assert (tmp_path / "schema.json").read_text() == (ROOT / "rewards" / "schema.json").read_text()


@proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FOLDERS)
def test_everything_else_works_without_a_folder(name: str, tree: Path, tmp_path: Path) -> None:
    with without(tree, name, tmp_path):
        helped = run(tree, "-m", "agentrl", "--help")
        assert helped.returncode == 0, helped.stderr
        listed = {line.split()[0] for line in helped.stdout.splitlines() if line.startswith("    ") and line.split()}
        assert not listed & set(COMMANDS.get(name, [])) and {"train", "eval", "env"} <= listed
        if name not in USED:
            imported = run(tree, "-c", IMPORTS.replace("GONE", name))
            assert imported.returncode == 0, imported.stderr
        trained = run(tree, "-m", "agentrl", *RUN, f"out={tmp_path}", "name=r")
        assert trained.returncode == 0, trained.stdout + trained.stderr
        assert (tmp_path / "r" / "final" / "model.safetensors").is_file()


@proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FOLDERS)
def test_the_rest_of_the_suite_passes_without_a_folder(name: str, tree: Path, tmp_path: Path) -> None:
    with without(tree, name, tmp_path) as users:
        left_out = [f"--ignore={file}" for file in users]
        assert run(tree, "-m", "pytest", "-q", "--collect-only", *left_out, "tests").returncode == 0
        folders = ["algorithm"] if name in USED else SUITE  # tests of the shelf's environments are in many folders
        played = run(tree, "-m", "pytest", "-q", "-x", "-n", "2", *left_out, *(f"tests/{folder}" for folder in folders))
        assert played.returncode == 0, played.stdout[-3000:]
