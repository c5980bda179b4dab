"""The contract, for each provider that can be had here; the others are skipped with the reason."""

import asyncio
import os
import shutil
import subprocess
import tarfile
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.contrib.sandboxes.contract import SANDBOXES, ExecResult, SandboxSpec
from tests.conftest import proof
from tests.contrib.sandboxes.contract import Contract, commands


def needs(name: str) -> pytest.MarkDecorator:
    reason = SANDBOXES.bind(name, {})().unavailable()
    return pytest.mark.skipif(reason is not None, reason=f"sandbox provider {name}: {reason}")


class TestLocal(Contract):
    provider_name = "local"
    looks = True
    refused: ClassVar[list[dict[str, Any]]] = [{"image": "x"}, {"build": Path("x")}, {"cpus": 1.0}]


@needs("bubblewrap")
class TestBubblewrap(Contract):
    provider_name = "bubblewrap"
    looks = True
    refused: ClassVar[list[dict[str, Any]]] = [{"image": "x"}, {"build": Path("x")}, {"cpus": 1.0}, {"processes": False}]

    def test_a_command_makes_no_namespaces_of_its_own(self) -> None:
        """In a user namespace it would have all capabilities over the others that it makes with it."""
        (made,) = commands(
            "bubblewrap", "unshare --user true 2>/dev/null; echo $?; unshare --user --net true 2>/dev/null; echo $?"
        )
        assert made.stdout.split() == ["1", "1"], made

    def test_calls_that_no_namespace_confines_are_refused(self) -> None:
        code = """
        import ctypes, errno, os
        libc, arm = ctypes.CDLL(None, use_errno=True), os.uname().machine == "aarch64"
        tried = (250, 219, 0, -3, 0), (425, 425, 1, bytes(120)), (298, 241, bytes(128), 0, -1, -1, 0), (323, 282, 1)
        for x86, number, *args in tried:
            done = libc.syscall(number if arm else x86, *args)
            print("done" if done >= 0 else errno.errorcode[ctypes.get_errno()])
        os.chmod("made", 0o640) if open("made", "w").close() is None else None
        print(oct(os.stat("made").st_mode)[-3:], os.kill(os.getpid(), 0))
        """
        (made,) = commands("bubblewrap", "python3 code.py", files={"code.py": textwrap.dedent(code).encode()})
        assert made.stdout.split() == ["EPERM"] * 4 + ["640", "None"], made


def tiny_image(client: str) -> str:
    """An image with a static busybox in it, made from this machine's; or the one that AGENTRL_TEST_IMAGE names."""
    if name := os.environ.get("AGENTRL_TEST_IMAGE"):
        return name
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox to make an image of (the package busybox-static), and AGENTRL_TEST_IMAGE is not set")
    import io

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(busybox, "bin/busybox")
        for name in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
            if name == "busybox":
                continue
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        archive.addfile(tarfile.TarInfo("etc/passwd"), io.BytesIO())
    subprocess.run([client, "import", "-", "agentrl-test:latest"], input=packed.getvalue(), check=True, capture_output=True)
    return "agentrl-test:latest"


class Containers(Contract):
    python = False
    refused: ClassVar[list[dict[str, Any]]] = [{"processes": False}, {"disk": 1 << 20}]

    @pytest.fixture(autouse=True)
    def made(self) -> None:
        type(self).image = type(self).image or tiny_image(self.provider_name)


CLIENT = """#!/bin/sh
cd "$(dirname "$0")" && echo "$*" | sed -E 's/agentrl-[0-9]+-[0-9a-f]+/BOX/' >> log
if [ "$1" = run ]; then echo ready; exec cat > /dev/null; fi
[ "$2" = -i ] || exit 0
shift 2
while [ "$1" = -e ]; do export "$2"; shift 2; done
cd ".$2" && shift 3 && exec "$@"
"""


def test_what_a_client_of_containers_is_asked(tmp_path: Path) -> None:
    """Of a client that runs each command here. What was cut off is killed in the container too."""
    (tmp_path / "client").write_text(CLIENT)
    (tmp_path / "client").chmod(0o755)
    (tmp_path / "app/in").mkdir(parents=True)

    async def work() -> list[ExecResult]:
        provider = SANDBOXES.bind("docker", {"command": [str(tmp_path / "client")], "run": ["--user", "7"]})()
        box = await provider.start(SandboxSpec(env={"KEY": "1", "B": "x y"}))
        done = [
            await box.exec("echo $KEY $B; cat; echo err >&2; exit 3", stdin=b"in"),
            await box.exec(("printf", "%s|", "a b", "$B"), cwd="in", env={"KEY": "3=4"}),
            await box.exec("echo out; echo err >&2", merge=True),
            await box.exec("head -c 30 /dev/zero", max_output=10),
            await box.exec("sleep 60", timeout=0.5),
        ]
        running = asyncio.ensure_future(box.exec("touch begun; sleep 60"))
        while not (tmp_path / "app/begun").exists():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await box.stop()
        return done

    own, words, merged, cut, late = asyncio.run(work())
    assert (own.stdout, own.stderr, own.code) == ("1 x y\nin", "err\n", 3)
    assert (words.stdout, merged.stdout, cut.cut, late.end) == ("a b|$B|", "out\nerr\n", 20, "wall")
    begun, *asked, end = (tmp_path / "log").read_text().splitlines()
    asks, kill = "exec -i -e KEY=1 -e B=x y -w /app BOX sh -c ", "exec BOX sh -c kill -9 -1"
    assert begun.startswith("run --rm -i --name BOX ") and " --user 7 " in begun and end == "rm -f -v BOX"
    assert asked == [
        asks + "echo $KEY $B; cat; echo err >&2; exit 3",
        "exec -i -e KEY=3=4 -e B=x y -w /app/in BOX printf %s| a b $B",
        asks + 'exec "$@" 2>&1 sh sh -c echo out; echo err >&2',
        asks + "head -c 30 /dev/zero", asks + "sleep 60", kill, asks + "touch begun; sleep 60", kill,
    ]  # fmt: skip


@proof
@needs("podman")
class TestPodman(Containers):
    provider_name = "podman"


@proof
@needs("docker")
class TestDocker(Containers):
    provider_name = "docker"
