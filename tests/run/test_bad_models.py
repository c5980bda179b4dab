"""Models that cannot be trained or sampled from: each is named by the command line, with what to do, before anything is "
"started."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.config.load import config_from
from agentrl.run.assembly import RunStart
from agentrl.run.checks import model_checks as check
from agentrl.run.engine_choice import EngineChoice
from agentrl.trainer import pretrained
from agentrl.trainer.weight_files import Header, check_tensors
from agentrl.utils.errors import ModelError
from tests.conftest import Agentrl

Change = Callable[[Path], object]
SMALL = ["cluster.backend=inline", "rollout.max_episode_tokens=512", "optim.micro_tokens=512", "optim.lr=1e-6"]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an engine nor a trainer is made, whatever the checks let through."""

    def started(*args: object, **options: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(EngineChoice, "make", started)
    monkeypatch.setattr("agentrl.run.driver.open_session", started)


@pytest.fixture
def folder(tiny: str, tmp_path: Path) -> Path:
    """A model to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def train(agentrl: Agentrl, folder: Path | str, *more: str, command: str = "train") -> str:
    out = Path(folder).parent if Path(folder).is_dir() else Path("runs")
    config = out / "config.toml"
    config.write_text(f'name = "bad"\nout = "{out}"\n[model]\npath = "{folder}"\n[env]\nid = "key_value"\n')
    text = agentrl(command, config, *SMALL, *more, code=2)
    assert not (out / "bad").exists()
    return " ".join(text.split())


def edited(name: str = "config.json", **changes: Any) -> Change:
    def change(folder: Path) -> None:
        table = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: value for key, value in {**table, **changes}.items() if value is not None}))

    return change


def tensors(**changes: torch.Tensor | None) -> Change:
    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors") | changes
        save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")

    return change


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def pointer(name: str) -> Change:
    return lambda folder: (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n")


def indexed(folder: Path) -> None:
    """Two shards by the index, of which the second is not there."""
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {name: f"model-0000{1 + (number > 9)}-of-00002.safetensors" for number, name in enumerate(held)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def renamed(name: str) -> Change:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def more_tokens(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<new{number}>" for number in range(3)])
    tokenizer.save_pretrained(folder)


def own_tokenizer(folder: Path) -> None:
    edited(model_type="mine", auto_map={"AutoConfig": "m.C"})(folder)
    edited("tokenizer_config.json", tokenizer_class="MyTokens", auto_map={"AutoTokenizer": ["tok.My", None]})(folder)


def other_tokenizer(folder: Path) -> None:
    edited(vocab_size=40_000)(folder)
    tensors(**{"model.embed_tokens.weight": torch.zeros(40_000, 32)})(folder)


ROW = torch.zeros(2, 32)
LAYER, HEAD = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
FAULTS: dict[str, tuple[Change, list[str]]] = {
    "a broken template": (lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"),
        ["the chat template refused the messages", "model.chat_template"]),
    "no template": (lambda folder: (folder / "chat_template.jinja").unlink(),
        ["no chat template", "instruction-tuned", "model.chat_template"]),
    "more tokens than rows": (more_tokens,
        ["ids up to 402 ('<new2>')", "embeds 400 (vocab_size", "resize_token_embeddings(403)"]),
    "another tokenizer": (other_tokenizer, ["no token for 39600 of the 40000 ids", "the tokenizer belongs to another model"]),
    "a missing weight": (tensors(**{LAYER: None}), [f"1 of 24 are not in its files: {LAYER}."]),
    "missing weights": (edited(num_hidden_layers=4, layer_types=None),
        ["22 of 46 are not in its files: model.layers.2.", "and 19 more"]),
    "a config that contradicts itself": (edited(num_hidden_layers=4),
        ["no model config can be loaded", "`num_hidden_layers` (4) must be equal to the number of `layer_types` (2)"]),
    "a config that is a list": (lambda folder: (folder / "config.json").write_text("[]"), ["expected an object, got a list"]),
    "a tokenizer's config that is a list": (lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
        ["tokenizer_config.json: expected an object, got a list"]),
    "settings of sampling that are a list": (lambda folder: (folder / "generation_config.json").write_text("[]"),
        ["generation_config.json: expected an object, got a list"]),
    "an unknown type": (edited(dtype="foo"), ["no model config can be loaded", "has no attribute 'foo'"]),
    "no heads": (edited(num_attention_heads=0), ["not a causal language model: ZeroDivisionError: integer division"]),
    "an unknown activation": (edited(hidden_act="foo"), ["not a causal language model: KeyError: 'foo'"]),
    "an index that is a list": (lambda folder: (renamed("other.bin")(folder),
        (folder / "model.safetensors.index.json").write_text("[]")), ["is not an index of weights (TypeError("]),
    "no tokenizer": (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], ["its files are missing. Copy them"]),
    "an adapter next to it": (lambda folder: (folder / "adapter_config.json").write_text("{}"),
        ["it holds an adapter (adapter_config.json). Merge it"]),
    "an extra weight": (tensors(**{"model.layers.1.mlp.gate.weight": ROW}),
        ["1 of its files have no place in Qwen3ForCausalLM: model.layers.1.mlp.gate.weight"]),
    "extra layers": (edited(num_hidden_layers=1, layer_types=None), ["11 of its files have no place", "and 8 more"]),
    "another shape": (edited(intermediate_size=48), ["6 have another shape", "(64x32 in its files, 48x32 by config.json)"]),
    "cut off": (cut, ["model.safetensors (", "damaged or cut off", "fetch it again"]),
    "a pointer": (pointer("model.safetensors"), ["model.safetensors is a git-LFS pointer", "git lfs pull"]),
    "a pointer for the tokenizer": (pointer("tokenizer.json"), ["tokenizer.json is a git-LFS pointer", "git lfs pull"]),
    "a damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"),
        ["no tokenizer can be loaded from it", "added_tokens"]),
    "no shard": (indexed, ["1 of the 2 files that model.safetensors.index.json names are not there: model-00002-of-00002"]),
    "another program's": (renamed("consolidated.00.pth"),
        ["no weights: expected model.safetensors", "found consolidated.00.pth", "save_pretrained"]),
    "adapters": (renamed("adapter_model.safetensors"), ["adapters alone", "merge"]),
    "gptq": (edited(quantization_config={"quant_method": "gptq", "bits": 4}),
        ["quantized by gptq (quantization_config of config.json)", "made from"]),
    "awq": (edited(quantization_config={"quant_method": "awq"}), ["quantized by awq"]),
    "fp8": (edited(quantization_config={"quant_method": "fp8"}), ["quantized by fp8", "FineGrainedFP8Config(dequantize=True)"]),
    "mxfp4": (edited(quantization_config={"quant_method": "mxfp4"}),
        ["quantized by mxfp4", "Mxfp4Config(dequantize=True)", "save_pretrained"]),
    "bitsandbytes": (edited(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ["quantized by bitsandbytes"]),
    "quantized without a word": (tensors(**{LAYER: torch.zeros(64, 32, dtype=torch.int8)}),
        [f"{LAYER} is stored as I8", "quantized"]),
    "code of its own": (edited(model_type="mine", auto_map={"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.My"}),
        ["code of its own (config.json names mine.MyConfig, config.json names mine.My)", "model.trust_remote_code = true"]),
    "a tokenizer of its own": (own_tokenizer,
        ["config.json names m.C, tokenizer_config.json names tok.My", "trust_remote_code"]),
    "a short context": (edited(max_position_embeddings=50),
        ["opening prompt of key_value (task seed ", "the model takes 50 (max_position", "no turn could be sampled"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_model_is_named_with_what_to_do(folder: Path, agentrl: Agentrl, fault: str) -> None:
    change, told = FAULTS[fault]
    change(folder)
    text = train(agentrl, folder)
    assert "Traceback" not in text and [part for part in told if part not in text] == [], text
    assert fault == "a short context" or f"model.path = {folder}: " in text


@pytest.mark.parametrize("command", ["sft", "eval", "rollout", "dry run"])
def test_every_command_names_it(folder: Path, agentrl: Agentrl, command: str) -> None:
    tensors(**{LAYER: None})(folder)
    if command in ("eval", "rollout"):
        out = folder.parent / "out"
        text = agentrl(command, "key_value", "--model", folder, "--out", out, "engine=embedded", code=2)
        assert not out.exists()
    elif command == "sft":
        text = train(agentrl, folder, "sft.max_steps=1", "sft.min_steps=1", command="sft")
    else:
        text = train(agentrl, folder, "--dry-run")
    assert "1 of 24 are not in its files" in " ".join(text.split())


def test_a_critic_and_a_reward_model_are_looked_at_too(folder: Path, tiny: str, agentrl: Agentrl) -> None:
    tensors(**{LAYER: None})(folder)
    for key, more in {"critic.path": ['algorithm.advantage={name="gae"}'], "reward_model.path": []}.items():
        if key == "reward_model.path":
            edited(architectures=["Qwen3ForSequenceClassification"])(folder)
            tensors(**{"score.weight": torch.zeros(1, 32)})(folder)
        text = train(agentrl, folder, f"model.path={tiny}", f"{key}={folder}", *more)
        assert f"{key} = {folder}: " in text and f"are not in its files: {LAYER}." in text


def test_what_a_checkpoint_may_hold_beside_the_model_is_counted(folder: Path) -> None:
    shell = pretrained.meta_model(config_from({"env": {"id": "key_value"}, "model": {"path": str(folder)}}, []).model)
    own = {name: Header("BF16", tuple(tensor.shape)) for name, tensor in shell.state_dict().items()}
    extra = ["model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.mlp.up_proj.weight",
             "model.visual.blocks.0.attn.weight", "vision_tower.a.weight", "multi_modal_projector.b", "score.weight",
             "v_head.summary.weight"]  # fmt: skip
    found = check_tensors(shell, own | {name: Header("BF16", (1,)) for name in extra})
    assert sorted(line.split(" tensors")[0] for line in found) == ["1", "1", "2", "3"]
    # a tied output head may be stored or not; layers behind the last one predict several tokens if the config says so
    shell.config.num_nextn_predict_layers = 1
    found = check_tensors(
        shell,
        {name: held for name, held in own.items() if name != "lm_head.weight"}
        | {"model.layers.2.eh_proj.weight": Header("F32", (1,))},
    )
    assert found == ["1 tensors not used: layers that predict several tokens at once"]
    with pytest.raises(ModelError, match=r"no place in Qwen3ForCausalLM: model\.layers\.3\.eh_proj"):
        check_tensors(shell, own | {"model.layers.3.eh_proj.weight": Header("F32", (1,))})


def test_what_is_not_used_and_what_the_context_cuts_is_a_warning(folder: Path) -> None:
    base = {"env": {"id": "key_value"}, "model": {"path": str(folder)}, "engine": "embedded"}
    assert check.model_notes(RunStart(config_from(base, ["rollout.max_turn_tokens=400"]))) == []
    tensors(**{"model.rotary_emb.inv_freq": torch.zeros(4)})(folder)
    edited(max_position_embeddings=100)(folder)
    unused, cut_off = check.model_notes(RunStart(config_from(base, ["rollout.max_turn_tokens=64"])))
    assert unused == f"model.path = {folder}: 1 tensors not used: rotary frequencies, which the config determines"
    assert cut_off.startswith("rollout.max_turn_tokens = 64: after the opening prompt (54 tokens, task seed 1) ")
    assert "room for 46" in cut_off


def test_a_plan_needs_no_weights(folder: Path, agentrl: Agentrl) -> None:
    (folder / "model.safetensors").unlink()
    assert "it has no weights: expected model.safetensors or model.safetensors.index.json" in train(agentrl, folder)
    refused, planned = f"warning: a run would refuse this: model.path = {folder} has no ", [*SMALL, "--dry-run"]
    assert f"{refused}weights; only its shape is planned" in agentrl("train", folder.parent / "config.toml", *planned).out
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert f"{refused}tokenizer; only its" in agentrl("train", folder.parent / "config.toml", *planned).out


def test_a_model_of_several_parts_is_refused_for_training_with_how_to_take_its_text_model(folder: Path, agentrl: Agentrl) -> None:
    for kind, text, take in (("gemma3", "gemma3_text", "Gemma3ForCausalLM"), ("qwen3_5", "qwen3_5_text", "Qwen3_5ForCausalLM")):
        table = {"model_type": kind, "architectures": ["TheirForConditionalGeneration"], "text_config": {"model_type": text}}
        (folder / "config.json").write_text(json.dumps(table))
        found = train(agentrl, folder)
        assert "it is TheirForConditionalGeneration, of several parts (text_config, vision_config)" in found
        assert f"from transformers import {take} as M" in found and "model.path = TO" in found


def test_a_context_is_the_text_models_and_stretched_by_its_rotary_positions(folder: Path) -> None:
    def context(**changes: Any) -> int:
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 1000} | changes))
        return pretrained.model_context(str(folder))

    assert context() == 1000
    assert context(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}) == 4000
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250, "rope_theta": 1e4}
    assert context(rope_parameters=yarn) == 1000  # counted already
    whole = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "max_position_embeddings": 77}}
    assert context(**whole) == 77
    with pytest.raises(ModelError, match=r"its config\.json has no max_position_embeddings"):
        context(model_type="bloom", n_layer=1, max_position_embeddings=None)  # a family without a longest sequence


def test_a_name_that_the_hub_does_not_give_is_told_at_once(agentrl: Agentrl, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs").mkdir()
    asked: list[str] = []

    def hub(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        if "nobody" in str(request.url):
            return httpx.Response(404)
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_session", lambda: httpx.Client(transport=httpx.MockTransport(hub)))
    text = train(agentrl, "someone/model")
    assert (
        "model.path = someone/model: there is no such folder here" in text
        and "cannot be reached: Name or service not known" in text
    )
    assert "hf download NAME" in text and len(asked) == 1
    assert "the hub answers 404" in train(agentrl, "nobody/model")
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    assert "HF_HUB_OFFLINE is set" in train(agentrl, "another/model") and len(asked) == 2
