"""The code blocks of the pages: found, read as what they are (commands, configs, specs, Python), and run top to bottom.

A fence's second word is the name of the file that the block is; `<!-- not run: REASON -->` above a block says why it cannot run
here. It is read all the same. A `text` block below commands is what they print: its lines are looked for in it, and `...` stands
for anything.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import tomli_w

from agentrl.cli import main as cli
from agentrl.config.load import load_config
from agentrl.env.catalog import find_config
from agentrl.reward import load_spec

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md", "envs/*/README.md")
PAGES = sorted({path.relative_to(ROOT) for pattern in PATTERNS for path in ROOT.glob(pattern)})
PROGRAMS = (
    "agentrl", "make", "python", "pip", "pytest", "cd", "export", "source", "curl", "kubectl", "ray", "ssh", "sbatch", "echo",
    "docker", "mv", "rm", "sed",
)  # fmt: skip
FENCE = re.compile(r"^(?P<indent> *)```(?P<head>[^`\n]*)\n(?P<text>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"<!-- not run: ((?:(?!-->).)+?) -->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block: where it is, its language, the file that it is (or ""), its text, and why it does not run (or "")."""

    page: Path
    line: int
    language: str
    name: str
    text: str
    reason: str
    fenced: bool = True

    @property
    def place(self) -> str:
        """Where it is, for a message."""
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The page's blocks in order, fenced and indented ones."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, name = match["head"].strip().partition(" ")
        body = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        reason = REASON.search(text[: match.start()])
        why = " ".join(reason[1].split()) if reason else ""
        found.append(Block(page, text.count("\n", 0, match.start()) + 1, language, name.strip(), body, why))
    return sorted([*found, *_indented(page, FENCE.sub(lambda m: "\n" * m[0].count("\n"), text))], key=lambda b: b.line)


def _indented(page: Path, text: str) -> Iterator[Block]:
    """Blocks by four spaces after an empty line, outside of lists; their language is guessed."""
    for match in re.finditer(r"(?:\A|\n)\n((?:(?: {4}[^\n]*)?\n)*? {4}[^\n]+\n(?:(?: {4}[^\n]*)?\n)*)", text):
        before = text[: match.start()].rstrip().rpartition("\n")[2]
        if re.match(r" *([-*]|\d+\.) ", before):  # a list goes on
            continue
        body = re.sub(r"^ {4}", "", match[1], flags=re.MULTILINE).strip("\n") + "\n"
        yield Block(page, text.count("\n", 0, match.start(1)) + 1, _guess(body), "", body, "", fenced=False)


def _guess(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("#", " "))]
    if lines and all(re.match(rf"(\w+=\S+ )*({'|'.join(PROGRAMS)})\b", line) for line in lines):
        return "sh"
    return "toml" if lines and re.match(r"\[+[a-z_.]+\]+\s*(#|$)|[a-z_]+ = [\"'\[{\d-]", lines[0]) else "text"


@dataclass(frozen=True)
class Line:
    """One command: its words, without redirections, and the exit code that a comment announces (`# exit code 1`)."""

    words: list[str]
    code: int


def lines_of(block: Block) -> list[Line]:
    """The commands of a block; those after `|` or `&&` are lines of their own."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        announced = re.search(r"# exit code (\d+)", line)
        for part in _split(shlex.split(line, comments=True)):
            while part and re.match(r"\w+=", part[0]):
                part = part[1:]
            if part:
                found.append(Line(part, int(announced[1]) if announced else 0))
    return found


def _split(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("|", "&&", ";"):
            parts.append([])
        elif word in (">", ">>", "2>", "<"):
            skip = True
        else:
            parts[-1].append(word)
    return parts


# -- reading ---------------------------------------------------------------------------------------


def problems(block: Block) -> list[str]:
    """What is wrong with a block as what it claims to be."""
    try:
        reader = {"sh": _read_sh, "toml": _read_toml, "json": _read_json, "python": _read_python}.get(block.language)
        return [f"{block.place}: {problem}" for problem in (reader(block) if reader else [])]
    except Exception as problem:
        return [f"{block.place}: {type(problem).__name__}: {problem}"]


def _read_sh(block: Block) -> list[str]:
    return [problem for line in lines_of(block) for problem in _read_line(line.words)]


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def _extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def _read_line(words: list[str]) -> list[str]:
    words = words[:-1] if words[-1] == "&" else words
    if words[0] == "agentrl":
        return _read_agentrl(words[1:])
    if words[0] == "make":
        named = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        return [f"make has no target {word}" for word in named if word not in _targets()]
    if "pip" in words[:3] and "install" in words:
        named = [extra.strip() for word in words for found in re.findall(r"\[(.+)\]", word) for extra in found.split(",")]
        return [f"there is no extra {extra}" for extra in named if extra not in _extras()] if "agentrl" in " ".join(words) else []
    return [] if words[0].rpartition("/")[2] in PROGRAMS or words[0].startswith("./") else [f"what is {words[0]}?"]


def _read_agentrl(words: list[str]) -> list[str]:
    """By the real parser; and each override must set a key that there is."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            parsed = cli._parse(words)
        except SystemExit as end:
            return [] if not end.code else [f"agentrl {' '.join(words)}: {said.getvalue().strip().splitlines()[-1]}"]
    if parsed.command not in ("train", "eval", "rollout", "sft"):
        return []
    from tests.test_docs import is_key

    keys = [word.partition("=")[0].lstrip("~") for word in parsed.overrides if "=" in word]
    return [f"no config key {key}" for key in keys if not is_key(key)]


def _read_toml(block: Block) -> list[str]:
    """As a config on its base: one beside it, one that the page shows, or the quickstart for a fragment and for a base that a
    command of the page writes."""
    table = tomllib.loads(block.text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for other in blocks_of(block.page):
            if other.language == "toml" and other.name:
                (folder / Path(other.name).name).write_text(other.text)
        base = str(table.get("base", ""))
        there = base and any((at / base).with_suffix(".toml").is_file() for at in (folder, ROOT / "configs"))
        if not there and not {"name", "model"} <= table.keys():
            table["base"] = "quickstart"
        (folder / "page.toml").write_text(tomli_w.dumps(table))
        load_config(folder / "page.toml", find=find_config)
    return []


def _read_json(block: Block) -> list[str]:
    found = json.loads(block.text)
    if isinstance(found, dict) and "agentrl_reward" in found:
        load_spec(found)
    return []


def _read_python(block: Block) -> list[str]:
    compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return []


# -- running ---------------------------------------------------------------------------------------


class Reader:
    """Somebody who follows a page: types its commands, writes its files and pastes its Python into one session, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = types.ModuleType("a_page")  # a tool's annotations are resolved in its module, so the page is one
        self.printed = ""
        self.servers: list[subprocess.Popen[bytes]] = []

    def follow(self, page: Path) -> int:
        """All blocks that run, in order; returns how many. Raises AssertionError with the place of the first that fails."""
        sys.modules[self.module.__name__] = self.module
        ran = 0
        self.above = ""  # the language of the block above, if it ran
        try:
            for block in blocks_of(page):
                if not block.fenced or block.reason:
                    self.above = ""
                else:
                    try:
                        ran += self.one(block)
                    except BaseException as problem:
                        problem.add_note(f"{block.place}, in {self.folder}; printed so far:\n{self.printed[-3000:]}")
                        raise
                    self.above = block.language
        finally:
            del sys.modules[self.module.__name__]
            for server in self.servers:
                server.kill()
                server.wait()
        return ran

    def one(self, block: Block) -> int:
        """Run one block; returns whether there was something to run."""
        if block.name:
            (self.folder / block.name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.name).write_text(block.text, encoding="utf-8")
            return 1
        if block.language == "python":
            self.printed = self._captured(lambda: self._python(block))
            return 1
        if block.language == "sh":
            self.printed = "".join(self._captured(partial(self._command, line.words, line.code)) for line in lines_of(block))
            return 1
        if block.language == "text" and self.above in ("sh", "python"):
            self.compare(block)
        return 0

    def _captured(self, act) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                act()
            except BaseException:
                self.printed = printed.getvalue()
                raise
        return printed.getvalue()

    def _python(self, block: Block) -> None:
        code = compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = eval(code, vars(self.module))
        if inspect.iscoroutine(made):
            asyncio.run(made)

    def _command(self, words: list[str], expected: int) -> None:
        if words[0] == "agentrl" and words[-1] != "&":
            code = cli.main(words[1:])
            assert code == expected, f"`{' '.join(words)}` ended with {code}"
        elif words[0] == "cd":
            os.chdir(words[1])
        elif words[0] == "export":
            os.environ.update(word.split("=", 1) for word in words[1:])
        elif words[-1] == "&":
            module = [sys.executable, "-m", "agentrl.cli.main"] if words[0] == "agentrl" else [sys.executable]
            self.servers.append(subprocess.Popen([*module, *words[1:-1]], stdout=subprocess.DEVNULL))
        elif words[0] == "python" and words[1].endswith(".py"):
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
        elif words[0] == "pytest":
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words[1:]], capture_output=True, text=True
            )
            print(done.stdout, done.stderr)
            assert done.returncode == 0, f"`{' '.join(words)}` ended with {done.returncode}"
        else:
            raise AssertionError(f"`{' '.join(words)}` cannot be run here: say why with <!-- not run: ... -->")

    def compare(self, block: Block) -> None:
        """Each line of the block is in what was printed last."""
        said = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", self.printed).split())
        for line in block.text.splitlines():
            parts = [" ".join(part.split()) for part in line.split("...")]
            pattern = ".*".join(re.escape(part) for part in parts)
            assert re.search(pattern, said), f"{block.place}: the page shows {line!r}, which was not printed"
