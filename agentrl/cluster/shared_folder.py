"""Folders that the driver and a group's processes must share: proven with files, never assumed because the paths are equal.

before a run    `check_shared`: each side writes a token and looks for the other's
after a save    `check_arrived`: the driver has every file that a process of the group sees

NFS may answer from its cache for some seconds. Opening a folder makes a client ask the server again, so every look here
lists the folder again.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.cluster.group import WorkerGroup
from agentrl.errors import CheckpointError, ConfigError
from agentrl.executors import in_thread

PATIENCE = 5.0
"""Seconds until what another machine wrote must be seen."""
POLL = 0.05
_PREFIX = ".agentrl-shared-"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a process sees of a folder: relative path -> bytes. `place`: its machine."""

    place: str
    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """A process's answer to a token: the name of the file that it wrote, or what is wrong with the folder there."""

    place: str
    file: str
    fault: str = ""


def this_place() -> str:
    """Host name of this machine, and its address in the cluster if it is part of one."""
    name = socket.gethostname()
    # Not imported: if nobody else has, this process is no part of a cluster.
    ray = sys.modules.get("ray")
    return f"{name} ({ray.util.get_node_ip_address()})" if ray is not None and ray.is_initialized() else name


async def check_shared(group: WorkerGroup[Any], folder: Path, key: str) -> None:
    """Raise ConfigError if a process of `group` and the driver do not read each other's files in `folder`.

    `key`: the config key that sets the folder. It may take PATIENCE seconds to find out that a file is missing.
    """
    token = _PREFIX + secrets.token_hex(8)
    try:
        # Both ways: two machines may each have a folder of that path, or one may mount it read-only.
        (folder / token).write_text(token)
        answers: list[TokenAnswer] = await group.in_processes(answer_token, str(folder), token, PATIENCE)
        for rank, found in enumerate(answers):
            fault = found.fault or await in_thread("files", _missing_answer, folder, found.file)
            if fault:
                raise ConfigError(
                    f"{key}: rank {rank} of the group {group.name!r}, on {found.place}, and this process, on {this_place()}, do "
                    f"not share the folder {folder}: {fault}. Set {key} to a folder that all nodes mount at the same path"
                )
    finally:
        # By the token, so that all answers go too, and no other run's files.
        for left in folder.glob(f"{token}*"):
            left.unlink(missing_ok=True)


def answer_token(folder: str, token: str, patience: float) -> TokenAnswer:
    """In a process of the group: look for the driver's token, and write a file of its own beside it."""
    # A random name: with one name for all ranks, a single one that shares the folder would answer for the others.
    place, own = this_place(), f"{token}-{secrets.token_hex(8)}"
    if not seen_in_time(lambda: token in _names(Path(folder)), patience):
        return TokenAnswer(place, own, "the group's process does not see the file that this one wrote")
    try:
        (Path(folder) / own).write_text(token)
    except OSError as problem:
        return TokenAnswer(place, own, f"the group's process cannot write there ({problem})")
    return TokenAnswer(place, own)


async def check_arrived(group: WorkerGroup[Any], folder: Path, what: str) -> None:
    """Raise CheckpointError if a process of `group` sees a file in `folder` that the driver does not, or another size of it:
    then it wrote to a disk of its own. `what`: what was written, for the message."""
    for rank, seen in enumerate(await group.in_processes(files_in, str(folder))):
        missing = await in_thread("files", _not_arrived, folder, seen.files)
        if missing:
            raise CheckpointError(
                f"{what}: {missing[0]} ({len(missing)} of {len(seen.files)} files), which rank {rank} of the group "
                f"{group.name!r} has on {seen.place}, is not in {folder} on {this_place()}: all nodes must share that folder "
                "(set out to one that they mount at the same path)"
            )


def files_in(folder: str) -> Seen:
    """The files below a folder as this process sees them; none if the folder is missing."""
    return Seen(this_place(), _sizes(Path(folder)))


def seen_in_time(look: Callable[[], bool], patience: float) -> bool:
    """Whether `look` is true within `patience` seconds."""
    deadline = time.monotonic() + patience
    while not look():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL)
    return True


def _missing_answer(folder: Path, name: str) -> str:
    arrived = seen_in_time(lambda: name in _names(folder), PATIENCE)
    return "" if arrived else "this process does not see the file that the group's process wrote"


def _not_arrived(folder: Path, files: dict[str, int]) -> list[str]:
    """Those of `files` that are not in `folder` with their sizes in time."""

    def missing() -> list[str]:
        here = _sizes(folder)
        # Sizes too: a name may be there before all of its bytes are.
        return sorted(name for name, size in files.items() if here.get(name) != size)

    return [] if seen_in_time(lambda: not missing(), PATIENCE) else missing()


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:  # not there, or not yet
        return set()


def _sizes(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        try:
            with path.open("rb") as file:  # opening asks the server, which a stat of a cached entry does not
                sizes[str(path.relative_to(folder))] = os.fstat(file.fileno()).st_size
        except OSError:  # a folder, or a temporary file that is gone again
            continue
    return sizes
