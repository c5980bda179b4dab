"""A run is resumed from any working folder, and only with what it was started with: the reward spec and the model's
files as they were. A learning rate that would be stretched over more steps is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config import TrainConfig, load_config
from agentrl.config.schema import InitModelConfig
from agentrl.render.chatml import CHATML_TEMPLATE
from agentrl.trainer.pretrained import init_model
from agentrl.utils.errors import WorkerDiedError
from tests.conftest import Agentrl, Said

TINY = InitModelConfig(layers=1, hidden=32, mlp=32, heads=2, kv_heads=1, head_dim=16, context=1024)


class Runs(list[tuple[TrainConfig, tuple[str, ...]]]):
    """The config and the notes of each run that would have been executed."""

    def __init__(self, agentrl: Agentrl) -> None:
        super().__init__()
        self._agentrl = agentrl

    def train(self, *more: str, env: str = "key_value", code: int = 0) -> Said:
        Path("mine.toml").write_text(f'[env]\nid = "{env}"\n')
        sizes = ["rollout.max_turns=2", "rollout.max_turn_tokens=16", "cluster.backend=inline", "engine=embedded"]
        return self._agentrl("train", "mine.toml", "name=r", "health.lint=false", *sizes, *more, code=code)

    def resume(self, *more: str, run: Path | str = "runs/r", code: int = 0) -> Said:
        return self._agentrl("train", "--resume", run, *more, code=code)


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agentrl: Agentrl) -> Runs:
    """The working folder is `there`."""
    runs = Runs(agentrl)
    monkeypatch.setattr(
        "agentrl.run.driver.execute", lambda config, folder, *, notes=(), **how: runs.append((config, notes)) or 0
    )
    monkeypatch.setattr("agentrl.run.checks.size_checks.check_capacity", lambda config: None)
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    return runs


def write_spec(file: str, least: float) -> None:
    root = {"use": "calls.schema", "scale": [0, least]}
    Path(file).write_text(json.dumps({"agentrl_reward": 1, "name": "mine", "root": root}))


def checkpoint(step: int) -> None:
    """A whole checkpoint of the run, as checks look at it."""
    Path(f"runs/r/checkpoints/step_{step:06d}").mkdir(parents=True)
    Path(f"runs/r/checkpoints/step_{step:06d}/manifest.json").write_text('{"files": {}}')


def test_a_run_with_relative_paths_goes_on_from_another_folder(
    executed: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_model(TINY, Path("model"), seed=0)
    write_spec("spec.json", 1.0)
    executed.train("model.path=model", "env.reward=./spec.json", "reward.judge.cache=verdicts", "weights.folder=w")
    there = tmp_path / "there"
    executed.resume("model.path=model")  # the same model by its relative name
    monkeypatch.chdir(tmp_path / "elsewhere")
    executed.resume(run=there / "runs" / "r")
    for config, notes in executed:
        assert config.model.path == str(there / "model") and not notes
        assert Path(config.env.reward or "").samefile(there / "spec.json")
        assert (config.reward.judge.cache, config.weights.folder) == (str(there / "verdicts"), str(there / "w"))


def test_what_a_run_lacks_elsewhere_is_said_with_the_folder_where_it_began(
    executed: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["env", "new", "mine"])
    executed.train("model.init={}", env="mine")
    monkeypatch.chdir(tmp_path / "elsewhere")
    there = tmp_path / "there"
    said = executed.resume(run=there / "runs" / "r", code=2).err
    assert "no environment 'mine'" in said and f"the run began in {there}" in said and f"AGENTRL_PATH={there}" in said
    monkeypatch.setenv("AGENTRL_PATH", str(there))
    executed.resume(run=there / "runs" / "r")


def test_an_edited_reward_spec_ends_a_run(executed: Runs) -> None:
    write_spec("spec.json", 1.0)
    executed.train("model.init={}", "env.reward=spec.json")
    write_spec("spec.json", 2.0)
    said = executed.resume(code=2).err
    assert "the content of env.reward was sha256:" in said and "spec.json" in said
    assert "restore" in said and "start a new run, or delete this file to continue" in said
    write_spec("spec.json", 1.0)
    executed.resume()
    write_spec("spec.json", 2.0)
    Path("runs/r/provenance.json").unlink()  # of an older version, which goes on and is held to what it has then
    executed.resume()
    assert executed[2][1][0].endswith("no provenance.json: the files of the config are assumed to be the same")
    write_spec("spec.json", 1.0)
    executed.resume(code=2)
    assert len(executed) == 3


def test_a_spec_that_is_edited_before_a_restart_ends_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, agentrl: Agentrl
) -> None:
    """A lost worker has the run read its files again, without anyone who resumes it."""
    attempts = []

    async def attempt(*args: object) -> None:
        attempts.append(args)
        write_spec("spec.json", 2.0)
        raise WorkerDiedError("actor 1 died")

    monkeypatch.setattr("agentrl.run.driver.open_session", attempt)
    monkeypatch.setattr("agentrl.run.checks.size_checks.check_capacity", lambda config: None)
    write_spec("spec.json", 1.0)
    Runs(agentrl).train("model.init={}", "env.reward=spec.json", "cluster.max_restarts=2", code=2)
    assert len(attempts) == 1
    assert "the content of env.reward was sha256:" in json.loads(Path("runs/r/summary.json").read_text())["error"]


def test_other_weights_under_the_old_path_end_a_run(executed: Runs) -> None:
    init_model(TINY, Path("model"), seed=0)
    executed.train("model.path=model")
    shutil.rmtree("model")
    init_model(TINY, Path("model"), seed=1)
    assert "the files of model.path was sha256:" in executed.resume(code=2).err
    assert len(executed) == 1


def swap(path: Path) -> None:
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def one_letter(path: Path) -> None:
    """Between the chunks that are read of large weights, and of the same size."""
    data, chunk = bytearray(path.read_bytes()), 64 << 10
    data[64 * (len(data) - chunk) // 127 + chunk + 1000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("change", "where"), [
    (swap, "rows.jsonl"), (lambda path: path.write_text(path.read_text() * 2), "rows.jsonl"),
    (lambda path: path.write_text(path.read_text().splitlines(keepends=True)[0]), "folder"),
    (lambda path: (path.parent / "more.jsonl").write_text("{}\n"), "folder"), (one_letter, "nested"), (one_letter, "variable"),
    (swap, "mixed"),
])  # fmt: skip
def test_data_that_an_argument_names_may_not_change(
    executed: Runs, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], where: str
) -> None:
    """Else rows of it are skipped or come twice, as a seed is the number of a row."""
    assert main(["env", "new", "mine"]) == 0
    source = Path("envs/mine/env.py")
    source.write_text(source.read_text().replace("things: int = 4,", "things: int = 4, tasks='', more=(),"))
    monkeypatch.setenv("DATA", str(Path.cwd()))
    Path("data").mkdir()
    rows = Path("data/rows.jsonl")
    rows.write_text("".join(f'{{"row": {number}}}\n' for number in range(700_000 if change is one_letter else 9)))
    named = {
        "rows.jsonl": "env.params={tasks='data/rows.jsonl'}",
        "folder": "env.params={tasks='data'}",
        "nested": "env.params.more=[{path='data/rows.jsonl'}]",
        "variable": "env.params={tasks='${env:DATA}/data/rows.jsonl',more='a\\nb'}",
        "mixed": "env=[{id='key_value'},{id='mine',name='b',params={tasks='data/rows.jsonl'}}]",
    }[where]
    executed.train("model.init={}", named, env="mine")
    executed.resume()
    change(rows)
    said = executed.resume(code=2).err
    assert "the files of env." in said and "was sha256:" in said and "restore" in said
    assert len(executed) == 2


def test_a_chat_template_may_not_change_and_changed_code_is_said(
    executed: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stopped at a bug must be able to continue with the bug fixed."""
    monkeypatch.syspath_prepend(tmp_path / "there")
    assert main(["env", "new", "mine"]) == 0
    Path("own.jinja").write_text(CHATML_TEMPLATE)
    Path("plugins").mkdir()
    plugin, module = Path("plugins/of_mine.py"), Path("resumed_code.py")
    plugin.write_text(
        "from agentrl.trainer.algorithms.losses import POLICY_LOSSES, LossOutput\n"
        "@POLICY_LOSSES.register('of_mine')\ndef of_mine(batch): return LossOutput(-batch.advantages * batch.logprobs)\n"
    )
    module.write_text("def half(view, args): return 0.5\n")
    more = ["algorithm.loss.name=of_mine", "reward.python.half=resumed_code:half", "model.chat_template=own.jinja"]
    executed.train("model.init={}", *more, env="mine")
    executed.resume()
    assert executed[1][1] == ()
    for file in (plugin, module, Path("envs/mine/env.py")):
        file.write_text(file.read_text() + "# mended\n")
    monkeypatch.setattr("agentrl.__version__", "0.0")
    executed.resume()
    assert sorted(note.split(" have changed")[0] for note in executed[2][1]) == [
        "the files of env.id",
        "the files of plugins/of_mine.py",
        "the files of there/resumed_code.py",
        "the versions of agentrl, torch and transformers",
    ]
    Path("own.jinja").write_text(CHATML_TEMPLATE + " ")
    assert "the files of model.chat_template was sha256:" in executed.resume(code=2).err


def test_a_config_that_is_edited_before_the_first_checkpoint_is_refused(executed: Runs) -> None:
    """The model of the old values lies there, and would be trained under the new ones."""
    executed.train("model.init={hidden=32}")
    assert "was learned with other values: rollout.group_size was 8, is 9" in executed.resume("rollout.group_size=9", code=2).err
    file = Path("runs/r/config.toml")
    file.write_text(file.read_text().replace("hidden = 32", "hidden = 64"))
    assert "was trained with other values: model.init.hidden was 32, is 64" in executed.resume(code=2).err


STRETCHED = "after update 10 it is {} of optim.lr; it would have been {}"
OVER = "steps = 9, and the run has done 10 updates: it is complete; to continue: steps=20"


@pytest.mark.parametrize(("began", "steps", "said"), [
    ("constant 20", 40, None), ("linear 20", 20, None),  # the factors of optim.lr in the next update, now and before
    ("linear 20", 40, STRETCHED.format("0.75", "0.5")), ("cosine 20", 10, STRETCHED.format("0", "0.5")),
    ("constant 10", 9, OVER), ("constant 10", 10, None), ("constant 10", 11, None),
])  # fmt: skip
def test_after_ten_updates_another_end_is_said_that_is_past_or_stretches_the_schedule(
    executed: Runs, began: str, steps: int, said: str | None
) -> None:
    schedule, planned = began.split()
    executed.train("model.init={}", f"optim.schedule={schedule}", f"steps={planned}")
    checkpoint(10)
    executed.resume(f"steps={steps}")
    notes = executed[1][1]
    assert len(notes) == (said is not None) and all(str(said) in note for note in notes)


@pytest.mark.parametrize(("left", "said"), [((), "updates 1 to 7"), ((4,), "updates 5 to 7"), ((4, 7), "")])
def test_updates_without_a_checkpoint_are_done_again_and_this_is_said(executed: Runs, left: tuple[int, ...], said: str) -> None:
    """Of checkpoints that were deleted, or did not come along when the folder was copied."""
    executed.train("model.init={}")
    rows = [json.dumps({"step": step, "phase": "train"}) for step in range(1, 8)]
    Path("runs/r/metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 9, "pha')
    for step in left:
        checkpoint(step)
    executed.resume()
    notes = executed[1][1]
    assert [note.split(" are in no checkpoint of ")[0] for note in notes] == ([said] if said else [])


# -- paths beside the file that names them ---------------------------------------------------------


def layered(tmp_path: Path) -> Path:
    """`top/mine.toml` on top of `below/base.toml`, which has the paths."""
    for name in ("top", "below/model", "cwd"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "below/spec.json").write_text("{}")
    text = '[env]\nid = "key_value"\nreward = "./spec.json"\n[model]\npath = "./model"\n[tools]\nsets = ["./../below/set.py"]\n'
    more = '[tools.mcp.m]\ncommand = ["python", "./set.py"]\n[env.params]\ntasks = "./model"\n'
    (tmp_path / "below/base.toml").write_text(text + more)
    (tmp_path / "below/set.py").write_text("")
    (tmp_path / "top/mine.toml").write_text('base = "../below/base"\n')
    return tmp_path / "top/mine.toml"


@pytest.mark.parametrize("where", ["below", "cwd", "both"])
def test_a_path_with_a_dot_is_beside_the_file_that_names_it_or_in_the_working_folder_and_not_in_both(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agentrl: Agentrl
) -> None:
    file, below = layered(tmp_path), tmp_path / "below"
    monkeypatch.chdir(tmp_path / "cwd")
    if where != "below":
        shutil.copy(below / "spec.json", "spec.json")
    if where == "both":
        said = agentrl("train", str(file), code=2).err
        assert "base.toml: env.reward = './spec.json'" in said
        assert f"{below / 'spec.json'}" in said and f"{tmp_path / 'cwd/spec.json'}" in said
        return
    if where == "cwd":
        (below / "spec.json").unlink()
    config = load_config(file)
    assert config.env.reward == "./spec.json" if where == "cwd" else Path(config.env.reward or "").samefile(below / "spec.json")
    assert Path(config.model.path or "").samefile(below / "model") and Path(config.tools.sets[0]).samefile(below / "set.py")
    assert (config.tools.mcp["m"].command[1], config.env.params["tasks"]) == (str(below / "set.py"), str(below / "model"))
    override = load_config(file, ["env.reward=./spec.json"])
    assert override.env.reward == "./spec.json", "the command line has no file: its paths are those of the working folder"


def test_names_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a hub and a spec of a shelf have no dot in front, and stay names whatever lies beside the file."""
    (tmp_path / "org/model").mkdir(parents=True)
    (tmp_path / "key_value_exact").mkdir()
    (tmp_path / "cwd").mkdir()
    file = tmp_path / "mine.toml"
    file.write_text('[env]\nid = "key_value"\nreward = "key_value_exact"\n[model]\npath = "org/model"\n')
    monkeypatch.chdir(tmp_path / "cwd")
    config = load_config(file)
    assert (config.env.reward, config.model.path) == ("key_value_exact", "org/model")
