"""The program inside the sandbox: it drops its rights, then runs the policy's code. Standard library only.

It is started as a script (never imported), reads one JSON object from its standard input, and drops one
after the other: resources (rlimits), root's capabilities, the file system except for its own folder and
Python's library (Landlock), and the system calls that reach beyond the process (a seccomp filter). The
kernel enforces all of these, and the code that runs afterwards cannot undo any. Once everything is
in place, it writes one byte to the status pipe: without that byte the caller knows that the sandbox
failed, not the code.
"""

from __future__ import annotations

import ast
import ctypes
import json
import linecache
import os
import resource
import signal
import stat
import struct
import sys
import traceback
from typing import Any

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
    # other ways to a socket or a file that bypass the filter
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
    # memory that the address-space limit does not count, or that outlives the process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
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
CLONE = (56, 220)
CLONE3 = (435, 435)
CLONE_THREAD = 0x00010000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS = 1, 38
MACHINE = os.uname().machine

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_DUMPABLE = 1, 38, 22, 4
NAME = "<code>"

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """The result of a C call. Raises OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def limit_resources(limits: dict[str, Any]) -> None:
    """Set hard and soft limits. CPU: SIGXCPU first, SIGKILL a second later."""
    cpu = int(limits["cpu"])
    memory, size = int(limits["memory"]), int(limits["file_size"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))


def drop_capabilities() -> None:
    """Set an empty capability set (version 3, two words), so that even root has no special rights."""
    header = struct.pack("Ii", 0x20080522, 0)
    checked(libc.capset(header, bytes(24)), "capset")


def restrict_files(folder: str, readable: list[str]) -> None:
    """Landlock: `folder` for reading and writing, `readable` for reading, nothing else."""
    abi = checked(libc.syscall(444, None, 0, 1), "landlock")
    handled = (1 << 13) - 1
    # A kernel refuses rights that its Landlock version does not know, so each is asked for only from its version on.
    for version, bit in ((2, 13), (3, 14), (5, 15)):
        handled |= (1 << bit) if abi >= version else 0
    net = 0b11 if abi >= 4 else 0
    scoped = 0b11 if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = struct.pack("QQQ", handled, net, scoped)
    rules = checked(libc.syscall(444, attributes, size, 0), "landlock_create_ruleset")
    read, write = 1 << 2, (1 << 1) | (handled & (1 << 14))
    # remove directory and file, make directory and regular file, move between folders
    change = (1 << 4) | (1 << 5) | (1 << 7) | (1 << 8) | (handled & (1 << 13))
    allowed = dict.fromkeys(readable, read | (1 << 3))
    allowed |= {"/dev/null": read | write, "/dev/zero": read, "/dev/urandom": read, "/dev/random": read}
    allowed[folder] = read | write | change | (1 << 3)
    for path, access in allowed.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= ~(1 << 3)  # the right to list a directory is invalid for a file
        rule = struct.pack("=Qi", access, place)
        checked(libc.syscall(445, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(place)
    checked(libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)


def filter_calls() -> None:
    """The seccomp filter, as classic BPF over (number, architecture, arguments)."""
    which = 0 if MACHINE == "x86_64" else 1
    load, jump_equal, jump_above, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, deny = 0x7FFF0000, 0x80000000, 0x00050000
    # The architecture is checked first: a number means different calls on different architectures.
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (jump_equal, 1, 0, AUDIT_ARCH[MACHINE]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
    ]
    if which == 0:  # the x32 calls of the same architecture
        program += [(jump_above, 0, 1, 0x40000000), (give, 0, 0, kill)]
    for table, answer in ((DENIED, deny | EPERM), (IGNORED, deny)):
        for numbers in table.values():
            if (number := numbers[which]) is not None:
                program += [(jump_equal, 0, 1, number), (give, 0, 0, answer)]
    # The C library falls back from clone3, whose flags a filter cannot read, to clone.
    program += [(jump_equal, 0, 1, CLONE3[which]), (give, 0, 0, deny | ENOSYS)]
    program += [
        (jump_equal, 0, 3, CLONE[which]),
        (load, 0, 0, 16),
        (jump_set, 1, 0, CLONE_THREAD),
        (give, 0, 0, deny | EPERM),
        (give, 0, 0, allow),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    checked(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def lock_down(job: dict[str, Any]) -> None:
    """Apply all restrictions, in an order in which no step forbids a later one."""
    checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
    limit_resources(job["limits"])
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    drop_capabilities()
    if job["isolate_files"]:
        restrict_files(job["folder"], job["readable"])
    filter_calls()


def run(source: str) -> int:
    """Run the code as `__main__`; the value of a final expression is printed, as in a notebook."""
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(source, NAME)
    except BaseException as fault:
        report(fault.with_traceback(None))
        return 1
    try:
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NAME, "eval"), space)
            if value is not None:
                print(repr(value))
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException as fault:
        if isinstance(fault, MemoryError):
            space.clear()  # or there is no memory left for the report
        report(fault)
        return 1
    return 0


def report(fault: BaseException) -> None:
    """The traceback of the policy's own code, without the frames of this file."""
    summary = traceback.TracebackException(type(fault), fault, fault.__traceback__, limit=-20)
    summary.stack = traceback.StackSummary.from_list([f for f in summary.stack if f.filename != __file__])
    sys.stdout.flush()
    print("".join(summary.format(chain=False)), file=sys.stderr, end="")


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    status = int(sys.argv[1])
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])
    sys.argv = [NAME]
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        lock_down(job)
    except OSError as problem:
        os.write(status, f"!{problem}".encode())
        os._exit(97)
    os.write(status, b"+")
    os.close(status)
    code = 1
    try:
        code = run(job["code"])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Skips the interpreter's shutdown, so that exit handlers and other threads of the code cannot interfere.
        os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
