"""What this machine's kernel and programs let the sandboxes do: the facts behind `agentrl doctor` and a refusal."""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache

from agentrl.errors import ResourceError
from agentrl.sandbox import bubblewrap
from agentrl.sandbox.local import require_kernel

LACKS = {
    2: "files cannot be moved between folders",
    3: "truncate by path is refused",
    4: "TCP is forbidden by the system-call filter alone",
    6: "a command's processes cannot signal each other",
}
"""What commands of the local sandbox do without, by the version of Landlock that brings it (docs/sandboxes.md)."""


@dataclass(frozen=True, slots=True)
class Reach:
    """`landlock`: its version, 0 without it. `local`, `bubblewrap`: None if that sandbox keeps here what docs/sandboxes.md says,
    else why not."""

    kernel: str
    landlock: int
    local: str | None
    bubblewrap: str | None

    def said(self) -> str:
        """All of it as a sentence."""
        lacks = "; ".join(what for version, what in LACKS.items() if self.landlock < version)
        local = f"local works{f' ({lacks})' if lacks else ''}" if self.local is None else "local is refused"
        inside = (
            f"bubblewrap works (namespaces: {NAMESPACES})" if self.bubblewrap is None else f"no bubblewrap: {self.bubblewrap}"
        )
        return f"Linux {self.kernel}, {f'Landlock {self.landlock}' if self.landlock else 'no Landlock'}; {local}; {inside}"


NAMESPACES = "user, mount, pid, ipc, net, uts, cgroup"


@cache
def reach() -> Reach:
    """Of this machine; asked once."""
    version = 0
    if sys.platform.startswith("linux"):
        version = max(int(ctypes.CDLL(None).syscall(444, None, 0, 1)), 0)  # landlock_create_ruleset, version query
    local = None
    try:
        require_kernel(True)
    except ResourceError as problem:
        local = str(problem)
    return Reach(platform.release(), version, local, bubblewrap.unavailable())
