"""Runs inside vLLM: its Qwen2.5-VL and Qwen3-VL for requests whose images are prepared already (model.py).

Of vLLM's own preparation only what it asks at the start is left: how large an image may be, and one of that size, by which it
measures what it needs. Whoever imports this file makes its classes known to the vLLM of the process.

vLLM's module of Qwen2-VL takes one function of transformers' image processor that needs torchvision, which has no build
for every torch; the processor without it has the same function."""

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
    """A prompt as vLLM takes it once all is prepared. `images`: of each its hash, and where its placeholders begin."""
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
    """A prompt as vLLM takes it without looking for text. Its cache of prefixes knows an image by the digest of its file."""
    named = [(image.sha256, start, pixels) for image, (start, pixels) in vision.match(ids, images)]
    return with_images(ids, named) if named else tokens_input(ids)


class PreparedInfo:
    """Limits of prompts: images, as many as there is room for. Mixed into vLLM's own of a model."""

    ctx: Any

    @cached_property
    def vision(self) -> Vision:
        return Vision(self.ctx.model_config.model, self.ctx.model_config.hf_config)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Of the largest image that a prompt of `seq_len` tokens has room for."""
        return {"image": max(1, min(self.vision.most_tokens, seq_len))}


class PreparedProcessor:
    """Asked for a blank image only. Mixed into vLLM's own of a model."""

    requires_tokenizer = False
    info: Any

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> Any:
        """As many blank images of that size."""
        config = self.info.ctx.model_config
        [most] = self.info.get_mm_max_tokens_per_item(config.max_model_len, mm_counts).values()
        blank, count = self.info.vision.blank(most), mm_counts.get("image", 0)
        ids = [self.info.vision.token] * blank.tokens * count
        return with_images(ids, [("", number * blank.tokens, blank) for number in range(count)])


def prepare(module: Any, name: str) -> Any:
    """vLLM's own class of a model, computed as it is, for images that are prepared already."""
    info = type(f"{name}Info", (PreparedInfo, getattr(module, f"{name}ProcessingInfo")), {})
    processor = type(f"{name}Processor", (PreparedProcessor, getattr(module, f"{name}MultiModalProcessor")), {})
    model = type(f"Prepared{name}", (getattr(module, f"{name}ForConditionalGeneration"),), {})
    register = MULTIMODAL_REGISTRY.register_processor
    return register(processor, info=info, dummy_inputs=getattr(module, f"{name}DummyInputsBuilder"))(model)


for _kind, _model in {"qwen2_5_vl": prepare(qwen2_5_vl, "Qwen2_5_VL"), "qwen3_vl": prepare(qwen3_vl, "Qwen3VL")}.items():
    ModelRegistry.register_model(ARCHITECTURES[_kind], _model)  # the class, not its name, of which vLLM would ask another process


class VisionReceiver(WeightReceiver):
    """Mixed into vLLM's worker in place of WeightReceiver: its processes import this file for it."""
