"""Vision-language models in the embedded engine, computed over whole sequences.

In a slot, the placeholders of each image have unique ids above the vocabulary, equal for equal images. So a cached prefix
matches only prompts with the same images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.contrib.vision.model import Vision, embed_images, features_of
from agentrl.data.images import Image
from agentrl.engines.embedded.embedded_model import RecomputedModel
from agentrl.utils.errors import EngineError

MOST_IDS = 1 << 24
"""Largest id: a slot stores ids as float32, which is exact for integers up to this one."""


class VisionModel(RecomputedModel):
    """Vision-language model that recomputes whole sequences."""

    def __init__(self, path: str, dtype: str, device: torch.device, trust: bool = False, router_replay: bool = False) -> None:
        super().__init__(path, dtype, device, trust, router_replay)
        self.vision = Vision(path, self.module.config)
        self.never_drawn = self.vision.special
        self.drop_images()

    def drop_images(self) -> None:
        self._first: dict[str, int] = {}
        self._images: dict[int, Image] = {}
        self._features: dict[int, list[Tensor]] = {}
        self._next = self.vocab

    def prompt(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        ids = list(token_ids)
        for image, (start, pixels) in self.vision.match(ids, images):
            if image.sha256 not in self._first:
                if self._next + pixels.tokens > MOST_IDS:
                    raise EngineError("too many images since the last publish: their ids are used up")
                self._first[image.sha256], self._images[self._next] = self._next, image
                self._next += pixels.tokens
            first = self._first[image.sha256]
            ids[start : start + pixels.tokens] = range(first, first + pixels.tokens)
        return ids

    def after(self, ids: Tensor) -> Tensor:
        # The first id of an image occurs once per occurrence of the image.
        shown = [(at, number) for at, number in enumerate(ids.tolist()) if number in self._images]
        places = [(at, self.vision.pixels(self._images[number])) for at, number in shown]
        for _, number in shown:
            if number not in self._features:  # once per image, not per token
                self._features[number] = features_of(self.module.model, [self.vision.pixels(self._images[number])], self.device)
        parts = zip(*(self._features[number] for _, number in shown), strict=True)
        plain, model = torch.where(ids >= self.vocab, self.vision.token, ids), self.module.model
        inputs = embed_images(model, plain, places, [torch.cat(part) for part in parts])
        where = self.vision.positions(len(ids), places).to(self.device)
        hidden = model.language_model(**inputs, position_ids=where[:, None], use_cache=False)
        logits: Tensor = self.module.lm_head(hidden.last_hidden_state[0, -1])
        return logits.float()
