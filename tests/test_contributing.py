"""What CONTRIBUTING.md says of adding something is enough: its blocks are applied to a copy of the tree, and its commands run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import proof

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
NAMES = ["advantage", "loss", "reward leaf", "environment", "engine", "config key", "command", "weight route"]
SHOWN = ("config key",)
"""Of which `make test` follows the recipe; the others are proofs."""
TOPS = ("agentrl", "envs", "tools", "rewards", "configs", "docs", "tests", "examples")
pytestmark = pytest.mark.timeout(400)


@dataclass
class Recipe:
    """How one kind of thing is added: whole files, diffs, and the commands."""

    files: dict[str, str]
    diffs: dict[str, str]
    commands: list[list[str]]


def section(name: str) -> str:
    [found] = re.findall(rf"^### An? {name}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def recipe(name: str) -> Recipe:
    blocks = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```", section(name), re.MULTILINE | re.DOTALL)
    files = {file: text for kind, file, text in blocks if kind == "python"}
    diffs = {file: text for kind, file, text in blocks if kind == "diff"}
    [shell] = [text for kind, _, text in blocks if kind == "sh"]
    return Recipe(files, diffs, [shlex.split(line) for line in shell.splitlines()])


def patched(text: str, diff: str) -> str:
    """`text` with each hunk applied: its lines stand there once; a hunk of new lines alone goes to the end."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        assert not old or text.count(old) == 1, f"{text.count(old)} times in the file, expected once:\n{old}"
        text = text.replace(old, new) if old else text + new
    return text


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree, without what is built but for the bytecode, which is of these very files (their times are kept)."""
    hidden = shutil.ignore_patterns("runs", "build")
    for top in TOPS:
        shutil.copytree(ROOT / top, tmp_path / top, ignore=hidden)
    for file in ("pyproject.toml", "Makefile", "README.md"):
        shutil.copy2(ROOT / file, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [name if name in SHOWN else pytest.param(name, marks=proof) for name in NAMES])
def test_what_is_added_as_the_page_says_works(name: str, tree: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    how = recipe(name)
    for file, text in how.files.items():
        assert not (tree / file).exists()
        (tree / file).parent.mkdir(exist_ok=True)
        (tree / file).write_text(text)
    for file, diff in how.diffs.items():
        (tree / file).write_text(patched((tree / file).read_text(), diff))
    for words in how.commands:
        more = ["-q", "-p", "no:cacheprovider"] if "pytest" in words else []
        done = subprocess.run([*words, *more], cwd=tree, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        assert not more or re.search(r"\d+ passed", done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_shows_fits_its_files_and_is_clean(name: str, tmp_path: Path) -> None:
    how = recipe(name)
    changed = {file: patched((ROOT / file).read_text(), diff) for file, diff in how.diffs.items()}
    python = [text for file, text in {**how.files, **changed}.items() if file.endswith(".py")]
    for number, text in enumerate(python):
        (tmp_path / f"m{number}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [*ruff, *command, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_diff_that_no_longer_fits_is_seen() -> None:
    assert patched("a\nb\n", " a\n+x\n@@\n-b\n+c\n@@\n+end\n") == "a\nx\nc\nend\n"
    with pytest.raises(AssertionError, match="2 times in the file"):
        patched("a\na\n", " a\n+x\n")
    with pytest.raises(AssertionError, match="0 times"):
        patched("a\n", "-b\n+x\n")
