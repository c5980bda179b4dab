"""What every sandbox provider passes. A provider's test file makes `Contract` a base and says how its sandboxes start."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

from agentrl.contrib.sandboxes.contract import SANDBOXES, ExecResult, FileInfo, Sandbox, SandboxProvider, SandboxSpec
from agentrl.contrib.sandboxes.local import FolderSandbox
from agentrl.utils.errors import ConfigError, SandboxError


def commands(provider: str, *texts: str, timeout: float = 60.0, **fields: Any) -> list[ExecResult]:
    """What comes of commands, one after the other in one sandbox."""

    async def main() -> list[ExecResult]:
        box = await SANDBOXES.bind(provider, {})().start(SandboxSpec(**fields))
        try:
            return [await box.exec(text, timeout=timeout, merge=True) for text in texts]
        finally:
            await box.stop()

    return asyncio.run(main())


FILES = {"a.txt": b"one\n", "in/deep/b.bin": bytes(range(256))}


class Contract:
    """`image`: where the provider needs one. Each test starts what it needs, in an event loop of its own."""

    provider_name: ClassVar[str]
    image: ClassVar[str | None] = None
    python: ClassVar[bool] = True
    """Whether the image has Python."""

    def provider(self) -> SandboxProvider:
        made: SandboxProvider = SANDBOXES.bind(self.provider_name, {})()
        return made

    def spec(self, **fields: Any) -> SandboxSpec:
        return SandboxSpec(**{"files": FILES, "image": self.image, **fields})

    def run(self, work: Callable[[Sandbox], Awaitable[Any]], **fields: Any) -> Any:
        """What `work` does with a started sandbox, which is stopped afterwards."""

        async def main() -> Any:
            box = await self.provider().start(self.spec(**fields))
            try:
                return await work(box)
            finally:
                await box.stop()

        return asyncio.run(main())

    def test_streams_status_and_time_of_a_command(self) -> None:
        async def work(box: Sandbox) -> list[ExecResult]:
            return [
                await box.exec("echo out; echo err >&2; exit 3"),
                await box.exec("echo out; echo err >&2", merge=True),
                await box.exec(["cat"], stdin=b"x" * 100_000, max_output=200_000),
                await box.exec(["printf", "%s|", "a b", "$HOME", "'"]),
                await box.exec("sleep 0.3"),
                await box.exec(["no-such-program"]),
                *[await box.exec(text) for text in ("echo a\0b", "echo \ud800", f"echo {'x' * 200_000}")],
                await box.exec("pwd", cwd="a\0b"),
            ]

        both, merged, echoed, plain, slept, absent, *unsent = self.run(work)
        assert [(one.code, one.end) for one in unsent] == [(127, "error")] * 4, "a command that no program takes is no outage"
        assert (both.code, both.stdout, both.stderr, both.end) == (3, "out\n", "err\n", "error")
        assert (merged.code, merged.stdout, merged.stderr, merged.end) == (0, "out\nerr\n", "", "ok")
        assert (echoed.stdout, echoed.cut, echoed.end) == ("x" * 100_000, 0, "ok")
        assert plain.stdout == "a b|$HOME|'|"
        assert 0.3 <= slept.seconds < 30
        assert absent.code in (126, 127) and absent.end == "error"

    def test_where_a_command_runs_and_with_which_variables(self) -> None:
        async def work(box: Sandbox) -> list[str]:
            results = [
                await box.exec("pwd; cat a.txt; echo $KEY $OTHER"),
                await box.exec("pwd; ls", cwd="in/deep", env={"OTHER": "2"}),
                await box.exec("echo $KEY $OTHER", env={"KEY": "3"}),
                await box.exec(["cat", box.path("/app/a.txt")]),
                await box.exec("env"),
            ]
            return [box.path("/app"), *(result.stdout for result in results)]

        work_folder, first, inner, again, whole, everything = self.run(work, env={"KEY": "1"})
        assert first == f"{work_folder}\none\n1\n"
        assert inner == f"{work_folder}/in/deep\nb.bin\n"
        assert again == "3\n" and whole == "one\n"
        assert "KEY=1" in everything and "PYTEST_CURRENT_TEST" not in everything  # nothing of this process's own

    def test_files_are_read_written_listed_and_removed(self) -> None:
        async def work(box: Sandbox) -> Any:
            assert await box.read("in/deep/b.bin") == bytes(range(256))
            await box.write({"new/c d.txt": b"c", "a.txt": b"two", "/tests/t.sh": b"#!/bin/sh\necho from a script\n"})
            assert await box.read("/app/a.txt") == b"two"
            script = await box.exec([box.path("/tests/t.sh")])
            assert script.stdout == "from a script\n", script
            await box.exec("ln -s /etc/passwd link; mkdir -p empty; mkdir -p one/two; echo 1 > one/two/f")
            listed = await box.entries()
            try:
                linked = await box.read("link")  # inside a container a link may be followed: it leads nowhere else
                assert linked.decode() == (await box.exec("cat link")).stdout and not isinstance(box, FolderSandbox)
            except FileNotFoundError:
                pass
            for path in ("empty", "nothing", "nothing/at/all", "."):
                with pytest.raises(FileNotFoundError):
                    await box.read(path)
            with pytest.raises(ValueError, match="256 bytes"):
                await box.read("in/deep/b.bin", most=255)
            with pytest.raises(FileExistsError):
                await box.write({"a.txt/inside": b""})
            await box.remove(["one", "a.txt", "nothing", "/tests"])
            rest = await box.entries(), await box.entries("/tests"), await box.entries("nowhere")
            await box.remove(["."])
            assert await box.entries() == [] and (await box.exec("ls -A; echo here")).stdout == "here\n"
            return listed, *rest

        before, after, tests, nowhere = self.run(work)
        assert [info.path for info in before] == ["a.txt", "in/deep/b.bin", "link", "new/c d.txt", "one/two/f"]
        assert FileInfo("a.txt", 3, True) in before and [info.path for info in before if not info.regular] == ["link"]
        assert [info.path for info in after] == ["in/deep/b.bin", "link", "new/c d.txt"] and tests == nowhere == []

    def test_a_slow_command_is_killed_with_its_children_and_the_sandbox_goes_on(self) -> None:
        async def work(box: Sandbox) -> Any:
            began = time.monotonic()
            late = await box.exec("echo begun; (sleep 1; touch late) & sleep 300", timeout=0.4)
            seconds = time.monotonic() - began
            alive = await box.exec("echo alive")
            await asyncio.sleep(1.1 - (time.monotonic() - began))
            return late, seconds, alive, [info.path for info in await box.entries()]

        late, seconds, alive, files = self.run(work, files={})
        assert (late.end, late.stdout) == ("wall", "begun\n")
        assert 0.4 <= seconds < 20 and alive.stdout == "alive\n"
        assert files == []  # the child that would have written later is gone as well

    def test_output_is_cut_and_endless_output_stopped(self) -> None:
        async def work(box: Sandbox) -> Any:
            return await box.exec("head -c 3000 /dev/zero | tr '\\0' x", max_output=1000), await box.exec(
                "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", max_output=1000, timeout=60
            )

        cut, endless = self.run(work)
        assert (cut.code, len(cut.stdout), cut.cut) == (0, 1000, 2000)
        assert len(endless.stdout) == 1000 and endless.cut > 63_000 and endless.end == "output"

    async def test_a_snapshot_starts_another(self) -> None:
        provider = self.provider()
        box = await provider.start(self.spec())
        await box.exec("echo two > a.txt; ln -s a.txt l; mkdir -p /tmp/x 2>/dev/null; true")
        saved = await box.snapshot()
        await box.exec("echo three > a.txt; rm -r in")
        other = await provider.start(self.spec(), saved)
        try:
            assert (await other.exec("cat l; ls in/deep")).stdout == "two\nb.bin\n"
            await other.exec("echo four > a.txt")
            assert (await box.exec("cat a.txt; ls")).stdout == "three\na.txt\nl\n"
            await box.stop()
            await other.stop()
            other = await provider.start(self.spec(), saved)  # the snapshot outlives its sandbox
            assert await other.read("a.txt") == b"two\n"
        finally:
            await box.stop()
            await other.stop()
            provider.forget(saved)

    def test_cancelling_kills_the_command(self) -> None:
        async def work(box: Sandbox) -> Any:
            running = asyncio.ensure_future(box.exec("touch begun; sleep 0.8; touch late"))
            while not [info for info in await box.entries() if info.path == "begun"] if self.looks else not running:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0 if self.looks else 0.5)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await asyncio.sleep(0.9)
            return [info.path for info in await box.entries()]

        assert self.run(work, files={}) == ["begun"]

    looks: ClassVar[bool] = False
    """Whether files can be listed while a command runs."""

    def test_there_is_no_network_unless_it_is_asked_for(self) -> None:
        async def work(box: Sandbox) -> str:
            return (await box.exec("cat /proc/net/dev 2>&1 | grep -c : ; true")).stdout.strip()

        assert self.run(work) in ("0", "1")  # no /proc, or the loopback device alone

    def test_python_code_runs_as_in_a_notebook(self) -> None:
        if not self.python:
            pytest.skip(f"the image {self.image} has no Python")

        async def work(box: Sandbox) -> Any:
            return (
                await box.python("open('n.txt', 'w').write('7')\nx = 6\nx * 7"),
                await box.python("1 / 0"),
                await box.read("n.txt"),
                await box.python("'\ud800'"),
                await box.python("def f(a: int): pass\nf.__annotations__"),
            )

        value, fault, kept, half, own = self.run(work)
        assert own.stdout == "{'a': <class 'int'>}\n", "the code inherits nothing of the program that runs it"
        assert (value.stdout, value.code, kept) == ("42\n", 0, b"7")
        assert fault.code == 1 and "ZeroDivisionError" in fault.stdout and "notebook" not in fault.stdout
        assert half.code == 1 and "surrogates not allowed" in half.stdout, "half a character, which JSON can say, is no text"

    async def test_after_stop_nothing_runs(self) -> None:
        box = await self.provider().start(self.spec())
        await box.stop()
        await box.stop()
        with pytest.raises((SandboxError, FileNotFoundError)):
            await box.exec("true")

    def test_an_unknown_snapshot_is_the_infrastructures_fault(self) -> None:
        with pytest.raises(SandboxError):
            asyncio.run(self.provider().start(self.spec(), "no-such-snapshot"))

    def test_what_it_cannot_give_is_refused_by_name(self) -> None:
        provider = self.provider()
        for fields in self.refused:
            with pytest.raises(ConfigError, match=f'"{self.provider_name}": {next(iter(fields))}'):
                provider.check(self.spec(**fields))
        assert self.refused

    refused: ClassVar[list[dict[str, Any]]] = []
