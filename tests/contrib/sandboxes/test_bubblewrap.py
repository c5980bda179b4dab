"""What a command in bubblewrap finds beside its folder: this machine's /proc and /dev, where it must change and fill nothing."""

import asyncio
import os
import time
from functools import partial
from pathlib import Path

import pytest

from agentrl.contrib.sandboxes import bubblewrap
from agentrl.contrib.sandboxes.contract import SandboxSpec
from agentrl.utils.errors import SandboxError
from tests.contrib.sandboxes import contract

REASON = bubblewrap.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no bubblewrap here: {REASON}")
commands = partial(contract.commands, "bubblewrap", timeout=20.0, disk=1 << 20)


def test_the_kernel_s_settings_cannot_be_changed_not_even_by_root() -> None:
    """root of the machine, as which agentrl often runs in a container, owns them, whatever namespace it is in. The value that is
    written is the one that is there."""
    setting, masked = "/proc/sys/fs/dir-notify-enable", " ".join(f"-not -path /proc/{name}" for name in bubblewrap.MASKED)
    wrote, writable, pressed = commands(
        f"value=$(cat {setting}); echo $value > {setting} && echo written",
        f"find /proc -writable -type f -not -path '/proc/[0-9]*' {masked} 2>/dev/null | head -3",
        "for name in sys sysrq-trigger irq bus fs mtrr; do test -w /proc/$name && echo $name; done",
    )
    assert "Read-only file system" in wrote.stdout and "written" not in wrote.stdout
    assert (writable.stdout, pressed.stdout) == ("", "")


def test_what_proc_tells_of_the_whole_machine_is_hidden_and_the_rest_is_there() -> None:
    hidden = [name for name in bubblewrap.MASKED if Path("/proc", name).exists()]
    assert {"keys", "timer_list"} & set(hidden)
    shown, rest = commands(
        f"cd /proc; for name in {' '.join(hidden)}; do head -c 1 $name 2>/dev/null; done",
        "cat /proc/self/comm; echo a > /dev/stderr; echo b > /proc/self/fd/1; head -c 9 /proc/meminfo; cat < /dev/null; ls /proc",
    )
    assert shown.stdout == ""
    assert rest.stdout.startswith("cat\na\nb\nMemTotal:") and rest.code == 0
    assert str(os.getpid()) not in rest.stdout.split() or os.getpid() < 20, "processes outside are not listed"


def test_files_in_the_machine_s_memory_are_few_and_gone_with_the_command() -> None:
    """The limit on files counts those on the disk; /dev/shm is memory."""
    many, again, made, lock = commands(
        "for n in $(seq 100); do head -c 1000000 /dev/zero > /dev/shm/$n || break; done; du -sk /dev/shm",
        "ls /dev/shm; echo x > /dev/shm/x && cat /dev/shm/x",
        "touch /dev/new; mkdir /dev/folder; echo y > /dev/null && head -c 1 /dev/urandom | wc -c",
        "python3 -c 'import multiprocessing as m; print(m.Lock())'",
    )
    assert "No space left" in many.stdout and 60_000 < int(many.stdout.splitlines()[-1].split()[0]) <= 65_536
    assert again.stdout == "x\n"
    assert made.stdout.count("Read-only file system") == 2 and made.stdout.endswith("\n1\n")
    assert "Lock" in lock.stdout, "a semaphore is a file of /dev/shm"


def test_a_search_of_everything_ends_at_the_command_s_limit() -> None:
    """As on any Linux with /proc, whose files of a process's pages are 256 GiB long."""
    began = time.monotonic()
    late, after = commands("grep -rs no-such-words /proc", "echo alive", timeout=2.0)
    assert late.end == "wall" and time.monotonic() - began < 10 and after.stdout == "alive\n"


BOMB = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"


async def test_a_limit_is_named_although_the_event_loop_is_busy() -> None:
    """The memory limit ends the bomb at some 900 threads, within 0.3 s."""
    box = await bubblewrap.BubblewrapProvider().start(SandboxSpec())
    try:
        running = asyncio.ensure_future(box.exec(f"python3 -c '{BOMB}'", timeout=20, merge=True))
        await asyncio.sleep(0.05)
        time.sleep(3.0)
        assert (await running).end == "processes"
    finally:
        await box.stop()


def test_only_bubblewrap_itself_can_say_that_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a policy gets out of a 0 by its words, and a machine's limit below the sandbox's is the policy's failure."""
    forged, left = commands("echo 'bwrap: no' >&2; exit 1", "ls -l /proc/*/fd; cat /proc/1/environ")
    assert (forged.code, forged.stdout, forged.end) == (1, "bwrap: no\n", "error")
    assert " 1 -> pipe" in left.stdout and " 4 -> " not in left.stdout and "STATUS" not in left.stdout
    for said in ("bwrap: setting up uid map: Permission denied", "ulimit: error setting limit"):
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho '{said}' >&2; exit 2")
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setattr(bubblewrap.os, "defpath", str(tmp_path))
        with pytest.raises(SandboxError, match=said):
            commands("true")


async def test_no_file_takes_the_place_of_a_folder_of_every_command() -> None:
    """The policy's file would fail all later commands, as the sandbox's fault."""
    box = await bubblewrap.BubblewrapProvider().start(SandboxSpec())
    try:
        for path in ("/tmp", "/root", "../tmp/"):
            with pytest.raises(FileExistsError):
                await box.write({path: b"x"})
        await box.write({"/tmp/x": b"x"})
        assert (await box.exec("cat /tmp/x")).stdout == "x"
    finally:
        await box.stop()


def test_threads_count_like_processes() -> None:
    """A thread bomb would else run to the wall limit: each of its threads is one that the machine's limit counts."""
    few = "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(0.5,)).start()\nprint(1)"
    stopped, fine = commands(f"python3 -c '{BOMB}'", f"python3 -c '{few}'")
    assert stopped.end == "processes" and stopped.seconds < 15
    assert (fine.stdout, fine.end) == ("1\n", "ok")
