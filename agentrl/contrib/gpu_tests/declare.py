"""Test files: find them, read what they declare, remember earlier runs, place temporary files."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from agentrl.contrib.gpu_tests.verdict import FileResult
from agentrl.utils.errors import ConfigError, ResourceError, RunFolderError, UserError, did_you_mean, hint_text
from agentrl.utils.files import atomic_write, shown_path
from agentrl.utils.parsing import module_of

PATTERNS = ("test_*.py", "*_test.py")
SKIPPED = (".*", "build", "dist", "node_modules", "venv", "__pycache__", "*.egg")
"""Folders that are not searched, unless they are named. Patterns and these are pytest's defaults."""


def find_files(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Each file, and what pytest gets of it: the file, or the tests named by `FILE::TEST`. Without words: the folder `tests`.

    Raises UserError for a path that is not there, and if there is no test file at all.
    """
    found: dict[str, list[str]] = {}
    for word in words or ["tests"]:
        path, colons, test = word.partition("::")
        for file in _files(Path(path)):
            found.setdefault(file, []).append(f"{file}{colons}{test}")
    if not found:
        raise UserError(f"no test file ({' or '.join(PATTERNS)}) in {', '.join(words) or 'tests'}")
    # A file that is named as a whole is run as a whole.
    return {file: (file,) if file in targets else tuple(dict.fromkeys(targets)) for file, targets in found.items()}


def _files(path: Path) -> Iterator[str]:
    if path.is_file():
        yield shown_path(path.resolve())
    elif path.is_dir():
        yield from (shown_path(file.resolve()) for file in _below(path))
    else:
        near = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path}: there is no such file or folder; {did_you_mean(str(path), near, 'name test files or folders')}")


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if not any(fnmatch(path.name, pattern) for pattern in SKIPPED):
                yield from _below(path)
        elif any(fnmatch(path.name, pattern) for pattern in PATTERNS):
            yield path


HOW = "write it once, at the top level of the file, as `pytestmark = pytest.mark.gpus(2)`"


@dataclass(frozen=True)
class Declaration:
    """`gpus`: cards needed, 0 without a mark. `timeout`: seconds for the whole file, None: the run's. `tests`: its functions
    and methods called `test*`, as pytest names them, without parameters."""

    gpus: int = 0
    timeout: float | None = None
    tests: tuple[str, ...] = ()


def read_declaration(path: Path, shown: str | None = None) -> Declaration:
    """Read the mark `gpus` of a file: `pytestmark = pytest.mark.gpus(N)`, also in a list or tuple of marks. N is a whole number
    or the name of one that the file assigns at its top level.

    Raises ConfigError with file (`shown`, by default the path) and line if the file is no Python, if the mark is anywhere else,
    twice, or has an argument that cannot be read.
    """
    shown = shown or str(path)
    try:
        tree = module_of(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{shown}{f':{line}' if line else ''}: this is no Python: {error.args[0]}") from error
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from error
    marks = [
        mark for value in _pytestmarks(tree) for mark in (value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value])
    ]
    calls = [mark for mark in marks if isinstance(mark, ast.Call) and _is_mark(mark.func)]
    readable = {id(call.func) for call in calls}
    for node in ast.walk(tree):
        if _is_mark(node) and id(node) not in readable:
            raise ConfigError(f"{shown}:{node.lineno}: cards are given to a file, and this mark gpus cannot be read: {HOW}")  # type: ignore[attr-defined]
    if len(calls) > 1:
        raise ConfigError(f"{shown}:{calls[1].lineno}: a second mark gpus (the first: line {calls[0].lineno}): {HOW}")
    gpus, timeout = _arguments(calls[0], _constants(tree), shown) if calls else (0, None)
    return Declaration(gpus, timeout, tuple(_tests(tree)))


def listed_tests(path: Path) -> tuple[str, ...]:
    """The names of a file's tests, as in `Declaration.tests`, whatever its marks are; none if it is no Python."""
    try:
        return tuple(_tests(module_of(path.read_bytes())))
    except (SyntaxError, ValueError, OSError):
        return ()


def _pytestmarks(tree: ast.Module) -> Iterator[ast.expr]:
    """Value that the file assigns to `pytestmark` at its top level."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets):
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            if node.value is not None:
                yield node.value


def _is_mark(node: ast.AST) -> bool:
    """Return True if it is `pytest.mark.gpus` or `mark.gpus`."""
    if not isinstance(node, ast.Attribute) or node.attr != "gpus":
        return False
    above = node.value
    return (isinstance(above, ast.Attribute) and above.attr == "mark") or (isinstance(above, ast.Name) and above.id == "mark")


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that the file assigns exactly once at its top level."""
    found: dict[str, list[ast.expr]] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                found.setdefault(target.id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _arguments(call: ast.Call, constants: dict[str, ast.expr], shown: str) -> tuple[int, float | None]:
    """The cards and the time limit of a mark."""
    at = f"{shown}:{call.lineno}"
    given: dict[str, ast.expr] = {"count": call.args[0]} if call.args else {}
    if len(call.args) > 1:
        raise ConfigError(f"{at}: gpus takes one number of cards, and `timeout=SECONDS`")
    for keyword in call.keywords:
        if keyword.arg not in ("count", "timeout") or keyword.arg in given:
            raise ConfigError(f"{at}: gpus has no argument {keyword.arg!r}{hint_text(keyword.arg, ['count', 'timeout'])}")
        given[keyword.arg] = keyword.value
    if "count" not in given:
        raise ConfigError(f"{at}: gpus needs a number of cards: {HOW}")
    count = _number(given["count"], constants, at)
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"{at}: gpus needs a whole number of cards, 0 or more, not {count!r}")
    timeout = _number(given["timeout"], constants, at) if "timeout" in given else None
    if timeout is not None and timeout <= 0:
        raise ConfigError(f"{at}: timeout needs seconds, more than 0, not {timeout!r}")
    return count, timeout


def _number(value: ast.expr, constants: dict[str, ast.expr], at: str) -> float:
    source = constants.get(value.id, value) if isinstance(value, ast.Name) else value
    try:
        found = ast.literal_eval(source)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        found = None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        told = f"{ast.unparse(value)!r} cannot be read as a number without importing the file"
        raise ConfigError(
            f"{at}: {told}: write the number, as in `pytest.mark.gpus(2)`, or the name of one assigned once in this file"
        )
    return found


def _tests(tree: ast.Module) -> Iterator[str]:
    """The names of its tests, as far as they can be seen."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test"):
            yield node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner.name.startswith("test"):
                    yield f"{node.name}::{inner.name}"


NAME = "files.json"


@dataclass(frozen=True)
class Earlier:
    """Of one file: the seconds of its last whole run, None if there was none; the tests that have not passed since (`left`),
    None for the file as a whole."""

    seconds: float | None = None
    left: tuple[str, ...] | None = ()


def recall(folder: Path) -> dict[str, Earlier]:
    """Load the facts known about each file. Raises RunFolderError if the record is damaged."""
    path = folder / NAME
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text())
        return {file: Earlier(row["seconds"], None if row["left"] is None else tuple(row["left"])) for file, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{path} is damaged ({error!r}): delete it; lengths and failures of earlier runs are then not known"
        ) from error


def remember(folder: Path, results: Sequence[FileResult]) -> None:
    """Add what a run found out, over what earlier ones did."""
    known = recall(folder)
    for result in results:
        earlier = known.get(result.file, Earlier())
        known[result.file] = Earlier(_seconds(result, earlier), _remaining_marks(result, earlier))
    atomic_write(folder / NAME, json.dumps({file: asdict(one) for file, one in sorted(known.items())}, indent=1))


def _seconds(result: FileResult, earlier: Earlier) -> float | None:
    whole = result.seconds is not None and not result.part and not result.counts["interrupted"] and not result.counts["not run"]
    return result.seconds if whole else earlier.seconds


def _remaining_marks(result: FileResult, earlier: Earlier) -> tuple[str, ...] | None:
    left = [case.name for case in result.cases if case.outcome in ("failed", "interrupted", "not run")]
    if result.problem is not None or (left and not result.collected):
        return None  # names that were read from the file's text may not be pytest's
    if not result.part:
        return tuple(left)
    if earlier.left is None:
        return None
    asked = {case.name for case in result.cases}
    return tuple(dict.fromkeys([*left, *(name for name in earlier.left if name not in asked)]))


def failed_before(found: Mapping[str, tuple[str, ...]], known: Mapping[str, Earlier]) -> dict[str, tuple[str, ...]]:
    """Tests of the found files that did not pass last time. Raises UserError if there is nothing."""
    left = {file: known[file].left for file in found if file in known and known[file].left != ()}
    if not left:
        raise UserError("--failed: nothing of this has failed, was interrupted or was not run when it was last asked for")
    return {file: (file,) if names is None else tuple(f"{file}::{name}" for name in names) for file, names in left.items()}


class FolderLock:
    """Keeps a second scheduler out of the folder with logs and records, as long as the process lives."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError, with who has it, if it is taken."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            told = self._file.read().strip()
            self._file.close()
            raise UserError(
                f"another `agentrl test` uses {folder} ({told}): wait for it, or give this one its own with --out"
            ) from None
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()}")
        self._file.flush()

    def release(self) -> None:
        """Let others in."""
        self._file.close()


NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "afs",
    "glusterfs",
    "pvfs2",
    "virtiofs",
    "fuse",
}
"""File systems whose files are on another machine or may be; so is every `fuse.NAME` but those of LOCAL_FUSE."""
LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.overlayfs", "fuse.ntfs-3g", "fuse.lxcfs"}
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
MOUNTS = Path("/proc/self/mountinfo")


def network_mount(folder: Path, mounts: str) -> str | None:
    """The type of the file system that a folder is on if that is a network's, else None. `mounts`: the text of mountinfo."""
    best, kind = -1, ""
    path = folder.resolve()
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if len(before.split()) < 5 or not after.split():
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        # Of two mounts at one place the later one is on top.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    network = kind in NETWORK or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)
    return kind if network else None


def local_folder(current: Path, mounts: str | None = None, places: Sequence[str] = PLACES) -> tuple[Path, str | None]:
    """`current` if it is local, else the first of `places` that is and can be written to, with the type of the network mount.

    Raises ResourceError without one.
    """
    mounts = MOUNTS.read_text(errors="replace") if mounts is None else mounts
    kind = network_mount(current, mounts)
    if kind is None:
        return current, None
    for place in map(Path, places):
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK) and network_mount(place, mounts) is None:
            return place, kind
    raise ResourceError(
        f"temporary files would be in {current}, on a network mount ({kind}); none of {', '.join(places)} is local: set TMPDIR"
    )
