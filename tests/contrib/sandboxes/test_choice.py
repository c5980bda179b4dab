"""Which of this machine's own sandboxes is chosen: by a probe of the real program, once a process, and said once."""

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from agentrl.config.schema import SandboxConfig
from agentrl.contrib.sandboxes import bubblewrap, local
from agentrl.contrib.sandboxes import sandbox_pool as choice
from agentrl.contrib.sandboxes.contract import SandboxSpec
from agentrl.contrib.sandboxes.sandbox_pool import provider_of, require, sandbox_config
from agentrl.utils.errors import ResourceError

BWRAP = shutil.which("bwrap")
REASON = bubblewrap.unavailable()
real = pytest.mark.skipif(REASON is not None, reason=f"no bubblewrap here: {REASON}")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    def forget() -> None:
        for cached in (bubblewrap.unavailable, bubblewrap._no_more_namespaces, choice.preferred_provider):
            cached.cache_clear()

    forget()
    yield
    forget()


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A `bwrap` at the head of the path, which writes down how often it is asked."""
    program = folder / "bwrap"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/asked"\n{script}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "asked"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "agentrl.contrib.sandboxes.sandbox_pool"]


@real
def test_bubblewrap_is_chosen_where_it_works_by_one_probe_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = stand_in(tmp_path, monkeypatch, f'exec {BWRAP} "$@"')
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert [sandbox_config(given).provider for given in (None, {}, {"warm": 1}, SandboxConfig())] == ["bubblewrap"] * 4
    assert len(said(caplog)) == 1 and 'env.sandbox.provider = "local" chooses the other one' in said(caplog)[0]
    assert len(asked.read_text().splitlines()) == 2, "one that it works, and one that it keeps commands from namespaces"
    assert require(SandboxConfig()).unavailable() is None and type(provider_of(SandboxConfig())).name == "bubblewrap"


def test_the_config_forces_either_and_arguments_are_the_local_one_s() -> None:
    assert [sandbox_config({"provider": name}).provider for name in ("local", "bubblewrap")] == ["local", "bubblewrap"]
    assert sandbox_config({"args": {"packages": True}}).provider == "local" and provider_of(
        SandboxConfig(args={"packages": True})
    )


@pytest.mark.parametrize(("script", "reason"), [
    ("echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1", "bwrap cannot make namespaces here: bwrap: setting up"),
    pytest.param(
        f'case " $* " in *" --disable-userns "*) echo "bwrap: Unknown option" >&2; exit 1;; esac\nexec {BWRAP} "$@"',
        "it is older than 0.8, so a command could make namespaces of its own",
        marks=real,
    ),
    pytest.param(
        f'case " $* " in *" --seccomp "*) echo "bwrap: prctl(PR_SET_SECCOMP)" >&2; exit 1;; esac\nexec {BWRAP} "$@"',
        "bwrap cannot make namespaces here: bwrap: prctl(PR_SET_SECCOMP)",
        marks=real,
    ),
    (None, "the program bwrap is not installed"),
], ids=["no user namespaces", "an old one", "no filter", "none"])  # fmt: skip
def test_one_that_does_not_keep_what_is_promised_is_not_chosen(
    script: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        stand_in(tmp_path, monkeypatch, script)
    with caplog.at_level(logging.INFO):
        assert [sandbox_config(None).provider for _ in range(2)] == ["local"] * 2
    assert len(said(caplog)) == 1 and reason in said(caplog)[0]


def test_where_neither_works_code_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_landlock(isolate_files: bool) -> None:
        raise ResourceError(f"the local sandbox needs a kernel with Landlock: {local.WHAT_HELPS}")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local, "require_kernel", without_landlock)
    with pytest.raises(ResourceError, match=r"needs a kernel with Landlock.*bubblewrap"):
        require(sandbox_config(None))


@real
@pytest.mark.parametrize("shown", [False, True])
async def test_installed_packages_are_empty_folders_unless_they_are_asked_for(shown: bool) -> None:
    folders = [path for path in local.package_folders() if path.startswith("/usr") and any(Path(path).iterdir())]
    if not folders:
        pytest.skip("no Python packages below /usr")
    box = await bubblewrap.BubblewrapProvider(packages=shown).start(SandboxSpec())
    try:
        run = partial(box.exec, timeout=20.0)
        for folder in folders:
            listed = await run(["ls", "-A", folder])
            assert bool(listed.stdout) is shown, (folder, listed)
            assert (await run(["touch", f"{folder}/x"])).code != 0
        assert "3" in (await box.python("1 + 2")).stdout
    finally:
        await box.stop()
