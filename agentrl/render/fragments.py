"""Tokenizers for parts of a text: what a tokenizer adds at the start of a text must not be repeated in the middle.

SentencePiece-style tokenizers put a space before their input. For a whole conversation they do so only at its
start ("first"), or after every control token as well; if the same conversation is encoded in parts, they would
do so before each part.
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
    """For each place, the tokenizer without its control tokens, which it therefore reads as ordinary text."""
    spec = json.loads(full.to_str())
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if entry["content"] not in control]
    # They are made for whole texts: each piece would get a begin token, or be cut.
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None
    spec["model"]["vocab"] = _unspellable(spec["model"], control)
    made: dict[str, Tokenizer] = {}  # a large vocabulary takes a second to build, so equal places share one
    result: dict[Place, Tokenizer] = {}
    for place in Place:
        parts = {name: _placed(spec[name], place) for name in ("normalizer", "pre_tokenizer")}
        key = json.dumps(parts)
        if key not in made:
            made[key] = Tokenizer.from_str(json.dumps({**spec, **parts}))
        result[place] = made[key]
    return result


def _unspellable(model: dict[str, Any], control: frozenset[str]) -> Any:
    """The model's vocabulary with control tokens renamed to strings that no text contains: a unigram model matches
    a piece anywhere in a text. (In a BPE model a piece that no merge produces matches only as a whole word.)"""
    vocab = model.get("vocab")
    secret = secrets.token_hex(16)
    if isinstance(vocab, list):
        return [[f"{secret}{i}" if piece in control else piece, score] for i, (piece, score) in enumerate(vocab)]
    if not isinstance(vocab, dict):
        return vocab
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    # Pieces that a merge uses keep their names: the tokenizers library refuses merges of unknown pieces.
    kept = {piece for pair in pairs for piece in (*pair, "".join(pair))} | {model.get("unk_token")}
    hidden = control - kept
    return {f"{secret}{number}" if piece in hidden else piece: number for piece, number in vocab.items()}


def _placed(part: Any, place: Place) -> Any:
    """A normalizer or pre-tokenizer as it acts at `place`; None if nothing remains of it."""
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
