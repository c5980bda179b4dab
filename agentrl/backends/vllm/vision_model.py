"""Runs inside vLLM: its Qwen2.5-VL for requests whose images are prepared already (vision.py).

Of vLLM's own preparation only what it asks at the start is left: how large an image may be, and one of that size, by which it
measures what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from agentrl.backends.vllm.vision import with_images
from agentrl.vision import Vision


class PreparedInfo(Qwen2_5_VLProcessingInfo):  # type: ignore[misc]
    """What prompts may have: images, as many as there is room for."""

    @cached_property
    def vision(self) -> Vision:
        return Vision(self.ctx.model_config.model, self.get_hf_config())

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Of the largest image that a prompt of `seq_len` tokens has room for."""
        return {"image": max(1, min(self.vision.most_tokens, seq_len))}


class PreparedProcessor(Qwen2_5_VLMultiModalProcessor):  # type: ignore[misc]
    """Asked for a blank image only."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> Any:
        """As many blank images of that size."""
        config = self.info.ctx.model_config
        [most] = self.info.get_mm_max_tokens_per_item(config.max_model_len, mm_counts).values()
        blank, count = self.info.vision.blank(most), mm_counts.get("image", 0)
        ids = [self.info.vision.token] * blank.tokens * count
        return with_images(ids, [("", number * blank.tokens, blank) for number in range(count)])


@MULTIMODAL_REGISTRY.register_processor(PreparedProcessor, info=PreparedInfo, dummy_inputs=Qwen2_5_VLDummyInputsBuilder)
class PreparedQwen2_5_VL(Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]
    """vLLM's own, computed as it is."""
