"""`agentrl doctor`: what it finds, and its exit code."""

import argparse
import ctypes
import json
from types import SimpleNamespace

import pytest

from agentrl.cli.main import build_parser
from agentrl.cluster import machine
from agentrl.cluster import ray_cluster as shipping
from agentrl.config.schema import ClusterConfig
from agentrl.contrib.doctor import machine_checks as checks
from agentrl.contrib.sandboxes import containers as sandboxes
from agentrl.contrib.sandboxes.local import require_kernel
from agentrl.utils.errors import ResourceError


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["doctor", *argv])


def test_the_quick_checks_pass_here_and_print_json(capsys):
    args = parse("--no-ray", "--json")
    assert args.run(args) == 0
    out = json.loads(capsys.readouterr().out)
    names = {finding["check"] for finding in out["findings"]}
    assert {"python", "torch", "ray", "shared memory", "disk", "own address", "open files", "sandbox"} <= names
    assert out["failed"] == []


def test_a_failed_check_gives_code_2_and_advice(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    args = parse("--no-ray")
    assert args.run(args) == 2
    text = capsys.readouterr().out
    assert "FAIL NCCL_SOCKET_IFNAME" in text and "nosuch0 is not an interface" in text and "-> this node has" in text


def test_an_empty_ray_address_and_a_lost_package_are_found(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert any(f.check == "RAY_ADDRESS" and f.level == "warn" for f in checks.check_network())
    monkeypatch.setattr(checks, "CORE", ("no-such-package",))
    assert any(f.check == "no-such-package" and f.level == "fail" for f in checks.check_versions())


@pytest.mark.parametrize(("landlock", "local", "bubblewrap", "level", "said", "advice"), [
    (7, None, None, "ok", "Landlock 7; local works; bubblewrap works (namespaces: user", ""),
    (1, None, "not installed", "ok", "(files cannot be moved between folders; truncate by path is refused; TCP", ""),
    (0, "no Landlock", None, "ok", "no Landlock; local is refused; bubblewrap works", ""),
    (0, "no Landlock", "not installed", "warn", "local is refused; no bubblewrap: not installed", "install bubblewrap"),
])  # fmt: skip
def test_what_the_sandboxes_reach(monkeypatch, landlock, local, bubblewrap, level, said, advice):
    monkeypatch.setattr(ctypes, "CDLL", lambda *args: SimpleNamespace(syscall=lambda *a: landlock or -1))
    monkeypatch.setattr(sandboxes.platform, "release", lambda: "6.1")
    monkeypatch.setattr(sandboxes.LocalProvider, "unavailable", lambda self: local)
    monkeypatch.setattr(sandboxes.bubblewrap, "unavailable", lambda: bubblewrap)
    monkeypatch.setattr(sandboxes, "preferred_provider", lambda: "local")
    [found] = sandboxes.check_sandbox()
    assert found.level == level and found.found.startswith("Linux 6.1, ") and said in found.found and advice in found.advice


def test_a_plug_in_adds_a_check_and_a_broken_one_is_named(here):
    (here / "plugins").mkdir()
    (here / "plugins" / "mine.py").write_text(
        "from agentrl.cluster.machine import MACHINE_CHECKS, MachineFinding\n"
        "@MACHINE_CHECKS.register('licence')\ndef licence():\n    yield MachineFinding('licence', 'ok', 'valid')\n"
        "@MACHINE_CHECKS.register('broken')\ndef broken():\n    raise OSError('no such server')\n    yield\n"
    )
    found = {one.check: (one.level, one.found) for one in checks.all_checks(ClusterConfig(), with_ray=False)}
    assert found["licence"] == ("ok", "valid") and found["broken"] == ("fail", "OSError: no such server")
    assert "sandbox" in found and "gpus" in found


def test_a_kernel_without_landlock_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **more: SimpleNamespace(prctl=lambda *a: 0, syscall=lambda *a: -1))
    require_kernel.cache_clear()
    try:
        with pytest.raises(ResourceError, match=r"needs a kernel with Landlock.*install bubblewrap .*Podman or Docker"):
            require_kernel(True)
    finally:
        require_kernel.cache_clear()


def test_temporary_folders_that_ray_cannot_use(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/tmp")
    assert machine.ray_folder() is None and checks.check_temporary_folder().level == "ok"
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/tmp/" + "deep/" * 10)
    assert machine.ray_folder() == "/tmp/ray" and checks.check_temporary_folder().level == "warn"
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/tmp")
    monkeypatch.setattr(machine, "file_system", lambda path: "nfs4")
    assert machine.ray_folder() == "/tmp/ray"


def test_shelves_are_staged_without_caches(monkeypatch, tmp_path):
    for name in ("one/envs/x/__pycache__", "one/other", "two/rewards"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "one/envs/x/env.py").write_text("x = 1")
    monkeypatch.chdir(tmp_path / "one")
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path / "two"))
    (tmp_path / "out").mkdir()
    assert shipping.shipped_env(tmp_path / "out")["AGENTRL_PATH"] == "shelf0:shelf1"
    staged = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*"))
    assert staged == ["shelf0", "shelf0/envs", "shelf0/envs/x", "shelf0/envs/x/env.py", "shelf1", "shelf1/rewards"]


@pytest.fixture(autouse=True)
def _no_ray_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
