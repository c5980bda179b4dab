"""Models that take images (Qwen2.5-VL, Qwen3-VL): images as their pixels and placeholder tokens, and the positions of all tokens.

An image is a run of placeholder tokens in a row, one for each patch that the vision tower merges; its features take the place of
their embeddings, and in Qwen3-VL those of the tower's early layers are added to what the language model's first layers make of
them (Meng et al. 2024, arXiv:2406.04334). Text counts positions one by one; the tokens of an image have a position in each of
three dimensions (time, height, width: M-RoPE, Wang et al. 2024, arXiv:2409.12191, section 2.1), and what follows begins behind
the largest of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.config import ModelConfig
from agentrl.data.images import Image
from agentrl.utils.errors import ImageError, ModelError

KINDS = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration"}
"""The model types whose images are computed, with transformers' class of each."""
KEPT = 256
"""Images whose pixels stay in memory, prepared."""


def takes_images(config: Any) -> bool:
    """Return True if a transformers config is of a model whose images are computed here."""
    return getattr(config, "model_type", None) in KINDS


def model_takes_images(model: ModelConfig, found: Any) -> bool:
    """Return True if images of a config's model are computed here. `found`: its transformers config, or None."""
    return model.init.vision if model.init is not None else takes_images(found)


def auto_class(config: Any) -> Any:
    """transformers' auto class for a model that is trained as a language model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as the vision tower takes it: `values` float32 [patches, numbers of a patch], `grid` its patches in time, height
    and width; `tokens` placeholders, in `rows` x `columns`."""

    values: Tensor
    grid: tuple[int, int, int]
    tokens: int
    rows: int
    columns: int


class Vision:
    """A model's treatment of images, by its config."""

    def __init__(self, path: str, config: Any) -> None:
        """`path`: the model's folder, whose preprocessor_config.json says how images are resized and normalized; without that
        file Qwen2.5-VL's own numbers. Raises ModelError if it cannot be read."""
        vision, self.kind = config.vision_config, str(config.model_type)
        self.token = int(config.image_token_id)
        self.begin, self.end = int(config.vision_start_token_id), int(config.vision_end_token_id)
        self.special = (self.token, int(config.video_token_id), self.begin, self.end)
        self.merge = int(vision.spatial_merge_size)
        self._patch = 3 * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
        self._side = int(vision.patch_size) * self.merge
        self._prepare = _processor(path, vision)
        self._kept: OrderedDict[str, Pixels] = OrderedDict()

    def save(self, folder: Path) -> None:
        """Write preprocessor_config.json, which says how images are prepared."""
        self._prepare.save_pretrained(folder)

    def pixels(self, image: Image) -> Pixels:
        """Raises ImageError for one that the processor refuses (a side 200 times the other)."""
        found = self._kept.get(image.sha256)
        if found is None:
            try:
                made = self._prepare(images=[image.picture()], return_tensors="pt")
            except ValueError as problem:
                raise ImageError(f"{image.line}: {problem}") from None
            time, height, width = (int(n) for n in made["image_grid_thw"][0])
            rows, columns = height // self.merge, width // self.merge
            values = made["pixel_values"].float()
            found = self._kept[image.sha256] = Pixels(values, (time, height, width), time * rows * columns, rows, columns)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    @property
    def most_tokens(self) -> int:
        """Placeholders of the largest image, as it is resized."""
        return int(self._prepare.size["longest_edge"]) // self._side**2

    def blank(self, tokens: int) -> Pixels:
        """An image of that many placeholders."""
        rows = next(rows for rows in range(isqrt(tokens), 0, -1) if tokens % rows == 0)
        columns = tokens // rows
        values = torch.zeros(tokens * self.merge**2, self._patch)
        return Pixels(values, (1, rows * self.merge, columns * self.merge), tokens, rows, columns)

    def tokens(self, image: Image) -> int:
        """Number of placeholders for it."""
        return self.pixels(image).tokens

    def places(self, ids: Sequence[int] | np.ndarray, images: Sequence[Image]) -> list[tuple[int, Pixels]]:
        """Positions in a row at which the placeholders of its images begin, in order. Raises ImageError unless each has its
        own."""
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

    def positions(self, length: int, places: Sequence[tuple[int, Pixels]]) -> Tensor:
        """Positions of a row's tokens in time, height and width, int64 [3, length]."""
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


@dataclass(frozen=True, slots=True)
class PackedImages:
    """The images of a micro-batch: `values` float32 [patches, numbers] of all of them, `grid` int64 [images, 3], and `places`
    int64 [placeholders], where in the packed rows their features go."""

    values: Tensor
    grid: Tensor
    places: Tensor

    def to(self, device: torch.device) -> PackedImages:
        return PackedImages(self.values.to(device), self.grid.to(device), self.places.to(device))


def seen_of(places: Sequence[tuple[int, Pixels]]) -> PackedImages:
    """`places` in the packed rows."""
    values = torch.cat([pixels.values for _, pixels in places])
    return PackedImages(values, torch.tensor([pixels.grid for _, pixels in places]), placeholders(places))


def placeholders(places: Sequence[tuple[int, Pixels]]) -> Tensor:
    """Positions of these images' placeholders in the packed rows, int64 [placeholders]."""
    return torch.cat([torch.arange(start, start + pixels.tokens) for start, pixels in places])


def features_of(model: Any, seen: PackedImages) -> list[Tensor]:
    """Features of the images from the vision tower: features [placeholders, E], and in some models as many again for each of
    the language model's first layers. `model`: the one with the tower."""
    with torch.no_grad():  # it is frozen (trainer/fsdp.py): its features need no graph
        found = model.get_image_features(seen.values, seen.grid, return_dict=True)
    return [torch.cat(part) for part in (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))]


def embed_images(model: Any, ids: Tensor, places: Tensor | None = None, features: Sequence[Tensor] = ()) -> dict[str, Any]:
    """The language model's arguments for the ids [T]: their embeddings [1, T, E], with the `features` of images (`features_of`)
    in their `places`, int64 [placeholders]; None of text alone."""
    embeddings: Tensor = model.get_input_embeddings()(ids)
    if places is None:
        return {"inputs_embeds": embeddings[None]}
    first, *others = features
    found = {"inputs_embeds": embeddings.index_copy(0, places, first.to(embeddings.dtype))[None]}
    if not others:
        return found
    mask = torch.zeros_like(ids, dtype=torch.bool).index_fill(0, places, True)
    return {**found, "visual_pos_masks": mask[None], "deepstack_visual_embeds": list(others)}


def _processor(path: str, vision: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    if not (Path(path) / "preprocessor_config.json").is_file() and (Path(path).is_dir() or not path):
        return Qwen2VLImageProcessorPil(**sizes)
    try:
        return Qwen2VLImageProcessorPil.from_pretrained(path)
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise ModelError(f"{path}: preprocessor_config.json cannot be read: {problem}") from problem
