"""`tokens/<name>.jsonl`: what training made of the tokens in `trajectories/<name>.jsonl`, row by row.

A row is `{"check": n, "ledgers": [{"advantage": a, "log_ratio": r}, ...]}`, with an entry for each ledger, or "ledgers": null for
an episode that is not trained on. `a` is one number if it is that of all sampled tokens, else base64 of little-endian float32,
one for each sampled token; `r` is base64 of float16, or null. `check` is of the sampled log probabilities in the
trajectory's row: a resumed run writes both files again, and if it is killed in between, they are of different episodes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentrl.plain_data import json_text
from agentrl.trajectory import TokenLedger, Trajectory

if TYPE_CHECKING:
    from agentrl.train.visits import TrainedTokens


def token_lines(members: Sequence[Trajectory], tokens: TrainedTokens) -> Iterator[str]:
    """A line for each of `members`, of which the scored ones' ledgers with tokens are the rows of `tokens`, in order."""
    row = 0
    for member in members:
        entries: list[dict[str, Any]] | None = None
        if member.reward is not None:
            entries = []
            for ledger in member.ledgers:
                entries.append(_entry(*tokens.row(row)) if len(ledger) else {"advantage": 0.0, "log_ratio": None})
                row += len(ledger) > 0
        yield json_text({"check": check_of(member.ledgers), "ledgers": entries}) + "\n"


def check_of(ledgers: Sequence[TokenLedger]) -> int:
    """A checksum of the log probabilities of an episode's sampled tokens."""
    found = 0
    for ledger in ledgers:
        found = zlib.crc32(np.ascontiguousarray(ledger.logprobs[ledger.sampled], dtype="<f4").tobytes(), found)
    return found


def _entry(advantages: npt.NDArray[np.float32], log_ratio: npt.NDArray[np.float16] | None) -> dict[str, Any]:
    same = len(advantages) > 0 and bool((advantages == advantages[0]).all())
    return {
        "advantage": float(advantages[0]) if same else _encoded(advantages, "<f4"),
        "log_ratio": None if log_ratio is None else _encoded(log_ratio, "<f2"),
    }


def token_columns(
    row: Mapping[str, Any], ledgers: Sequence[TokenLedger], at: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None] | None:
    """Advantages and ratios of the sampled tokens of ledger `at`, from its episode's row; None if the episode was not trained on,
    or the row is of another episode. Raises KeyError, TypeError, ValueError or IndexError for a row of another shape."""
    if row["check"] != check_of(ledgers) or row["ledgers"] is None:
        return None
    entry, count = row["ledgers"][at], ledgers[at].sampled_tokens
    given = entry["advantage"]
    advantages = np.full(count, given, dtype=np.float32) if isinstance(given, (int, float)) else _decoded(given, "<f4", count)
    ratio = None if entry["log_ratio"] is None else np.exp(_decoded(entry["log_ratio"], "<f2", count).astype(np.float32))
    return advantages, ratio


def _encoded(values: npt.NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode("ascii")


def _decoded(text: str, kind: str, count: int) -> npt.NDArray[Any]:
    found = np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)
    if len(found) != count:
        raise ValueError(f"{len(found)} numbers for {count} sampled tokens")
    return found.astype(found.dtype.newbyteorder("="), copy=False)
