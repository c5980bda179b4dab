"""Repositories of models, data sets and environments in a folder: one name with its revisions, in the layout of the hub's cache.

    SHARE/models/NAME/refs/main                    the newest revision
    SHARE/models/NAME/snapshots/REVISION/...       its files, README.md and checksums.json among them
    SHARE/datasets/NAME/...    SHARE/environments/NAME/...

A revision is the digest of checksums.json, hence of all content: equal content is one revision, whoever pushes it. A snapshot
appears under its name when it is whole, and `refs/main` is replaced after that, so that readers find the old one or the new one.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl.errors import RepositoryError
from agentrl.files import atomic_write, file_sha256, full_disk_said, open_plain, read_plain
from agentrl.plain_data import json_text, read_json
from agentrl.redaction import known, redact_said
from agentrl.train.seal import sync_folder

SUMS = "checksums.json"
KINDS = ("models", "datasets", "environments")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")
_REVISION = re.compile(r"[0-9a-f]{40}")
_UNFIT = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_CHUNK = 1 << 22
_LEFT = 7 * 86400
"""Seconds after which what a push on another machine has not finished is taken for left there."""


def repository(share: str | Path, kind: str, name: str) -> Path:
    """Its folder. Raises RepositoryError for a name that could be anywhere else."""
    if not _NAME.fullmatch(name) or ".." in name or name.rpartition("/")[2] in ("snapshots", "refs"):
        raise RepositoryError(
            f"--name {name!r}: expected letters, digits, '.', '_' and '-', and at most one '/': my-model, me/my-model; "
            "'snapshots' and 'refs' are parts of a repository"
        )
    return Path(share) / kind / name


def kind_of(folder: Path) -> str:
    """What a folder holds, by its files. Raises RepositoryError."""
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return "models"
    if (folder / "env.py").is_file():
        return "environments"
    if any(path.suffix in (".jsonl", ".parquet", ".arrow") for path in folder.rglob("*")):
        return "datasets"
    raise RepositoryError(
        f"{folder}: neither a run (config.toml), a model (config.json, *.safetensors), an adapter (adapter_config.json), an "
        "environment (env.py) nor data (*.jsonl, *.parquet)"
    )


def files_of(folder: Path, kind: str) -> Iterator[Path]:
    """The files to push, relative to the folder, in order: not what begins with a dot, and no __pycache__. Raises
    RepositoryError for links, for weights as pickles, which run code when they are loaded, and for a folder without any."""
    found = False
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts) or str(relative) == SUMS:
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise RepositoryError(f"{path}: a link, pipe or device; push plain files")
        if kind == "models" and path.suffix in _UNFIT:
            raise RepositoryError(f"{path}: weights as a pickle, which can run code; only safetensors are pushed")
        if path.is_file():
            found = True
            yield relative
    if not found:
        raise RepositoryError(f"{folder}: there is no file to push")


def check_weights(folder: Path, files: Collection[Path]) -> None:
    """Raises RepositoryError for a model's or adapter's folder without its weights, or with some of them missing."""
    adapter = Path("adapter_config.json") in files
    whole = "adapter_model.safetensors" if adapter else "model.safetensors"
    if Path(whole) in files:
        return
    index = Path(f"{whole}.index.json")
    if index not in files:
        raise RepositoryError(f"{folder}: it has no weights ({whole}, or shards with {index})")
    try:
        shards = set(map(str, read_json(read_plain(folder / index))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise RepositoryError(f"{folder / index}: cannot be read: {problem}") from None
    if missing := sorted(shards - set(map(str, files))):
        raise RepositoryError(
            f"{folder}: it lacks {missing[0]}, which {index} lists ({len(missing)} of {len(shards)} are missing)"
        )


def check_secrets(folder: Path, files: list[Path]) -> None:
    """Raises RepositoryError, naming file and line, if a file holds a secret that this process knows, or what looks like one."""
    here = [secret.encode("utf-8", "surrogateescape") for secret in known()]
    for relative in files:
        path = folder / relative
        if path.suffix == ".safetensors":
            continue
        with open_plain(path) as file:
            plain = b"\0" not in file.read(_CHUNK)  # whatever its name (a notebook, a page)
            file.seek(0)
            for number, line in enumerate(file, start=1):
                text = plain and line.decode("utf-8", "replace")
                if any(secret in line for secret in here) or (text and redact_said(text) != text):
                    where = f"{path}:{number}" if plain else str(path)
                    raise RepositoryError(
                        f"{where}: holds what is, or looks like, a key or password; take it out before you push"
                    )


def publish(staged: Path, repo: Path) -> tuple[str, bool]:
    """Make a folder of the repository's (`staging`) its newest revision: the revision, and whether it is new there."""
    sums = {str(path): _said(staged / path) for path in _all(staged)}
    text = json_text({"files": sums})
    revision = hashlib.sha256(text.encode()).hexdigest()[:40]
    atomic_write(staged / SUMS, text)
    place = repo / "snapshots" / revision
    for folder in [staged, *(path for path in staged.rglob("*") if path.is_dir())]:
        sync_folder(folder)
    new = not place.exists()
    if new:
        with suppress(OSError):  # somebody else published the same meanwhile
            staged.rename(place)
            sync_folder(place.parent)
    check_snapshot(place, revision)
    (repo / "refs").mkdir(exist_ok=True)
    if not (repo / "refs/main").is_file() or read_plain(repo / "refs/main") != revision:
        atomic_write(repo / "refs/main", revision)
    return revision, new


def staging(repo: Path) -> Path:
    """A new folder beside the snapshots, which nobody takes for one; what a push that died left there goes.

    Other machines push to the same share, where the numbers of processes say nothing of this one's.
    """
    snapshots, host = repo / "snapshots", socket.gethostname()
    snapshots.mkdir(parents=True, exist_ok=True)
    for left in snapshots.glob(".new.*"):
        of, _, pid = left.name.removeprefix(".new.").rpartition("-")[0].rpartition("-")
        dead = of == host and not Path(f"/proc/{pid}").exists()
        with suppress(OSError):
            if dead or time.time() - left.stat().st_mtime > _LEFT:
                shutil.rmtree(left, ignore_errors=True)
    made = snapshots / f".new.{host}-{os.getpid()}-{secrets.token_hex(4)}"
    made.mkdir()  # not by tempfile: others of the share are to read it
    return made


def revision_of(repo: Path, wanted: str | None) -> str:
    """The newest revision, or the one that begins with `wanted`. Raises RepositoryError, naming those there are."""
    there = sorted(path.name for path in (repo / "snapshots").glob("*") if _REVISION.fullmatch(path.name))
    if not there:
        raise RepositoryError(f"{repo}: no repository (it has no snapshots/); expected SHARE/models/NAME or the like")
    if wanted is None:
        try:
            wanted = read_plain(repo / "refs/main").strip()
        except (OSError, ValueError):
            raise RepositoryError(f"{repo}/refs/main: cannot be read; --revision is one of {', '.join(there[:8])}") from None
    found = [name for name in there if name.startswith(wanted)]
    if len(found) != 1 or len(wanted) < 4:
        raise RepositoryError(f"{repo}: no revision {wanted!r}; there are {', '.join(there[:8])}")
    return found[0]


def read_sums(place: Path, revision: str) -> dict[str, dict[str, Any]]:
    """The files of a snapshot with sizes and digests. Raises RepositoryError if the list is not the revision's, or names a file
    outside of the snapshot."""
    try:
        text = read_plain(place / SUMS)
        files: dict[str, dict[str, Any]] = read_json(text)["files"]
        whole = all(isinstance(said["size"], int) and isinstance(said["sha256"], str) for said in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise RepositoryError(f"{place / SUMS}: cannot be read: {problem}") from None
    if not whole or hashlib.sha256(text.encode()).hexdigest()[:40] != revision:
        raise RepositoryError(f"{place / SUMS}: not the list of revision {revision}: it was changed after it was pushed")
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
            raise RepositoryError(f"{place / SUMS}: {name!r} leads out of the folder")
    return files


def check_snapshot(place: Path, revision: str) -> None:
    """Raises RepositoryError, naming the first file that is not as it was pushed."""
    for name, said in read_sums(place, revision).items():
        if not _is(place / name, said):
            raise RepositoryError(f"{place / name}: missing, or not as it was pushed (SHA-256 differs)")


def copy_snapshot(place: Path, revision: str, target: Path) -> bool:
    """The files of a snapshot in `target`, each verified; False if they were there already. What a copy that was cut short has
    whole is not copied again. Raises RepositoryError if something else is at `target`, or a file is not as it was pushed."""
    files = read_sums(place, revision)
    if os.path.lexists(target):
        if target.is_dir() and (target / SUMS).is_file() and read_plain(target / SUMS) == read_plain(place / SUMS):
            check_snapshot(target, revision)
            return False
        if not (target.is_dir() and not any(target.iterdir())):
            raise RepositoryError(f"{target}: already exists, with other content; give a path that does not exist")
        target.rmdir()
    partial = target.parent / f".{target.name}.{revision[:12]}"
    with full_disk_said(target, "repeat the command, which goes on with what it has"):
        for name, said in files.items():
            _copy(place, name, partial / name, said)
        for left in [path for path in partial.rglob("*") if path.is_file() and str(path.relative_to(partial)) not in files]:
            left.unlink()
        atomic_write(partial / SUMS, read_plain(place / SUMS))
        partial.rename(target)
        sync_folder(target.parent)
    return True


def _copy(place: Path, name: str, to: Path, said: dict[str, Any]) -> None:
    source = place / name
    if any(path.is_symlink() for path in (source, *list(source.parents)[: len(PurePosixPath(name).parts) - 1])):
        raise RepositoryError(f"{source}: a link, which may lead out of the folder")
    if _is(to, said):
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    aside, digest = to.with_name(f"{to.name}.part"), hashlib.sha256()
    try:
        with open_plain(source) as file, aside.open("wb") as out:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except FileNotFoundError:
        raise RepositoryError(f"{source}: is missing, and checksums.json lists it") from None
    if digest.hexdigest() != said["sha256"]:
        aside.unlink()
        raise RepositoryError(f"{source}: not as it was pushed (SHA-256 differs); nothing was pulled")
    aside.rename(to)


def _all(folder: Path) -> list[PurePosixPath]:
    return [
        PurePosixPath(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / SUMS
    ]


def _said(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": file_sha256(path)}


def _is(path: Path, said: dict[str, Any]) -> bool:
    try:
        return not path.is_symlink() and path.stat().st_size == said["size"] and file_sha256(path) == said["sha256"]
    except OSError:
        return False
