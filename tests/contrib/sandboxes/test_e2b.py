"""The adapter to E2B's SDK: against a stand-in of the SDK that runs commands on this machine, and each of its calls against the
installed SDK's signatures where that is there. The contract against the service itself is in test_providers.py."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.contrib.sandboxes import e2b as adapter
from agentrl.env.sandbox import SANDBOXES, SandboxSpec
from agentrl.utils.errors import ConfigError, SandboxError

CALLS: list[tuple[str, dict[str, Any]]] = []


class CommandExitException(Exception):
    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


class Handle:
    def __init__(self, process: asyncio.subprocess.Process, out: Any, err: Any) -> None:
        self.process, self.out, self.err = process, out, err

    async def wait(self) -> Any:
        out, err = await self.process.communicate()
        self.out(out.decode())
        self.err(err.decode())
        if self.process.returncode:
            raise CommandExitException(self.process.returncode)
        return SimpleNamespace(exit_code=0)

    async def kill(self) -> None:
        CALLS.append(("kill command", {}))
        os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def disconnect(self) -> None: ...


class Remote:
    """`AsyncSandbox`, its `commands` and its `files`, in a folder of this machine."""

    root: Path
    made = 0

    def __init__(self) -> None:
        self.commands = self.files = self
        self.sandbox_id = f"b{Remote.made}"
        Remote.made += 1

    @classmethod
    async def create(cls, **options: Any) -> Remote:
        CALLS.append(("create", options))
        if options["template"] == "no-such":
            raise RuntimeError("404: template not found")
        return cls()

    async def run(self, line: str, **options: Any) -> Handle:
        CALLS.append(("run", {"line": line, **options}))
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", "exec " + line.replace("/app", str(self.root))),
            cwd=self.root,
            env={"PATH": "/usr/bin:/bin", **options["envs"]},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return Handle(process, options["on_stdout"], options["on_stderr"])

    async def write(self, path: str, data: bytes, user: str) -> None:
        Path(path).write_bytes(data)

    async def write_files(self, entries: list[dict[str, Any]], user: str) -> None:
        for entry in entries:
            (self.root / entry["path"].removeprefix("/app/")).write_bytes(entry["data"])

    async def kill(self) -> None:
        CALLS.append(("kill", {"id": self.sandbox_id}))

    async def create_snapshot(self) -> Any:
        return SimpleNamespace(snapshot_id="snap-1")


@pytest.fixture(autouse=True)
def sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = types.ModuleType("e2b")
    vars(fake).update(AsyncSandbox=Remote, CommandExitException=CommandExitException, InvalidArgumentException=KeyError)
    monkeypatch.setitem(sys.modules, "e2b", fake)
    monkeypatch.setattr(adapter, "find_spec", lambda name: object())
    Remote.root = tmp_path
    CALLS.clear()


def called(name: str) -> list[dict[str, Any]]:
    return [options for kind, options in CALLS if kind == name]


def test_commands_files_limits_and_ends() -> None:
    async def main() -> None:
        spec = SandboxSpec(image="t", files={"a": b"one"}, network="none", env={"K": "1"}, seconds=90)
        box = await SANDBOXES.bind("e2b", {"user": "me"})().start(spec)
        made = called("create")[0]
        assert (made["template"], made["timeout"], made["allow_internet_access"], made["envs"]) == ("t", 90, False, {"K": "1"})
        done = await box.exec("cat a; echo $K $L; cat; exit 3", env={"L": "2"}, stdin=b"in")
        assert (done.code, done.stdout, done.end) == (3, "one1 2\nin", "error")
        assert (await box.exec(["echo", "a b", "$K"])).stdout == "a b $K\n"
        cut = await box.exec("printf 12345; printf abc >&2", max_output=4)
        assert (cut.stdout, cut.stderr, cut.cut) == ("1234", "abc", 1)
        late = await box.exec("sleep 20", timeout=0.1)
        assert late.timed_out and late.code == -9 and len(called("kill command")) == 1
        running = asyncio.ensure_future(box.exec("sleep 20"))
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(called("kill command")) == 2
        assert await box.snapshot() == "snap-1"
        await box.restore("snap-1")  # another sandbox, from the snapshot; the old one is killed
        assert called("create")[1]["template"] == "snap-1" and called("kill") == [{"id": f"b{Remote.made - 2}"}]
        await box.stop()
        assert called("kill")[1:] == [{"id": f"b{Remote.made - 1}"}]
        assert {options["user"] for options in called("run")} == {"me"}

    asyncio.run(main())


def test_what_the_service_lacks_is_its_fault_and_what_it_cannot_give_is_refused() -> None:
    provider = SANDBOXES.bind("e2b", {})()
    with pytest.raises(SandboxError, match="e2b: RuntimeError: 404"):
        asyncio.run(provider.start(SandboxSpec(image="no-such")))
    with pytest.raises(ConfigError, match=r'"e2b": memory = 1073741824: belongs to the template'):
        provider.check(SandboxSpec(memory=1 << 30))


def test_the_calls_fit_the_installed_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "e2b")
    e2b = pytest.importorskip("e2b", reason="the package e2b is not installed")
    from e2b.sandbox_async.commands.command import Commands
    from e2b.sandbox_async.commands.command_handle import AsyncCommandHandle
    from e2b.sandbox_async.filesystem.filesystem import Filesystem

    run = {"background", "cwd", "envs", "user", "on_stdout", "on_stderr", "timeout", "retain_output"}
    for function, names in (
        (e2b.AsyncSandbox.create, {"template", "timeout", "envs", "allow_internet_access", "metadata"}),
        (Commands.run, run), (Filesystem.get_info, {"path", "user"}), (Filesystem.read, {"path", "format", "user"}),
        (Filesystem.write, {"path", "data", "user"}), (Filesystem.write_files, {"files", "user"}),
        (AsyncCommandHandle.kill, set()), (AsyncCommandHandle.disconnect, set()), (AsyncCommandHandle.wait, set()),
    ):  # fmt: skip
        assert names <= set(inspect.signature(function).parameters), function
    for name in ("create_snapshot", "kill"):
        assert inspect.iscoroutinefunction(inspect.unwrap(getattr(e2b.AsyncSandbox, name))) or callable(
            getattr(e2b.AsyncSandbox, name)
        )
    assert callable(e2b.Sandbox.delete_snapshot) and callable(e2b.Sandbox.kill)
    for name in ("CommandExitException", "FileNotFoundException", "FileType", "InvalidArgumentException"):
        assert hasattr(e2b, name)
