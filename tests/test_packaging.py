"""The wheel carries the shelves and works without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from agentrl.utils.search_path import load_module
from tests.e2e.runs import SMALL

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel unpacked, as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], check=True, timeout=300
    )
    [wheel] = folder.glob("agentrl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder / "site")
    assert not [n for n in names if n.split("/")[0] in ("envs", "tools", "rewards", "configs", "tests")]
    return folder / "site"


def test_the_packaged_quickstart_trains_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    here: dict[str, Any] = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 300}
    where = subprocess.run([sys.executable, "-c", "import agentrl; print(agentrl.__file__)"], **here)
    assert where.stdout.startswith(str(site))
    few = ["sft.max_steps=2", "sft.min_steps=2", "sft.gate_every=2", "steps=1", "eval.tasks=2", "eval.every=0"]
    args = ["train", "quickstart", "cluster.backend=inline", *SMALL, *few]
    done = subprocess.run([sys.executable, "-m", "agentrl.cli.main", *args], **here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())["status"] == "done"


def test_every_shelf_is_in_the_wheel(site: Path) -> None:
    for shelf, pattern in (("envs", "*/env.py"), ("rewards", "*.json"), ("configs", "*.toml")):
        inside = {p.relative_to(site / "agentrl" / "_shelf" / shelf) for p in (site / "agentrl" / "_shelf" / shelf).glob(pattern)}
        outside = {p.relative_to(ROOT / shelf) for p in (ROOT / shelf).glob(pattern)}
        assert inside == outside and inside


def test_the_viewers_page_is_in_the_wheel_with_the_licenses_of_what_it_carries(site: Path) -> None:
    inside, outside = (
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (site / "agentrl" / "contrib" / "view" / "assets", ROOT / "agentrl" / "contrib" / "view" / "assets")
    )
    assert inside == outside and "index.html" in inside
    carried = {
        name.split("/")[1].split("-")[0] for name in inside if name.startswith("vendor/") and name.endswith((".js", ".css"))
    }
    assert carried == {"uplot", "htm"} and {f"vendor/LICENSE.{name}" for name in (*carried, "preact")} <= set(inside)


# -- the installation ------------------------------------------------------------------------------


CONFIG = """:env:.find-links='/mine'
global.extra-index-url='https://a/simple https://b/simple'
global.find-links='/all'
global.timeout='60'
"""


@pytest.mark.parametrize("fails", [False, True])
def test_uv_installs_from_where_pip_is_configured_to_and_pip_if_it_fails(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    install = load_module(Path(__file__).resolve().parents[1] / ".ci" / "install.py")
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
