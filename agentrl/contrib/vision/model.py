"""Vision-language models (Qwen2.5-VL, Qwen3-VL): pixels and placeholder tokens of images, and the positions of all tokens.

An image is a run of placeholder tokens in a row, one per merged patch of the vision tower; the image features replace their
embeddings. In Qwen3-VL, features of the tower's early layers are also added to the hidden states of the language model's first
layers (Meng et al. 2024, arXiv:2406.04334). Text tokens have consecutive positions; image tokens have a position in each of
three dimensions (time, height, width: M-RoPE, Wang et al. 2024, arXiv:2409.12191, section 2.1), and the next text token follows
the largest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.config.schema import InitModelConfig, TrainConfig, VllmConfig
from agentrl.data.images import Image
from agentrl.render.modality import MODALITIES, Inputs, Modality, Rows
from agentrl.utils.errors import ConfigError, EngineError, ImageError, ModelError

KEPT = 256
"""Number of images whose prepared pixels are cached."""
ARCHITECTURES = {"qwen2_5_vl": "AgentrlQwen2_5_VL", "qwen3_vl": "AgentrlQwen3_VL"}
"""Names in vLLM of the classes in vllm_models.py, by model type."""
OWN = ("limit_mm_per_prompt", "language_model_only", "enable_mm_embeds", "interleave_mm_strings", "media_io_kwargs")
"""vLLM arguments of its image preprocessing, which is not used, in addition to those that start with `mm_`."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """Input of the vision tower for an image: `values` float32 [patches, values per patch], `grid` the number of patches in
    time, height and width; `tokens` placeholders, in `rows` x `columns`."""

    values: Tensor
    grid: tuple[int, int, int]
    tokens: int
    rows: int
    columns: int


@MODALITIES.register("qwen2_5_vl", traits={"tiny"})
@MODALITIES.register("qwen3_vl")
class Vision(Modality):
    """Image processing of a model, by its config."""

    auto_class = "AutoModelForImageTextToText"
    embedded_model = "agentrl.contrib.vision.embedded:VisionModel"
    vllm_prompt = "agentrl.contrib.vision.vllm_models:prompt_of"
    no_adapters = r".*\bvisual\..*"
    tiny_tokens = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")

    def __init__(self, path: str, config: Any) -> None:
        """`path`: model folder; its preprocessor_config.json defines resizing and normalization (default: Qwen2.5-VL's values).
        Raises ModelError if it cannot be read."""
        vision, self.kind = config.vision_config, str(config.model_type)
        self.token = int(config.image_token_id)
        self.begin, self.end = int(config.vision_start_token_id), int(config.vision_end_token_id)
        self.around = (self.begin, self.token, self.end)
        self.special = (*self.around, int(config.video_token_id))
        self.merge = int(vision.spatial_merge_size)
        self._patch = 3 * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
        self._side = int(vision.patch_size) * self.merge
        sizes = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size, "merge_size": self.merge}
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor

        if not (Path(path) / "preprocessor_config.json").is_file() and (Path(path).is_dir() or not path):
            self.processor = Processor(**sizes)
        else:
            try:
                self.processor = Processor.from_pretrained(path)
            except (OSError, ValueError, TypeError, KeyError) as problem:
                raise ModelError(f"{path}: preprocessor_config.json cannot be read: {problem}") from problem
        self.pixels = lru_cache(KEPT)(self._prepare)

    @classmethod
    def check(cls, config: TrainConfig, trains: bool) -> None:
        rollout, model, algorithm = config.rollout, config.model, config.algorithm
        # Settings that prevent sampling or training, each with the key and its value.
        obstacles = [
            (rollout.workers > 0, f"rollout.workers = {rollout.workers}"),
            (config.agent is not None, "[agent], whose endpoint takes no images,"),
        ]
        if trains:
            from agentrl.rollout.engine import ENGINES
            from agentrl.run.engine_choice import EngineChoice
            from agentrl.trainer.train_engine import TRAIN_ENGINES

            sees, trainers = ENGINES.that_are("vision"), TRAIN_ENGINES.that_are("vision")
            spread = {
                name: getattr(model, name) for name in ("replicas", "sequence_parallel", "tensor_parallel", "expert_parallel")
            }
            obstacles += [
                (
                    "vision" not in EngineChoice(config).traits,
                    f'engine = "{config.engine}" (use {sees}; the embedded one with engine_args = {{ cache = false }})',
                ),
                ("vision" not in TRAIN_ENGINES.entry(model.engine).traits, f'model.engine = "{model.engine}" (use {trainers})'),
                *((ranks > 1, f"model.{name} = {ranks}") for name, ranks in spread.items()),
                (config.weights.lora == "adapter", 'weights.lora = "adapter"'),
                (model.packing.startswith("one_row"), f'model.packing = "{model.packing}"'),
                (model.compile, "model.compile = true"),
                (config.critic is not None, "[critic]"),
                (config.reward_model is not None, "[reward_model]"),
                (algorithm.kl.reference == "moving", 'algorithm.kl.reference = "moving"'),
                (algorithm.experience is not None, "[algorithm.experience]"),
                (algorithm.demonstrations is not None, "[algorithm.demonstrations]"),
                (algorithm.distillation is not None, "[algorithm.distillation]"),
                (rollout.branch is not None, "[rollout.branch]"),
                (rollout.start is not None, "[rollout.start]"),
                (config.data is not None, "[data], whose rows are tokens alone,"),
            ]
        for wrong, what in obstacles:
            if wrong:
                raise ConfigError(
                    f"{what} does not go with a model that takes images ({' or '.join(ARCHITECTURES)}): "
                    "docs/howto/images.md says what does"
                )

    def freeze(self, model: Any) -> None:
        """Freeze the vision tower and give it transformers' attention, since only text rows are packed."""
        model.model.visual.set_attn_implementation("sdpa")
        model.model.visual.requires_grad_(False)

    def inputs(self, ids: Tensor, rows: Rows) -> Inputs:
        """Prepare three positions per token, and embeddings with image features at the placeholders."""
        every, found, parts = ids.cpu().numpy(), [], []
        for start, stop, images in rows:
            places = self.places(every[start:stop], images)
            parts.append(self.positions(stop - start, places))
            found += [(start + at, pixels) for at, pixels in places]
        positions = torch.cat(parts, 1).to(ids.device)[:, None]

        def of(model: Any) -> tuple[Any, Tensor, dict[str, Any]]:
            features = features_of(model, [pixels for _, pixels in found], ids.device) if found else []
            return model.language_model, positions, embed_images(model, ids, found, features)

        return of

    @classmethod
    def tiny(cls, cfg: InitModelConfig, text: Mapping[str, Any], tokenizer: Any) -> Any:
        """Build a Qwen2.5-VL of that size, whose vision tower is one block of half the width."""
        from transformers import Qwen2_5_VLConfig

        if cfg.hidden != cfg.heads * cfg.head_dim or cfg.head_dim % 16:
            raise ConfigError(
                f"model.init.vision = true: model.init.hidden = {cfg.hidden} must be heads * head_dim = "
                f"{cfg.heads * cfg.head_dim}, and head_dim = {cfg.head_dim} a multiple of 16; set hidden = 64, heads = 4, "
                "head_dim = 16, for example"
            )
        begin, image, end, video = map(tokenizer.convert_tokens_to_ids, cls.tiny_tokens)
        width = 3 * cfg.head_dim // 16  # frequencies of height and of width; the rest belongs to time, as in released models
        text = {
            **text,
            "vocab_size": text["vocab_size"] + len(cls.tiny_tokens),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [cfg.head_dim // 2 - 2 * width, width, width],
            },
        }
        tower = {
            "depth": 1,
            "hidden_size": max(32, cfg.hidden // 2),
            "intermediate_size": cfg.mlp,
            "num_heads": 2,
            "out_hidden_size": cfg.hidden,
            "fullatt_block_indexes": [0],
            "initializer_range": cfg.init_std,
        }
        return Qwen2_5_VLConfig(
            text_config=text,
            vision_config=tower,
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=begin,
            vision_end_token_id=end,
            tie_word_embeddings=True,
            dtype="float32",
        )

    @classmethod
    def check_vllm(cls, vllm: VllmConfig) -> None:
        if vllm.tensor_parallel > 1:
            raise ConfigError(
                f"vllm.tensor_parallel = {vllm.tensor_parallel}: a model that takes images is not split; set it to 1, and "
                "vllm.replicas for more GPUs"
            )
        for name in vllm.args:
            if name in OWN or name.startswith("mm_"):
                raise ConfigError(
                    f"vllm.args.{name}: the model takes images, which are prepared as the trainer does it; unset it"
                )
        if "architectures" in vllm.args.get("hf_overrides", {}):
            raise ConfigError(
                "vllm.args.hf_overrides.architectures: the model takes images, for which vLLM is given a class; unset it"
            )

    def vllm_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        overrides = {**options.get("hf_overrides", {}), "architectures": [ARCHITECTURES[self.kind]]}
        return {
            "hf_overrides": overrides,
            "worker_extension_cls": "agentrl.contrib.vision.vllm_models.VisionReceiver",
            # The replica caches prepared images itself, and vLLM's cache must see each one in order.
            "mm_processor_cache_gb": 0,
            # Images are already normalized; vLLM would silently normalize them again.
            "mm_device_do_normalize": False,
        }

    def _prepare(self, image: Image) -> Pixels:
        """Prepare an image. Raises ImageError if the processor refuses it (one side 200 times the other)."""
        try:
            made = self.processor(images=[image.picture()], return_tensors="pt")
        except ValueError as problem:
            raise ImageError(f"{image.line}: {problem}") from None
        time, height, width = (int(n) for n in made["image_grid_thw"][0])
        rows, columns = height // self.merge, width // self.merge
        values = made["pixel_values"].float()
        return Pixels(values, (time, height, width), time * rows * columns, rows, columns)

    @property
    def most_tokens(self) -> int:
        """Return the number of placeholders of the largest resized image."""
        return int(self.processor.size["longest_edge"]) // self._side**2

    def blank(self, tokens: int) -> Pixels:
        """Return a blank image of that many placeholders."""
        rows = next(rows for rows in range(isqrt(tokens), 0, -1) if tokens % rows == 0)
        columns = tokens // rows
        values = torch.zeros(tokens * self.merge**2, self._patch)
        return Pixels(values, (1, rows * self.merge, columns * self.merge), tokens, rows, columns)

    def tokens(self, image: Image) -> int:
        return self.pixels(image).tokens

    def places(self, ids: Sequence[int] | np.ndarray, images: Sequence[Image]) -> list[tuple[int, Pixels]]:
        """Return the start of each image's placeholders in a row, in order. Raises ImageError if images and placeholders do not
        match."""
        at = np.flatnonzero(np.asarray(ids) == self.token)
        found, done = [], 0
        for image in images:
            pixels = self.pixels(image)
            own = at[done : done + pixels.tokens]
            if len(own) < pixels.tokens or own[-1] - own[0] + 1 != pixels.tokens:
                raise ImageError(f"{image.line}: its {pixels.tokens} placeholder tokens are not in the row one after the other")
            found.append((int(own[0]), pixels))
            done += pixels.tokens
        if images and done < len(at):
            raise ImageError(f"{len(at) - done} placeholder tokens more than those of the row's {len(images)} images")
        return found

    def match(self, ids: Sequence[int], images: Sequence[Image]) -> list[tuple[Image, tuple[int, Pixels]]]:
        """Pair the images of a prompt with their places. Raises EngineError if they do not match the placeholders."""
        if not images and self.token in ids:
            raise EngineError("a prompt has image placeholders, but its images did not come with it")
        try:
            return list(zip(images, self.places(ids, images), strict=True))
        except ImageError as problem:
            raise EngineError(str(problem)) from None

    def positions(self, length: int, places: Sequence[tuple[int, Pixels]]) -> Tensor:
        """Return the positions of a row's tokens in time, height and width, int64 [3, length]."""
        parts, done, after = [], 0, 0
        for start, pixels in places:
            parts.append(torch.arange(after, after + start - done).expand(3, -1))
            after += start - done
            cells = torch.arange(pixels.tokens)
            within = cells % (pixels.rows * pixels.columns)
            where = torch.stack([cells // (pixels.rows * pixels.columns), within // pixels.columns, within % pixels.columns])
            parts.append(where + after)
            after += max(pixels.rows, pixels.columns)
            done = start + pixels.tokens
        return torch.cat([*parts, torch.arange(after, after + length - done).expand(3, -1)], 1)


def features_of(model: Any, images: Sequence[Pixels], device: torch.device) -> list[Tensor]:
    """Compute the images' features in the vision tower of `model`: [placeholders, E], and in some models one more such tensor
    for each of the language model's first layers."""
    values = torch.cat([pixels.values for pixels in images]).to(device)
    with torch.no_grad():  # the tower is frozen
        found = model.get_image_features(values, torch.tensor([pixels.grid for pixels in images]).to(device), return_dict=True)
    deeper = (found.deepstack_features or ()) if model.config.model_type == "qwen3_vl" else ()
    return [torch.cat(part) for part in (found.pooler_output, *deeper)]


def embed_images(model: Any, ids: Tensor, places: Sequence[tuple[int, Pixels]], features: Sequence[Tensor]) -> dict[str, Any]:
    """Return the language model's arguments for the ids [T]: embeddings [1, T, E], with image `features` (`features_of`) at
    their `places`."""
    embeddings: Tensor = model.get_input_embeddings()(ids)
    if not places:
        return {"inputs_embeds": embeddings[None]}
    at = torch.cat([torch.arange(start, start + pixels.tokens) for start, pixels in places]).to(ids.device)
    first, *others = features
    found = {"inputs_embeds": embeddings.index_copy(0, at, first.to(embeddings.dtype))[None]}
    if not others:
        return found
    mask = torch.zeros_like(ids, dtype=torch.bool).index_fill(0, at, True)
    return {**found, "visual_pos_masks": mask[None], "deepstack_visual_embeds": list(others)}
