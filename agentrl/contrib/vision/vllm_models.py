"""Qwen2.5-VL and Qwen3-VL inside vLLM, for requests whose images are already prepared (model.py).

vLLM's image processor only answers its questions at the start: the size of the largest image, and a blank image of that size,
by which vLLM measures its memory. Importing this file registers its classes in vLLM.

vLLM's module of Qwen2-VL imports a function of transformers' image processor that needs torchvision, which is not built for
every torch; the processor without torchvision has the same function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

if importlib.util.find_spec("torchvision") is None:
    _WITHOUT = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", _WITHOUT)

import torch
from vllm.inputs.engine import mm_input, tokens_input
from vllm.model_executor.models import qwen2_5_vl, qwen3_vl
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from agentrl.contrib.vision.model import ARCHITECTURES, Pixels, Vision
from agentrl.data.images import Image
from agentrl.engines.vllm.vllm_worker import WeightReceiver


def with_images(token_ids: list[int], images: Sequence[tuple[str, int, Pixels]]) -> Any:
    """Return a vLLM prompt with prepared images. `images`: hash, start of the placeholders, and pixels of each."""
    items = []
    for _, _, pixels in images:
        grid = torch.tensor([pixels.grid])
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        data: Any = {"pixel_values": pixels.values, "image_grid_thw": grid}
        items.append(MultiModalKwargsItems.from_hf_inputs(data, fields)["image"][0])
    return mm_input(
        token_ids,
        MultiModalKwargsItems({"image": items}),
        {"image": [name for name, _, _ in images]},
        {"image": [PlaceholderRange(offset=start, length=pixels.tokens) for _, start, pixels in images]},
    )


def prompt_of(vision: Vision, ids: list[int], images: Sequence[Image]) -> Any:
    """Return a vLLM prompt of token ids. Its prefix cache identifies an image by the digest of its file."""
    named = [(image.sha256, start, pixels) for image, (start, pixels) in vision.match(ids, images)]
    return with_images(ids, named) if named else tokens_input(ids)


class PreparedInfo:
    """Mixin of vLLM's processing info: a prompt may have as many images as fit."""

    ctx: Any

    @cached_property
    def vision(self) -> Vision:
        return Vision(self.ctx.model_config.model, self.ctx.model_config.hf_config)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return the tokens of the largest image that fits into a prompt of `seq_len` tokens."""
        return {"image": max(1, min(self.vision.most_tokens, seq_len))}


class PreparedProcessor:
    """Mixin of vLLM's processor, which only makes blank images."""

    requires_tokenizer = False
    info: Any

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> Any:
        """Return that many blank images of the largest size."""
        config = self.info.ctx.model_config
        [most] = self.info.get_mm_max_tokens_per_item(config.max_model_len, mm_counts).values()
        blank, count = self.info.vision.blank(most), mm_counts.get("image", 0)
        ids = [self.info.vision.token] * blank.tokens * count
        return with_images(ids, [("", number * blank.tokens, blank) for number in range(count)])


def prepare(module: Any, name: str) -> Any:
    """Return a subclass of vLLM's class of a model, for images that are already prepared."""
    info = type(f"{name}Info", (PreparedInfo, getattr(module, f"{name}ProcessingInfo")), {})
    processor = type(f"{name}Processor", (PreparedProcessor, getattr(module, f"{name}MultiModalProcessor")), {})
    model = type(f"Prepared{name}", (getattr(module, f"{name}ForConditionalGeneration"),), {})
    register = MULTIMODAL_REGISTRY.register_processor
    return register(processor, info=info, dummy_inputs=getattr(module, f"{name}DummyInputsBuilder"))(model)


for _kind, _model in {"qwen2_5_vl": prepare(qwen2_5_vl, "Qwen2_5_VL"), "qwen3_vl": prepare(qwen3_vl, "Qwen3VL")}.items():
    ModelRegistry.register_model(ARCHITECTURES[_kind], _model)  # the class, since vLLM would inspect a name in another process


class VisionReceiver(WeightReceiver):
    """Mixin of vLLM's worker in place of WeightReceiver; it makes vLLM's processes import this file."""
