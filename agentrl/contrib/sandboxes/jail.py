"""Launcher of a policy's code on this machine: it drops its rights, then runs the code. Standard library only.

It runs as a script and reads one JSON object from standard input. It then limits resources (rlimits), drops root's
capabilities, restricts the file system to its own folder and the files that it must read (Landlock), and forbids system calls
that reach beyond the process (a seccomp filter; `bubblewrap.py` imports the functions for it). The kernel enforces all of
these, and the code cannot undo them. After the last restriction it writes one byte to the status pipe: without that byte the
sandbox failed, not the code.

Python code ("code") runs in this process, which cannot start another one. A command ("argv") runs in a child, which can start
others, but none of them can leave the process group: this process, the group's leader, kills the group when it ends, gets
SIGTERM, or loses its parent."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import resource
import runpy
import signal
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

# System call numbers on (x86_64, aarch64); None if the architecture does not have the call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # network; a socket pair is harmless, but nothing here needs one either
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # other ways to open a socket or file, past the filter
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    # new processes and programs (`clone` is filtered below: threads are allowed)
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # other processes of the same user
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_mrelease": (448, 448),
    # activity of other processes on their files
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
    # memory that the address-space limit does not count, or that outlives the process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # the limits themselves
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    # the machine
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "unshare": (272, 97),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
# Landlock does not cover a file's mode, owner, times and attributes. These calls do nothing and report
# success, so that ordinary code (copying a file) still works.
IGNORED: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
}
# Calls that commands may use in addition: start programs, and set limits (which are hard already).
FOR_COMMANDS = {"fork", "vfork", "execve", "execveat", "setrlimit", "socketpair"}
# Denied for other processes only: call -> value that its first argument must have.
ON_ITSELF = {"prlimit64": 0}
# Denied for some values of an argument: call -> (numbers, index of the argument, values). F_SETOWN, F_SETSIG, F_SETOWN_EX,
# FIOSETOWN and SIOCSPGRP choose the receiver of a signal that the kernel sends when a file is ready (without a call to `kill`);
# with PR_SET_PDEATHSIG a process could unset the signal at its parent's death and outlive it.
DENIED_VALUES: dict[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    "fcntl": ((72, 25), 1, (8, 10, 15)),
    "ioctl": ((16, 29), 1, (0x8901, 0x8902)),
    "prctl": ((157, 167), 0, (1,)),
}
# Landlock before version 3 (Linux 6.2) does not cover truncation by path, or by an open that does not write.
TRUNCATE = {"truncate": (76, 45), "openat2": (437, 437)}
OPENS: dict[str, tuple[tuple[int | None, int | None], int]] = {"open": ((2, None), 1), "openat": ((257, 56), 2)}
O_TRUNC, WRITES = 0o1000, (1, 2)
# Where Landlock confines signals (from version 6), commands may send them; `kill` is filtered below.
SIGNALS = {"tkill", "tgkill", "rt_tgsigqueueinfo"}
NETWORK = {"socket", "connect", "bind", "listen", "accept", "accept4"}
NAMESPACES = 0x7E020000
CLONE = (56, 220)
CLONE3 = (435, 435)
CLONE_THREAD = 0x00010000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS = 1, 38
MACHINE = os.uname().machine
WHICH = 0 if MACHINE == "x86_64" else 1  # index into the pairs of numbers above

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22

libc = ctypes.CDLL(None, use_errno=True)


def check_result(result: int, what: str) -> int:
    """Return the result of a C call. Raises OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def landlock_version(job: dict[str, Any]) -> int:
    """Return the kernel's Landlock version, at most the one that the caller requested."""
    return min(check_result(libc.syscall(444, None, 0, 1), "landlock"), int(job["landlock"]))


def restrict_files(job: dict[str, Any]) -> None:
    """Restrict files by Landlock: read and write the folder, read "readable", read and run "programs", list "listed", nothing
    else."""
    abi = landlock_version(job)
    handled = (1 << 13) - 1
    # A kernel refuses rights that its Landlock version does not know, so each is asked for only from its version on.
    for version, bit in ((2, 13), (3, 14), (5, 15)):
        handled |= (1 << bit) if abi >= version else 0
    net = 0b11 if abi >= 4 and not job["network"] else 0
    scoped = 0b11 if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = struct.pack("QQQ", handled, net, scoped)
    rules = check_result(libc.syscall(444, attributes, size, 0), "landlock_create_ruleset")
    run, read, enter = 1 << 0, 1 << 2, 1 << 3
    write = (1 << 1) | (handled & (1 << 14))
    # remove directory and file, make directory and regular file, move between folders
    change = (1 << 4) | (1 << 5) | (1 << 7) | (1 << 8) | (handled & (1 << 13))
    allowed = dict.fromkeys(job["listed"], enter)
    allowed |= dict.fromkeys(job["readable"], read | enter)
    allowed |= dict.fromkeys(job["programs"], read | enter | run)
    allowed |= {"/dev/null": read | write, "/dev/zero": read, "/dev/urandom": read, "/dev/random": read}
    allowed[job["folder"]] = read | write | change | enter
    if "argv" in job:  # links and pipes too; links cannot escape, since Landlock checks the target at each open
        allowed[job["folder"]] |= run | (1 << 10) | (1 << 12)
    for path, access in allowed.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= ~enter  # the right to list a directory is invalid for a file
        rule = struct.pack("=Qi", access, place)
        check_result(libc.syscall(445, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(place)
    check_result(libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)


LOAD, EQUAL, AT_LEAST, ANY_BIT, MASK, GIVE = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x00050000
FIRST = 16  # offset of the lower half of the first argument
Step = tuple[int, int, int, int]


def opening() -> list[Step]:
    """Return the start of a filter, which checks the architecture first: call numbers depend on it."""
    program: list[Step] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH[MACHINE]), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    # x86_64 also has the x32 calls, under the same architecture.
    return program if WHICH else [*program, (AT_LEAST, 0, 1, 0x40000000), (GIVE, 0, 0, KILL)]


def reply(numbers: tuple[int | None, int | None], answer: int) -> list[Step]:
    """Return the steps that give a call this answer; none if the architecture lacks the call."""
    number = numbers[WHICH]
    return [] if number is None else [(EQUAL, 0, 1, number), (GIVE, 0, 0, answer)]


def clone(denied: Step) -> list[Step]:
    """Return the end of a filter, which checks the flags of `clone`. A filter cannot read the flags of clone3, which is denied:
    the C library then falls back to `clone`."""
    new = [(EQUAL, 0, 1, CLONE3[WHICH]), (GIVE, 0, 0, DENY | ENOSYS), (EQUAL, 0, 3, CLONE[WHICH]), (LOAD, 0, 0, FIRST)]
    return [*new, denied, (GIVE, 0, 0, DENY | EPERM), (GIVE, 0, 0, ALLOW)]


def as_bytes(program: list[Step]) -> bytes:
    """Encode a filter for the kernel."""
    return b"".join(struct.pack("HBBI", *step) for step in program)


def filter_calls(job: dict[str, Any]) -> None:
    """Install the seccomp filter, classic BPF over (number, architecture, arguments)."""
    program = opening()
    allowed: set[str] = NETWORK if job["network"] else set()
    signals = False
    if "argv" in job:
        signals = job["isolate_files"] and landlock_version(job) >= 6
        allowed = allowed | FOR_COMMANDS | (SIGNALS if signals else set())
    for table, answer in ((DENIED, DENY | EPERM), (IGNORED, DENY)):
        for name, numbers in table.items():
            number = numbers[WHICH]
            if number is None or name in allowed:
                continue
            if name == "kill" and signals:
                # Ignore signals to a group (0 or negative), which would reach the leader too: `timeout` sends one.
                rule = [(LOAD, 0, 0, FIRST), (EQUAL, 0, 1, 0), (GIVE, 0, 0, DENY), (AT_LEAST, 0, 1, 1 << 31)]
                program += [(EQUAL, 0, 6, number), *rule, (GIVE, 0, 0, DENY | EPERM), (GIVE, 0, 0, ALLOW)]
            elif name in ON_ITSELF and "argv" in job:
                rule = [(LOAD, 0, 0, FIRST), (EQUAL, 0, 1, ON_ITSELF[name]), (GIVE, 0, 0, ALLOW)]
                program += [(EQUAL, 0, 4, number), *rule, (GIVE, 0, 0, answer)]
            else:
                program += reply(numbers, answer)
    for numbers_of, argument, values in DENIED_VALUES.values():
        checks = [step for value in values for step in ((EQUAL, 0, 1, value), (GIVE, 0, 0, DENY | EPERM))]
        program += [
            (EQUAL, 0, 2 + len(checks), numbers_of[WHICH]),
            (LOAD, 0, 0, FIRST + 8 * argument),
            *checks,
            (GIVE, 0, 0, ALLOW),
        ]
    if job["isolate_files"] and landlock_version(job) < 3:
        program += truncation()
    program += clone((ANY_BIT, 0, 1, NAMESPACES) if "argv" in job else (ANY_BIT, 1, 0, CLONE_THREAD))
    code = as_bytes(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    check_result(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def truncation() -> list[Step]:
    """Return the steps that deny truncation, which Landlock does not before Linux 6.2. An open that truncates must also write,
    which Landlock checks."""
    program: list[Step] = []
    for numbers in TRUNCATE.values():  # a filter cannot read openat2's flags; without it, programs use openat
        program += [(EQUAL, 0, 1, numbers[WHICH]), (GIVE, 0, 0, DENY | (ENOSYS if numbers[WHICH] == 437 else EPERM))]
    for pair, argument in OPENS.values():
        if (number := pair[WHICH]) is None:
            continue
        flags = [(LOAD, 0, 0, FIRST + 8 * argument), (ANY_BIT, 1, 0, O_TRUNC), (GIVE, 0, 0, ALLOW), (MASK, 0, 0, 3)]
        writes = [step for value in WRITES for step in ((EQUAL, 0, 1, value), (GIVE, 0, 0, ALLOW))]
        program += [(EQUAL, 0, len(flags) + len(writes) + 1, number), *flags, *writes, (GIVE, 0, 0, DENY | EPERM)]
    return program


def report_or_leave(job: dict[str, Any], status: int) -> None:
    """Apply all restrictions and report success to the caller, or report the problem and exit."""
    try:
        # Apply all restrictions, in an order in which no step forbids a later one
        check_result(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
        limits = job["limits"]  # both hard and soft
        command = "argv" in job
        cpu, memory, size = limits["cpu"], limits["memory"], limits["file_size"]
        for which, pair in (
            (resource.RLIMIT_CPU, cpu and (int(cpu), int(cpu) + 1)),
            (resource.RLIMIT_AS, memory and (int(memory), int(memory))),
            (resource.RLIMIT_FSIZE, size and (int(size), int(size))),
            (resource.RLIMIT_NOFILE, (1024, 1024) if command else (64, 64)),
            (resource.RLIMIT_CORE, (0, 0)),
            (resource.RLIMIT_MEMLOCK, (0, 0)),
            (resource.RLIMIT_MSGQUEUE, (0, 0)),
        ):
            if pair:
                resource.setrlimit(which, pair)
        check_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        # Set an empty capability set (version 3, two words), so that even root has no special rights
        header = struct.pack("Ii", 0x20080522, 0)
        check_result(libc.capset(header, bytes(24)), "capset")
        if job["isolate_files"]:
            restrict_files(job)
        filter_calls(job)
    except OSError as problem:
        os.write(status, f"!{problem}".encode())
        os._exit(97)
    os.write(status, b"+")
    os.close(status)


def give_input(content: bytes) -> None:
    """Replace standard input by this content. Uses a pipe if it fits into one, else an unlinked file."""
    if len(content) <= 4096:
        reader, writer = os.pipe()
        os.write(writer, content)
        os.close(writer)
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            reader = os.dup(file.fileno())
    os.dup2(reader, 0)
    os.close(reader)


def command(job: dict[str, Any], status: int) -> NoReturn:
    """Restrict the child process and replace it by the command."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.set_inheritable(status, False)
    give_input(job["stdin"].encode("latin-1"))
    try:
        os.chdir(job["cwd"])
    except OSError as problem:
        job["argv"], job["reason"] = [], f"cd: {job['cwd']}: {problem.strerror}"
    report_or_leave(job, status)
    reason = job.get("reason", "")
    if job["argv"]:
        try:
            os.execvpe(job["argv"][0], job["argv"], job["env"])
        except OSError as problem:
            reason = f"{job['argv'][0]}: {problem.strerror}"
    os.write(2, f"{reason}\n".encode())
    os._exit(127)


COUNT_EVERY_S = 0.1
"""Seconds between two counts of a command's processes."""


def lead(job: dict[str, Any], status: int) -> NoReturn:
    """Lead the command's process group: wait for the command, and kill the group if the parent is gone, on SIGTERM, or if it has
    too many processes."""

    def end_all(*_: object) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_all)
    check_result(libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0), "pdeathsig")
    if os.getppid() != job["parent"]:
        end_all()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    child = os.fork()
    if child == 0:
        command(job, status)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    with suppress(PermissionError):
        # A fork bomb has a thousand processes in a tenth of a second, among which this one would count late. Without the
        # right to set the priority it may.
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    while True:
        signal.sigtimedwait([signal.SIGCHLD], COUNT_EVERY_S)
        ended, how = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if group_exceeds(job["limits"]["pids"]):
            os.write(status, b"p")
            end_all()
    if os.WIFSIGNALED(how):  # end by the same signal, so that the caller sees it
        signal.signal(os.WTERMSIG(how), signal.SIG_DFL) if os.WTERMSIG(how) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(how))
    os._exit(os.WEXITSTATUS(how) if os.WIFEXITED(how) else 128)


def group_exceeds(most: int) -> bool:
    """Return True if this group has more threads than `most`; each process has at least one. Stops counting early, because a
    fork bomb keeps appending processes to the list."""
    own, found = os.getpgrp(), 0
    with os.scandir("/proc") as processes:
        for process in processes:
            if process.name.isdigit():
                try:
                    if os.getpgid(int(process.name)) == own:
                        found += pathlib.Path(process.path, "task").stat().st_nlink - 2
                except (ProcessLookupError, FileNotFoundError):
                    continue
                if found > most:
                    return True
    return False


def python(job: dict[str, Any], status: int) -> None:
    """Run Python code in this process."""
    leave: Callable[[str], None] = runpy.run_path(job["notebook"], run_name="notebook")["leave"]
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])
    give_input(b"")
    report_or_leave(job, status)
    leave(job["code"])


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    status = int(sys.argv[1])
    if "argv" in job:
        lead(job, status)
    python(job, status)


if __name__ == "__main__":
    main()
