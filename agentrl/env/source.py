"""Where a suite's source is on this machine: a benchmark's checkout or package, and the record of its installation.

`agentrl env install` writes a record to the user's folder: source, version, counts, and size, time and sha256 of the files that
tasks and checkers come from. An environment reads the benchmark in place; nothing of it is copied.
"""

from __future__ import annotations

import json
import os
import platform
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.files import atomic_write, file_sha256
from agentrl.plain_data import read_json
from agentrl.shelves import user_folder

SOURCES = "AGENTRL_SOURCES"
"""Set on the workers of a cluster: the sources that the driver has records of, as JSON, by suite."""
_LEFT_OUT = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True)
class SourceFile:
    """A file as it was at the installation: bytes, modification time in ns, sha256."""

    size: int
    modified: int
    sha256: str


@dataclass(frozen=True)
class InstallRecord:
    """What `agentrl env install` wrote. `source`: the folder; `files`: by path relative to it; `tasks`: counts by environment id,
    split and family; `installed`: the date."""

    suite: str
    source: str
    version: str
    installed: str
    files: dict[str, SourceFile] = field(repr=False)
    tasks: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)

    def changes(self, patterns: Iterable[str]) -> list[str]:
        """What is other now than at the installation, of the files that the patterns name, in words: "data/tasks.json was
        changed"; empty if nothing is."""
        now = {str(path.relative_to(self.source)) for path in _matching(Path(self.source), patterns)}
        found = [f"{name} is new" for name in sorted(now - set(self.files))]
        for name, old in self.files.items():
            path = Path(self.source) / name
            if not path.is_file():
                found.append(f"{name} is gone")
                continue
            stat = path.stat()
            if (stat.st_size, stat.st_mtime_ns) != (old.size, old.modified) and file_of(path).sha256 != old.sha256:
                found.append(f"{name} was changed")
        return found


def record_file(suite: str) -> Path:
    """Where the record of a suite is, or would be."""
    return user_folder() / "suites" / f"{suite}.json"


def read_record(suite: str) -> InstallRecord | None:
    """The record of a suite's installation; None if it is not installed. Raises ConfigError for a damaged one."""
    file = record_file(suite)
    try:
        stat = file.stat()
    except OSError:
        return None
    return _read_record(suite, file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)  # an environment asks for each episode
def _read_record(suite: str, file: Path, modified: int, size: int) -> InstallRecord:
    """The record in a file as it was at that time."""
    try:
        raw: dict[str, Any] = read_json(file.read_text(encoding="utf-8"))
        return InstallRecord(**{**raw, "files": {name: SourceFile(**one) for name, one in raw["files"].items()}})
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ConfigError(f"{file}: not a record of `agentrl env install` ({problem}); install {suite} again") from None


def write_record(record: InstallRecord) -> Path:
    """Write a suite's record, in place of an older one; returns its path."""
    file = record_file(record.suite)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, json.dumps(asdict(record), indent=1) + "\n")
    return file


def recorded_sources() -> dict[str, str]:
    """The source of every installed suite, for the workers of a cluster; those of the driver, if this process is a worker's."""
    folder = user_folder() / "suites"
    records = [read_record(file.stem) for file in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return {**{record.suite: record.source for record in records if record is not None}, **_of_driver()}


def find_source(
    suite: str, given: str | None, module: str | None, own: Path | None = None, *, obtain: str = "", called: str = "params.source"
) -> tuple[Path, str]:
    """The folder of a suite's source, and how it was found: "given", "driver", "installed", "package" or "own". `called`: what
    `given` is in the user's words. Raises ConfigError if there is none, with the commands that help, or if a folder that is named
    does not exist on this machine."""
    if given is not None and not given.strip():
        raise ConfigError(f"{suite}: {called} is empty; expected {_expected(suite, obtain)}")
    record = read_record(suite)
    places: tuple[tuple[str | None, str, str], ...] = (
        (given, "given", called),
        (_of_driver().get(suite), "driver", "the source on the driver's machine"),
        (None if record is None else record.source, "installed", "the source that `agentrl env install` recorded"),
    )
    for place, how, said in places:
        if place is not None:
            return _folder(suite, Path(place).expanduser(), said, _expected(suite, obtain)), how
    if module is not None and (packaged := module_folder(module)) is not None:
        return packaged, "package"
    if own is not None:
        return own, "own"
    raise ConfigError(f"{suite}: its source is not installed. {how_to_install(suite, obtain)}")


def how_to_install(suite: str, obtain: str) -> str:
    """The commands that help if a suite's source is missing."""
    first = f"First `{obtain}`, then" if obtain else "Use"
    return f"{first} `agentrl env install {suite} --from FOLDER` (or set params.source=FOLDER for one run)"


def module_folder(module: str) -> Path | None:
    """The folder of an importable top-level package, which is not imported; None if there is none."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]).resolve() if places else None


def checkout_version(folder: Path) -> str:
    """The commit of a git checkout that a folder is in (its first 12 digits), read without running git; "no version" if it is in
    none."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.is_file():  # of a worktree: "gitdir: PATH", whose refs are two folders above it
            git = place / git.read_text().removeprefix("gitdir:").strip()
        if (git / "HEAD").is_file():
            return _commit(git) or "no version"
    return "no version"


def need(folder: Path, names: Iterable[str]) -> None:
    """Raises ConfigError naming the first of files and folders (relative to `folder`) that is missing."""
    for name in names:
        if not (folder / name).exists():
            raise ConfigError(f"{name} is missing")


def found_version(folder: Path) -> str:
    """The version of a checkout or package: what its `pyproject.toml` says, what is written beside an installed package
    (`NAME-*.dist-info`), else `checkout_version`. Raises ConfigError for a `pyproject.toml` that is none."""
    project = folder / "pyproject.toml"
    if project.is_file():
        try:
            said = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("version")
        except ValueError as problem:
            raise ConfigError(f"pyproject.toml: {problem}") from None
        if said is not None:
            return str(said)
    beside = sorted(folder.parent.glob(f"{folder.name}-*.dist-info"))
    return beside[-1].name.removesuffix(".dist-info").partition("-")[2] if beside else checkout_version(folder)


def _commit(git: Path) -> str:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head[:12]
    name = head.removeprefix("ref:").strip()
    for root in (git, git.parent.parent):
        if (root / name).is_file():
            return (root / name).read_text().strip()[:12]
        packed = (root / "packed-refs").read_text().splitlines() if (root / "packed-refs").is_file() else []
        if found := [line.split()[0] for line in packed if line.endswith(f" {name}")]:
            return found[0][:12]
    return ""


def read_files(folder: Path, patterns: Iterable[str]) -> dict[str, SourceFile]:
    """The files of a folder that one of the glob patterns names, hashed; by relative path, sorted."""
    return {str(path.relative_to(folder)): file_of(path) for path in _matching(folder, patterns)}


def file_of(path: Path) -> SourceFile:
    """A file's size, time and hash."""
    stat = path.stat()
    return SourceFile(stat.st_size, stat.st_mtime_ns, file_sha256(path))


def fingerprint(files: Mapping[str, SourceFile]) -> str:
    """One digest of the files' names and contents."""
    return sha256(json.dumps([[name, one.sha256] for name, one in sorted(files.items())]).encode()).hexdigest()


def _matching(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(found):
        parts = path.relative_to(folder).parts
        if not any(part.startswith(".") or part in _LEFT_OUT for part in parts):
            yield path


def _of_driver() -> dict[str, str]:
    found: dict[str, str] = read_json(os.environ.get(SOURCES) or "{}")
    return found


def _expected(suite: str, obtain: str) -> str:
    return "the folder that holds the benchmark" + (f", which you get by `{obtain}`" if obtain else f" {suite}")


def _folder(suite: str, place: Path, said: str, expected: str) -> Path:
    if not place.is_dir():
        what = "that is a file" if place.is_file() else f"there is no such folder on {platform.node() or 'this machine'}"
        raise ConfigError(
            f"{suite}: {said} is {str(place)!r}, and {what}; expected {expected}. A suite is read in place, so each machine that "
            f"plays it needs it at that path (`agentrl env install {suite} --from FOLDER` records another)"
        )
    return place.resolve()
