from itertools import takewhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.embedded.kv_cache import common_prefix
from agentrl.engines.embedded.scheduler import draw_tokens, kept_set


@pytest.mark.parametrize(("temperature", "k", "p", "unused", "shares"), [
    (1.0, 0, 1.0, [], [0.5, 0.3, 0.15, 0.05]),
    (0.5, 0, 1.0, [], [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    (2.0, 0, 1.0, [], [0.379, 0.2936, 0.2076, 0.1199]),
    (1.0, 2, 1.0, [], [0.625, 0.375, 0, 0]),
    (1.0, 0, 0.79, [], [0.625, 0.375, 0, 0]),  # .5 + .3 reach it
    (1.0, 0, 0.81, [], [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    (1.0, 3, 0.53, [], [0.625, 0.375, 0, 0]),  # .5 / .95 = .526 does not reach it
    (1.0, 0, 1.0, [0], [0, 0.6, 0.3, 0.1]),  # renormalized by .5
    (1.0, 2, 1.0, [0], [0, 2 / 3, 1 / 3, 0]),  # the likeliest two of the others
    (1.0, 0, 0.59, [0], [0, 1, 0, 0]),  # .3 / .5 reaches it
    (0.0, 0, 1.0, [0], [0, 1, 0, 0]),
])  # fmt: skip
def test_shares_and_logprobs_by_hand(temperature, k, p, unused, shares):
    """Drawn once at each of 20,000 evenly spaced random numbers. Log probabilities are of the whole vocabulary, as a trainer
    computes them: what may not be drawn counts."""
    n = 20_000
    rows, uniform = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(n, -1), (torch.arange(n).double() + 0.5) / n
    options = [torch.full((n,), value) for value in (temperature, k, p)]
    ids, logprobs = draw_tokens(rows, *options, uniform, torch.tensor(unused) if unused else None)  # type: ignore[call-arg]
    assert (torch.bincount(ids, minlength=4) / n - torch.tensor(shares)).abs().max() < 1e-3
    expected = torch.log_softmax(rows / (temperature or 1.0), -1)
    assert (logprobs - expected.gather(1, ids.unsqueeze(1)).squeeze(1)).abs().max() < 1e-5


def test_no_token_of_probability_zero_is_ever_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    for value in (0.0, 0.5, 1.0 - 2**-53):
        one = [torch.tensor([x]) for x in (1.0, 0, 1.0)]
        ids, logprobs = draw_tokens(logits, *one, torch.tensor([value], dtype=torch.float64))  # type: ignore[call-arg]
        assert ids.item() in (1, 3) and abs(logprobs.item() - torch.tensor(0.5).log().item()) < 1e-6


def test_a_grammar_draws_in_proportion_where_float32_holds_no_probability_of_what_it_allows():
    """The last id was drawn, whatever fitted."""
    logits, one = torch.tensor([[130.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), torch.ones(2)
    fitting = torch.tensor([[False, True, True, False], [True, True, True, True]])
    drawn = [
        draw_tokens(logits, one, torch.zeros(2), one, torch.full((2,), at, dtype=torch.float64), fitting=fitting)
        for at in (0.0, 0.72, 0.74, 1.0 - 2**-53)
    ]
    assert [ids.tolist() for ids, _ in drawn] == [[1, 0], [1, 2], [2, 2], [2, 3]]
    assert [logprobs[0].item() for _, logprobs in drawn] == [-129.0, -129.0, -130.0, -130.0]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(0, 12), st.floats(0.05, 1.0))
def test_the_kept_set_is_the_smallest_that_reaches_p(seed, k, p):
    logp = torch.log_softmax(torch.randn(3, 10, generator=torch.Generator().manual_seed(seed)), -1)
    mask = kept_set(logp, torch.full((3,), k), torch.full((3,), p))
    for row, keep in zip(logp, mask, strict=True):
        order = row.argsort(descending=True)[: k or 10]
        share = torch.softmax(row[order], 0)
        count = 1 + int((share.cumsum(0)[:-1] < p).sum()) if p < 1 else len(order)
        assert sorted(order[:count].tolist()) == keep.nonzero().flatten().tolist()


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_common_prefix(left, right):
    assert common_prefix(left, right) == len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))
