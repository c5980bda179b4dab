"""Measure decode attention of a layer with and without reading shared prompts once: processor microseconds, bytes saved.

    python benchmarks/cascade.py

There are `groups` x 8 rows, each with the prompt of its group and separate tokens. `MIN_SAVED_BYTES` of
agentrl/engines/embedded/kv_cache.py is about where the ratio passes 1.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from agentrl.engines.embedded import kv_cache as attention
from agentrl.engines.embedded import kv_cache as cascade
from agentrl.engines.embedded.kv_cache import CachedSequence as Sequence
from agentrl.engines.embedded.kv_cache import KvShape, Pool, PrefixIndex
from agentrl.engines.exact_attention import AttentionForm

MEMBERS, DIM, KV_HEADS = 8, 32, 2


def seconds(call: Callable[[], object], repeats: int = 30) -> float:
    """Return median processor seconds, on which other load has little effect."""
    call()
    laps = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        laps.append(time.process_time() - began)
    return statistics.median(laps)


def measure(groups: int, prompt: int, own: int, queries: int) -> tuple[int, float, float]:
    """Return bytes saved, and microseconds without and with sharing."""
    shape = KvShape(1, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
    rows = groups * MEMBERS
    pool = Pool(shape, prompt + own + 32)
    pool.kv = torch.randn(2, 1, rows, KV_HEADS, pool.capacity, DIM)
    draw = random.Random(0)
    sequences = []
    for group in range(groups):
        begin = [group] * prompt
        blocks = PrefixIndex().find([*begin, 0])[2]
        for member in range(MEMBERS):
            tokens = begin + [draw.randrange(99) for _ in range(own)]
            sequences.append(Sequence("", tokens, pool, group * MEMBERS + member, len(tokens) - 1, blocks, len(blocks)))
    span = attention.Span(0, sequences, [1] * rows, shape.device)
    shared = span.cascade
    assert shared is not None
    query = torch.randn(rows, KV_HEADS * queries, 1, DIM)
    mask = span.mask(AttentionForm(0.2), torch.float32)
    kv = pool.kv[:, 0]
    plain = seconds(lambda: attention._decode(query, span.read_cache(kv), mask, 0.2))
    own_mask = mask[..., shared.length :]
    once = seconds(lambda: shared.attend(query, kv, span.read_cache(kv, shared.length), own_mask, 0.2))
    return (rows - groups) * shared.length * shape.token_bytes, 1e6 * plain, 1e6 * once


def main() -> None:
    torch.set_num_threads(1)
    cascade.MIN_SAVED_BYTES = 0
    print("groups  prompt  own  queries  KiB saved  plain us  shared us  ratio")
    for groups, prompt, own, queries in (
        (1, 64, 64, 2), (1, 256, 64, 2), (1, 1024, 64, 2), (2, 256, 64, 2), (8, 64, 64, 4), (8, 64, 128, 2), (8, 128, 64, 2),
        (8, 256, 64, 2), (8, 256, 64, 4), (8, 1024, 128, 2), (8, 1024, 128, 4), (16, 96, 96, 2), (16, 512, 96, 2),
    ):  # fmt: skip
        saved, plain, once = measure(groups, prompt, own, queries)
        print(
            f"{groups:6} {prompt:7} {own:4} {queries:8} {saved >> 10:10} {plain:9.0f} {once:10.0f} {plain / once:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
