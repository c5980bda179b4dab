"""Sandboxes of bubblewrap, and the filter of system calls in them."""

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
from agentrl.contrib.sandboxes.process_group import Watched, run_group
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
    """A file in memory with the filter, as bwrap's `--seccomp` reads it; it lives as long as this process."""
    program = jail.opening()
    for name in REFUSED:
        program += jail.reply(jail.DENIED[name], jail.DENY | jail.EPERM)
    program += jail.clone((jail.ANY_BIT, 0, 1, jail.NAMESPACES))
    file = os.memfd_create("agentrl-calls")
    os.write(file, jail.as_bytes(program))
    return file


def with_filter(bwrap: list[str]) -> list[str]:
    """A command of bwrap's, without its program's name, under the filter. The shell opens the file of this process anew, since
    bwrap reads from where a shared descriptor stands."""
    opened = f'exec 3</proc/{os.getpid()}/fd/{filter_file()} && exec bwrap --seccomp 3 "$@"'
    return ["/bin/sh", "-c", opened, "sh", *bwrap]


# The bubblewrap provider

SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt", "etc", "proc", "dev", "sys")
HOME = "/root"
CONFINED = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox")
"""What every command of a sandbox is begun with."""
MASKED = ("kcore", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "sched_debug", "timer_list")
"""Files of /proc that tell of the whole machine, root alone mostly, which a namespace does not keep apart."""
SHARED_MEMORY = 64 << 20
"""Bytes of /dev/shm, which is memory that no limit on files or processes counts; a command's own, gone with it."""


class BubblewrapSandbox(FolderSandbox):
    """Each command has its own processes' namespace, which ends with it."""

    packages = False

    async def execute(self, run: Run) -> ExecResult:
        # A shell sets the limits of each process of the command: hard ones, which it can't raise again.
        memory, size = self.spec.memory, self.spec.file_size
        limits = {"-c": 0, "-v": memory and memory >> 10, "-f": size and -(-size // 512), "-t": self.spec.cpu_s}
        lines = [f"ulimit {flag} {value};" for flag, value in limits.items() if value is not None]
        limited = ["/bin/sh", "-c", f'{" ".join(lines)} exec "$@"', "sh", *run.argv]
        started = with_filter([*self._flags(run), "--", *limited])
        async with self._turn:
            watched = await self.watched(run.timeout, run.max_output)
            ended = await run_group(started, run.stdin, watched, env={"PATH": os.defpath}, merge=run.merge, status=False)
        said = (ended.stderr or ended.stdout).decode(errors="replace")
        if ended.code == 1 and said.startswith("bwrap: "):
            if "execvp" in said or "Can't chdir" in said:
                return ExecResult(127, "", said, ended.seconds, "error", ended.cut)
            raise SandboxError(f"bubblewrap did not start: {said.strip()[-300:]}")
        return ended.result(ending(ended.end, ended.code, self.spec))

    async def write(self, files: Mapping[str, bytes]) -> None:
        for path in files:
            if self.spec.place(path).split("/")[1] in SYSTEM:
                raise FileExistsError(f"{path}: a folder of this machine's, which is read-only")
        await super().write(files)

    async def watched(self, timeout: float, max_output: int) -> Watched:
        return replace(await super().watched(timeout, max_output), pids=self.spec.pids, crowded=Crowd())

    def _flags(self, run: Run) -> Iterator[str]:
        share = ["--share-net"] if self.spec.network == "all" else []
        yield from [*CONFINED[:1], *share, *CONFINED[1:]]
        yield from _no_more_namespaces()
        yield from _machine(self.packages)
        # Folders at the top that something was written to; others would be lost with the command's own root.
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
    """Needs the program `bwrap`, and a kernel that lets it make namespaces. `packages`: as for the local one."""

    name = "bubblewrap"

    def __init__(self, *, packages: bool = False) -> None:
        self.packages = packages

    def unavailable(self) -> str | None:
        return unavailable()

    def check(self, spec: SandboxSpec) -> None:
        need = 'needs a container; use provider = "docker" or "podman"'
        self.refuse(spec, image=need, build=need, cpus="bubblewrap has no share of processors; leave it out")
        self.refuse(spec, processes="bubblewrap does not forbid processes; use the local provider")

    async def start(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        self.check(spec)
        if reason := await in_thread("sandbox", self.unavailable):
            raise SandboxError(reason)
        made = BubblewrapSandbox(spec, await self.folder(spec, snapshot))
        made.packages = self.packages
        return made


def ending(end: End, code: int, spec: SandboxSpec) -> End:
    """End of a command whose signal a shell or a namespace reports as 128 + N: 24 and 9 are the processor's time."""
    if end in ("ok", "error", "killed", "cpu") and code in (-9, -24, 137, 152):
        return "cpu" if spec.cpu_s is not None else "killed"
    return end


class Crowd:
    """Tells whether more threads are in a namespace than may be; each process has one at least. Its processes are looked for at
    every fifth call, which is slow; between them the threads of those are counted, which a thread bomb makes at once."""

    def __init__(self) -> None:
        self._calls, self._inside = 0, list[Path]()

    def __call__(self, leader: int, most: int) -> bool:
        self._calls += 1
        if self._calls % 5 == 0:
            # Not to the end: new ones of a fork bomb come at the list's end.
            self._inside = list(islice(_processes(leader), most + 1))
        found = 0
        for process in self._inside:
            with suppress(OSError):
                found += (process / "task").stat().st_nlink - 2
        return max(found, len(self._inside)) > most


def _processes(leader: int) -> Iterator[Path]:
    """The processes in the namespace that bwrap, process `leader`, made for its command."""
    with suppress(OSError, IndexError):
        children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
        inside = Path(f"/proc/{children[0]}/ns/pid").readlink()
        for process in (Path("/proc", entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()):
            with suppress(OSError):
                if (process / "ns/pid").readlink() == inside:
                    yield process


@cache
def _machine(packages: bool = False) -> tuple[str, ...]:
    """This machine's programs and libraries, read-only, and nothing else of its files; Python's installed packages, agentrl's
    environments and their answers among them, are empty folders unless `packages`."""
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
    # /proc and /dev, both read-only but for /dev/shm. Files of /proc/sys belong to the machine's root: if that is who runs
    # agentrl, it may write them in a namespace too, and bwrap's own covers leave them open.
    flags += ["--proc", "/proc"]
    for name in MASKED:
        if Path("/proc", name).exists():
            flags += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    flags += ["--remount-ro", "/proc", "--dev", "/dev"]
    return (*flags, "--perms", "1777", "--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")


@cache
def _no_more_namespaces() -> tuple[str, ...]:
    """Flags with which a command cannot make user namespaces of its own, in which it would have all capabilities; bubblewrap has
    them from 0.8 on."""
    flags = ("--unshare-user", "--disable-userns")
    done = subprocess.run(["bwrap", "--unshare-all", *flags, "--ro-bind", "/", "/", "true"], capture_output=True, timeout=20)
    return flags if done.returncode == 0 else ()


@cache
def unavailable() -> str | None:
    """Why there is no bubblewrap here, or None."""
    if shutil.which("bwrap") is None:
        return "the program bwrap is not installed (the package bubblewrap has it)"
    probe = with_filter([*CONFINED, *_machine(), "--", "/bin/sh", "-c", "true"])  # as a command is run, the filter included
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "bwrap did not end within 20 s"
    return None if done.returncode == 0 else f"bwrap cannot make namespaces here: {done.stderr.strip()[-200:]}"


def lacking() -> str | None:
    """Promises of docs/sandboxes.md that this bubblewrap does not keep, or None."""
    return None if _no_more_namespaces() else "it is older than 0.8, so a command could make namespaces of its own"
