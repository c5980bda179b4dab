"""The tokens of a ledger as columns: their text, and what sampling and training made of them."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import UserError
from agentrl.files import open_plain
from agentrl.plain_data import read_json
from agentrl.run.reader import RunRecord, episode_of
from agentrl.run.token_file import token_columns
from agentrl.trajectory import TokenLedger

Json = Any
MOST = 20_000


def columns(run: RunRecord, row: sqlite3.Row, found: Mapping[str, Json], at: int, offset: int, limit: int) -> dict[str, Json]:
    """Tokens `offset` to `offset + limit` of ledger `at` of an episode. Numbers are null for a token that has none. Raises
    UserError for a ledger that there is not."""
    ledgers = episode_of(json.dumps(found), row["id"]).ledgers
    if not 0 <= at < len(ledgers):
        raise UserError(f"ledger={at}: the episode has {len(ledgers)} ledgers")
    ledger, part = ledgers[at], slice(offset, offset + limit)
    sampled = ledger.sampled
    trained = _trained(run, row, ledgers, at)
    ids = ledger.token_ids[part].tolist()
    texts, why = _texts(run, ids)
    out = {
        "text": texts,
        "id": ids,
        "sampled": sampled[part].tolist(),
        "logprob": _on(sampled, ledger.logprobs[sampled])[part],
        "version": _on(sampled, ledger.versions[sampled])[part],
        "turn": ledger.turns[part].tolist(),
        "advantage": None,
        "ratio": None,
        "total": len(ledger),
        "offset": offset,
        "text_problem": why,
    }
    if trained is not None:
        out["advantage"] = _on(sampled, trained[0])[part]
        out["ratio"] = None if trained[1] is None else _on(sampled, trained[1])[part]
    return out


def _on(sampled: Any, values: Any) -> list[float | int | None]:
    """Values of the sampled tokens among all tokens."""
    out: list[float | int | None] = [None] * len(sampled)
    for place, value in zip(np.flatnonzero(sampled).tolist(), values.tolist(), strict=True):
        out[place] = value
    return out


def _trained(run: RunRecord, row: sqlite3.Row, ledgers: Sequence[TokenLedger], at: int) -> Any:
    """Advantages and ratios, if the run wrote them of this episode."""
    path = run.folder.tokens / f"{row['id'].rpartition('.')[0]}.jsonl"
    try:
        stat = path.stat()
        start, stop = _lines(path, stat.st_ino, stat.st_size)[row["row"] : row["row"] + 2]
        with open_plain(path) as file:
            file.seek(start)
            return token_columns(read_json(file.read(stop - start)), ledgers, at)
    except (OSError, KeyError, TypeError, ValueError, IndexError):
        return None  # no such file, or one of another version or run: unknown


@functools.lru_cache(maxsize=64)
def _lines(path: Path, inode: int, size: int) -> list[int]:
    """Where each line of a file begins, and where the last one ends."""
    starts = [0]
    with open_plain(path) as file:
        for line in file:
            starts.append(starts[-1] + len(line))
    return starts


def _texts(run: RunRecord, ids: Sequence[int]) -> tuple[list[str | None], str | None]:
    """The text of each token, and why there is none. Tokens that are parts of one character have it at the last of them."""
    path = tokenizer_file(run)
    if path is None:
        return [None] * len(ids), "no tokenizer of the run's model is on this machine"
    try:
        tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
        return _split(tokenizer, ids), None
    except Exception as problem:  # of the Rust library, which has no kind of its own
        return [None] * len(ids), f"{path}: {problem}"


def _split(tokenizer: Any, ids: Sequence[int]) -> list[str | None]:
    alone: list[str] = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
    out: list[str | None] = [*alone]
    begun = 0
    for place, text in enumerate(alone):
        if "\ufffd" not in text:
            begun = place + 1
            continue
        # A character of several tokens: they are joined until they make one, four bytes at most.
        whole = tokenizer.decode(list(ids[begun : place + 1]), skip_special_tokens=False)
        if "\ufffd" not in whole:
            out[begun : place + 1] = [""] * (place - begun) + [whole]
            begun = place + 1
        elif place - begun >= 3:
            begun += 1
    return out


@functools.lru_cache(maxsize=4)
def _tokenizer(path: Path, changed: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def tokenizer_file(run: RunRecord) -> Path | None:
    """The tokenizer.json of the run's model: in its folder, at `model.path`, or in the hub's cache; None if there is none."""
    folder = run.folder
    folders = [folder.model, folder.warm_start, folder.final]
    model = run.table.get("model") if run.text else _asked_model(run)
    given = model.get("path") if isinstance(model, dict) else None
    if isinstance(given, str):
        folders.append(Path(given))
    for place in folders:
        if os.path.isfile(place / "tokenizer.json"):  # noqa: PTH113 - Path.is_file raises where the folder may not be read
            return place / "tokenizer.json"
    if not isinstance(given, str) or given.startswith((".", "/")) or ":" in given:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(given, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _asked_model(run: RunRecord) -> dict[str, Json]:
    """The model of an evaluation, as its note says."""
    for name in ("eval.json", "rollout.json"):
        try:
            identity = read_json((run.path / name).read_text())["identity"]
            return {"path": identity.get("model.path")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return {}
