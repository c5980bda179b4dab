"""Features of `agentrl.contrib` are optional: without a folder of it everything else works as before."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import proof

ROOT = Path(__file__).resolve().parents[1]
CONTRIB = ROOT / "agentrl" / "contrib"
FOLDERS = sorted(path.name for path in CONTRIB.iterdir() if (path / "__init__.py").is_file())
# These leave with a folder.
COMMANDS = {"doctor": ["doctor"], "gpu_tests": ["test"], "hub": ["push", "pull"], "view": ["view", "runs", "show"]}
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


REFUSED = {  # by name, without the folder
    "agents": "agent={command=['x']}", "branching": "rollout.branch={roots=2}", "experience": "algorithm.experience={rare=0.5}",
    "moe": "rollout.router_replay=true", "remote_envs": "env.url='http://x'", "vision": "model.init.vision=true",
    "trackers": "trackers=[{name='wandb'}]", "sglang": "engine=sglang", "split": "model.tensor_parallel=2 cluster.actors=2",
}  # fmt: skip
# A section of a feature stays in the schema of configs, as do its metrics, pages and faults: these tests are about all of them.
ABOUT_ALL = [
    "tests/config/test_no_dead_keys.py", "tests/run/test_metrics.py::test_no_entry_is_of_a_number_that_no_code_makes",
    "tests/test_contrib.py", "tests/test_doc_blocks.py", "tests/test_docs.py", "tests/test_faults.py",
]  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def users_of(tree: Path, name: str) -> list[str]:
    """The folder, and what cannot be without it: folders of contrib and files of the shelf that import it or have its leaves."""
    files = [file for shelf in ("agentrl/contrib", "envs", "tools", "rewards") for file in (tree / shelf).rglob("*.*")]
    files = [file for file in files if file.suffix == ".py" or (file.parent.name == "rewards" and file.stem != "schema")]
    texts = {file.relative_to(tree).parts: file.read_text() for file in files}
    gone: list[str] = []
    new = {f"agentrl/contrib/{name}"}
    while new:
        gone += sorted(new)
        words = [rf"contrib\.{Path(path).name}\b" for path in gone if path.startswith("agentrl")]
        own = [text for parts, text in texts.items() if "/".join(parts[:3]) in gone]
        kinds = [kind for text in own for kind in re.findall(r'(?:LEAVES|CALL_FORMS)\.register\("([^"]+)"', text)]
        words += [rf'"(use|form)": "{kind}"' for kind in kinds]
        named = [parts for parts, text in texts.items() if any(re.search(word, text) for word in words)]
        new = {"/".join(parts[: 3 if parts[0] == "agentrl" else 2]) for parts in named} - {*gone}
    return gone


def users_in_tests(tree: Path, gone: Sequence[str]) -> list[str]:
    """The tests that name what is gone (contrib.view, "bfcl"), or import such a test's module: they cannot run."""
    folders = [Path(path).name for path in gone if path.startswith("agentrl")]
    shelf = [Path(path).stem for path in gone if not path.startswith("agentrl")] or ["none of the shelf"]
    words = [re.compile(rf"contrib[./]({'|'.join(folders)})\b|['\"/]({'|'.join(shelf)})['\"/.]")]
    texts = {file: file.read_text() for file in (tree / "tests").rglob("*.py") if file.name != "conftest.py"}
    users: set[Path] = set()
    while words:
        found = {file for file in texts.keys() - users if any(word.search(texts[file]) for word in words)}
        users |= found
        modules = [file.relative_to(tree).with_suffix("").parts for file in found]
        words = [re.compile(rf"{r'.'.join(parts[:-1])}(\.| import .*\b){parts[-1]}\b") for parts in modules]
    return sorted(str(file.relative_to(tree)) for file in users)


def kept_for_tests(tree: Path) -> dict[frozenset[str], list[str]]:
    """The files of tests by the folders without which they cannot run; those of a folder of contrib are played together."""
    files = {str(file.relative_to(tree)) for file in (tree / "tests").rglob("test_*.py")} - {*ABOUT_ALL}
    places = {file: "/".join(file.split("/")[:3]) if file.startswith("tests/contrib") else file for file in sorted(files)}
    needed: dict[str, set[str]] = {place: set() for place in places.values()}
    for name in FOLDERS:
        gone = users_of(tree, name)
        users = {f"tests/contrib/{Path(path).name}" for path in gone} | {places.get(file) for file in users_in_tests(tree, gone)}
        for place in needed.keys() & users:
            needed[place].add(name)
    groups: dict[frozenset[str], list[str]] = {}
    for file, place in places.items():
        groups.setdefault(frozenset(needed[place]), []).append(file)
    return groups


@contextlib.contextmanager
def without(tree: Path, names: Collection[str], kept: Path) -> Iterator[None]:
    """The tree without folders, their users, and the tests of both."""
    gone = sorted({path for name in names for path in users_of(tree, name)})
    moved = [*gone, *(f"tests/contrib/{Path(path).name}" for path in gone if path.startswith("agentrl"))]
    for number, path in enumerate(moved):
        shutil.move(tree / path, kept / str(number))
    try:
        yield
    finally:
        for number, path in enumerate(moved):
            shutil.move(kept / str(number), tree / path)


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(tree), "AGENTRL_PROOFS": ""}
    return subprocess.run([sys.executable, *words], cwd=tree, env=variables, capture_output=True, text=True, timeout=7000)


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
    with without(tree, [name], tmp_path):
        helped = run(tree, "-m", "agentrl", "--help")
        assert helped.returncode == 0, helped.stderr
        listed = {line.split()[0] for line in helped.stdout.splitlines() if line.startswith("    ") and line.split()}
        assert not listed & set(COMMANDS.get(name, [])) and {"train", "eval", "env"} <= listed
        imported = run(tree, "-c", IMPORTS.replace("GONE", name))
        assert imported.returncode == 0, imported.stderr
        if name in REFUSED:
            refused = run(tree, "-m", "agentrl", "train", "quickstart", "--dry-run", *REFUSED[name].split())
            assert refused.returncode == 2 and "Traceback" not in refused.stderr
            assert re.search(rf"{re.split('[.=]', REFUSED[name])[0]}.*(missing|unknown name)", refused.stderr)
        trained = run(tree, "-m", "agentrl", *RUN, f"out={tmp_path}", "name=r")
        assert trained.returncode == 0, trained.stdout + trained.stderr
        assert (tmp_path / "r" / "final" / "model.safetensors").is_file()


@proof
@pytest.mark.timeout(7200)
def test_each_test_passes_without_the_folders_that_it_does_not_name(tree: Path, tmp_path: Path) -> None:
    """All folders are gone at once; a test that needs one of them fails also without others."""
    groups, failed = kept_for_tests(tree), []
    for number, (kept, files) in enumerate(groups.items()):
        (aside := tmp_path / str(number)).mkdir()
        with without(tree, {*FOLDERS} - kept, aside):
            others = [file for group in groups.values() if group is not files for file in group]
            left_out = [f"--deselect={test}" for test in ABOUT_ALL] + [f"--ignore={file}" for file in others]
            left_out += [f"-pno:agentrl.contrib.{name}.plugin" for name in FOLDERS if name not in kept]
            played = run(tree, "-m", "pytest", "-q", *left_out, "tests")
        if played.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):  # none but slow ones
            failed.append(f"with {sorted(kept)} only: {played.stdout[-3000:]}")
    assert not failed, "\n".join(failed)
