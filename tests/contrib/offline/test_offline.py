"""Runs on data from the command line: each loss, what is chosen and refused, Ctrl-C and resume."""

import asyncio
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from agentrl.cli.main import main
from agentrl.config import TrainConfig
from agentrl.config.keys import inline
from agentrl.config.load import config_from
from agentrl.config.schema import DataConfig
from agentrl.contrib.offline.data_run import DataRunKind, _check_loss
from agentrl.contrib.offline.objectives import Supervised
from agentrl.contrib.offline.prepare import Preparation
from agentrl.contrib.offline.store import RowStore, sources
from agentrl.contrib.view.library import overview
from agentrl.data.trajectory import Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.warm_start import transcript
from agentrl.run.assembly import RunStart
from agentrl.run.checks.size_checks import check_placement
from agentrl.run.digests import contents_of
from agentrl.run.interrupt import Interrupt
from agentrl.run.reader import load_run
from agentrl.trainer.learner import check_learner
from agentrl.trainer.model_folder import export_run
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ConfigError, TaskDataError
from tests.conftest import proof
from tests.contrib.offline.test_layouts import ASKED, HERMES, TOOLS, parquet

MODEL = "model.init={layers=2,hidden=32,mlp=64,heads=4,kv_heads=2,head_dim=8}"
USUAL = [MODEL, "optim.lr=3e-3", "trackers=[]"]


def sft(*words: str, out: Path, name: str = "run", backend: str = "inline") -> int:
    return main(["sft", *words, *USUAL, f"cluster.backend={backend}", f"out={out}", f"name={name}"])


def rows(run: Path, phase: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["phase"] == phase]


def written(file: Path, made: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


def numbered(row: dict[str, Any], count: int, key: str = "messages") -> list[dict[str, Any]]:
    """The row so many times with another first word each: equal ones are one task, and held out together."""
    first, *rest = row[key]
    return [{**row, key: [{**first, "content": f"{n}: {first['content']}"}, *rest]} for n in range(count)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve chats, of two layouts, in JSON lines and in Parquet: what data.path names."""
    folder = tmp_path_factory.mktemp("chats")
    written(folder / "a.jsonl", [*numbered({"messages": ASKED, "tools": TOOLS}, 5), HERMES])
    parquet(folder / "b.parquet", numbered({"messages": ASKED, "tools": json.dumps(TOOLS)}, 11)[5:])
    return folder


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's episodes: four tasks of key_value, each played three times by the teacher, with rewards 0, 0.5 and 1."""
    run = tmp_path_factory.mktemp("played")
    renderer, made = make_renderer(packaged_tokenizer(512)), list[Trajectory]()
    env = EnvRef("key_value")
    for seed in range(4):
        for member in range(3):
            one = asyncio.run(transcript(env.build(), renderer, seed, teacher={}))
            one.member, one.reward, one.success = member, member / 2, member == 2
            made.append(one)
    made[0].reward = made[0].success = None
    made.append(replace(made[-1], task=replace(made[-1].task, split="heldout")))
    (run / "trajectories").mkdir()
    (run / "trajectories" / "step_000001.jsonl").write_text("".join(json.dumps(one.to_json()) + "\n" for one in made))
    (run / "trajectories" / "after_000001.jsonl").write_text(json.dumps(made[-1].to_json()) + "\n")
    return run


@pytest.fixture(scope="module")
def learned(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned the chats."""
    out = tmp_path_factory.mktemp("out")
    assert sft("--data", str(chats), "data.epochs=4", "data.batch=4", "data.heldout=0.2", "eval.every=5", out=out) == 0
    return out / "run"


def test_chats_of_both_layouts_and_files_are_learned_and_the_loss_on_held_out_ones_falls(learned: Path) -> None:
    held = rows(learned, "heldout")
    assert [row["step"] for row in held] == [0, 5, 10, 12] and held[-1]["loss"] < 0.8 * held[0]["loss"]
    assert [row["step"] for row in rows(learned, "data")] == list(range(1, 13))  # 9 chats in batches of 4, 4 times
    about = json.loads((learned / "data" / "data.json").read_text())
    assert (about["examples"], len(about["heldout"]), about["left_out"]) == (12, 3, [])
    assert (learned / "final" / "model.safetensors").is_file()
    assert json.loads((learned / "summary.json").read_text())["heldout_after"] == held[-1]["loss"]
    found = overview(load_run(learned))
    assert (found["updates"], found["steps"], found["status"], found["success_after"]) == (12, 12, "done", None)


def test_commands_that_need_an_environment_and_a_name_that_is_taken_are_refused(
    learned: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (learned.parent / "file").touch()
    again = ["sft", "--data", str(chats), *USUAL, f"out={learned.parent}"]
    for words, said in (
        (["eval", "--run", str(learned)], f"agentrl eval key_value --model {learned / 'final'}"),
        (["train", "--resume", str(learned)], f"continue it by agentrl sft --resume {learned}"),
        ([*again, "name=run"], f"Continue it: agentrl sft --resume {learned}"),
        ([*again, "name=file"], "it exists and is no run"),
    ):
        assert main(words) == 2
        found = capsys.readouterr()
        assert said in found.err and "data:" not in found.out, "before the data is read"


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data", str(chats), "data.epochs=2", "data.batch=4", "optim.schedule=linear", "checkpoint.every=100")
    assert sft(*words, out=tmp_path, name="whole") == 0
    pressed: list[Interrupt] = []
    install, step = Interrupt.install, Supervised.step

    def installed(self: Interrupt) -> None:
        pressed.append(self)
        install(self)

    async def third(self: Any, examples: np.ndarray) -> dict[str, float]:
        found = await step(self, examples)
        if len(rows(tmp_path / "cut", "data")) == 2:
            pressed[-1].request()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Interrupt, "install", installed)
        patch.setattr(Supervised, "step", third)
        assert sft(*words, out=tmp_path, name="cut") == 130
    assert f"agentrl sft --resume {tmp_path / 'cut'}" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "cut", "data")] == [1, 2, 3]
    assert main(["sft", "--resume", str(tmp_path / "cut"), "--overwrite"]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
    taken = [name for name in ("a.jsonl", "b.parquet") if (chats / name).rename(tmp_path / name)]
    assert main(["sft", "--resume", str(tmp_path / "cut")]) == 0, "all that it learns from is in its folder"
    for name in taken:
        (tmp_path / name).rename(chats / name)
    for phase in ("data", "heldout"):
        whole, cut = ([{**row, "time/data_s": 0} for row in rows(tmp_path / name, phase)] for name in ("whole", "cut"))
        assert whole == cut
    one, two = ((tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == two


def test_rejection_sampling_keeps_the_best_of_each_task_with_their_tokens_as_they_are(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data", str(played), "--min-reward", "0.5", "--per-task", "1", "data.heldout=0.0")
    assert sft(*words, out=tmp_path) == 0
    store = RowStore(tmp_path / "run" / "data")
    best = [Trajectory.from_json(json.loads(line)) for line in (played / "trajectories" / "step_000001.jsonl").open()][2::3]
    found = store.load(store.train)
    assert [one.ledgers[0].ids() for one in found] == [one.ledgers[0].ids() for one in best]
    assert all((a.ledgers[0].sampled == b.ledgers[0].sampled).all() for a, b in zip(found, best, strict=True))
    said = capsys.readouterr().out
    for why in ("1 of the split 'heldout'", "1 unscored", "3 below data.min_reward", "4 more than data.per_task = 1"):
        assert why in said


def test_successes_alone_and_messages_rendered_anew_are_the_same_rows(played: Path, tmp_path: Path) -> None:
    """The same tokenizer and chat template write the teacher's episodes again as they were."""
    for name, more in (("recorded", []), ("again", ["data.rerender=true"])):
        assert sft("--data", str(played), "--success", "data.heldout=0.0", *more, out=tmp_path, name=name) == 0
    one, two = (RowStore(tmp_path / name / "data") for name in ("recorded", "again"))
    assert one.about.examples == two.about.examples == 4
    assert [t.ledgers[0].ids() for t in one.load(one.train)] == [t.ledgers[0].ids() for t in two.load(two.train)]


@pytest.mark.parametrize("loss", ["dpo", "reward"])
def test_preferences_in_a_file_are_learned(loss: str, tmp_path: Path) -> None:
    rejected = [{"role": "assistant", "content": "who knows"}]
    pair = {"prompt": ASKED[:1], "chosen": [*ASKED[1:3], ASKED[5]], "rejected": rejected, "tools": TOOLS}
    file = written(tmp_path / "pairs.jsonl", numbered(pair, 12, "prompt"))
    assert sft("--data", str(file), "--loss", loss, "data.epochs=5", "data.heldout=0.2", out=tmp_path) == 0
    held = rows(tmp_path / "run", "heldout")
    assert held[0]["loss"] == pytest.approx(np.log(2)) and held[0]["reward_margin"] == pytest.approx(0, abs=1e-6)
    if loss == "reward":  # of rows that differ, the policy's and the reference's log probabilities differ by a rounding
        assert held[0]["accuracy"] == 0.0, "what is level is not right"
    assert held[-1]["loss"] < 0.6 and held[-1]["accuracy"] == 1.0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0


def test_a_reward_model_is_trained_on_from_its_own_head_and_one_of_several_labels_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pair = {"prompt": ASKED[:1], "chosen": [ASKED[5]], "rejected": [{"role": "assistant", "content": "no"}]}
    file = written(tmp_path / "pairs.jsonl", numbered(pair, 4, "prompt"))
    words = ["--data", str(file), "--loss", "reward", "trackers=[]", f"out={tmp_path}"]
    assert main(["sft", *words, MODEL, "name=first", "cluster.backend=inline", "optim.lr=3e-3"]) == 0
    assert "MISSING" not in "".join(capfd.readouterr()), "the head is made, not forgotten"
    first = rows(tmp_path / "first", "heldout")
    assert main(["sft", *words, f"model.path={tmp_path / 'first' / 'final'}", "name=second", "cluster.backend=inline"]) == 0
    assert rows(tmp_path / "second", "heldout")[0]["loss"] == pytest.approx(first[-1]["loss"], rel=1e-6)
    assert "not used" not in "".join(capfd.readouterr()), "of the head too"
    file = tmp_path / "first" / "final" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"score.weight": tensors["score.weight"].repeat(3, 1)}, file, metadata={"format": "pt"})
    (file.parent / "manifest.json").unlink(missing_ok=True)
    assert main(["sft", *words, f"model.path={file.parent}", "name=third", "cluster.backend=inline"]) == 2
    assert "score.weight" in capfd.readouterr().err and not (tmp_path / "third").exists()


def test_adapters_alone_learn_and_are_merged_into_the_result(chats: Path, tmp_path: Path) -> None:
    assert sft("--data", str(chats), "data.epochs=3", "data.heldout=0.2", "model.lora.rank=4", out=tmp_path) == 0
    held = rows(tmp_path / "run", "heldout")
    assert held[-1]["loss"] < held[0]["loss"]


@proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("loss", "split"),
    [("sft", []), ("dpo", []), ("reward", []), ("sft", ["model.sequence_parallel=2"]), ("dpo", ["model.sequence_parallel=2"]),
     ("dpo", ["model.tensor_parallel=2"])],
)  # fmt: skip
def test_two_ranks_train_what_one_does(loss: str, split: list[str], tmp_path: Path) -> None:
    """Rows of a pair are on different ranks, in one batch of an odd number; the same losses, norms and weights."""
    wrong = [{"role": "assistant", "content": "no " * times} for times in range(1, 10)]
    made = [{"prompt": ASKED[:1], "chosen": [*ASKED[1:3], ASKED[5]], "rejected": [one], "tools": TOOLS} for one in wrong]
    made = [{"messages": [*one["prompt"], *one["rejected"]]} for one in made] if loss == "sft" else made
    file = written(tmp_path / "rows.jsonl", made)
    words = ("--data", str(file), "--loss", loss, "data.batch=3", "data.heldout=0.2", "data.epochs=2", "eval.every=1")
    assert sft(*words, out=tmp_path, name="one") == 0
    assert sft(*words, "cluster.actors=2", *split, out=tmp_path, name="two", backend="ray") == 0
    for phase in ("data", "heldout"):
        one, two = (rows(tmp_path / name, phase) for name in ("one", "two"))
        assert len(one) == len(two) >= 6
        for key in {"loss", "grad_norm", "reward_margin", "tokens_trained"} & set(one[0]):
            assert [row[key] for row in two] == pytest.approx([row[key] for row in one], rel=2e-4, abs=1e-6), key


def test_a_held_out_loss_is_the_same_in_whatever_batches_it_is_computed(tmp_path: Path) -> None:
    """The mean over tokens of examples whose lengths differ, which is not the mean over batches."""
    made = [{"messages": [ASKED[0], {"role": "assistant", "content": "no " * times}]} for times in range(1, 12)]
    file, found = written(tmp_path / "rows.jsonl", made), []
    for batch in (1, 3, 8):
        words = ("--data", str(file), "data.heldout=0.6", f"data.batch={batch}")
        assert sft(*words, out=tmp_path, name=f"of_{batch}") == 0
        found.append(rows(tmp_path / f"of_{batch}", "heldout")[0])
    assert found[0]["examples"] == 7
    assert [row["loss"] for row in found[1:]] == pytest.approx([found[0]["loss"]] * 2, rel=1e-6)


def test_a_dpo_run_without_its_last_checkpoints_is_the_same_run_again_and_its_best_has_the_lowest_loss(tmp_path: Path) -> None:
    """The reference is the model that it started from, also after a resume; what was said of steps that are done again is cut."""
    wrong = [{"role": "assistant", "content": "no " * times} for times in range(1, 7)]
    made = [{"prompt": ASKED[:1], "chosen": [*ASKED[1:3], ASKED[5]], "rejected": [one], "tools": TOOLS} for one in wrong]
    file, run = written(tmp_path / "pairs.jsonl", made), tmp_path / "run"
    words = ["data.batch=2", "data.epochs=3", "data.heldout=0.3", "eval.every=1", "checkpoint={every=6,keep=9}", "optim.lr=3e-2"]
    assert sft("--data", str(file), "--loss", "dpo", *words, out=tmp_path) == 0
    steps = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert steps == [f"step_{n:06d}" for n in range(1, 7)], "each of these losses is the lowest so far"
    losses = {row["step"]: row["loss"] for row in rows(run, "heldout")[1:]}
    assert export_run(run, tmp_path / "best", best=True) == min(losses, key=lambda step: losses[step])
    whole = [{**row, "time/data_s": 0} for phase in ("data", "heldout") for row in rows(run, phase)]
    assert [row["epoch"] for row in whole[:6]] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    tokens = [int(row["tokens_trained"]) for row in whole[:6]]
    assert min(tokens) > 10 and len({sum(tokens[at : at + 2]) for at in (0, 2, 4)}) == 1, "each pass trains the same"
    assert json.loads((run / "summary.json").read_text())["tokens"] == sum(tokens)
    for step in steps[3:]:
        shutil.rmtree(run / "checkpoints" / step)
    assert main(["sft", "--resume", str(run)]) == 0
    assert [{**row, "time/data_s": 0} for phase in ("data", "heldout") for row in rows(run, phase)] == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_ended_while_the_data_is_read_leaves_nothing_behind(
    number: int, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Preparation.write

    def ended(self: Preparation, folder: Path, seed: int) -> Any:
        made = write(self, folder, seed)
        assert (folder / "token_ids.bin").is_file()
        os.kill(os.getpid(), number)
        time.sleep(5)
        return made

    monkeypatch.setattr(Preparation, "write", ended)
    before = signal.getsignal(signal.SIGTERM)
    assert sft("--data", str(chats), out=tmp_path) == 130
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) == before


def test_another_tokenizers_tokens_are_refused_by_name_and_rendered_anew_if_asked(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [Trajectory.from_json(json.loads(line)) for line in (played / "trajectories" / "step_000001.jsonl").open()]
    table = [one.to_json() for one in made]
    for row, one in zip(table, made, strict=True):
        row["ledgers"] = [{**ledger.to_json(), "token_ids": [token ^ 1 for token in ledger.ids()]} for ledger in one.ledgers]
    file = written(tmp_path / "other.jsonl", table)
    assert sft("--data", str(file), out=tmp_path) == 2
    said = capsys.readouterr().err
    assert "other.jsonl:2" in said and "sampled with another one" in said and "data.rerender=true" in said
    assert not (tmp_path / "run").exists()
    assert sft("--data", str(file), "data.rerender=true", out=tmp_path) == 0


def test_too_many_bad_rows_refuse_the_run_and_few_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"messages": ASKED, "tools": TOOLS}
    file = written(tmp_path / "mixed.jsonl", [good, {"messages": ASKED}, good, {"text": "x"}, good])
    assert sft("--data", str(file), out=tmp_path) == 2
    said = capsys.readouterr().err
    assert "2 of 5 rows cannot be used (40.0%), and data.max_bad = 0.01" in said
    assert "mixed.jsonl:2: messages[1]: a call of 'add'" in said and "mixed.jsonl:4: data.loss" in said
    assert list(tmp_path.iterdir()) == [file]  # nothing is left behind
    assert sft("--data", str(file), "data.max_bad=0.5", "data.heldout=0.0", out=tmp_path) == 0
    assert "cannot be used: " in capsys.readouterr().out


def test_a_folders_files_of_other_splits_are_left_out_unless_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were trained on; so was a file twice that has two names, and a compressed one was passed over in silence."""
    for name in ("a/test-00000-of-00001", "a/train-00000-of-00001", ".old/train"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / f"{name}.jsonl", [{"messages": ASKED, "tools": TOOLS}])
    test, train = sorted((tmp_path / "a").iterdir())
    assert sources([str(tmp_path), str(tmp_path / "a" / ".." / "a")]) == {test: "heldout", train: "train"}
    assert sources([str(tmp_path), str(test)]) == {test: None, train: "train"}
    monkeypatch.chdir(tmp_path)
    assert sources(["a", str(test)]) == {Path("a", test.name): None, Path("a", train.name): "train"}
    tokenizer = packaged_tokenizer(512)
    made = Preparation(DataConfig(path=[str(tmp_path)]), make_renderer(tokenizer), tokenizer, 1000).write(tmp_path / "made", 0)
    assert made.examples == 1 and made.passed == {"of the split 'heldout', not data.split = 'train'": 1}
    (tmp_path / "more.jsonl.gz").touch()
    with pytest.raises(TaskDataError, match=r"data\.path: .*more\.jsonl\.gz: is compressed"):
        sources([str(tmp_path)])


REFUSED = [
    (["--data", "nowhere.jsonl"], "there is no such file or folder"),
    (["--data", "HERE", "--loss", "dpo", "--success"], "would find no worse one"),
    (["--data", "HERE", "--loss", "reward", "model.lora.rank=4"], "also trains a new head"),
    (["--data", "HERE", "--loss", "reward", "model.sequence_parallel=2"], "model.sequence_parallel: data.loss"),
    (["--data", "HERE", "--loss", "reward", "model.tensor_parallel=2"], "model.tensor_parallel: data.loss"),
    (["--data", "HERE", "--loss", "reward", "model.expert_parallel=2"], "model.expert_parallel: data.loss"),
    (["--data", "HERE", "optim.micro_tokens=16"], "16 (the lesser of optim.micro_tokens"),
    (["--data", "HERE", "data.pats=x"], "data.pats: unknown key"),
    ([], "a config or data is needed"),
    (["quickstart", "--loss", "dpo"], "data.loss: it needs data, but quickstart names none; name it too: --data PATH"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_mistake_is_refused_by_name(
    words: list[str], said: str, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft(*[str(chats) if word == "HERE" else word for word in words], out=tmp_path) == 2
    assert said in capsys.readouterr().err


def test_what_is_written_as_an_override_is_after_the_options(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft("--data", "nowhere", "--per-task", "9", "--loss", "dpo", f"data.path=['{chats}']", "data.loss=sft",
               "data.per_task=false", out=tmp_path) == 0  # fmt: skip
    assert json.loads((tmp_path / "run" / "data" / "data.json").read_text())["each"] == 1
    assert f"agentrl eval ENV --model {tmp_path / 'run' / 'final'}" in capsys.readouterr().out


def test_train_and_eval_refuse_a_config_of_data(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "data.toml"
    config.write_text(f'cluster.backend = "inline"\n[data]\npath = ["{chats}"]\n[model.init]\nlayers = 1\n')
    assert main(["train", str(config), f"out={tmp_path}"]) == 2
    assert "agentrl train learns only from episodes that it plays" in capsys.readouterr().err
    assert main(["sft", str(config), f"out={tmp_path}", "data.pats=1"]) == 2


# -- a key that is set and read by nothing is refused with what would read it; its default may be written out


def config(*words: str) -> TrainConfig:
    return config_from({"env": {"id": "key_value"}, "model": {"init": {}}}, words)


def test_a_key_of_an_algorithm_that_nothing_reads_is_refused() -> None:
    needs = 'algorithm.kl.reference = "moving"'
    with pytest.raises(ConfigError, match=rf"^algorithm.kl.decay = 0\.5 is read with {needs} alone; set that too, or"):
        check_learner(config("algorithm.kl.decay=0.5"))
    check_learner(config("algorithm.kl.decay=0.5", "algorithm.kl.reference=moving", "algorithm.kl.coef=0.1"))
    check_learner(config("algorithm.kl.decay=0.99"))


@pytest.mark.parametrize(("word", "loss", "others", "needs"), [
    ("data.beta=0.5", "dpo", ["sft", "reward"], 'data.loss = "dpo"'),
    ("data.margin=0.5", "dpo", ["sft"], "a data.loss of pairs"),
    ("data.margin=0.5", "reward", ["sft"], "a data.loss of pairs"),
])  # fmt: skip
def test_a_key_of_data_that_nothing_reads_is_refused(word: str, loss: str, others: list[str], needs: str) -> None:
    def check(*words: str) -> None:
        given = config('data.path=["x"]', *words)
        assert given.data is not None
        _check_loss(given.data, given.model)

    check(f"data.loss={loss}", word)
    for other in others:
        with pytest.raises(ConfigError, match=f"is read with {needs} alone"):
            check(f"data.loss={other}", word)
        check(f"data.loss={other}", "data.beta=0.1", "data.margin=1e-6")


def test_data_is_trained_on_by_the_cluster_of_a_run_with_other_roles() -> None:
    roles = {"actor": "train", "critic": "judge", "rollout": "judge"}
    words = ["cluster.backend=ray", "cluster.pools={train={},judge={}}", f"cluster.roles={inline(roles)}", "stop_at_success=0.9"]
    kind = DataRunKind(config('data.path=["x"]', *words, "steps=7"))
    assert "steps = 7 is not read: data.epochs = 1 sets the length of a run on data" in kind.check(prepared=True)
    check_learner(view := kind.relevant_sections())
    check_placement(RunStart(view))
    assert (list(view.cluster.pools), view.cluster.roles) == (["train"], {"actor": "train"})


def test_of_a_config_for_episodes_data_reads_its_own_sections_and_names_the_others() -> None:
    """Its servers were taken for keys of another engine, and its environment was looked up once all data was read."""
    words = ["engine=sglang", 'sglang.servers=["http://x:1"]', "env.id=nope", "profile.steps=[1]", "sft.batch=2"]
    kind = DataRunKind(config('data.path=["x"]', *words, "cluster.backend=inline"))
    assert kind.check(prepared=True) == [
        "not read by a run on data, which trains with [optim]: engine, env, sft, sglang, profile"
    ]
    assert not [key for key in contents_of(kind.config, "train").digests if "env" in key]
    loss = DataRunKind(config('data.path=["x"]', "data.loss=reward", "optim.prefix_sharing=on", "cluster.backend=inline"))
    with pytest.raises(ConfigError, match="computes each row by itself"):
        loss.check(prepared=True)
