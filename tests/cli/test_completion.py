"""Shell completion: what a word may become, and that a real shell asks for it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from agentrl.cli import completion as complete
from agentrl.cli.main import build_parser, main
from agentrl.contrib.remote_envs import commands
from agentrl.contrib.remote_envs.sessions import SessionLimits
from agentrl.run.registries import REGISTRIES, registry_of, written_names
from agentrl.utils.registry import _packaged_entries

ROOT = Path(__file__).resolve().parents[2]
PROOFS = os.environ.get("AGENTRL_PROOFS") == "1"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("rollout.gro", {"rollout.groups=", "rollout.group_size=", "rollout.grow="}),
        ("ste", {"steps="}),
        ("algorithm.adv", {"algorithm.advantage.name="}),
        ("model.offload=", {f"model.offload={when}" for when in ("never", "idle", "always")}),
        ("model.compile=t", {"model.compile=true"}),
        ("algorithm.loss.name=gsp", {"algorithm.loss.name=gspo"}),
        ("env.advantage.name=gp", {"env.advantage.name=gpg"}),
        ("~model.ini", {"~model.init", *(f"~model.init.{key}" for key in ("layers", "hidden", "mlp", "heads", "kv_heads",
                        "head_dim", "context", "init_std", "vision"))}),
        ("nothing", set()),
        ("optim.lr=", set()),
    ],
)  # fmt: skip
def test_an_override_is_completed(typed: str, offered: set[str]) -> None:
    assert set(complete._offer((complete.overrides,), typed)) == offered


def test_without_a_letter_sections_are_offered_and_not_two_hundred_keys() -> None:
    found = list(complete.overrides(""))
    assert {"rollout.", "model.", "steps=", "name="} <= set(found) and len(found) < 40


def test_configs_environments_and_runs_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = partial(complete._offer, (complete.configs,))
    assert offered("quick") == ["quickstart"] and "configs/ppo.toml" in offered("configs/p")
    assert complete._offer((complete.environments,), "key_") == ["key_value"]
    for name in ("a", "b"):
        (tmp_path / "runs" / name / "final").mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").write_text("")
    (tmp_path / "runs" / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    assert sorted(complete._offer((complete.runs,), "runs/")) == ["runs/a", "runs/b"]
    assert "runs/a/final" in complete._offer((complete.models,), "runs/a")


def test_names_are_read_off_the_source_as_the_registries_have_them() -> None:
    for key in REGISTRIES:
        registry = registry_of(key)
        assert registry is not None and written_names(key) == sorted(dict(_packaged_entries(registry.home, registry.symbol))), key


def test_each_argument_that_has_a_completer_is_one() -> None:
    pytest.importorskip("agentrl.contrib.view")
    named = {action.dest for action in complete._actions(build_parser())}
    assert set(complete.COMPLETERS) <= named, "a completer of an argument that no command has"


def test_the_limits_of_a_server_are_those_that_it_has() -> None:
    assert SessionLimits() == SessionLimits(commands.EPISODES, commands.IDLE, commands.BODY)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "agentrl" in capsys.readouterr().out


# -- real shells -------------------------------------------------------------------------------------

SET_UP = {
    "bash": (["--norc", "--noprofile", "-i"], 'eval "$(agentrl completion bash)"; bind "set enable-bracketed-paste off"'),
    "zsh": (["-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(agentrl completion zsh)"'),
    "fish": (["--no-config", "-i"], "agentrl completion fish | source"),
}


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A folder with a program `agentrl`."""
    program = tmp_path / "agentrl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m agentrl.cli.main "$@"\n')
    program.chmod(0o755)
    return tmp_path


def environ(command: Path) -> dict[str, str]:
    path = f"{command}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TERM": "dumb", "HOME": str(command)}


def test_bash_asks_agentrl(command: Path) -> None:
    """Bash's own function, called as Bash calls it."""
    line = "agentrl config docs rollout.turn"
    script = f'source <(agentrl completion bash); COMP_LINE="{line}"; COMP_POINT={len(line)}; COMP_TYPE=9; '
    script += 'COMPREPLY=(); _python_argcomplete agentrl; echo "<${COMPREPLY[*]}>"'
    done = subprocess.run(["bash", "-c", script], env=environ(command), capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "<rollout.turn_timeout >", done.stderr


@pytest.mark.skipif(not PROOFS, reason="seconds for each shell (make proofs)")
@pytest.mark.parametrize("shell", list(SET_UP))
def test_a_tab_completes_in_an_interactive_shell(shell: str, command: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    options, set_up = SET_UP[shell]
    child, terminal = pty.fork()
    if child == 0:
        os.execve(program, [program, *options], environ(command))
    try:
        typed(terminal, f'{set_up}; echo rea""dy\n', "ready")
        seen = typed(terminal, "agentrl config docs rollout.turn\t", "turn_timeout")
        assert "turn_timeout" in seen
        assert "type: number > 0" in typed(terminal, "\n", "unit: seconds")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def typed(terminal: int, text: str, until: str, seconds: float = 30.0) -> str:
    """Type, and read what the terminal shows until it shows `until`."""
    os.write(terminal, text.encode())
    seen, end = "", time.monotonic() + seconds
    while until not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    assert until in seen, seen[-2000:]
    return seen
