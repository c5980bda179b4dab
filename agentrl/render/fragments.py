"""Tokenizers for parts of a text: what a tokenizer puts before a whole text must not come again in its middle.

Tokenizers in the manner of sentencepiece write a space before what they are given. Given a conversation whole
they do that at its beginning only ("first"), or after every control token too; given the same conversation in
parts they would do it before each part.
"""

from __future__ import annotations

import json
import secrets
from enum import Enum
from typing import Any

from tokenizers import Tokenizer


class Place(Enum):
    """What a piece of ordinary text comes after."""

    START = "nothing"
    TOKEN = "a control token"
    TEXT = "more text"


def plain_tokenizers(full: Tokenizer, control: frozenset[str]) -> dict[Place, Tokenizer]:
    """For each place, the tokenizer without its control tokens: their spelling is text to it, too."""
    spec = json.loads(full.to_str())
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if entry["content"] not in control]
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None
    spec["model"]["vocab"] = _unspellable(spec["model"], control)
    made: dict[str, Tokenizer] = {}  # a large vocabulary takes a second to build: once for places that do not differ
    result: dict[Place, Tokenizer] = {}
    for place in Place:
        parts = {name: _placed(spec[name], place) for name in ("normalizer", "pre_tokenizer")}
        key = json.dumps(parts)
        if key not in made:
            made[key] = Tokenizer.from_str(json.dumps({**spec, **parts}))
        result[place] = made[key]
    return result


def _unspellable(model: dict[str, Any], control: frozenset[str]) -> Any:
    """The model's vocabulary with control tokens under names that no text holds: a unigram model takes a piece
    wherever its letters stand. (In a BPE model a piece that no merge makes is found only by whole words.)"""
    vocab = model.get("vocab")
    secret = secrets.token_hex(16)
    if isinstance(vocab, list):
        return [[f"{secret}{i}" if piece in control else piece, score] for i, (piece, score) in enumerate(vocab)]
    if not isinstance(vocab, dict):
        return vocab
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    kept = {piece for pair in pairs for piece in (*pair, "".join(pair))} | {model.get("unk_token")}
    hidden = control - kept
    return {f"{secret}{number}" if piece in hidden else piece: number for piece, number in vocab.items()}


def _placed(part: Any, place: Place) -> Any:
    """A normalizer or pre-tokenizer as it acts at `place`; None where nothing of it is left."""
    if not isinstance(part, dict):
        return part
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        inner = [_placed(item, place) for item in part[key]]
        return {**part, key: [item for item in inner if item is not None]}
    if part["type"] == "Prepend":
        return None if place is Place.TEXT else part
    if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
        return {**part, "add_prefix_space": place is not Place.TEXT}
    if part["type"] == "Metaspace":
        scheme = part["prepend_scheme"]
        never = place is Place.TEXT or (place is Place.TOKEN and scheme == "first")
        return {**part, "prepend_scheme": "never" if never else scheme}
    return part
