"""`.ci/install.py`: uv installs from where pip would, and pip does it if uv cannot. What the Makefile's programs find."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = """:env:.find-links='/mine'
global.extra-index-url='https://a/simple https://b/simple'
global.find-links='/all'
global.timeout='60'
"""


@pytest.mark.parametrize("fails", [False, True])
def test_uv_installs_from_where_pip_is_configured_to_and_pip_if_it_fails(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    spec = importlib.util.spec_from_file_location("install", Path(__file__).resolve().parents[1] / ".ci" / "install.py")
    assert spec is not None and spec.loader is not None
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    called: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[-2:] == ["config", "list"]:
            return subprocess.CompletedProcess(command, 0, CONFIG, "")
        called.append(command)
        return subprocess.CompletedProcess(command, int(fails and command[0] == "/bin/sh"), "", "")

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install.shutil, "which", lambda name: "/bin/sh")  # any file that is there stands for uv
    monkeypatch.setattr(install, "CONSTRAINTS", Path("/none"))
    install.pip("--no-deps", "some==1")
    places = ["--index-strategy", "unsafe-best-match"]
    places += ["--index", "https://a/simple", "--index", "https://b/simple", "--find-links", "/mine"]
    by_uv = ["/bin/sh", "pip", "install", "--quiet", "--python", sys.executable, *places, "--no-deps", "some==1"]
    by_pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "some==1"]
    assert called == ([by_uv, by_pip] if fails else [by_uv])


def test_what_make_starts_keeps_the_bytecode_that_it_compiles() -> None:
    """uv leaves the packages uncompiled: 3 s became 10 s for every process that imports torch and transformers."""
    shown = "shown: ; @printenv PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED || true"
    done = subprocess.run(
        ["make", "--silent", "--directory", str(Path(__file__).resolve().parents[1]), f"--eval={shown}", "shown"],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "7\n"
