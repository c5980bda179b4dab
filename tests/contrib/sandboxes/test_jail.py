"""The local sandbox with Python code that may start no process: attacked in every way that docs/sandboxes.md names."""

import asyncio
import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from agentrl.contrib.sandboxes import local
from agentrl.contrib.sandboxes.contract import SANDBOXES, ExecResult, SandboxSpec
from agentrl.contrib.sandboxes.process_group import Watched, run_group
from agentrl.env.catalog import find_env
from agentrl.utils.errors import EnvError, ResourceError
from agentrl.utils.search_path import load_module
from tests.waits import runs, until

FOLDER = Path(str(find_env("python").path)).parent
files = load_module(FOLDER / "files.py")
SHORT = SandboxSpec(cpu_s=1, memory=256 << 20, file_size=1 << 20, disk=4 << 20, processes=False, workdir="/")
OUTPUT = 16 << 10


def left_by(code: str, spec: SandboxSpec = SHORT, wall: float = 120.0) -> tuple[ExecResult, dict[str, bytes], list[str]]:
    """Outcome of a program in the sandbox (its wall is long), its files, and names of those not kept."""

    async def main() -> tuple[ExecResult, dict[str, bytes], list[str]]:
        box = await SANDBOXES.bind("local", {})().start(spec)
        try:
            result = await box.python(code, timeout=wall, max_output=OUTPUT)
            sizes, dropped = await files.keep_files(box)
            return result, {name: await box.read(name) for name in sizes}, dropped
        finally:
            await box.stop()

    return asyncio.run(main())


def attack(code: str, spec: SandboxSpec = SHORT, wall: float = 120.0) -> ExecResult:
    return left_by(code, spec, wall)[0]


def test_a_kernel_that_cannot_hold_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    local.require_kernel.cache_clear()
    monkeypatch.setattr(local.platform, "machine", lambda: "riscv64")
    with pytest.raises(ResourceError, match="riscv64"):
        local.require_kernel(True)
    monkeypatch.undo()
    local.require_kernel.cache_clear()


def test_a_sandbox_that_does_not_come_up_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infrastructure fault, so the episode is unscored; code cannot fake one: the pipe is closed."""
    fake = "import os\nfor fd in range(3, 60):\n try: os.write(fd, b'!')\n except OSError: pass\nos._exit(97)"
    assert attack(fake).code == 97
    monkeypatch.setattr(local, "JAIL", FOLDER / "env.py")
    with pytest.raises(EnvError, match="did not start"):
        attack("1")


# -- attacks -----------------------------------------------------------------------------------------


FORBIDDEN = {
    "from socket import *\nsocket(AF_UNIX)": "not permitted", "from socket import *\nsocketpair()": "not permitted",
    "from socket import *\nsocket(AF_NETLINK, SOCK_RAW)": "not permitted",
    f"import os\nfor sig in (0, 9): os.kill({os.getpid()}, sig)": "not permitted",
    "import os\nos.killpg(os.getpgid(os.getppid()), 9)": "not permitted", "import os\nos.setsid()": "",
    "import os\nwhile True:\n os.fork()": "", "import os\nos.posix_spawn('/bin/sh', ['sh'], {})": "",
    "import subprocess\nsubprocess.run(['sleep', '100'])": "",
    "import multiprocessing as m\nm.Process(target=print).start()": "", "import os\nos.execv('/bin/sh', ['sh'])": "",
    "import os\nos.system('sleep 100') and exit(1)": "", "import os\nos.memfd_create('x')": "",
    "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))": "",
}  # fmt: skip


def test_no_network_no_children_no_other_programs_and_no_other_process() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = {f"import socket\nsocket.create_connection({server.getsockname()!r}, timeout=1)": "not permitted"}
        for code, says in {**reach, **FORBIDDEN}.items():
            outcome = attack(code)
            assert outcome.end == "error" and says in outcome.stdout, code
            assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, code


def test_nothing_outside_the_folder_is_read_or_changed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("gold")
    secret.chmod(0o640)
    for code in (
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w')",
        f"import os; os.remove({str(secret)!r})",
        f"import os; os.rename({str(secret)!r}, 'mine')",
        f"import os; os.link({str(secret)!r}, 'mine'); print(open('mine').read())",
        f"import os; os.symlink({str(secret)!r}, 'mine')",
        f"import os; os.truncate({str(secret)!r}, 0)",
        f"import os; print(os.listdir({str(tmp_path)!r}))",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "print(open('/proc/self/environ').read())",
        f"print(open({str(FOLDER / 'problems.py')!r}).read())",
        "open('/dev/shm/x', 'w')",
    ):
        assert attack(code).end == "error", code
    touch = f"import os; os.chmod({str(secret)!r}, 0o777); os.utime({str(secret)!r}, (1, 1))"
    assert attack(touch).end == "ok"
    assert secret.read_text() == "gold" and secret.stat().st_mode & 0o777 == 0o640
    assert secret.stat().st_mtime > 10 and sorted(tmp_path.iterdir()) == [secret]


def test_memory_is_bounded() -> None:
    assert "MemoryError" in attack("x = bytearray(1 << 30)").stdout
    for size in (1 << 20, 64):  # small pieces fill it slowly: the limit of the processor's time must not come first
        assert "MemoryError" in attack(f"x = []\nwhile True: x.append(bytes({size}))", replace(SHORT, cpu_s=20)).stdout


def test_files_are_bounded_one_by_one_and_together() -> None:
    outcome, kept, _ = left_by("open('big', 'wb').write(bytes(8 << 20))")
    assert "File too large" in outcome.stdout and len(kept["big"]) == 1 << 20
    outcome, kept, _ = left_by("i = 0\nwhile True:\n open(f'f{i}', 'wb').write(bytes(1 << 19)); i += 1")
    assert outcome.end == "disk" and SHORT.disk is not None and sum(map(len, kept.values())) <= SHORT.disk
    _, kept, dropped = left_by("for i in range(200): open(f'f{i:03}', 'w').write('x')")
    assert len(kept) == files.MOST and dropped


def test_strange_folders_are_kept_or_dropped_but_always_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep, kept, _ = left_by("import os\nfor i in range(1500): os.mkdir('d' * 9); os.chdir('d' * 9)")
    assert deep.end in ("disk", "ok") and not kept
    odd = "import os\nos.mkdir('in')\nos.umask(0o777)\nopen('in/f', 'w')\nopen(b'\\xff', 'w')\nos.mkdir('.0')"
    _, kept, dropped = left_by(odd)
    assert kept.keys() == {"in/f"} and "?" in dropped
    assert not list(tmp_path.iterdir())


def test_endless_loops_and_sleeps_end() -> None:
    assert attack("while True: pass").end == "cpu"
    assert attack("import time\ntime.sleep(60)", wall=0.3).end == "wall"
    silent = "import os, time\nos.close(1); os.close(2); time.sleep(60)"
    assert attack(silent, wall=0.3).end == "wall"


def test_a_crash_of_the_interpreter_is_an_answer() -> None:
    outcome = attack("import ctypes\nctypes.string_at(0)")
    assert (outcome.end, outcome.code) == ("killed", -11)


def test_leftover_children_die_with_their_group(tmp_path: Path) -> None:
    """A program that may have children (no jail here): none outlives it, and nothing waits for them."""
    script = f"(trap '' HUP TERM; sleep 300) & sleep 300 & echo $! > '{tmp_path}/pid'; echo started"
    ended = asyncio.run(run_group(["/bin/sh", "-c", script], b"", Watched(120.0, OUTPUT)))
    assert (ended.stdout, ended.end) == (b"started\n", "ok")
    child = int((tmp_path / "pid").read_text())
    assert until(lambda: not runs(child), 2)


def test_ordinary_code_works() -> None:
    code = (
        "import math, statistics, itertools, json, re, datetime, decimal, fractions, heapq\n"
        "import shutil, hashlib, csv, zoneinfo, sqlite3, random, uuid, threading\n"
        "r = []; x = [threading.Thread(target=r.append, args=(i,)) for i in range(4)]; [i.start() for i in x]\n"
        "[i.join() for i in x]\n"
        "open('a', 'w').write('x'); shutil.copy('a', 'b')\n"
        "row = sqlite3.connect(':memory:').execute('select 1').fetchone()\n"
        "print(hashlib.sha256(b'a').hexdigest()[:4], row, len(r))\n"
        "{'a', 'b', 'c'}"
    )
    (one, kept, _), two = left_by(code), attack(code)
    assert one.end == "ok" and one.stdout.startswith("ca97 (1,) 4") and set(kept) == {"a", "b"}
    assert one.stdout == two.stdout  # the order of a set is the same in every run


def test_a_traceback_shows_the_policys_own_lines_only() -> None:
    output = attack("def f():\n    return 1 / 0\nf()").stdout
    assert "line 2, in f" in output and "ZeroDivisionError" in output and "jail" not in output
    assert attack("x = (").stdout.count("File") == 1


def test_the_system_call_table_names_every_call_once() -> None:
    jail: ModuleType = load_module(local.JAIL)
    for column in (0, 1):
        numbers = [pair[column] for table in (jail.DENIED, jail.IGNORED) for pair in table.values()]
        known = [number for number in numbers if number is not None]
        assert len(known) == len(set(known)) and jail.CLONE[column] not in known
