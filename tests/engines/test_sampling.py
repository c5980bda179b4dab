from itertools import takewhile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.embedded.kv_cache import common_prefix
from agentrl.engines.embedded.scheduler import draw_tokens, kept_set


def grid(logits, n=20_000, temperature=1.0, top_k=0, top_p=1.0):
    """Draw once at each of n evenly spaced random numbers: counts are exact to 1 / n."""
    rows = torch.tensor(logits).expand(n, -1)
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    full = [torch.full((n,), value) for value in (temperature, top_k, top_p)]
    ids, logprobs = draw_tokens(rows, *full, uniform)  # type: ignore[call-arg]
    return torch.bincount(ids, minlength=len(logits)) / n, dict(zip(ids.tolist(), logprobs.tolist(), strict=True))


def test_frequencies_are_the_probabilities():
    logits = [0.0, 1.0, 2.0, -3.0]
    for temperature in (0.5, 1.0, 2.0):
        shares, logprobs = grid(logits, temperature=temperature)
        expected = torch.softmax(torch.tensor(logits) / temperature, 0)
        assert (shares - expected).abs().max() < 1e-3
        for token, logprob in logprobs.items():
            assert abs(logprob - expected[token].log().item()) < 1e-5


def test_top_k_and_top_p_by_hand():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    shares, logprobs = grid(logits, top_k=2)
    assert (shares - torch.tensor([0.625, 0.375, 0.0, 0.0])).abs().max() < 1e-3
    assert abs(logprobs[1] - torch.tensor(0.3).log().item()) < 1e-5  # of the whole vocabulary: what a trainer computes
    shares, _ = grid(logits, top_p=0.79)  # .5 + .3 reach it
    assert (shares - torch.tensor([0.625, 0.375, 0.0, 0.0])).abs().max() < 1e-3
    shares, _ = grid(logits, top_p=0.81)
    assert (shares > 0).tolist() == [True, True, True, False]
    shares, _ = grid(logits, top_k=3, top_p=0.53)  # .5 / .95 = .526 does not reach it
    assert (shares > 0).tolist() == [True, True, False, False]


def test_an_id_without_a_token_is_never_drawn_and_still_counts_in_the_logprobs():
    rows, uniform = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(1000, -1), (torch.arange(1000).double() + 0.5) / 1000
    for temperature, k, p, shares in [
        (1.0, 0, 1.0, [0, 0.6, 0.3, 0.1]),  # renormalized by .5
        (1.0, 2, 1.0, [0, 2 / 3, 1 / 3, 0]),  # the likeliest two of the others
        (1.0, 0, 0.59, [0, 1, 0, 0]),  # .3 / .5 reaches it
        (0.0, 0, 1.0, [0, 1, 0, 0]),
    ]:
        options = [torch.full((1000,), value) for value in (temperature, k, p)]
        ids, logprobs = draw_tokens(rows, *options, uniform, torch.tensor([0]))  # type: ignore[call-arg]
        assert (torch.bincount(ids, minlength=4) / 1000 - torch.tensor(shares)).abs().max() < 2e-3
        assert (logprobs - rows.gather(1, ids.unsqueeze(1)).squeeze(1)).abs().max() < 1e-6


def test_no_token_of_probability_zero_is_ever_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    for value in (0.0, 0.5, 1.0 - 2**-53):
        one = [torch.tensor([x]) for x in (1.0, 0, 1.0)]
        ids, logprobs = draw_tokens(logits, *one, torch.tensor([value], dtype=torch.float64))  # type: ignore[call-arg]
        assert ids.item() in (1, 3) and abs(logprobs.item() - torch.tensor(0.5).log().item()) < 1e-6


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
