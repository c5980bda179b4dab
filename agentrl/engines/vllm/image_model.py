"""Runs inside vLLM: its Qwen2.5-VL and Qwen3-VL for requests whose images are prepared already (vision.py).

Of vLLM's own preparation only what it asks at the start is left: how large an image may be, and one of that size, by which it
measures what it needs. Whoever imports this file makes its classes known to the vLLM of the process.

vLLM's module of Qwen2-VL takes one function of transformers' image processor that needs torchvision, which has no build
for every torch; the processor without it has the same function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any

if importlib.util.find_spec("torchvision") is None:
    _WITHOUT = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", _WITHOUT)

from vllm.model_executor.models import qwen2_5_vl, qwen3_vl
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY

from agentrl.engines.vllm.images import ARCHITECTURES, with_images
from agentrl.engines.vllm.vllm_worker import WeightReceiver
from agentrl.render.vision import Vision


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


class Qwen25Info(PreparedInfo, qwen2_5_vl.Qwen2_5_VLProcessingInfo):  # type: ignore[misc]
    """Of Qwen2.5-VL."""


class Qwen25Processor(PreparedProcessor, qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):  # type: ignore[misc]
    """Of Qwen2.5-VL."""


@MULTIMODAL_REGISTRY.register_processor(Qwen25Processor, info=Qwen25Info, dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder)
class PreparedQwen25(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]
    """vLLM's own, computed as it is."""


class Qwen3Info(PreparedInfo, qwen3_vl.Qwen3VLProcessingInfo):  # type: ignore[misc]
    """Of Qwen3-VL."""


class Qwen3Processor(PreparedProcessor, qwen3_vl.Qwen3VLMultiModalProcessor):  # type: ignore[misc]
    """Of Qwen3-VL."""


@MULTIMODAL_REGISTRY.register_processor(Qwen3Processor, info=Qwen3Info, dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder)
class PreparedQwen3(qwen3_vl.Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """vLLM's own, computed as it is."""


for _kind, _model in {"qwen2_5_vl": PreparedQwen25, "qwen3_vl": PreparedQwen3}.items():
    ModelRegistry.register_model(ARCHITECTURES[_kind], _model)  # the class, not its name, of which vLLM would ask another process


class VisionReceiver(WeightReceiver):
    """Mixed into vLLM's worker in place of WeightReceiver: its processes import this file for it."""
