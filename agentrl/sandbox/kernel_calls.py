"""The filter of system calls within bubblewrap: those that no namespace confines."""

from __future__ import annotations

import os
import struct
from functools import cache

from agentrl.sandbox.jail import (
    ALLOW,
    ANY_BIT,
    AT_LEAST,
    AUDIT_ARCH,
    CLONE,
    CLONE3,
    DENIED,
    DENY,
    ENOSYS,
    EPERM,
    EQUAL,
    FIRST,
    GIVE,
    KILL,
    LOAD,
    MACHINE,
    NAMESPACES,
    Step,
)  # fmt: skip

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
    which = 0 if MACHINE == "x86_64" else 1
    program: list[Step] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH[MACHINE]), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if which == 0:  # the x32 calls of the same architecture
        program += [(AT_LEAST, 0, 1, 0x40000000), (GIVE, 0, 0, KILL)]
    for name in REFUSED:
        if (number := DENIED[name][which]) is not None:
            program += [(EQUAL, 0, 1, number), (GIVE, 0, 0, DENY | EPERM)]
    # The C library falls back from clone3, whose flags a filter cannot read, to clone.
    program += [(EQUAL, 0, 1, CLONE3[which]), (GIVE, 0, 0, DENY | ENOSYS), (EQUAL, 0, 3, CLONE[which]), (LOAD, 0, 0, FIRST)]
    program += [(ANY_BIT, 0, 1, NAMESPACES), (GIVE, 0, 0, DENY | EPERM), (GIVE, 0, 0, ALLOW)]
    file = os.memfd_create("agentrl-calls")
    os.write(file, b"".join(struct.pack("HBBI", *step) for step in program))
    return file


def filtered(bwrap: list[str]) -> list[str]:
    """A command of bwrap's, without its program's name, under the filter. The shell opens the file of this process anew, since
    bwrap reads from where a shared descriptor stands."""
    opened = f'exec 3</proc/{os.getpid()}/fd/{filter_file()} && exec bwrap --seccomp 3 "$@"'
    return ["/bin/sh", "-c", opened, "sh", *bwrap]
