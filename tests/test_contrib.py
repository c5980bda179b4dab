"""Features of `agentrl.contrib` are optional: without a folder of it everything else works as before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import proof

ROOT = Path(__file__).resolve().parents[1]
CONTRIB = ROOT / "agentrl" / "contrib"
FOLDERS = sorted(path.name for path in CONTRIB.iterdir() if (path / "__init__.py").is_file())
COMMANDS = {"gpu_tests": ["test"], "hub": ["push", "pull"], "view": ["view", "runs", "show"]}
"""Commands that leave with a folder."""
RUN = [
    "train", "quickstart", "steps=1", "sft=false", "cluster.backend=inline", "engine=embedded", "eval.tasks=2",
    "rollout.groups=2", "rollout.group_size=2", "trackers=[]", "stop_at_success=false", "health.lint=false",
]  # fmt: skip
IMPORTS = """
import importlib, pkgutil, sys
import agentrl
for module in pkgutil.walk_packages(agentrl.__path__, "agentrl."):
    if not module.name.startswith(("agentrl.contrib.titan", "agentrl.engines.vllm", "agentrl.__main__")):
        importlib.import_module(module.name)
assert not any(name.startswith("agentrl.contrib.GONE") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what an installation has."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("agentrl", "envs", "tools", "rewards", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *words], cwd=tree, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_says_how_it_enters_and_where_its_tests_are(name: str) -> None:
    text = (CONTRIB / name / "README.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    rows = dict(cells)
    assert {"enters by", "extras", "tests", "manual"} <= rows.keys()
    assert all(list(ROOT.glob(path)) for path in rows["tests"].split(", ")), rows["tests"]


@proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FOLDERS)
def test_everything_else_works_without_a_folder(name: str, tree: Path, tmp_path: Path) -> None:
    shutil.move(tree / "agentrl" / "contrib" / name, tmp_path / name)
    try:
        helped = run(tree, "-m", "agentrl", "--help")
        assert helped.returncode == 0, helped.stderr
        listed = {line.split()[0] for line in helped.stdout.splitlines() if line.startswith("    ") and line.split()}
        assert not listed & set(COMMANDS.get(name, [])) and {"train", "eval", "env"} <= listed
        if name not in ("sandboxes", "suites", "toolkit"):  # of these environments and tools of the shelf make use
            imported = run(tree, "-c", IMPORTS.replace("GONE", name))
            assert imported.returncode == 0, imported.stderr
        trained = run(tree, "-m", "agentrl", *RUN, f"out={tmp_path}", "name=r")
        assert trained.returncode == 0, trained.stdout + trained.stderr
        assert (tmp_path / "r" / "final" / "model.safetensors").is_file()
    finally:
        shutil.move(tmp_path / name, tree / "agentrl" / "contrib" / name)
