"""Paths, config keys, links and addresses that the pages name exist."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.config.keys import all_keys, find_keys, section_at
from agentrl.config.schema import EnvConfig
from agentrl.run.metrics import info_of
from agentrl.utils.errors import ConfigError
from agentrl.utils.search_path import load_module
from tests.test_shape import ROOMS

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md")
IGNORED = (ROOT / ".gitignore").read_text().splitlines()
WRITTEN = {ROOT / line[1:] for line in IGNORED if line.startswith("/docs/")}
"""Pages that `make docs` builds, and whose links it checks; git has none of them."""
PAGES = sorted({page for pattern in PATTERNS for page in ROOT.glob(pattern)} - WRITTEN)
LINKING = [*PAGES, *sorted(ROOT.glob("envs/*/README.md"))]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
TOPS = ("agentrl", "benchmarks", "configs", "docs", "envs", "examples", "rewards", "tests", "tools", ".ci", ".github")

# What a page speaks of that a reader makes, or that a run writes.
MADE = re.compile(r"/(test_)?(my|mine|your)\b|/(test_)?my_|NAME|/_shelf|<|\.\.\.|-v\d$|^envs/shelf")


def text_of(page: Path) -> str:
    text = page.read_text()
    if page.name == "coming_from.md":  # its first columns are other projects' names; test_coming_from.py looks up the others
        text = re.sub(r"^\|.*? \| ", "| ", text, flags=re.MULTILINE)
    return text


def ticked(text: str) -> Iterator[str]:
    """What stands in single backticks outside of code blocks."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (found.replace("\n", " ") for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", plain))


def paths_of(text: str) -> Iterator[str]:
    """Paths that begin in a folder of the project or in a room of the package, wherever they stand."""
    tops = "|".join(re.escape(top) for top in (*TOPS, *ROOMS))
    for found in re.findall(rf"(?<![\w/.:-])((?:{tops})/[\w./*<>-]*\w(?:/(?![\w*]))?)", text):
        if found.split("/")[0] in TOPS or found.endswith((".py", "/")):
            yield found
    for tick in ticked(text):
        if re.fullmatch(rf"(?:{tops})/[\w/]+", tick):
            yield tick


def exists(path: str, page: Path) -> bool:
    if ROOT / path in WRITTEN:
        return True
    folders = [ROOT, ROOT / "agentrl", page.parent]
    return any(any(folder.glob(name)) for folder in folders for name in (path.rstrip("/"), f"{path}.py"))


@EACH_PAGE
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    text = text_of(page)
    shown = set(re.findall(r"^```python (\S+)", text, re.MULTILINE))
    there = (path for path in paths_of(text) if info_of(path) is None)  # `rollout/returned` is a number of metrics.jsonl
    gone = {path for path in there if not MADE.search(path) and path not in shown and not exists(path, page)}
    assert not gone, sorted(gone)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings that a forge and the site both have: they differ in signs between words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        forge, site = plain.replace(" ", "-"), re.sub(r"[-\s]+", "-", plain)
        found |= {forge} & {site}
    return found


@pytest.mark.parametrize("page", LINKING, ids=[str(page.relative_to(ROOT)) for page in LINKING])
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    """To a file that is there, and in a page to a heading."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    gone = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        target = page.parent / link if link else page
        if target.resolve() in WRITTEN:
            continue
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target.resolve()))):
            gone.append(f"{link}#{anchor}" if anchor else link)
    assert gone == []


def is_key(dotted: str) -> bool:
    parts = dotted.split(".")
    if parts[0] == "env" and len(parts) > 2 and parts[1] not in EnvConfig.model_fields:
        del parts[1]  # of the environment of that name
    if (section := section_at(parts[:-1])) is not None:
        return parts[-1] in section.model_fields
    try:
        return bool(find_keys(".".join(parts)))  # inside of a table
    except ConfigError:
        return False


@EACH_PAGE
def test_every_config_key_that_a_page_names_is_there(page: Path) -> None:
    sections = "|".join(key.name for key in all_keys() if "." not in key.name and (key.section or "table" in key.type))
    gone = []
    for tick in ticked(text_of(page)):
        for dotted in re.findall(rf"^((?:{sections})(?:\.[a-z_]+)+)(?=$|[ =])", tick):
            if not is_key(dotted) and not dotted.endswith((".py", ".json", ".toml")):
                gone.append(dotted)
    assert not gone, gone


# -- the site --------------------------------------------------------------------------------------


KINDS = ["Tutorials", "How-to guides", "Reference", "Explanation"]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """.ci/docs_site.py"""
    return load_module(ROOT / ".ci" / "docs_site.py")


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
