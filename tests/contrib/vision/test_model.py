"""Models that take images, Qwen2.5-VL's and Qwen3-VL's: packed rows against transformers' own forward pass of each alone."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoConfig

from agentrl.config.schema import InitModelConfig, ModelConfig
from agentrl.contrib.vision.model import Vision, features_of
from agentrl.data.images import Image
from agentrl.data.rows import Ragged, collate, nested_tensor, offsets_of
from agentrl.data.token_ledger import PromptIds, TokenLedger
from agentrl.data.trajectory import Task, Trajectory
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.pretrained import architecture, init_model, packaged_tokenizer
from agentrl.trainer.update import compute_logprobs

TINY = InitModelConfig(layers=2, heads=4, kv_heads=2, head_dim=16, hidden=64, vision=True, init_std=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_model(TINY, tmp_path_factory.mktemp("vision") / "model", 0)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """transformers alone."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


def qwen3_vl(folder: Path) -> Path:
    """A tiny Qwen3-VL, two of whose tower's layers reach into the language model; with the packaged tokenizer."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    small = architecture(TINY)
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    same = ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")
    text = {key: getattr(small.text_config, key) for key in same} | {"hidden_size": 64, "intermediate_size": 96}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text |= {"head_dim": 32, "rope_parameters": rope, "initializer_range": 0.2}
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    tower |= {"initializer_range": 0.2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    ids = {key: getattr(small, key) for key in tokens}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, dtype="float32", **ids)
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    packaged_tokenizer(TINY.context, True).save_pretrained(folder)
    Vision(str(folder), config).processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Qwen3-VL, and transformers alone of it."""
    from transformers import Qwen3VLForConditionalGeneration

    folder = qwen3_vl(tmp_path_factory.mktemp("deep") / "model")
    return folder, Qwen3VLForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


def drawn(color: str, size: tuple[int, int]) -> Image:
    made = Pictures.new("RGB", size, "white")
    made.paste(color, (5, 7, size[0] - 9, size[1] // 2))
    return Image.of(made)


SMALL = {"shortest_edge": 28 * 28, "longest_edge": 56 * 84}
RED, BLUE, WIDE = drawn("red", (56, 56)), drawn("blue", (56, 56)), drawn("green", (190, 75))


def episode(vision: Vision, member: int, *parts: Image | int) -> Trajectory:
    """Images and runs of so many sampled tokens, each after some context."""
    rng, ledger = np.random.default_rng(member), TokenLedger()
    ledger.append_context(rng.integers(7, 400, 5).tolist(), 0)
    for part in parts:
        if isinstance(part, Image):
            ids = [vision.begin, *[vision.token] * vision.tokens(part), vision.end, 9]
            ledger.append_context(PromptIds(ids, [part]), 0)
        else:
            ledger.append_sampled(rng.integers(7, 400, part).tolist(), [-1.0] * part, [0] * part, 0)
    return Trajectory("t", Task("t", 0), member=member, ledgers=[ledger], reward=1.0)


def pictured(model: str) -> TensorDict:
    """A batch of 9 rows, of which some have no image, some several, with random advantages."""
    vision = Vision(model, AutoConfig.from_pretrained(model))
    kinds: list[tuple[Image | int, ...]] = [(RED, 6, WIDE, 4), (5,), (WIDE, RED, RED, 3, BLUE, 2), (BLUE, 7)]
    batch = collate([episode(vision, member, *kinds[member % 4]) for member in range(9)])
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(len(batch["sampled"].values()), generator=draw) * batch["sampled"].values()
    return batch.update({"advantages": nested_tensor(values, offsets_of(batch["sampled"]))})


def alone(reference: Any, vision: Vision, ledger: TokenLedger, temperature: float) -> torch.Tensor:
    """Logprobs of a row's tokens after the first, by transformers' own forward pass, which makes positions and features."""
    ids = torch.tensor([ledger.ids()])
    given: dict[str, Any] = {}
    if ledger.images:
        made = [vision.pixels(image) for image in ledger.images]
        given["pixel_values"] = torch.cat([pixels.values for pixels in made])
        given["image_grid_thw"] = torch.tensor([pixels.grid for pixels in made])
        given["mm_token_type_ids"] = (ids == vision.token).int()
    with torch.no_grad():
        logits = reference(input_ids=ids, use_cache=False, **given).logits[0]
    return (logits[:-1] / temperature).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_packed_rows_with_images_are_each_row_alone(kind: str, folder: Path, reference: Any, deep: Any) -> None:
    if kind == "qwen3_vl":
        folder, reference = deep
    engine = FsdpEngine(str(folder), ModelConfig(path=str(folder), packing="packed"), 1.0, device=torch.device("cpu"))
    vision = engine.modality
    assert isinstance(vision, Vision)
    assert {name.split(".")[1] for name, _ in engine.named_weights()} == {"language_model"}, "the tower is frozen"
    kinds: list[tuple[Image | int, ...]] = [(RED, 6, WIDE, 4), (5,), (WIDE, RED, RED, 3, BLUE, 2), (BLUE, 6, WIDE, 4)]
    episodes = [episode(vision, number, *parts) for number, parts in enumerate(kinds)]
    view = Ragged.of(collate(episodes))
    out = compute_logprobs(engine, view, 0.7, 10_000)["logprobs"].unbind()
    for row, one in zip(out, episodes, strict=True):
        ledger = one.ledgers[0]
        own = alone(reference, vision, ledger, 0.7)
        sampled = torch.from_numpy(ledger.sampled.copy())
        assert float((row[sampled] - own[sampled[1:]]).abs().max()) < 1e-5
    # The images matter: with others in their places all numbers behind them are others.
    swapped = [episode(vision, 0, BLUE, 6, WIDE, 4)]
    other = compute_logprobs(engine, Ragged.of(collate(swapped)), 0.7, 10_000)["logprobs"].unbind()[0]
    assert float((other - out[0])[torch.from_numpy(episodes[0].ledgers[0].sampled.copy())].abs().min()) > 1e-4


def test_what_is_exported_prepares_images_as_the_model_did(folder: Path, tmp_path: Path) -> None:
    """The model's own sizes and normalization, which its config does not have, are among its files; so is the tower."""
    own = shutil.copytree(folder, tmp_path / "own")
    file = own / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1, 0.2, 0.3], "size": SMALL}))
    engine = FsdpEngine(str(own), ModelConfig(path=str(own), packing="packed"), 1.0, device=torch.device("cpu"))
    engine.export(tmp_path / "out")
    first, last = (Vision(str(at), engine.config).pixels(WIDE) for at in (own, tmp_path / "out"))
    plain = Vision(str(folder), engine.config).pixels(WIDE)
    assert torch.equal(first.values, last.values) and first.tokens == last.tokens < plain.tokens
    before, after = (load_file(at / "model.safetensors") for at in (own, tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(kind: str, folder: Path, reference: Any, deep: Any) -> None:
    if kind == "qwen3_vl":
        folder, reference = deep
    vision = Vision(str(folder), reference.config)
    ledger = episode(vision, 0, RED, WIDE, 6, BLUE, 4).ledgers[0]
    ids = torch.tensor([ledger.ids()])
    places = vision.places(ledger.token_ids, ledger.images)
    grid = torch.tensor([pixels.grid for _, pixels in places])
    kinds = (ids == vision.token).int()
    own, _ = reference.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)
    assert torch.equal(own[:, 0], vision.positions(len(ledger), places))


def test_features_for_the_language_models_layers_are_never_left_out(deep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep[1].model
    monkeypatch.setattr(model, "get_image_features", lambda *given, **named: SimpleNamespace(pooler_output=[torch.ones(1, 1)]))
    pixels: Any = SimpleNamespace(values=torch.ones(1), grid=[1])
    with pytest.raises(AttributeError, match="deepstack_features"):
        features_of(model, [pixels], torch.device("cpu"))
