"""A user's mistake: one clear message, exit code 2, nothing half-written, no stack trace."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from agentrl.cli.main import _parse, main
from agentrl.config import load_config
from agentrl.run.folder import RunFolder, lock_folder
from tests.conftest import Agentrl

SMALL = ["engine=embedded", "cluster.backend=inline", "sft=false"]
LONG, SPLIT = "rollout.max_episode_tokens=3000", ["optim.micro_tokens=2000", "model.sequence_parallel=2", "cluster.actors=2"]
QUICKSTART = str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml")


pytestmark = pytest.mark.usefixtures("here")


def test_a_home_folder_is_found_behind_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells expand `--out ~/x`, but not `--out=~/x`, `a.b=~/x` and what is quoted."""
    home = tmp_path / r"DOM\user"  # no template of a regular expression
    monkeypatch.setenv("HOME", str(home))
    home.mkdir()
    for number, out in enumerate((["--out=~/0.json"], ["--out", "~/1.json"])):
        assert main(["reward", "schema", *out]) == 0
        assert (home / f"{number}.json").is_file()
    assert _parse(["eval", "key_value", "--run=~/r", "data.path=~/d", "~a.b", "a=x~/b"]).overrides == [
        f"data.path={home}/d", "~a.b", "a=x~/b",
    ]  # fmt: skip
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(("args", "expected"), [
    (["train", "missing.toml"], ["missing.toml: no such config file"]),
    (["train", "quickstrat"], ["quickstrat", "quickstart"]),
    (["train"], ["a config is needed"]),
    (["train", QUICKSTART, "rollout.group_sise=3"], ["rollout.group_sise", "did you mean 'rollout.group_size'"]),
    (["train", QUICKSTART, "rollout.temperature=0.0"], ["rollout.temperature = 0", "at least 0.01"]),
    (["train", QUICKSTART, "rollout.temperature=0.005"], ["rollout.temperature = 0.005", "at least 0.01"]),
    (["train", QUICKSTART, "eval.temperature=0.005"], ["eval.temperature = 0.005", "expected 0 (greedy) or"]),
    (["train", QUICKSTART, "rollout.top_p=0.0"], ["rollout.top_p", "greater than 0"]),
    (["train", QUICKSTART, "env.id=key_valeu"], ["key_valeu", "key_value"]),
    (["train", QUICKSTART, "env.params.cals=3"], ["cals", "calls"]),
    (["train", QUICKSTART, "env.params.calls=99"], ["calls = 99", "2..50"]),
    (["train", QUICKSTART, "env.reward=nowhere.json"], ["nowhere.json"]),
    (["train", QUICKSTART, "env.reward=bad.json"], ["bad.json", "not JSON", "line 1"]),
    (["train", QUICKSTART, "env.reward=odd.json"], ["/root/use", "did you mean", "text.equals"]),
    (["train", QUICKSTART, "algorithm.advantage.name=gpro"], ["gpro", "did you mean 'grpo'"]),
    (["train", QUICKSTART, "algorithm.loss.args.clip_hgih=0.3"], ["clip_hgih", "did you mean 'clip_high'"]),
    (["train", QUICKSTART, "model.tool_parser=hermez"], ["model.tool_parser = 'hermez'", "did you mean 'hermes'"]),
    (["train", QUICKSTART, "model.path=nowhere/model", "model.init.layers=1"], ["set one of model.path"]),
    (["train", QUICKSTART, "model.path=nowhere/model"], ["model.path = nowhere/model", "there is no such folder"]),
    (["train", QUICKSTART, "~model.inti"], ["override '~model.inti'", "did you mean 'model.init'"]),
    (["train", QUICKSTART, "cluster.actors=5000"], ["cannot run", "cluster.actors=5000"]),
    (["train", QUICKSTART, LONG, "optim.micro_tokens=2999"], ["micro_tokens = 2999", "tokens = 3000", "at least 3000"]),
    (["train", QUICKSTART, "rollout.max_episode_tokens=90000", "optim.micro_tokens=4095"], ["takes 4096", "at least 4096"]),
    (["train", QUICKSTART, LONG, *SPLIT], ["optim.micro_tokens = 2000", "at least 3000"]),
    (["train", QUICKSTART, "rollout.group_size=1"], ["rollout.group_size = 1", '"grpo"', "2 or more", "remax"]),
    (
        ["train", QUICKSTART, "rollout.max_filtered=2.0"],
        ["rollout.max_filtered = 2.0 is read with rollout.filter_zero_variance"],
    ),
    (["train", QUICKSTART, "rollout.mixture.name=by_success"], ["rollout.mixture", "is read with several environments"]),
    (["train", QUICKSTART, "env.weight=2.0"], ["env.weight = 2.0 is read with several environments, [[env]],"]),
    (["train", QUICKSTART, "env.eval.weight=2.0"], ["env.eval.weight = 2.0 is read with several environments, [[env]],"]),
    (["train", QUICKSTART, "eval.split=heldot", *SMALL], ["the split 'heldot' has no task: ", "did you mean 'heldout'?"]),
    (["train", QUICKSTART, "sglang.seeds=false"], ['sglang.seeds = False is read with engine = "sglang" alone']),
    (["train", QUICKSTART, "weights.route=shared", "weights.folder=w"], ["weights.folder = ", 'weights.route = "disk" alone']),
    (["train", QUICKSTART, "checkpoint.best=reward", "checkpoint.keep_best=0"], ["checkpoint.best", "keep_best above 0"]),
    (["train", QUICKSTART, "cluster.backend=ray", "cluster.pools={big={}}"], ["cluster.pools.big: no role uses it"]),
    (["train", QUICKSTART, "eval.every=0"], ["stop_at_success = 0.98 is read with eval.every"]),
    (["train", QUICKSTART, "name=../evil"], ["name", "'../evil' is not the name of one folder", "set out"]),
    (["train", QUICKSTART, "name=/tmp/evil", "--overwrite"], ["name", "not the name of one folder"]),
    (["train", QUICKSTART, "name=.."], ["name", "not the name of one folder"]),
    (["train", QUICKSTART, "name=a\\b"], ["name", "not the name of one folder"]),
    (["train", "--resume", "runs/nothing"], ["runs/nothing: not a run folder"]),
    (["eval", "key_value", "--model", "./nowhere"], ["nowhere: no such model folder"]),
    (["sft", QUICKSTART, "seed=-1"], ["seed", "greater than or equal to 0"]),
    (["train", QUICKSTART, "optim.weight_decay=inf"], ["optim.weight_decay", "input should be a finite number, got inf"]),
    (["train", QUICKSTART, "reward.judge.usd_per_million=[-1,2]"], ["usd_per_million.0", "greater than or equal to 0, got -1"]),
    (["train", "quickstart", "model.path=api:openai/x"], ["API model", "cannot be trained", "agentrl eval"]),
    (["eval", "key_value", "--model", "api:"], ["NAME is missing"]),
    (["eval", "key_value", "--model", "api:openai/x", "rollout.top_k=5"], ["rollout.top_k", "no top_k"]),
    (["rollout", "key_valeu", "--model", "api:openai/x"], ["key_valeu", "key_value"]),
    (["eval", "key_value", "--policy", "gold", "-n", "1", "--out", "bad.json"], ["--out bad.json: bad.json is a file"]),
    (["rollout", "key_value", "--policy", "gold", "-n", "1", "--out", "bad.json/x"], ["--out bad.json/x: bad.json is a file"]),
    (["rollout", "key_value"], ["--model is needed"]),
    (["rollout"], ["an environment is needed"]),
    (["rollout", "--model", "api:openai/x", "key_valeu", "rollout.max_turns=2"], ["key_valeu", "key_value"]),
    (["rollout", "rollout.max_turns=2", "--model", "api:openai/x"], ["an environment is needed"]),
])  # fmt: skip
def test_a_mistake_is_named_and_leaves_nothing_behind(
    args: list[str], expected: list[str], tmp_path: Path, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "odd.json").write_text('{"agentrl_reward": 1, "name": "x", "root": {"use": "text.equls"}}')
    if any("actors" in arg for arg in args):
        monkeypatch.setattr("agentrl.run.checks.size_checks.MEMORY_PER_PROCESS_MIB", 0)
    message = agentrl(*args, code=2).err
    for part in expected:
        assert part in message
    assert "Traceback" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "odd.json"]


@pytest.mark.parametrize(("args", "ends"), [
    (["trian", QUICKSTART], "did you mean 'train'?"),
    (["env", "chek"], "did you mean 'check'?"),
    (["train", QUICKSTART, "--overwite"], "did you mean '--overwrite'?"),
    (["eval", "key_value", "--modle", "m"], "did you mean '--model'?"),
    (["env", "check", "key_value", "--alltasks"], "did you mean '--all-tasks'?"),
    (["zzzz"], "')"),  # nothing is near
    (["env", "play"], "the following arguments are required: env"),  # and no word that may be left out
    (["config", "show"], "the following arguments are required: config"),
    (["train", QUICKSTART, "name=\udc80"], "'name=\\udc80' is not UTF-8: no name, path or value can hold it"),
])  # fmt: skip
def test_a_mistyped_word_of_the_command_line(args: list[str], ends: str, agentrl: Agentrl) -> None:
    assert agentrl(*args, code=2).err.rstrip().endswith(ends)


@pytest.mark.parametrize("taken", ["quickstart", "quickstart/notes.txt"])
def test_what_is_no_run_is_not_overwritten(taken: str, tmp_path: Path, agentrl: Agentrl) -> None:
    (file := tmp_path / "runs" / taken).parent.mkdir(parents=True)
    file.write_text("mine")
    for more in ([], ["--overwrite"]):
        said = agentrl("train", QUICKSTART, *more, code=2).err
        assert "runs/quickstart: it exists and is no run; choose another name: name=quickstart-2" in said
    assert file.read_text() == "mine"


@pytest.mark.parametrize(("args", "expected"), [
    (["name=" + "n" * 300], "runs/" + "n" * 300 + ": the run folder cannot be written: [Errno 36] File name too long"),
    (["out=there", "name=" + "n" * 300], "File name too long"),
    (["out=file"], "file/quickstart: the run folder cannot be written: [Errno 20] Not a directory"),
    (["out=gone"], "run folder cannot be written: [Errno 2] a link that leads nowhere"),
    (["out=.", "name=gone"], "run folder cannot be written: [Errno 2] a link that leads nowhere"),
    (["out=file/deeper"], "file/deeper/quickstart: the run folder cannot be written: [Errno 20] Not a directory"),
    (["out=there", "name=mine"], "there/mine: it exists and is no run; choose another name: name=mine-2"),
    (["out=there", "name=mine", "--overwrite"], "there/mine: it exists and is no run"),
    (["out=there", "name=run", "--overwrite"], "there/run: process PID on"),
    (["--resume", "there/run"], "there/run: process PID on"),
])  # fmt: skip
def test_a_dry_run_refuses_the_folder_that_the_start_refuses_in_its_words(
    args: list[str], expected: str, tmp_path: Path, agentrl: Agentrl
) -> None:
    Path("file").write_text("mine")
    Path("gone").symlink_to("nowhere")
    Path("there/mine").mkdir(parents=True)
    Path("there/mine/notes.txt").write_text("mine")
    run = RunFolder.create(load_config(QUICKSTART, ["out=there", "name=run", *SMALL]))
    before = sorted(tmp_path.rglob("*"))
    words = [*args, *SMALL] if args[0] == "--resume" else [QUICKSTART, *args, *SMALL]
    with lock_folder(run.path) if "--overwrite" in args or args[0] == "--resume" else nullcontext():
        refused = agentrl("train", *words, code=2).err
        planned = agentrl("train", *words, "--dry-run", code=2)
    assert expected.replace("PID", str(os.getpid())) in refused and planned.err == refused and not planned.out
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name not in (".lock", "provenance.json")] == before


def test_a_dry_run_of_a_name_that_is_taken_plans_and_says_that_the_start_refuses_it(agentrl: Agentrl) -> None:
    config = [QUICKSTART, *SMALL]
    free = agentrl("train", *config, "--dry-run", "--json")
    RunFolder.create(load_config(QUICKSTART, SMALL))
    refused = agentrl("train", *config, code=2).err.removeprefix("agentrl: ")
    taken = agentrl("train", *config, "--dry-run", "--json")
    assert refused.startswith("runs/quickstart: there is a run of that name. Continue it: agentrl train --resume")
    # On a busy machine a line says what takes long.
    lines, others = ([line for line in text.splitlines() if "[dry run]" not in line] for text in (taken.err, free.err))
    assert lines == [*others, *f"warning: a run would refuse this: {refused}".splitlines()]
    assert json.loads(taken.out)["batches"] == json.loads(free.out)["batches"]


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_name_that_is_taken_is_told_before_a_server_is_started(command: str, tmp_path: Path, agentrl: Agentrl) -> None:
    pytest.importorskip("agentrl.contrib.mcp")
    config = ["engine=embedded", "cluster.backend=inline"]
    RunFolder.create(load_config(QUICKSTART, ["name=run", *config]))
    begun = tmp_path / "begun"
    server = f'tools.mcp.shop={{command=["touch","{begun}"]}}'
    assert "shop" in agentrl(command, QUICKSTART, "name=free", *config, server, code=2).err and begun.exists()
    begun.unlink()
    said = agentrl(command, QUICKSTART, "name=run", *config, server, code=2).err
    assert "runs/run: there is a run of that name" in said and not begun.exists()


def test_a_dry_run_with_overwrite_leaves_the_run_that_it_would_remove(tmp_path: Path) -> None:
    run = RunFolder.create(load_config(QUICKSTART, ["name=run", *SMALL]))
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", QUICKSTART, "name=run", *SMALL, "--overwrite", "--dry-run"]) == 0
    assert run.config.is_file() and sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_is_a_message_and_not_a_trace(tmp_path: Path, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunFolder, "append_metrics", full)
    monkeypatch.setattr("agentrl.run.driver.draw_curve", full)  # nor has the figure of what there is any room
    logger = logging.getLogger("agentrl")
    before = [*logger.handlers], logger.propagate
    short = ["cluster.backend=inline", "sft.max_steps=10", "sft.min_steps=10", "sft.batch=1"]
    assert "the disk is full" in agentrl("train", QUICKSTART, *short, code=2).err
    # A process may go on, in another folder: a handler of the run that is over would write to a file that is gone.
    assert ([*logger.handlers], logger.propagate) == before
    assert "failed" in (tmp_path / "runs" / "quickstart" / "summary.json").read_text()
    assert "the curve is not drawn" in (tmp_path / "runs" / "quickstart" / "log.txt").read_text()


@pytest.mark.parametrize("name", ["mine", "env mine"])
@pytest.mark.parametrize("line", ["import not_installed", "", "raise ValueError(1)"])
def test_a_broken_command_of_a_plug_in_stops_only_that_command(tmp_path: Path, line: str, name: str, agentrl: Agentrl) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text(
        f"from agentrl.cli.arguments import COMMANDS\n{line}\n\n\n@COMMANDS.register('{name}')\ndef mine(parser):\n    1 / 0\n"
    )
    assert agentrl("metrics").err == ""
    said = agentrl(*name.split(), code=2).err
    assert said.count("\n") == 1 and f"command {name}: its plug-in does not load: " in said


@pytest.mark.parametrize(("words", "code"), [("mine", 3), ("mine --no", 2)])
def test_a_command_of_a_plug_in_ends_with_its_own_exit_code(tmp_path: Path, words: str, code: int, agentrl: Agentrl) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text(
        "import sys\nfrom agentrl.cli.arguments import COMMANDS\n\n\n@COMMANDS.register('mine')\ndef mine(parser):\n"
        "    parser.add_argument('--no', action='store_true')\n"
        "    parser.set_defaults(run=lambda args: parser.error('no') if args.no else sys.exit(3))\n"
    )
    assert "SystemExit" not in agentrl(*words.split(), code=code).err


@pytest.mark.parametrize("words", ["--help", "--version", "env --help", "env list", "config docs"])
def test_a_full_standard_output_is_one_line(tmp_path: Path, words: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl", *words.split()], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "agentrl: standard output: cannot be written: No space left on device. Send it elsewhere\n"


PLAY = ["--policy", "gold", "-n", "1"]


@pytest.mark.parametrize(("words", "code", "said"), [
    (["metrics", "entropi"], 1, "no metric has 'entropi' in its name or meaning; did you mean 'entropy'?"),
    (["rollout", "function_calling", *PLAY, "data=rows.json"], 2,
     "data is a section. Write data.KEY=VALUE, or for the environment env.params.data=rows.json"),
    # The folder stayed with the wrong split in its note, and the right command was refused by it.
    (["eval", "key_value", *PLAY, "--split", "tset"], 2, "no split 'tset'"),
])  # fmt: skip
def test_a_word_that_is_none_is_said(words: list[str], code: int, said: str, agentrl: Agentrl) -> None:
    assert said in agentrl(*words, code=code).err and not Path("evals").exists()


UNREAD = {
    "--compare reads existing evaluations": [
        "eval --compare a b", "-n 5", "-k 2", "--seed 1", "--split all", "--max-concurrent 2", "--all",
        "--model m", "--policy gold", "--checkpoint last",
    ],
    "it belongs to --http without --mcp": [
        "env serve key_value --mcp", "--host 0.0.0.0", "--port 1", "--token-env T", "--max-episodes 2", "--idle-timeout 2",
        "--max-body 9",
    ],
    "it belongs to --mcp": ["env serve key_value --http", "--seed 1", "--split heldout"],
    "--http names port 9": ["env serve key_value --http 9", "--port 8"],
    "--list shows every suite": ["env install --list", "bfcl", "--from x", "--remove"],
    "--remove reads no folder": ["env install bfcl --remove", "--from x"],
    "x.gguf determines the model": ["init-model m --from x.gguf", "--seed 1", "--layers 2"],
    "it sets the type of the weights of --from": ["init-model m", "--dtype bfloat16"],
    "nothing is probed without": ["reward lint rewards/answer.json", "-n 2", "--seed 1", "--ask-judge"],
    "no judge is asked": ["reward lint key_value", "--judge-cache c", "--judge-calls 1", "--judge-usd 1"],
    "--markdown prints the whole page": ["metrics --markdown", "kl"],
    "it is for planning": ["train quickstart", "--json", "--gpu-memory 80", "--nodes 1x1"],
}  # fmt: skip
"""What is said of an option that nothing would read: the command, then the options."""


@pytest.mark.parametrize("said", UNREAD)
def test_an_option_that_would_not_be_read_is_refused(said: str, agentrl: Agentrl) -> None:
    command, *options = UNREAD[said]
    for option in options:
        error = agentrl(*command.split(), *option.split(), code=2).err
        assert said in error and (option[:2] != "--" or option.split()[0] in error.splitlines()[0].rpartition(": ")[0])
