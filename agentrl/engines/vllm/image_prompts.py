"""Prompts with images for a replica of vLLM."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.data.images import images_in
from agentrl.engines.vllm.image_options import ARCHITECTURES, RECEIVER, vision_of, with_images
from agentrl.render.vision import Pixels, Vision
from agentrl.utils.errors import EngineError, ImageError

_NEEDS_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_WITHOUT = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"


def register() -> None:
    """Make the models' classes known to the vLLM of this process. Imports vLLM.

    vLLM's module of Qwen2-VL takes one function of transformers' image processor that needs torchvision, of which there is no
    build for every torch; the processor without it has the same function.
    """
    if importlib.util.find_spec("torchvision") is None:
        sys.modules.setdefault(_NEEDS_TORCHVISION, importlib.import_module(_WITHOUT))
    from vllm.model_executor.models.registry import ModelRegistry

    if not set(ARCHITECTURES.values()) <= ModelRegistry.get_supported_archs():
        from agentrl.engines.vllm.image_model import PREPARED

        for kind, name in ARCHITECTURES.items():  # the classes, not their names, of which vLLM would ask another process
            ModelRegistry.register_model(name, PREPARED[kind])


def prompts_of(options: Mapping[str, Any], plain: Callable[[list[int]], Any]) -> Callable[[Sequence[int], Sequence[int]], Any]:
    """Maker of prompts for a replica that is started with `options`: of token ids, which may have images
    (agentrl.data.images.PromptIds), and of what is sampled behind them already. `plain`: makes those without images. What it
    returns raises EngineError for placeholders that are not those of the images. Imports vLLM if the model takes images."""
    vision = None
    if options.get("worker_extension_cls") == RECEIVER:
        vision = vision_of(str(options["model"]), bool(options.get("trust_remote_code")))
        register()

    def prompt(token_ids: Sequence[int], sampled: Sequence[int]) -> Any:
        named = _place_images(vision, token_ids)
        ids = [*token_ids, *sampled]
        return with_images(ids, named) if named else plain(ids)

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
