"""`agentrl export`: a checkpoint becomes a folder that plain transformers loads."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.cli.main import build_parser
from agentrl.config import to_toml
from agentrl.config.schema import EnvConfig, LoraSection, ModelConfig, TrainConfig
from agentrl.run.provenance import model_of
from agentrl.run.provenance import run_folder as run_folder_of
from agentrl.trainer import model_folder as export
from agentrl.trainer.checkpoint import Checkpoints
from agentrl.trainer.model_folder import export_run
from agentrl.utils.errors import CheckpointError, ModelError
from tests.trainer.learners import saved_run


@pytest.fixture
def run_folder(tiny: str, tmp_path: Path) -> Path:
    """A run of two checkpoints, which differ."""
    saved_run(tmp_path / "run", ModelConfig(path=tiny))
    return tmp_path / "run"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def same(folder: Path, other: Path) -> bool:
    found, expected = weights(folder), weights(other)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("step", [1, 2, None])
def test_export_is_the_model_of_that_step(run_folder: Path, tmp_path: Path, step: int | None) -> None:
    assert export_run(run_folder, tmp_path / "out", step) == (step or 2)
    assert [same(tmp_path / "out", run_folder / f"direct{one}") for one in (1, 2)] == [step == 1, step != 1]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 400


def test_the_generation_config_is_written_key_for_key_as_it_came(tiny: str, tmp_path: Path) -> None:
    """Served elsewhere a model with one end token of two ran past the end of its turn."""
    given = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False, "temperature": 0.6, "top_k": 20, "of_ours": [1]}
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(tiny, source)
    (source / "generation_config.json").write_text(json.dumps(given))
    saved_run(run, ModelConfig(path=str(source)), steps=1)
    export_run(run, tmp_path / "out")
    for folder in (run / "direct1", tmp_path / "out"):
        assert json.loads((folder / "generation_config.json").read_text()) == given
        before, after = (json.loads((place / "config.json").read_text()) for place in (source, folder))
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert changed <= {"dtype", "torch_dtype", "transformers_version"}, changed


def test_the_best_is_the_one_that_was_evaluated_best(run_folder: Path, tmp_path: Path) -> None:
    parser = build_parser()
    args = parser.parse_args(["export", str(run_folder), str(tmp_path / "best"), "--best"])
    with pytest.raises(CheckpointError, match="no checkpoint was evaluated"):
        args.run(args)
    checkpoints = Checkpoints(run_folder / "checkpoints", keep=2, keep_best=1)
    checkpoints.rate(2, 0.25)
    checkpoints.rate(1, 0.75)
    assert args.run(args) == 0 and same(tmp_path / "best", run_folder / "direct1")


def test_the_command_says_step_and_type_nothing_of_how_torch_reads_and_what_is_wrong(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = build_parser().parse_args(["export", str(run_folder), str(tmp_path / "out")])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert args.run(args) == 0
    assert not [one for one in warned if "torch.distributed" in str(one.message)]
    said = capsys.readouterr().out
    assert "step 2" in said and f"to {tmp_path / 'out'}, in float32" in said
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(ModelError, match="already exists"):
        args.run(args)
    with pytest.raises(CheckpointError, match="whole ones: 1, 2"):
        export_run(run_folder, tmp_path / "x", 7)
    with pytest.raises(CheckpointError, match=r"no config\.toml"):
        export_run(tmp_path / "nowhere", tmp_path / "x")


def test_a_damaged_checkpoint_is_refused_and_what_is_half_written_is_removed(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte of the weights is another one: with the same size it would load."""
    file = max((run_folder / "checkpoints" / "step_000002").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match=file.name):
        export_run(run_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and export_run(run_folder, tmp_path / "out", 1) == 1

    def torn(source: str, about: object, tensors: object, dtype: object, target: Path, **more: object) -> None:
        target.mkdir()
        (target / "model.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrl.trainer.model_folder.save_model", torn)
    with pytest.raises(KeyboardInterrupt):
        export_run(run_folder, tmp_path / "again", 1)
    assert not (tmp_path / "again").exists(), "the command can be repeated"


def test_a_run_of_many_gpus_is_exported_by_one_process_without_any(run_folder: Path, tmp_path: Path, tiny: str) -> None:
    """On the head node, say: how the ranks were used, what they computed in is theirs alone."""
    many = {"replicas": 2, "sequence_parallel": 2, "dtype": "bfloat16", "compile": True}
    for number, memory in enumerate(({"offload": "always"}, {"offload": "idle"})):
        config = TrainConfig(env=EnvConfig(id="none"), model=ModelConfig(path=tiny, **many, **memory))
        (run_folder / "config.toml").write_text(to_toml(config))
        export_run(run_folder, tmp_path / f"out{number}", 1)
        assert same(tmp_path / f"out{number}", run_folder / "direct1")


def test_the_adapter_alone_is_what_peft_loads_over_the_start_model(tiny: str, tmp_path: Path) -> None:
    """peft's own loading and merging of the folder gives the weights of the plain export; a run without adapters has none."""
    from peft import PeftModel

    run = tmp_path / "run"
    saved_run(run, ModelConfig(path=tiny, lora=LoraSection(rank=3, alpha=7.0)), lr=1e-2)  # the first step moves only B
    args = build_parser().parse_args(["export", str(run), str(tmp_path / "adapter"), "--adapter"])
    assert args.run(args) == 0 and export_run(run, tmp_path / "model") == 2
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny
    original = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(original, tmp_path / "adapter").merge_and_unload()
    plain, begun = weights(tmp_path / "model"), weights(Path(tiny))
    found = dict(loaded.named_parameters())
    assert set(found) == set(plain)
    assert all(torch.allclose(found[name], plain[name], atol=1e-6) for name in plain)
    assert sum(not torch.equal(plain[name], begun[name]) for name in plain) == 2 * 7  # of two layers
    (run / "config.toml").write_text(to_toml(TrainConfig(env=EnvConfig(id="none"), model=ModelConfig(path=tiny))))
    with pytest.raises(ModelError, match="trained all weights and has no adapter"):
        export_run(run, tmp_path / "none", adapter=True)


def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_damaged_and_the_next_one_is_taken(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on and keeps one checkpoint: its model is exported and pushed all the same."""
    whole = export.saved_model

    def removes(folder: Path) -> Any:
        found = whole(folder)
        if folder.parent.name == "step_000002":
            shutil.rmtree(folder.parent)
        return found

    kept = tmp_path / "kept"
    monkeypatch.setattr(export, "saved_model", removes)
    shutil.copytree(run_folder / "checkpoints/step_000002", kept)
    with pytest.raises(CheckpointError, match=r"step_000002: it was removed while it was read, by the run"):
        export_run(run_folder, tmp_path / "second", 2)
    for out in ("newest", "last"):
        shutil.copytree(kept, run_folder / "checkpoints/step_000002")
        found = export_run(run_folder, tmp_path / out) if out == "newest" else model_of(run_folder_of(run_folder), "last").step
        assert found == 1 and not (run_folder / "checkpoints/step_000002").exists(), out
    assert not (tmp_path / "second").exists()
