"""Every code block of every page is what it says, and runs (guides: `AGENTRL_PROOFS=1`) or says why not."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import main
from tests.conftest import proof
from tests.doc_blocks import PAGES, ROOT, Block, Reader, blocks_of, problems
from tests.e2e.runs import SMALL

QUICK = {"docs/environments.md"}
"""Pages that take less than a second each, once the libraries are imported."""
ELSEWHERE = {"examples/": "tests/examples", "CONTRIBUTING.md": "tests/test_contributing.py"}
"""Pages whose blocks other tests run, unchanged."""
GUIDES = [page for page in PAGES if page.as_posix().startswith(("docs/tutorials/", "docs/howto/"))]


def follow(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Somebody with a checkout's `configs/` follows the page in an otherwise empty folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["agentrl"])
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for name in set(os.environ) & {"AGENTRL_PATH", "OPENAI_API_KEY", "OPENAI_BASE_URL"}:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    try:
        return Reader(folder).follow(page)
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_block_of_a_page_is_what_it_says(page: Path) -> None:
    found = [problem for block in blocks_of(page) for problem in problems(block)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("language", "text", "wrong"), [
    ("sh", "agentrl trian a.toml", "invalid choice: 'trian'"),
    ("sh", "agentrl eval key_value --modle m", "unrecognized arguments"),
    ("sh", "agentrl train quickstart rollout.max_turn=3", "no config key rollout.max_turn"),
    ("sh", "make tets", "make has no target tets"), ("sh", "pip install 'agentrl[vlm]'", "there is no extra vlm"),
    ("sh", "agnetrl train a.toml", "what is agnetrl?"), ("toml", "[rollout]\nmax_turn = 3", "did you mean 'rollout.max_turns'"),
    ("json", '{"agentrl_reward": 1, "name": "a", "root": {"use": "number.clos"}}', "number.close"),
    ("json", '{"a": 1,}', "JSONDecodeError"), ("python", "f(", "SyntaxError"),
])  # fmt: skip
def test_what_is_wrong_in_a_block_is_found(language: str, text: str, wrong: str) -> None:
    [problem] = problems(Block(Path("docs/README.md"), 7, language, "", text, ""))
    assert problem.startswith("docs/README.md:7: ") and wrong in problem


def test_guides_show_nothing_that_is_not_read() -> None:
    """Their blocks are fenced, in a language that is read and run; and a guide has some."""
    known = {"sh", "toml", "json", "python", "text"}
    assert [block.place for page in GUIDES for block in blocks_of(page) if not block.fenced or block.language not in known] == []
    assert [page for page in GUIDES if not blocks_of(page)] == []


@pytest.mark.parametrize("page", sorted(QUICK))
def test_a_quick_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert follow(Path(page), tmp_path, monkeypatch) >= 1


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder like the quickstart's, of a few updates."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", "quickstart", f"out={folder}", "cluster.backend=inline", *SMALL]) == 0
    return folder / "quickstart"


@proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.as_posix() not in QUICK and not p.as_posix().startswith(tuple(ELSEWHERE))], ids=str
)
def test_a_page_runs(page: Path, tmp_path: Path, quickstart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shelf in ("configs", "rewards"):
        (tmp_path / shelf).symlink_to(ROOT / shelf)
    if "runs/quickstart" in (ROOT / page).read_text() and not any(
        "train quickstart" in b.text for b in blocks_of(page) if b.fenced
    ):
        shutil.copytree(quickstart, tmp_path / "runs" / "quickstart")
    runs = [b for b in blocks_of(page) if b.fenced and not b.reason and (b.name or b.language in ("python", "sh"))]
    assert follow(page, tmp_path, monkeypatch) == len(runs)
