"""The local sandbox with commands: what they may do among themselves, and what they cannot do to others."""

import errno
import os
import resource
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest

from agentrl.contrib.sandboxes import local
from tests.conftest import proof
from tests.contrib.sandboxes import contract
from tests.contrib.sandboxes.test_reach import victim as victim

commands = partial(contract.commands, "local")


def test_no_command_reaches_another_process(victim: subprocess.Popen[bytes]) -> None:
    pid, before = victim.pid, psutil.Process(victim.pid).nice()
    results = commands(
        f"kill -9 {pid}; kill -9 {os.getpid()}; kill -9 -1; kill -9 0; kill -9 $PPID; echo still here",
        f"prlimit --pid {pid} --nofile=5:5; prlimit --nofile=9999:9999",
        f"renice 19 -p {pid}; cat /proc/{pid}/environ; ls /proc",
        f"unshare -U true; nsenter -t {pid} -a true",
    )
    assert results[0].stdout.endswith("still here\n") and results[0].stdout.count("not permitted") >= 4
    assert "not permitted" in results[1].stdout and results[1].code != 0
    assert victim.poll() is None and psutil.Process(pid).nice() == before
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert results[2].code != 0 and results[3].code != 0


def test_commands_have_their_own_processes_in_hand() -> None:
    """Signals between them, `timeout`, pipes, background work; but no way out of the group that is killed with the command."""
    own, leave = commands(
        "exec 2>/dev/null; sleep 300 & kill $!; wait $!; echo $?; timeout 0.2 sleep 99; echo $?; yes | sed 2q; kill -9 $$",
        "setsid sleep 300; echo $?; python3 -c 'import os; os.setpgid(0, 0)' 2>&1 | tail -1",
    )
    assert (own.stdout, own.code, own.end) == ("143\n124\ny\ny\n", -9, "killed")
    assert leave.stdout.splitlines()[-2:] == ["1", "PermissionError: [Errno 1] Operation not permitted"]


def test_nothing_outside_of_the_folder_is_read_or_changed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("gold")
    secret.chmod(0o640)
    named = f'"{secret}"'
    said = commands(
        f"cat {named}; echo x > {named}; rm {named}; mv {named} mine; ln {named} mine; touch '{tmp_path}/new'; ls '{tmp_path}'",
        f"ln -s {named} link; cat link; echo x > link; cp /bin/sh sh; ./sh -c 'cat {named}'",
        f"chmod 777 {named}; touch -d 2000-01-01 {named}; chown 1:1 {named}; true",
        "cat /etc/shadow; ls /root /home /tmp /dev/shm; echo x > /usr/x; mkdir /x",
    )
    assert "gold" not in "".join(result.stdout for result in said)
    info = secret.stat()
    assert (secret.read_text(), info.st_mode & 0o777, info.st_uid) == ("gold", 0o640, os.getuid()) and info.st_mtime > 1e9
    assert list(tmp_path.iterdir()) == [secret] and not Path("/usr/x").exists() and not Path("/x").exists()


def test_a_fork_bomb_and_a_full_folder_end_and_the_next_command_can_clear_up() -> None:
    bomb, disk, fine = commands(
        "f() { f | f & }; f; sleep 300",
        "i=0; while :; do head -c 500000 /dev/zero > f$i; i=$((i + 1)); done",
        "sleep 0.2; rm -f f*; ls; echo fine",  # a full folder must not pass for a sandbox that fails: nobody scores that
        pids=40, disk=8 << 20, timeout=30.0,
    )  # fmt: skip
    assert (bomb.end, disk.end) == ("processes", "disk")
    assert (fine.stdout, fine.end) == ("fine\n", "ok")


@proof
def test_each_limit_of_a_process_is_named() -> None:
    size = 1 << 20
    cpu, memory, file, fine = commands(
        "while :; do :; done",
        "python3 -c 'bytearray(1 << 30)' 2>&1 | tail -1",
        "head -c 3000000 /dev/zero > big; wc -c < big; rm big",
        "echo fine",
        cpu_s=1, memory=512 * size, file_size=size,
    )  # fmt: skip
    assert cpu.end == "cpu"
    assert memory.stdout == "MemoryError\n" and str(size) in file.stdout
    assert (fine.stdout, fine.end) == ("fine\n", "ok")


def test_the_network_is_there_only_if_it_is_asked_for() -> None:
    connect = "python3 -c 'import socket; print(socket.socket().fileno() > 2)' 2>&1 | tail -1"
    assert commands(connect)[0].stdout == "PermissionError: [Errno 1] Operation not permitted\n"
    assert commands(connect, network="all")[0].stdout == "True\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE])
def test_a_disk_of_this_machine_s_that_fails_is_not_the_policy_s_path(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else tests that cannot be written are a reward of 0."""
    folder = local.Folder()

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, "the disk")

    monkeypatch.setattr(local.os, "open", fail)
    for use in (lambda: folder.write({"/a": b""}), lambda: folder.read("/a", 9)):
        with pytest.raises(OSError, match="the disk") as caught:
            use()
        assert caught.value.errno == number
