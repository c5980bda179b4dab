"""Attention of rows that share prefixes, as two parts joined by their sums, against one softmax under a mask in float64."""

import math

import pytest
import torch

from agentrl.trainer.attention import SharedAttention, packed_trees

SPANS = torch.tensor([[0, 0, 0, 30], [0, 30, 30, 41], [0, 30, 41, 60], [60, 60, 60, 70], [70, 70, 70, 75], [70, 75, 75, 76]])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_results_and_gradients_are_those_of_one_softmax(dtype: torch.dtype, most: float) -> None:
    """Two suffixes of unequal lengths after one prefix, a row alone, and a suffix of one token."""
    torch.manual_seed(0)
    given = [torch.randn(76, 2, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(76, 2, 16, dtype=dtype)
    layout = packed_trees(SPANS, 49, torch.device("cpu"))
    assert layout.parts is not None
    assert layout.parts.after == ((0, 30, 30, 60), (70, 75, 75, 76)), "suffixes that follow each other are one run"
    found = SharedAttention.apply(given[0], given[1], given[2], layout.parts, None)
    found.backward(upstream)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    q, k, v = exact
    seen = torch.zeros(76, 76, dtype=torch.bool)
    for first, last, start, stop in SPANS.tolist():
        seen[start:stop, first:last] = True
        seen[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
    scores = (torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(16)).masked_fill(~seen, -math.inf)
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    want.backward(upstream.double())
    pairs = [(found, want), *((mine.grad, theirs.grad) for mine, theirs in zip(given, exact, strict=True))]
    for mine, theirs in pairs:
        assert mine is not None and theirs is not None
        assert float((mine.detach().double() - theirs.detach()).abs().max()) < most
