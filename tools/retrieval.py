"""Search and read a folder of documents, with passages ranked by BM25."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agentrl.contrib.toolkit.bm25 import Bm25
from agentrl.data.trajectory import Json
from agentrl.env import ToolSet, tool
from agentrl.utils.errors import ConfigError, ToolError, hint_text

_SUFFIXES = (".txt", ".md", ".rst", ".json", ".jsonl", ".csv", ".html")


@dataclass(frozen=True)
class Library:
    """Documents of a folder by path, and the index of their passages (path, line, text). Immutable, and shared by all episodes
    of the process."""

    texts: dict[str, str]
    passages: tuple[tuple[str, int, str], ...]
    index: Bm25


class Retrieval(ToolSet):
    """Read-only search; its only state is the folder."""

    name = "retrieval"

    def __init__(
        self,
        *,
        folder: str,
        results: Annotated[int, Field(ge=1, le=50)] = 5,
        passage: Annotated[int, Field(ge=100)] = 1000,
        shown: Annotated[int, Field(ge=100)] = 4000,
    ) -> None:
        """`folder`: folder of text files (.txt, .md, .rst, .json, .jsonl, .csv, .html), split at empty lines into passages of
        about `passage` characters. A search shows at most `results` passages, a read at most `shown` characters. Raises
        ConfigError if there is no document."""
        self.folder, self.passage, self.results, self.shown = folder, passage, results, shown
        _library(folder, passage)

    @tool(inline=True, read_only=True)
    def search_documents(
        self, query: Annotated[str, Field(min_length=1, max_length=400)], most: Annotated[int, Field(ge=1, le=50)] = 5
    ) -> list[Json]:
        """Find passages by words, best first: their document, first line and text.

        Args:
            query: words that the passage should hold
            most: how many passages
        """
        library = _library(self.folder, self.passage)
        found = (library.passages[number] for number, _ in library.index.top(query, min(most, self.results)))
        return [{"document": path, "line": line, "text": text} for path, line, text in found]

    @tool(inline=True, read_only=True)
    def read_document(self, document: Annotated[str, Field(max_length=400)], line: Annotated[int, Field(ge=1)] = 1) -> str:
        """A document's text from a line on.

        Args:
            document: as a search gives it, such as guide/setup.md
            line: the first line
        """
        texts = _library(self.folder, self.passage).texts
        if document not in texts:
            raise ToolError(f"no document {document[:200]!r}{hint_text(document, texts)}")
        lines = texts[document].splitlines(keepends=True)
        if line > max(len(lines), 1):
            raise ToolError(f"{document!r} has {len(lines)} lines")
        text = "".join(lines[line - 1 :])
        if len(text) <= self.shown:
            return text
        if self.shown < len(lines[line - 1]):  # continuing at this line would show the same again
            said = f"line {line} has {len(lines[line - 1])} characters; only its first {self.shown} are shown"
            return f"{text[: self.shown]}\n({said}{f', go on at line {line + 1}' if line < len(lines) else ''})"
        return f"{text[: self.shown]}\n(cut; go on at line {line + text[: self.shown].count(chr(10))})"


@lru_cache(maxsize=16)
def _library(folder: str, passage: int) -> Library:
    """Read and index a folder, once per process."""
    root = Path(folder)
    paths = sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file() and not path.is_symlink())
    if not paths:
        raise ConfigError(f"tools.args.retrieval.folder = {folder!r}: no documents there ({', '.join(_SUFFIXES)})")
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8", errors="replace") for path in paths}
    passages = tuple((name, line, part) for name, text in texts.items() for line, part in _passages(text, passage))
    return Library(texts, passages, Bm25([f"{name} {text}" for name, _, text in passages]))


def _passages(text: str, size: int) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of passages that end at the first empty line after `size` characters, or at twice that."""
    held, start = "", 1
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        for at in range(0, len(line), 2 * size):  # a line may be as long as the file
            if not held.strip():
                held, start = "", number
            held += line[at : at + 2 * size]
            if len(held) >= 2 * size or (len(held) >= size and not line.strip()):
                yield start, held.strip()
                held = ""
    if held.strip():
        yield start, held.strip()
