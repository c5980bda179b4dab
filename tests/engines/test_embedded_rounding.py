"""What of a GPU the embedded engine must bear, as far as a CPU shows it: kernels that round in other ways."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentrl.engines.embedded import kv_cache as attention
from agentrl.engines.embedded.embedded_model import EmbeddedModel
from agentrl.utils.errors import ModelError
from tests.engines.engine_models import build_model

CPU = torch.device("cpu")


def disturbed(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """The engine's attention, each number of its output off by a random share of that size."""
    plain, generator = attention.attend, torch.Generator().manual_seed(0)

    def attend(*args: object, **kwargs: object) -> tuple[Tensor, None]:
        out = plain(*args, **kwargs)[0]
        noise = torch.randn(out.shape, generator=generator) * size
        return (out.float() * (1 + noise)).to(out.dtype), None

    monkeypatch.setattr(attention, "attend", attend)


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

    out = attention._by_key_head(query, kv, mask, 0.3)
    group = heads // kv_heads
    assert (out - plain(*kv.repeat_interleave(group, dim=2))).abs().max() < 1e-12
    if 1 < kv_heads < heads:
        assert (out - plain(*kv.repeat(1, 1, group, 1, 1))).abs().max() > 0.1
