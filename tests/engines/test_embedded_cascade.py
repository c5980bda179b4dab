"""Decode attention that reads a shared prompt once: the numbers of reading it for each row, and where it is used."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.engines.embedded import kv_cache
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.engines.embedded.embedded_model import EmbeddedModel
from agentrl.engines.embedded.kv_cache import CachedSequence as Sequence
from agentrl.engines.embedded.kv_cache import KvShape, PrefixIndex, cascade_of
from agentrl.engines.exact_attention import AttentionForm
from agentrl.rollout.engine import Sampling
from agentrl.utils.errors import ModelError
from tests.engines.contract import prompt_of
from tests.engines.engine_models import build_model

SHAPE = KvShape(1, 2, 8, torch.float32, torch.device("cpu"))


def held(tokens: list[int], slot: int) -> Sequence:
    blocks = PrefixIndex().find(tokens)[2]
    return Sequence(str(slot), tokens, None, slot, blocks=blocks, first=len(blocks))  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    """Three rows with 48 tokens in common, of which two have 64; and one with 32, and others after them."""
    first = list(range(64))
    return [[*first, 70 + row] for row in range(2)] + [[*first[:48], *range(90, 107)], [*first[:32], *range(90, 130)]]


def by_hand(query: Any, kv: Any, slot: int, keys: int, scale: float) -> Any:
    """In float64, head by head: softmax(q k) v over the slot's first `keys` tokens."""
    heads, out = kv.shape[2], []
    for number, one in enumerate(query.double()):
        key, value = (part[slot, number * heads // len(query), :keys].double() for part in kv)
        scores = [float(one @ k) * scale for k in key]
        weights = [math.exp(score - max(scores)) for score in scores]
        out.append(sum(w * v for w, v in zip(weights, value, strict=True)) / sum(weights))
    return torch.stack(out)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [0, 1, 2, 5], [0, 4, 9, 17]], ids=["dense", "one idle slot", "far apart"])
def test_rows_attend_to_what_they_would_alone(slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of three and of one, behind the depth that saves most: two blocks; whatever slots they lie in."""
    monkeypatch.setattr(kv_cache, "MIN_SAVED_BYTES", 0)
    rows = [held(tokens, slot) for tokens, slot in zip(prompts(), slots, strict=True)]
    pool = kv_cache.Pool(SHAPE, 96)
    torch.manual_seed(0)
    pool.kv = torch.randn(2, 1, 18, 2, 96, 8)
    for row in rows:
        row.pool, row.computed = pool, len(row.tokens) - 1
        for other in rows:  # what a copy of a prefix, or its computation, would have made
            same = next((i for i, (a, b) in enumerate(zip(row.tokens, other.tokens, strict=False)) if a != b), 0)
            pool.kv[:, :, other.slot, :, :same] = pool.kv[:, :, row.slot, :, :same]
    span = kv_cache.Span(0, rows, [1] * len(rows), SHAPE.device)
    assert span.cascade is not None
    assert (span.cascade.length, len(span.cascade.leaders)) == (32, 1), (
        "4 rows x 32 tokens save 96, 3 x 48 also 96, 2 x 64 only 64"
    )
    query, scale = torch.randn(4, 4, 8), 0.3
    mask = span.mask(AttentionForm(scale), torch.float32)
    by_row = span.by_row(query)
    shared = span.flat(span.cascade.attend(by_row, pool.kv[:, 0], span.read_cache(pool.kv[:, 0], 32), mask[..., 32:], scale))
    alone = span.flat(kv_cache._decode(by_row, span.read_cache(pool.kv[:, 0]), mask, scale))
    wanted = torch.stack([by_hand(query[i], pool.kv[:, 0], row.slot, len(row.tokens), scale) for i, row in enumerate(rows)])
    assert torch.allclose(shared.double(), wanted, atol=1e-6) and torch.allclose(alone.double(), wanted, atol=1e-6)


def test_several_groups_of_unequal_size() -> None:
    """Rows of one group, of another and of none, in any order; a row that takes no part has no say."""
    torch.manual_seed(1)
    groups, place = [[4, 0, 2], [3]], [1, 0, 2, 3, 0]
    made = kv_cache.Cascade(16, [7, 5], torch.tensor([4, 0, 2, 3, 3, 3]), torch.tensor(place))
    query, kv, own = torch.randn(5, 6, 1, 8), torch.randn(2, 9, 2, 40, 8), torch.randn(2, 5, 2, 6, 8)
    mask = torch.zeros(5, 1, 1, 6).masked_fill_(torch.arange(6) > torch.tensor([5, 0, 3, 1, 0])[:, None, None, None], -math.inf)
    found = made.attend(query, kv, own, mask, 0.5)
    for group, slot in zip(groups, (7, 5), strict=True):
        for row in group:
            whole = torch.cat([kv[:, slot, :, :16], own[:, row]], 2)[:, None]
            seen = 16 + int((mask[row] == 0).sum())
            assert torch.allclose(
                found[row].flatten(0, 1).double(), by_hand(query[row].flatten(0, 1), whole, 0, seen, 0.5), atol=1e-6
            )


def test_it_is_used_where_enough_bytes_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [held(tokens, slot) for slot, tokens in enumerate(prompts())]
    saved = 3 * 32 * SHAPE.token_bytes
    monkeypatch.setattr(kv_cache, "MIN_SAVED_BYTES", saved)
    assert cascade_of(rows, range(4), 4, SHAPE) is not None
    monkeypatch.setattr(kv_cache, "MIN_SAVED_BYTES", saved + 1)
    assert cascade_of(rows, range(4), 4, SHAPE) is None
    monkeypatch.setattr(kv_cache, "MIN_SAVED_BYTES", 0)
    half = KvShape(1, 2, 8, torch.bfloat16, torch.device("cpu"))
    assert cascade_of(rows, range(4), 4, half) is None, "in half precision the fused kernel reads keys and values"
    assert cascade_of([held(list(range(9)), 0), rows[0]], range(2), 2, SHAPE) is None, "no block in common"


async def episodes(folder: str, worth: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[list[int], list[float]]], int]:
    """Three groups of four episodes of two turns, the second of which begins with a rewritten history for every other episode;
    and how many layers' steps shared a prompt."""
    monkeypatch.setattr(kv_cache, "MIN_SAVED_BYTES", worth)
    count, plain = [0], kv_cache.Cascade.attend
    monkeypatch.setattr(kv_cache.Cascade, "attend", lambda *args: (count.__setitem__(0, count[0] + 1), plain(*args))[1])
    engine = EmbeddedEngine(folder, device="cpu", max_slots=32)
    await engine.start()

    async def episode(number: int) -> tuple[list[int], list[float]]:
        ids, said, logprobs = prompt_of(70, seed=number // 4), list[int](), list[float]()
        for turn in range(2):
            sampling = Sampling(max_tokens=12 + number % 3, seed=100 * number + turn, temperature=0.7 + 0.1 * (number % 4))
            found = await engine.generate(ids, sampling, f"e{number}")
            said, logprobs, ids = said + found.token_ids, logprobs + found.logprobs, ids + found.token_ids + [7] * 5
            if number % 2:
                ids = [*ids[:3], 9, *ids[4:]]
        return said, logprobs

    try:
        return list(await asyncio.gather(*(episode(number) for number in range(12)))), count[0]
    finally:
        await engine.close()
        monkeypatch.setattr(kv_cache.Cascade, "attend", plain)


async def test_an_engine_samples_the_same_tokens_with_the_same_logprobs(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, steps = await episodes(model_folder, 0, monkeypatch)
    plain, none = await episodes(model_folder, math.inf, monkeypatch)
    assert steps > 20 and none == 0
    assert [ids for ids, _ in shared] == [ids for ids, _ in plain]
    assert max(abs(a - b) for one, other in zip(shared, plain, strict=True) for a, b in zip(one[1], other[1], strict=True)) < 1e-5


def test_a_turns_new_tokens_read_the_cache_of_their_own_rows_alone_into_memory_that_stays() -> None:
    """Two rows of 64 slots: their keys and values are copied once, 2 x 2 x 2 x 40 x 8 numbers of 4 bytes, not those of all slots,
    and the second layer's into the same memory. Histories that are one token longer take twice as much once, then no more."""
    pool = kv_cache.Pool(SHAPE, 96)
    pool.kv = torch.randn(2, 2, 64, 2, 96, 8)
    rows = [Sequence(str(slot), list(range(40)), pool, slot, computed=30) for slot in (3, 60)]
    span = kv_cache.Span(0, rows, [10, 10], SHAPE.device)
    taken = []
    for layer, tokens in ((0, 40), (1, 40), (0, 41), (1, 42)):
        span.longest = tokens
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            found = span.read_cache(pool.kv[:, layer])
        assert torch.equal(found, pool.kv[:, layer, [3, 60], :, :tokens]) and found.is_contiguous()
        taken.append(sum(max(event.self_cpu_memory_usage, 0) for event in seen.key_averages()))
    first = 2 * 2 * 2 * 40 * 8 * 4
    assert taken == [first, 0, 2 * first, 0]


# -- rounding --------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def disturbed(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """The engine's attention, each number of its output off by a random share of that size."""
    plain, generator = kv_cache.attend, torch.Generator().manual_seed(0)

    def attend(*args: object, **kwargs: object) -> tuple[Tensor, None]:
        out = plain(*args, **kwargs)[0]
        noise = torch.randn(out.shape, generator=generator) * size
        return (out.float() * (1 + noise)).to(out.dtype), None

    monkeypatch.setattr(kv_cache, "attend", attend)


def test_a_model_in_bfloat16_may_round_otherwise_than_its_own_attention(tmp_path, monkeypatch):
    """A real model's logits reach 30, where bfloat16 resolves 0.125, and its layers' noise comes on top."""
    folder = build_model(tmp_path, num_hidden_layers=8, hidden_size=256, head_dim=64, vocab_size=8000)
    disturbed(monkeypatch, 2.0**-9)
    EmbeddedModel(folder, "bfloat16", CPU)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_whose_attention_is_off_by_a_third_is_refused(tmp_path, monkeypatch, dtype):
    folder = build_model(tmp_path, num_hidden_layers=8)
    disturbed(monkeypatch, 0.3)
    with pytest.raises(ModelError, match="does not reproduce"):
        EmbeddedModel(folder, dtype, CPU)


def test_weights_that_are_not_finite_are_the_cause_and_not_the_cache(tmp_path):
    """It was "its layers keep state that a KV cache does not hold; use engine = vllm"."""
    folder, name = build_model(tmp_path), "model.layers.0.mlp.gate_proj.weight"
    file = Path(folder) / "model.safetensors"
    save_file(load_file(file) | {name: load_file(file)[name] * float("nan")}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"its weight {name} has numbers that are not finite. Fetch"):
        EmbeddedModel(folder, "float32", CPU)


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_grouped_heads_under_a_mask_without_repeated_keys(kv_heads):
    """The way of a GPU, in float64 against plain softmax; another order of heads is seen."""
    torch.manual_seed(0)
    rows, heads, width, length, dim = 3, 8, 5, 11, 16
    query = torch.randn(rows, heads, width, dim, dtype=torch.float64)
    kv = torch.randn(2, rows, kv_heads, length, dim, dtype=torch.float64)
    seen = torch.arange(length) <= torch.tensor([4, 0, 6])[:, None, None] + torch.arange(width)[:, None]
    mask = torch.zeros(rows, 1, width, length, dtype=torch.float64).masked_fill(~seen[:, None], float("-inf"))

    def plain(keys: Tensor, values: Tensor) -> Tensor:
        scores = query @ keys.transpose(2, 3) * 0.3 + mask
        return torch.softmax(scores, -1) @ values

    out = kv_cache._by_key_head(query, kv, mask, 0.3)
    group = heads // kv_heads
    assert (out - plain(*kv.repeat_interleave(group, dim=2))).abs().max() < 1e-12
    if 1 < kv_heads < heads:
        assert (out - plain(*kv.repeat(1, 1, group, 1, 1))).abs().max() > 0.1
