"""PackedSequences attention: equal to one row at a time, and never a leak between rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from agentrl.backends.embedded.attention import register_slot_attention
from agentrl.errors import ModelError
from agentrl.train.attention import PACKED, packed_attention, packed_rows, register_packed_attention, varlen_takes
from agentrl.train.modules import positions


def offsets_for(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def attend(lengths: list[int], heads: int, kv_heads: int, inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs)
    out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packed=packed_rows(offsets_for(lengths)), scaling=0.3)
    return out[0]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    kv_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_one_row_at_a_time(lengths: list[int], kv_heads: int, seed: int) -> None:
    torch.manual_seed(seed)
    total = sum(lengths)
    inputs = [torch.randn(total, heads, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    found = attend(lengths, 4, kv_heads, inputs)
    weights = torch.randn_like(found)
    grads = torch.autograd.grad((found * weights).sum(), inputs)
    q, k, v = inputs
    k, v = (tensor.repeat_interleave(4 // kv_heads, dim=1) for tensor in (k, v))
    rows, start = [], 0
    for n in lengths:
        part = slice(start, start + n)
        scores = torch.einsum("qhd,khd->hqk", q[part], k[part]) * 0.3
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[part]))
        start += n
    expected = torch.cat(rows)
    assert torch.allclose(found, expected, atol=1e-5)
    for mine, other in zip(grads, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_row_never_sees_another(tiny: str, changed: int) -> None:
    """Change every token of one row: the hidden states of the others keep every bit."""
    register_packed_attention()
    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation=PACKED)
    offsets = offsets_for([9, 13, 5])
    ids = torch.randint(7, 400, (27,), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    row = slice(int(offsets[changed]), int(offsets[changed + 1]))
    other[row] = (ids[row] + 1) % 400

    def states(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = model.model(
                input_ids=tokens[None],
                position_ids=positions(offsets)[None],
                use_cache=False,
                packed=packed_rows(offsets),
            )
        return out.last_hidden_state[0]

    same = (states(ids) == states(other)).all(-1)
    outside = torch.ones(27, dtype=torch.bool)
    outside[row] = False
    assert bool(same[outside].all())
    assert not bool(same[row].any())


def test_control_transformers_own_attention_leaks_here(tiny: str) -> None:
    """Why the custom form exists: with transformers' sdpa and a cache (the default) packed rows do leak."""
    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="sdpa")
    offsets = offsets_for([9, 13])
    ids = torch.randint(7, 400, (22,), generator=torch.Generator().manual_seed(0))
    other = torch.cat([(ids[:9] + 1) % 400, ids[9:]])
    with torch.no_grad():
        a, b = (model.model(input_ids=x[None], position_ids=positions(offsets)[None]).last_hidden_state[0] for x in (ids, other))
    assert (a[9:] - b[9:]).abs().max() > 1e-3


def test_what_it_cannot_compute_is_an_error() -> None:
    inputs = [torch.randn(1, 2, 6, 4) for _ in range(3)]
    packed = packed_rows(offsets_for([6]))
    with pytest.raises(ModelError, match="dropout"):
        packed_attention(torch.nn.Identity(), *inputs, None, packed=packed, dropout=0.1)
    with pytest.raises(ModelError, match="sliding window of 4"):
        packed_attention(torch.nn.Identity(), *inputs, None, packed=packed, sliding_window=4)


def test_the_varlen_kernel_is_asked_for_what_it_takes() -> None:
    """It would end the run ("must be a multiple of 8"; "at most 256"), where the blocks' kernels go on."""
    assert [width for width in (8, 20, 64, 80, 128, 192, 256, 264, 576) if varlen_takes(width)] == [8, 64, 80, 128, 192, 256]


@pytest.mark.parametrize("register", [register_packed_attention, register_slot_attention])
def test_no_kernel_that_prepares_itself_for_each_shape(register: Callable[[], None]) -> None:
    """cuDNN's attention, which torch would prefer on Hopper cards (check_prefer_cudnn_attention, from cuDNN 9.15.1 on)."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    register()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
