"""Loading and exporting: each rank holds its own shards, bit for bit what transformers loads, and never the whole model."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from agentrl.config.schema import LoraSection, ModelConfig
from agentrl.trainer.attention import PACKED
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.model_folder import export_run, region_of, save_model
from agentrl.trainer.optim import local
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.trainer.weight_files import SINGLE
from agentrl.utils.errors import ModelError
from tests.trainer.bytes_held import BytesHeld
from tests.trainer.learners import as_rank, saved_run

COMMON: dict[str, Any] = {
    "vocab_size": 401,  # prime, so that no number of ranks divides it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, **LLAMA3}
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**COMMON, **EXPERTS, num_experts=5),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**COMMON, **EXPERTS, n_routed_experts=6, first_k_dense_replace=1, n_group=1),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, sliding_window=16),
    "olmo3": lambda: transformers.Olmo3Config(**COMMON),
}
RANKS = 4


def saved(folder: Path, config: Any, kind: Any = transformers.AutoModelForCausalLM, **options: Any) -> str:
    """A random model as published ones are: bfloat16, in several files."""
    torch.manual_seed(0)
    model = kind.from_config(config)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.normal_()  # a bias that balances experts, for example: zeros would prove nothing
    model.to(torch.bfloat16).save_pretrained(folder, **{"max_shard_size": "40KB", **options})
    packaged_tokenizer(128).save_pretrained(folder)
    return str(folder)


def agree(engine: FsdpEngine, plain: Any, prefix: str = "hf.") -> int:
    """Every parameter and buffer of the engine is this rank's region of transformers' own; how many there are."""
    theirs = {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers())}
    mine = {**dict(engine.module.named_parameters()), **dict(engine.module.named_buffers())}
    for name, tensor in mine.items():
        want = theirs[name.removeprefix(prefix)]
        assert tensor.shape == want.shape and not tensor.is_meta and tensor.dtype == want.dtype, name
        assert torch.equal(local(tensor), rows_of(tensor, want)), name
    return len(mine)


def rows_of(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What FSDP2 gives this rank of the whole tensor: its part of equal ones along the first dimension, the last ones shorter."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh = tensor.device_mesh
    parts = whole.chunk(mesh.size(mesh.ndim - 1))
    index = mesh.get_local_rank(mesh.ndim - 1)
    return parts[index] if index < len(parts) else whole[:0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_holds_what_plain_transformers_loads(family: str, tmp_path: Path) -> None:
    """Ranks without rows (five experts over four ranks, vectors of eight) and padded shards among them."""
    path = saved(tmp_path, FAMILIES[family]())
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.get_rng_state()
    whole = FsdpEngine(path, ModelConfig(), 1.0)
    assert agree(whole, plain) == len({id(p) for p in plain.parameters()}) + len(dict(plain.named_buffers()))
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            engine = FsdpEngine(path, ModelConfig(), 1.0)
            agree(engine, plain)
            assert all(isinstance(p, DTensor) for p in engine.module.parameters())
    with as_rank(3, RANKS):  # two replicas of two shards: rank 3 holds the second half
        agree(FsdpEngine(path, ModelConfig(replicas=2), 1.0), plain)
    assert torch.equal(torch.get_rng_state(), generator)


def test_classifiers_and_value_heads(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**COMMON, num_labels=1, architectures=["Qwen3ForSequenceClassification"])
    path = saved(tmp_path / "score", config, transformers.AutoModelForSequenceClassification)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    base = saved(tmp_path / "base", FAMILIES["qwen3_moe"]())
    backbone = transformers.AutoModel.from_pretrained(base, dtype=torch.float32)
    for rank in range(2):
        with as_rank(rank, 2):
            agree(FsdpEngine(path, ModelConfig(), 1.0, "score"), plain)
            critic = FsdpEngine(base, ModelConfig(), 1.0, "value")
            head = critic.module.head
            assert head.weight.shape == (1, 32) and not local(head.weight).any()
            del critic.module.head
            agree(critic, backbone)


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_adapters_are_drawn_as_without_ranks(tmp_path: Path) -> None:
    """What peft draws itself on a model that is not on the meta device, each rank its rows of it."""
    path, lora = saved(tmp_path, FAMILIES["qwen3"]()), LoraSection(rank=4)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = LoraConfig(r=4, lora_alpha=lora.alpha, target_modules=LINEAR, lora_dropout=0.0)
        inject_adapter_in_model(settings, plain)
    down = [p for name, p in plain.named_parameters() if ".lora_A." in name]
    assert len(down) == 2 * len(LINEAR) and all(p.any() for p in down)
    agree(FsdpEngine(path, ModelConfig(lora=lora), 1.0), plain)
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            engine = FsdpEngine(path, ModelConfig(lora=lora), 1.0)
            agree(engine, plain)
            assert {".lora_" in name for name, _ in engine.named_weights()} == {True}


def test_old_files_are_read_too(tmp_path: Path) -> None:
    path = saved(tmp_path, FAMILIES["qwen3"]())
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for file in tmp_path.glob("model*"):
        file.unlink()
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")  # tied ones twice, as these files have them
    with as_rank(1, RANKS):
        agree(FsdpEngine(path, ModelConfig(), 1.0), plain)
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match="its weights cannot be read"):
        FsdpEngine(path, ModelConfig(), 1.0)


@pytest.mark.parametrize(("change", "message"), [
    (lambda held: held.pop("model.norm.weight"), r"no weights for model\.norm\.weight \(1 missing\)"),
    (lambda held: held.update({"model.norm.weight": torch.ones(31)}), r"model\.norm\.weight has shape \(31,\) .* \(32,\)"),
    (lambda held: held.update({"lm_head.weight": torch.ones(401, 32)}), r"ties .*weight to another tensor"),
], ids=["missing", "other shape", "not tied"])  # fmt: skip
def test_what_is_refused(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        path = saved(tmp_path, FAMILIES["qwen3"](), max_shard_size="1GB")
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        FsdpEngine(path, ModelConfig(), 1.0)


def test_quantized_and_absent_weights_are_refused(tmp_path: Path) -> None:
    config = FAMILIES["qwen3"]()
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"it has no weights: expected model\.safetensors or model\.safetensors\.index\.json"):
        FsdpEngine(str(tmp_path), ModelConfig(), 1.0)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="quantized"):
        FsdpEngine(str(tmp_path), ModelConfig(), 1.0)


def sizes(engine: FsdpEngine) -> tuple[int, int, int]:
    """Bytes of the whole model, of this rank's shard, and of the largest part that is gathered at once."""

    def total(module: torch.nn.Module, sharded: bool) -> int:
        return sum((local(p) if sharded else p).numel() * 4 for p in module.parameters())

    parts = [total(part, False) for part in engine.module.modules() if isinstance(part, FSDPModule)]
    return parts[0], total(engine.module, True), max(*parts[1:], parts[0] - sum(parts[1:]))


LARGER = {**COMMON, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 6}
LARGE: dict[str, Callable[[], Any]] = {  # about 0.3 MB in float32 a layer, and 0.15 MB in each of two embeddings
    "qwen3": lambda: transformers.Qwen3Config(**LARGER),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**{**LARGER, **EXPERTS}, num_experts=8),
}


@pytest.mark.parametrize("family", LARGE)
def test_no_rank_holds_more_than_its_shard_and_a_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that tensor operations allocate while a rank loads, and while rank 0 exports."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # what transformers read in threads of its own would not be counted
    path = saved(tmp_path / "model", LARGE[family](), max_shard_size="500KB")
    with as_rank(0, RANKS):
        with BytesHeld() as held:
            engine = FsdpEngine(path, ModelConfig(), 1.0)
        whole, shard, layer = sizes(engine)
        assert shard < 0.26 * whole and layer < 0.2 * whole
        assert shard <= held.peak <= 1.3 * shard + layer
        with BytesHeld() as held:
            engine.export(tmp_path / "out")
        assert 0 < held.peak <= layer
    assert sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) > whole


def test_an_export_of_a_run_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved_run(run, ModelConfig(path=saved(tmp_path / "model", LARGE["qwen3"]())), steps=1)
    with BytesHeld() as held:
        export_run(run, tmp_path / "out")
    assert held.peak <= 3 * 401 * 96 * 4  # of the largest tensor: the bytes that are read, what they become, what is written
    assert (tmp_path / "out" / SINGLE).read_bytes() == (run / "direct1" / SINGLE).read_bytes()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe"])
def test_an_export_is_byte_for_byte_what_transformers_saves(family: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "model", FAMILIES[family]())
    plain = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="sdpa")
    plain.load_state_dict(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict())
    plain.save_pretrained(tmp_path / "theirs")
    FsdpEngine(path, ModelConfig(), 1.0).export(tmp_path / "mine")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "mine" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


def test_large_exports_are_cut_into_files(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", FAMILIES["qwen3_moe"]())
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"of an earlier export")
    weights = list(plain.state_dict().items())
    save_model(path, plain.config, iter(weights), torch.float32, out, max_bytes=60_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(file.stat().st_size < 70_000 for file in files)
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(p, dict(weights)[name]) for name, p in again.named_parameters())
    with pytest.raises(ModelError, match=r"no weights for .* \(1 missing\)"):
        save_model(path, plain.config, iter(weights[:-1]), torch.float32, tmp_path / "half")
    assert not list((tmp_path / "half").iterdir())


def test_the_region_of_a_rank_on_two_axes_and_what_has_none() -> None:
    """Rows that are split in two and then sharded in two by FSDP2: rank (1, 0) of the mesh has the second quarter. Two matrices
    kept as one, both of which are split, are two regions."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tp"))
    plain = distribute_tensor(torch.zeros(8, 6), mesh, [Replicate(), Shard(1)])
    assert region_of(plain) == (slice(0, 8), slice(0, 6)) and region_of(torch.zeros(2)) is None
    sizes = [_compute_local_shape_and_global_offset((8, 6), (2, 2), at, (_StridedShard(0, split_factor=2), Shard(0)))
             for at in ([0, 0], [1, 0], [0, 1], [1, 1])]  # fmt: skip
    assert sizes == [((2, 6), (0, 0)), ((2, 6), (2, 0)), ((2, 6), (4, 0)), ((2, 6), (6, 0))]
    packed = distribute_tensor(torch.zeros(8, 6), mesh, [Replicate(), _StridedShard(0, split_factor=2)])
    with pytest.raises(ModelError, match=r"shape \(8, 6\) is sharded as .* not one region a rank"):
        region_of(packed)


def test_no_digit_hangs_on_the_file_that_weights_come_from(tiny: str, tmp_path: Path) -> None:
    """The second file's header is 8 bytes longer, and with it every weight begins 8 bytes later."""
    state = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for more in (0, 8):
        folder = Path(shutil.copytree(tiny, tmp_path / str(more)))
        file = folder / "model.safetensors"
        save_file(load_file(file), file, {"format": "pt", "more": "x" * (64 + more)})
        engine = FsdpEngine(str(folder), ModelConfig(), max_grad_norm=1.0)
        matrices = {name: p.detach() for name, p in engine.named_weights() if p.shape[1:] == (32,)}
        found.append({name: (state @ matrix.t()).tolist() for name, matrix in matrices.items()})
        assert {p.data_ptr() % 64 for _, p in engine.named_weights()} == {0}
    assert found[0] == found[1] and len(found[0]) > 8


def test_an_export_does_not_switch_the_attention_of_the_live_model(tiny: str, tmp_path: Path) -> None:
    engine = FsdpEngine(tiny, ModelConfig(), max_grad_norm=1.0)
    engine.export(tmp_path / "out")
    assert engine.module.hf.config._attn_implementation == PACKED
