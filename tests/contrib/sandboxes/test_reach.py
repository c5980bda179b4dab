"""What code in the local sandbox can do to others, by the calls that neither Landlock nor an empty set of capabilities covers:
signals by file descriptors, truncation on old kernels, priorities, System V's objects, threads, and outliving its driver.

Each is tried by Python code and, in `make proofs`, by a command and with the filter as an older kernel gets it."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import psutil
import pytest

from agentrl.contrib.sandboxes import local
from agentrl.contrib.sandboxes.contract import SANDBOXES, ExecResult, SandboxSpec
from tests.conftest import proof
from tests.waits import until

CODE = SandboxSpec(cpu_s=5, memory=512 << 20, processes=False, workdir="/")
COMMANDS = SandboxSpec(cpu_s=5, memory=512 << 20, workdir="/")
HEAD = """
import ctypes, errno, os, fcntl, struct
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"
def call(x86, arm, *args):
    ctypes.set_errno(0)
    done = libc.syscall(arm if ARM else x86, *args)
    return "done" if done >= 0 else errno.errorcode[ctypes.get_errno()]
def tried(f, *args):
    try:
        f(*args)
        return "done"
    except OSError as problem:
        return errno.errorcode[problem.errno]
"""


async def run(code: str, spec: SandboxSpec, **args: object) -> ExecResult:
    box = await SANDBOXES.bind("local", args)().start(spec)
    try:
        text = HEAD + textwrap.dedent(code)
        if not spec.processes:
            return await box.python(text, timeout=60)
        await box.write({"code.py": text.encode()})
        return await box.exec(["python3", "code.py"], timeout=60)
    finally:
        await box.stop()


@pytest.fixture(params=["code", pytest.param("command", marks=proof)])
def kind(request: pytest.FixtureRequest) -> SandboxSpec:
    return CODE if request.param == "code" else COMMANDS


@pytest.fixture(params=[None, pytest.param(1, marks=proof)])
def landlock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """None: this kernel's version; 1: the filter and rules that Linux 5.13 would get."""
    if request.param is not None:
        monkeypatch.setattr(local, "LANDLOCK_AT_MOST", request.param)
    return request.param


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process without capabilities, as those of an ordinary user."""
    drop = "ctypes.CDLL(None).capset(b'\\x22\\x05\\x08\\x20' + bytes(4), bytes(24))"
    code = f"import ctypes, time; {drop}; print(flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def out(code: str, spec: SandboxSpec) -> str:
    result = asyncio.run(run(code, spec))
    assert result.end == "ok", result
    return result.stdout.strip()


def test_no_signal_goes_by_a_file_descriptor(kind: SandboxSpec, landlock: int | None, victim: subprocess.Popen[bytes]) -> None:
    """F_SETOWN and O_ASYNC make the kernel send SIGIO, or any other signal, to whom they name (before 6.12 to anybody)."""
    code = f"""
    a, b = os.pipe()
    owner = struct.pack("ii", 1, {victim.pid})
    print(tried(fcntl.fcntl, a, fcntl.F_SETOWN, {victim.pid}), tried(fcntl.fcntl, a, 10, 9), tried(fcntl.fcntl, a, 15, owner))
    print(*(tried(fcntl.ioctl, a, number, struct.pack("i", {victim.pid})) for number in (0x8901, 0x8902)))
    print(tried(fcntl.fcntl, a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK), tried(fcntl.fcntl, a, fcntl.F_GETFL))
    _ = os.write(b, b"x")
    """
    assert out(code, kind).split() == ["EPERM"] * 5 + ["done"] * 2  # the last two alone tell nobody
    time.sleep(0.05)
    assert victim.poll() is None


def test_nothing_outside_is_truncated(kind: SandboxSpec, landlock: int | None, tmp_path: Path) -> None:
    """Landlock knows of truncation from Linux 6.2 on."""
    kept = tmp_path / "kept"
    kept.write_text("gold")
    path = str(kept).encode()
    code = f"""
    print(call(76, 45, {path!r}, 0), call(257, 56, -100, {path!r}, os.O_TRUNC), call(257, 56, -100, {path!r}, os.O_TRUNC | 3))
    print(tried(os.open, {path!r}, os.O_TRUNC), tried(os.open, {path!r}, os.O_WRONLY | os.O_TRUNC))
    open("own", "w").write("abc"); open("own", "w").write("a"); f = open("own", "r+"); f.truncate(0)
    print(os.path.getsize("own"))
    """
    found = out(code, kind).split()
    assert "done" not in found and found[-1] == "0"
    assert kept.read_text() == "gold"


def test_nobody_elses_priority_changes(kind: SandboxSpec, victim: subprocess.Popen[bytes]) -> None:
    pid = victim.pid
    attributes = "struct.pack('IIQiIQQQ', 48, 3, 0, 19, 0, 0, 0, 0)"
    code = f"""
    print(call(314, 274, {pid}, {attributes}, 0), call(251, 30, 1, {pid}, 3 << 13), call(142, 118, {pid}, bytes(4)))
    print(call(141, 140, 0, {pid}, 19), call(203, 122, {pid}, 8, b"\\x01" + bytes(7)), call(144, 119, {pid}, 5, bytes(4)))
    print(call(256, 238, {pid}, 64, bytes(8), bytes(8)), call(279, 239, {pid}, 1, bytes(8), 0, bytes(4), 0))
    """
    before = psutil.Process(pid).nice(), psutil.Process(pid).cpu_affinity(), psutil.Process(pid).ionice()
    assert set(out(code, kind).split()) <= {"EPERM"}
    assert (psutil.Process(pid).nice(), psutil.Process(pid).cpu_affinity(), psutil.Process(pid).ionice()) == before


def test_no_object_of_system_v_is_removed_or_read(kind: SandboxSpec) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    shared, semaphores, queue = libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)
    assert min(shared, semaphores, queue) >= 0
    try:
        code = f"""
        print(call(31, 195, {shared}, 0, None), call(66, 191, {semaphores}, 0, 0), call(71, 187, {queue}, 0, None))
        print(call(30, 196, {shared}, None, 0), call(65, 193, {semaphores}, struct.pack("Hhh", 0, 1, 0), 1))
        print(call(69, 189, {queue}, struct.pack("q8s", 1, b"x"), 8, 0), call(70, 188, {queue}, bytes(64), 8, 0, 0o4000))
        print(call(241, 181, b"/agentrl-none"))
        """
        assert set(out(code, kind).split()) <= {"EPERM"}
        assert libc.shmctl(shared, 2, ctypes.create_string_buffer(256)) == 0
        assert libc.semctl(semaphores, 0, 12, 0) == 0 and libc.msgctl(queue, 2, ctypes.create_string_buffer(256)) == 0
    finally:
        libc.shmctl(shared, 0, None), libc.semctl(semaphores, 0, 0), libc.msgctl(queue, 0, None)


def test_threads_have_an_end(kind: SandboxSpec) -> None:
    """With small stacks and no limit on memory nothing else would stop them."""
    code = """
    import threading, time
    threading.stack_size(32 << 10)
    made = 0
    while made < 3000:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        made += 1
    time.sleep(2)
    print(made)
    """
    spec = SandboxSpec(cpu_s=20, processes=kind.processes, workdir="/", pids=100)
    result = asyncio.run(run(code, spec))
    assert result.end == "processes", result


DRIVER = """
import asyncio, os, sys
from agentrl.contrib.sandboxes import SANDBOXES, SandboxSpec
async def main():
    box = await SANDBOXES.bind("local", {{}})().start(SandboxSpec(processes={processes}, workdir="/"))
    code = '''{code}'''
    if {processes}:
        await box.write({{"code.py": code.encode()}})
        await box.exec(["python3", "code.py"])
    else:
        await box.python(code)
asyncio.run(main())
"""


def test_it_dies_with_its_driver_whatever_it_asks_the_kernel(kind: SandboxSpec, tmp_path: Path) -> None:
    mark = f"orphan-{os.getpid()}-{kind.processes}"
    code = f"import ctypes, time\\np = ctypes.CDLL(None).prctl\\np(1, 0, 0, 0, 0)\\np(15, b'{mark[:15]}')\\ntime.sleep(60)"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(processes=kind.processes, code=code)], env={**os.environ, "TMPDIR": str(tmp_path)}
    )

    def alive() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["name", "status"]):
            if process.info["name"] == mark[:15] and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    try:
        assert until(alive, 60)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        assert until(lambda: not alive(), 5)
    finally:
        for process in alive():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_installed_packages_are_not_read(kind: SandboxSpec) -> None:
    """Where agentrl and its environments are installed, gold answers are. Python's own library is read as ever."""
    base = Path(sys.base_prefix) / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    folders = {Path(sysconfig.get_paths()["purelib"]), base, Path("/usr/lib/python3/dist-packages")}
    there = [str(file) for folder in folders if folder.is_dir() for file in islice(folder.rglob("*.py"), 20)]
    assert there
    code = f"""
    import zoneinfo, sqlite3, json, email.mime.text
    print(*(tried(open, path) for path in {there!r}))
    """
    assert set(out(code, kind).split()) == {"EACCES"}
    if kind.processes:
        assert "done" in asyncio.run(run(code, kind, packages=True)).stdout
