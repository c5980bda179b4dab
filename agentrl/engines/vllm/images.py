"""Images in vLLM: prompts whose images are prepared here, as the trainer prepares them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.config.schema import VllmConfig
from agentrl.data.token_ledger import images_in
from agentrl.render.vision import Pixels, Vision
from agentrl.utils.errors import ConfigError, EngineError, ImageError, ModelError

ARCHITECTURES = {"qwen2_5_vl": "AgentrlQwen2_5_VL", "qwen3_vl": "AgentrlQwen3_VL"}
"""vLLM's names of the models' classes here (image_model.py), by the model's type."""
RECEIVER = "agentrl.engines.vllm.image_model.VisionReceiver"
OWN = ("limit_mm_per_prompt", "language_model_only", "enable_mm_embeds", "interleave_mm_strings", "media_io_kwargs")
"""Arguments of vLLM, next to those that begin with `mm_`, of its own preparation of images, which has no part in it."""


def vision_options(options: dict[str, Any], kind: str) -> dict[str, Any]:
    """Arguments of vLLM for a model that takes images, of the type `kind`."""
    overrides = {**options.get("hf_overrides", {}), "architectures": [ARCHITECTURES[kind]]}
    return {
        "hf_overrides": overrides,
        "worker_extension_cls": RECEIVER,
        # The replica keeps prepared images itself (agentrl/render/vision.py), and vLLM's cache has to see each in order.
        "mm_processor_cache_gb": 0,
        # They are normalized already: vLLM would do it again, without an error.
        "mm_device_do_normalize": False,
    }


def check_images(vllm: VllmConfig) -> None:
    """Raise ConfigError for keys that do not go with a model that takes images."""
    if vllm.tensor_parallel > 1:
        raise ConfigError(
            f"vllm.tensor_parallel = {vllm.tensor_parallel}: a model that takes images is not split; set it to 1, and "
            "vllm.replicas for more GPUs"
        )
    for name in vllm.args:
        if name in OWN or name.startswith("mm_"):
            raise ConfigError(f"vllm.args.{name}: the model takes images, which are prepared as the trainer does it; unset it")
    if "architectures" in vllm.args.get("hf_overrides", {}):
        raise ConfigError(
            "vllm.args.hf_overrides.architectures: the model takes images, for which vLLM is given a class; unset it"
        )


def item_of(pixels: Pixels) -> Any:
    """An image as the model's class takes it in vLLM."""
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    grid = torch.tensor([pixels.grid])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    data: Any = {"pixel_values": pixels.values, "image_grid_thw": grid}
    return MultiModalKwargsItems.from_hf_inputs(data, fields)["image"][0]


def with_images(token_ids: list[int], images: Sequence[tuple[str, int, Pixels]]) -> Any:
    """A prompt as vLLM takes it once all is prepared. `images`: of each its hash, and where its placeholders begin."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    return mm_input(
        token_ids,
        MultiModalKwargsItems({"image": [item_of(pixels) for _, _, pixels in images]}),
        {"image": [name for name, _, _ in images]},
        {"image": [PlaceholderRange(offset=start, length=pixels.tokens) for _, start, pixels in images]},
    )


def vision_of(path: str, trust: bool) -> Vision:
    """Of a model that takes images. Raises ModelError if its files cannot be read."""
    from transformers import AutoConfig

    try:
        return Vision(path, AutoConfig.from_pretrained(path, trust_remote_code=trust))
    except (OSError, ValueError, KeyError) as problem:
        raise ModelError(f"cannot read the model config of {path}: {problem}") from problem


# In a replica


def prompts_of(options: Mapping[str, Any]) -> Callable[[Sequence[int]], Any]:
    """Maker of prompts for a replica that is started with `options`: of token ids, which may have images
    (agentrl.data.token_ledger.PromptIds), in the form that vLLM takes without looking for text. What it returns raises
    EngineError for placeholders that are not those of the images. Imports vLLM."""
    from vllm.inputs.engine import tokens_input

    vision = None
    if options.get("worker_extension_cls") == RECEIVER:
        vision = vision_of(str(options["model"]), bool(options.get("trust_remote_code")))
        importlib.import_module("agentrl.engines.vllm.image_model")  # makes its classes known to vLLM

    def prompt(token_ids: Sequence[int]) -> Any:
        named, ids = _place_images(vision, token_ids), list(token_ids)
        return with_images(ids, named) if named else tokens_input(ids)

    return prompt


def _place_images(vision: Vision | None, token_ids: Sequence[int]) -> list[tuple[str, int, Pixels]]:
    """The images of a prompt. vLLM's cache of prefixes knows one by the digest of its file."""
    images = images_in(token_ids)
    if vision is None and images:
        raise EngineError(f"a prompt with {len(images)} images for a model of text")
    if vision is None:
        return []
    if not images and vision.token in token_ids:
        raise EngineError("a prompt has placeholders of images, and its images did not come with it")
    try:
        places = vision.places(token_ids, images)
    except ImageError as problem:
        raise EngineError(str(problem)) from None
    return [(image.sha256, start, pixels) for image, (start, pixels) in zip(images, places, strict=True)]
