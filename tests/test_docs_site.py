"""The documentation site: each page has one place in it, pages come as they are, and what is wrong with a built site is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
KINDS = ["Tutorials", "How-to guides", "Reference", "Explanation"]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """.ci/docs_site.py"""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / ".ci" / "docs_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_without_a_place_and_one_with_two_are_told(site: ModuleType) -> None:
    text = (ROOT / "docs" / "README.md").read_text().replace("](moe.md)", "](weights.md)")
    found = site.misplaced(site.navigation(text))
    assert found == [
        "docs/README.md: docs/moe.md is not listed: give it a place",
        "docs/README.md: docs/weights.md is listed twice",
    ]


def test_pages_are_staged_under_their_paths_with_the_files_that_they_link_to(
    site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "STAGE", tmp_path)
    site.stage()
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.md")} == set(site.pages())
    script = tmp_path / "examples" / "cluster" / "slurm.sbatch.txt"
    assert script.read_text() == (ROOT / "examples" / "cluster" / "slurm.sbatch").read_text()
    assert "](../examples/cluster/slurm.sbatch.txt)" in (tmp_path / "docs" / "cluster.md").read_text()
    assert (tmp_path / "benchmarks" / "learning_curves.png").is_file()


def test_what_is_wrong_with_a_built_site_is_found(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "index.html").write_text('<h2 id="yes"></h2><a href="../page.html#top">back</a>')
    (tmp_path / "page.html").write_text(
        '<link rel="canonical" href="https://a.example/page"><body id="top"><a href="there/#yes">1</a><a href="there/#no">2</a>'
        '<a href="gone.html">3</a><a href="https://elsewhere.example/">4</a><img src="gone.png">'
        '<script src="//cdn.example/x.js"></script>'
    )
    assert sorted(site.check(tmp_path)) == [
        "page.html: gone.html leads nowhere",
        "page.html: gone.png leads nowhere",
        "page.html: it loads //cdn.example/x.js from elsewhere",
        "page.html: there/#no: no such anchor",
    ]


def test_addresses_outside_are_listed_with_their_pages(site: ModuleType) -> None:
    found = site.outside()
    assert found["https://arxiv.org/abs/2510.11370"] == ["docs/moe.md"]
    assert [link for link in found if "127.0.0.1" in link or "localhost" in link or "10.0.0" in link] == []
