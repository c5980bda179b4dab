"""Bubblewrap sandboxes and their system-call filter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path

from agentrl.contrib.sandboxes import jail
from agentrl.contrib.sandboxes.contract import SANDBOXES, End, ExecResult, Run, Sandbox, SandboxSpec
from agentrl.contrib.sandboxes.local import READABLE, FolderProvider, FolderSandbox, own_variables, package_folders
from agentrl.contrib.sandboxes.process_group import STATUS, Watched, run_group
from agentrl.utils.errors import SandboxError
from agentrl.utils.threads import in_thread

# The filter of system calls

REFUSED = (
    "io_uring_setup", "io_uring_enter", "io_uring_register", "open_by_handle_at", "fanotify_init", "syslog", "add_key",
    "request_key", "keyctl", "migrate_pages", "move_pages", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree",
    "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "setns", "unshare", "swapon", "swapoff", "reboot", "init_module",
    "finit_module", "delete_module", "kexec_load", "kexec_file_load", "bpf", "perf_event_open", "userfaultfd", "acct", "quotactl",
    "settimeofday", "clock_settime", "adjtimex",
)  # fmt: skip


@cache
def filter_file() -> int:
    """Return the descriptor of an in-memory file with the filter, for bwrap's `--seccomp`; it stays open in this process."""
    program = jail.opening()
    for name in REFUSED:
        program += jail.reply(jail.DENIED[name], jail.DENY | jail.EPERM)
    program += jail.clone((jail.ANY_BIT, 0, 1, jail.NAMESPACES))
    file = os.memfd_create("agentrl-calls")
    os.write(file, jail.as_bytes(program))
    return file


def with_filter(bwrap: list[str]) -> list[str]:
    """Return a command that runs bwrap with these arguments and the filter, with the status pipe of `run_group`, if any, as
    descriptor 4. The shell reopens the file, because bwrap reads from the current offset of a shared descriptor."""
    opened = f'exec 3</proc/{os.getpid()}/fd/{filter_file()} 4>"${{{STATUS}-/dev/null}}"; unset {STATUS}'
    return ["/bin/sh", "-c", f'{opened}; exec bwrap --seccomp 3 "$@"', "sh", *bwrap]


# The bubblewrap provider

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt", "etc", "proc", "dev", "sys")
HOME = "/root"
CONFINED = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox")
"""Flags of bwrap for every sandboxed command."""
MASKED = ("kcore", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "sched_debug", "timer_list")
"""Files of /proc about the whole machine, mostly readable by root alone, which a namespace does not hide."""
SHARED_MEMORY = 64 << 20
"""Bytes of /dev/shm for each command, freed when it ends; no limit on files or processes counts this memory."""


class BubblewrapSandbox(FolderSandbox):
    """Run each command in a process namespace of its own, which ends with the command."""

    packages = False

    async def execute(self, run: Run) -> ExecResult:
        # A shell sets hard limits for each process of the command, which the command cannot raise.
        memory, size = self.spec.memory, self.spec.file_size
        limits = {"-c": 0, "-v": memory and memory >> 10, "-f": size and -(-size // 512), "-t": self.spec.cpu_s}
        lines = [f"ulimit {flag} {value};" for flag, value in limits.items() if value is not None]
        # A byte in the status pipe, which is then closed: without it the sandbox failed, whatever a command prints.
        limited = ["/bin/sh", "-c", f'{" ".join(lines)} echo + >&4; exec 4>&- "$@"', "sh", *run.argv]
        started = with_filter([*self._flags(run), "--", *limited])
        async with self._turn:
            watched = await self.watched(run.timeout, run.max_output)
            ended = await run_group(started, run.stdin, watched, env={"PATH": os.defpath}, merge=run.merge, status="variable")
        if not ended.status.startswith(b"+"):
            said = (ended.stderr or ended.stdout).decode(errors="replace")
            if "execvp" in said or "Can't chdir" in said:
                return ExecResult(127, "", said, ended.seconds, "error", ended.cut)
            raise SandboxError(f"bubblewrap did not start ({ended.end}): {said.strip()[-300:]}")
        return ended.result(ending(ended.end, ended.code, self.spec))

    async def write(self, files: Mapping[str, bytes]) -> None:
        for path in files:
            if (place := self.spec.place(path)) in ("/tmp", HOME) or place.split("/")[1] in SYSTEM:
                raise FileExistsError(f"{path}: a folder of every command's, or of this machine's, which is read-only")
        await super().write(files)

    async def watched(self, timeout: float, max_output: int) -> Watched:
        return replace(await super().watched(timeout, max_output), pids=self.spec.pids, crowded=Crowd())

    def _flags(self, run: Run) -> Iterator[str]:
        share = ["--share-net"] if self.spec.network == "all" else []
        yield from [*CONFINED[:1], *share, *CONFINED[1:]]
        yield from _no_more_namespaces()
        yield from _machine(self.packages)
        # Bind top-level folders that hold written files; all else is lost with the command's temporary root.
        self.host("")
        tops = {entry.name for entry in os.scandir(self.folder.root) if entry.is_dir(follow_symlinks=False)}
        for top in sorted({*tops, "tmp", HOME.lstrip("/"), self.spec.place("").split("/")[1]} - {""}):
            (self.folder.root / top).mkdir(exist_ok=True)
            yield from ["--bind", str(self.folder.root / top), f"/{top}"]
        yield from ["--remount-ro", "/", "--chdir", run.cwd, "--clearenv"]
        for name, value in {**own_variables(HOME), **run.env}.items():
            yield from ["--setenv", name, value]


@SANDBOXES.register("bubblewrap")
class BubblewrapProvider(FolderProvider):
    """Run commands in bubblewrap; needs `bwrap` and a kernel that allows namespaces. `packages`: as for `local`."""

    name = "bubblewrap"

    def __init__(self, *, packages: bool = False) -> None:
        self.packages = packages

    def unavailable(self) -> str | None:
        return unavailable()

    def check(self, spec: SandboxSpec) -> None:
        need = 'needs a container; use provider = "docker" or "podman"'
        self.refuse(spec, image=need, build=need, cpus="bubblewrap cannot limit processors; leave it out")
        self.refuse(spec, processes="bubblewrap does not forbid processes; use the local provider")

    async def start(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        self.check(spec)
        if reason := await in_thread("sandbox", self.unavailable):
            raise SandboxError(reason)
        made = BubblewrapSandbox(spec, await self.folder(spec, snapshot))
        made.packages = self.packages
        return made


def ending(end: End, code: int, spec: SandboxSpec) -> End:
    """Correct the end of a signalled command. Signals 9 and 24 (or 128 + N) mean "cpu" with a CPU limit, else "killed"."""
    if end in ("ok", "error", "killed", "cpu") and code in (-9, -24, 137, 152):
        return "cpu" if spec.cpu_s is not None else "killed"
    return end


class Crowd:
    """Test if a namespace has more threads than allowed; each process has at least one. The slow search for processes runs at
    every fifth call only; the other calls count the threads of the known processes, to catch a thread bomb early."""

    def __init__(self) -> None:
        self._calls, self._inside = 0, list[Path]()

    def __call__(self, leader: int, most: int) -> bool:
        self._calls += 1
        if self._calls % 5 == 0:
            # Stop early: a fork bomb keeps appending processes to the list.
            self._inside = list(islice(_processes(leader), most + 1))
        found = 0
        for process in self._inside:
            with suppress(OSError):
                found += (process / "task").stat().st_nlink - 2
        return max(found, len(self._inside)) > most


def _processes(leader: int) -> Iterator[Path]:
    """Yield the processes in the namespace that bwrap (process `leader`) made for its command."""
    with suppress(OSError, IndexError):
        children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
        inside = Path(f"/proc/{children[0]}/ns/pid").readlink()
        for process in (Path("/proc", entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()):
            with suppress(OSError):
                if (process / "ns/pid").readlink() == inside:
                    yield process


@cache
def _machine(packages: bool = False) -> tuple[str, ...]:
    """Return flags that mount this machine's programs and libraries read-only, and no other files. Installed Python packages,
    which include agentrl's environments and their answers, are empty folders unless `packages`."""
    flags: list[str] = []
    for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt"):
        path = Path("/", name)
        if path.is_symlink():
            flags += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            flags += ["--ro-bind", str(path), str(path)]
    for file in READABLE:
        flags += ["--ro-bind-try", file, file]
    # Python's own folder if it is not below /usr; its parents are empty in the sandbox.
    if not sys.base_prefix.startswith("/usr"):
        flags += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    seen = [Path(path).resolve() for flag, path in pairwise(flags) if flag == "--ro-bind"]
    for hidden in sorted(() if packages else package_folders()):
        if any(Path(hidden).is_relative_to(folder) for folder in seen):
            flags += ["--tmpfs", hidden, "--remount-ro", hidden]
    # Mount /proc and /dev read-only, except /dev/shm. The machine's root owns the files of /proc/sys: if root runs agentrl,
    # it could write them from a namespace too, and bwrap's own masks do not cover them.
    flags += ["--proc", "/proc"]
    for name in MASKED:
        if Path("/proc", name).exists():
            flags += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    flags += ["--remount-ro", "/proc", "--dev", "/dev"]
    return (*flags, "--perms", "1777", "--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")


@cache
def _no_more_namespaces() -> tuple[str, ...]:
    """Return flags that forbid a command to make user namespaces, () before bubblewrap 0.8. It would have all capabilities
    inside."""
    flags = ("--unshare-user", "--disable-userns")
    done = subprocess.run(["bwrap", "--unshare-all", *flags, "--ro-bind", "/", "/", "true"], capture_output=True, timeout=20)
    return flags if done.returncode == 0 else ()


@cache
def unavailable() -> str | None:
    """Return the reason why bubblewrap cannot run here, or None."""
    if shutil.which("bwrap") is None:
        return "the program bwrap is not installed (the package bubblewrap has it)"
    probe = with_filter([*CONFINED, *_machine(), "--", "/bin/sh", "-c", "true"])  # like a real command, with the filter
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "bwrap did not end within 20 s"
    return None if done.returncode == 0 else f"bwrap cannot make namespaces here: {done.stderr.strip()[-200:]}"


def lacking() -> str | None:
    """Return the promise of docs/sandboxes.md that this bubblewrap does not keep, or None."""
    return None if _no_more_namespaces() else "it is older than 0.8, so a command could make namespaces of its own"
