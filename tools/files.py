"""Text files in a separate in-memory folder per episode. No path leads out of it, and nothing has to be cleaned up."""

from __future__ import annotations

import base64
import os
import posixpath
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agentrl.data.trajectory import Json
from agentrl.env import ToolSet, tool
from agentrl.utils.errors import ConfigError, ToolError
from agentrl.utils.threads import by_size

Place = Annotated[str, Field(min_length=1, max_length=400)]
_DEEPEST = 16
_HITS = 50  # lines per search result


class Files(ToolSet):
    """Files by path. A subclass may store them elsewhere by overriding `load`, `store`, `paths` and `drop`."""

    name = "files"

    def __init__(
        self,
        *,
        folder: str | None = None,
        file_bytes: Annotated[int, Field(ge=1)] = 1 << 20,
        total_bytes: Annotated[int, Field(ge=1)] = 8 << 20,
        most: Annotated[int, Field(ge=1)] = 1000,
    ) -> None:
        """Each episode begins with the files below `folder` (links in it are left out), and may hold `most` files of at most
        `file_bytes` each and `total_bytes` together. Raises ConfigError if there is no such folder or it holds more."""
        self.file_bytes, self.total_bytes, self.most = file_bytes, total_bytes, most
        self.files: dict[str, bytes] = dict(_below(folder)) if folder is not None else {}
        if problem := self.over(map(len, self.files.values())):
            raise ConfigError(f"tools.args.{self.name}.folder = {folder!r}: {problem}")

    def state(self) -> Json:
        """Return texts by path; a binary file is "base64:" and its bytes in base64."""
        return {path: _shown(content) for path, content in sorted(self.files.items())}

    # -- storage -------------------------------------------------------------------------------------

    async def load(self, path: str) -> bytes:
        """Return a file's content. Raises ToolError if it does not exist."""
        if path not in self.files:
            raise ToolError(f"no file {path!r}")
        return self.files[path]

    async def store(self, path: str, content: bytes) -> None:
        """Write a whole file. Raises ToolError if the path is blocked or a limit is exceeded."""
        parents = [path[:at] for at, letter in enumerate(path) if letter == "/"]
        if any(parent in self.files for parent in parents) or any(other.startswith(f"{path}/") for other in self.files):
            raise ToolError(f"{path!r}: a file has the name of a folder")
        if problem := self.over([len(content), *(len(other) for name, other in self.files.items() if name != path)]):
            raise ToolError(f"{path!r} is not written: {problem}")
        self.files[path] = content

    async def paths(self) -> dict[str, int]:
        """Return the size of every file in bytes, by path."""
        return {path: len(content) for path, content in self.files.items()}

    async def drop(self, path: str) -> None:
        """Remove a file. Raises ToolError if it does not exist."""
        if self.files.pop(path, None) is None:
            raise ToolError(f"no file {path!r}")

    def over(self, lengths: Iterable[int]) -> str:
        """Describe the limit that files of these sizes exceed; "" if none."""
        sizes = list(lengths)
        if len(sizes) > self.most:
            return f"{len(sizes)} files, and {self.most} are allowed"
        if max(sizes, default=0) > self.file_bytes:
            return f"a file of {max(sizes)} bytes, and {self.file_bytes} are allowed"
        return f"{sum(sizes)} bytes in all, and {self.total_bytes} are allowed" if sum(sizes) > self.total_bytes else ""

    # -- tools ---------------------------------------------------------------------------------------

    @tool(read_only=True)
    async def list_files(self, folder: str = ".") -> str:
        """The files below a folder, with their sizes in bytes.

        Args:
            folder: such as src; left out, all files
        """
        under = inside(folder)
        found = {path: size for path, size in (await self.paths()).items() if under in ("", path) or path.startswith(f"{under}/")}
        if not found and under:
            raise ToolError(f"no folder {folder[:200]!r}")
        return "\n".join(f"{path} {size}" for path, size in sorted(found.items())) or "(no files)"

    @tool(read_only=True)
    async def read_file(
        self, path: Place, start: Annotated[int, Field(ge=1)] = 1, lines: Annotated[int, Field(ge=1, le=2000)] = 200
    ) -> str:
        """Lines of a text file.

        Args:
            path: such as src/main.py
            start: the first line
            lines: how many at most
        """
        found = _text(path, await self.load(inside(path, file=True))).splitlines(keepends=True)
        if start > max(len(found), 1):
            raise ToolError(f"{path!r} has {len(found)} lines")
        shown, rest = found[start - 1 : start - 1 + lines], len(found) - (start - 1 + lines)
        return "".join(shown) + (f"\n({rest} more lines)" if rest > 0 else "")

    @tool(parallel=False)
    async def write_file(self, path: Place, text: str) -> str:
        """Create a text file, or replace one, with the folders that it needs.

        Args:
            path: such as src/main.py
            text: the whole file
        """
        content = text.encode("utf-8", "replace")
        await self.store(inside(path, file=True), content)
        return f"{len(content)} bytes written"

    @tool(parallel=False)
    async def edit_file(self, path: Place, old: Annotated[str, Field(min_length=1)], new: str) -> str:
        """Replace a piece of a text file that occurs in it exactly once.

        Args:
            path: such as src/main.py
            old: the piece, with enough around it to occur once
            new: what takes its place
        """
        place = inside(path, file=True)
        text = _text(path, await self.load(place))
        if (times := text.count(old)) != 1:
            raise ToolError(f"the piece occurs {times} times in {path!r}; it must occur once")
        await self.store(place, text.replace(old, new).encode("utf-8", "replace"))
        return "replaced"

    @tool(read_only=True)
    async def search_files(self, text: Annotated[str, Field(min_length=1, max_length=400)], folder: str = ".") -> str:
        """The lines that hold a text, whatever its case: path, line number, line.

        Args:
            text: as it stands in the file; no pattern
            folder: where to look; left out, in all files
        """
        under = inside(folder)
        within = sorted(path for path in await self.paths() if under in ("", path) or path.startswith(f"{under}/"))
        contents = {path: await self.load(path) for path in within}
        return await by_size(sum(map(len, contents.values())), _found, text.casefold(), contents)

    @tool(parallel=False)
    async def delete_file(self, path: Place) -> str:
        """Delete a file.

        Args:
            path: such as src/main.py
        """
        await self.drop(inside(path, file=True))
        return "deleted"


def inside(path: str, file: bool = False) -> str:
    """Normalize a path relative to the folder's root (""). Raises ToolError for an invalid path or one that leaves the root."""
    clean = posixpath.normpath(path.strip() or ".")
    parts = clean.split("/")
    if ".." in parts or clean.startswith("/"):
        raise ToolError(f"{path[:200]!r} leads out of the folder; paths begin in it, such as src/main.py")
    if "\0" in path or len(parts) > _DEEPEST or any(len(part.encode("utf-8", "replace")) > 255 for part in parts):
        raise ToolError(f"{path[:200]!r} is not a path")
    if file and clean == ".":
        raise ToolError(f"{path[:200]!r} is not the path of a file")
    return "" if clean == "." else clean


def _found(text: str, contents: Mapping[str, bytes]) -> str:
    shown, more = list[str](), 0
    for path, content in contents.items():
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
            if text in line.casefold():
                if len(shown) < _HITS:
                    shown.append(f"{path}:{number}: {line[:200]}")
                else:
                    more += 1
    return "\n".join(shown) + (f"\n({more} more)" if more else "") if shown else "(not found)"


def _text(path: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ToolError(f"{path!r} is not text: {len(content)} bytes") from None


def _shown(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(content).decode()}"


@lru_cache(maxsize=64)
def _below(folder: str) -> Mapping[str, bytes]:
    """Read the regular files below a folder, once per process. Raises ConfigError if the folder does not exist."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"tools.args: folder = {folder!r}: no such folder (from {Path.cwd()})")
    below = (Path(here) / name for here, _, names in os.walk(root) for name in names)
    plain = (path for path in below if path.is_file() and not path.is_symlink())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in plain}
