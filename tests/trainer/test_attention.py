"""PackedSequences attention: equal to one row at a time, and never a leak between rows."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from agentrl.engines.embedded.kv_cache import register_slot_attention
from agentrl.engines.exact_attention import AttentionForm, exact_attention
from agentrl.trainer.attention import (
    PACKED,
    WithSinks,
    packed_attention,
    packed_rows,
    register_packed_attention,
    varlen_attention,
    varlen_takes,
)
from agentrl.trainer.language_model import PolicyModule
from agentrl.utils.errors import ModelError
from tests.trainer.tiny_families import FAMILIES, VOCAB, micro_of, row_logprobs, tiny_model


def offsets_for(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


ROWS = [[0, 0, 0, 11], [11, 11, 11, 12], [12, 12, 12, 31]]
TREES = [[0, 0, 0, 7], [0, 7, 7, 18], [0, 7, 18, 22], [22, 22, 22, 25], [25, 25, 25, 30], [25, 30, 30, 31]]
"""Spans of key tokens from, to, and of a row's own from, to: rows alone, and prefixes with what follows them."""
FORMS = {
    "plain": AttentionForm(0.4), "plain by blocks, as on a GPU": AttentionForm(0.4), "window": AttentionForm(0.4, window=5),
    "chunks": AttentionForm(0.4, chunk=5), "cap": AttentionForm(0.4, cap=1.5),
    "sinks": AttentionForm(0.4, sinks=torch.empty(0)), "all": AttentionForm(0.4, window=4, cap=2.0, sinks=torch.empty(0)),
    "one key": AttentionForm(0.4, window=1, sinks=torch.empty(0)),
}  # fmt: skip


class LayerOf(torch.nn.Module):
    """A layer's attention, of a model whose only layer attends to chunks, or to all."""

    def __init__(self, chunk: int | None = None) -> None:
        super().__init__()
        kinds = ["full_attention" if chunk is None else "chunked_attention"]
        self.config = SimpleNamespace(layer_types=kinds, attention_chunk_size=chunk)
        self.layer_idx = 0


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm, sinks: torch.Tensor | None, before: int
) -> torch.Tensor:
    """Attention of one row, float64: q [n, H, D] at positions from `before` on, k [before + n, H, D], v [before + n, H, E]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * form.scale
    if form.cap is not None:
        scores = form.cap * torch.tanh(scores / form.cap)
    at, to = torch.arange(before, len(k))[:, None], torch.arange(len(k))
    seen = to <= at
    if form.window is not None:
        seen &= at - to < form.window
    if form.chunk is not None:
        seen &= at // form.chunk == to // form.chunk
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1) + (0 if sinks is None else sinks.exp()[:, None])
    return torch.einsum("hqk,khd->qhd", weights / total[..., None], v)


def close(found: list[torch.Tensor], expected: list[torch.Tensor], near: float) -> None:
    for mine, right in zip(found, expected, strict=True):
        assert ((mine.double() - right).norm() / right.norm()).item() < near


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [(2, 8, 8), (2, 12, 8), (2, 8, 12), (1, 8, 8), (4, 8, 8)], ids=str)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shared", [False, True], ids=["rows", "prefixes"])
def test_each_form_gives_values_and_gradients_of_each_row_by_hand(
    name: str, keys: tuple[int, int, int], shared: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, or a prefix of 7 tokens with two suffixes, a row alone, and a prefix with a suffix of one token. `keys`:
    key heads, of 4 query heads; their width; that of values."""
    monkeypatch.setattr("agentrl.engines.exact_attention.CELLS", 300)  # several pieces a block
    spans = TREES if shared else ROWS
    torch.manual_seed(0)
    heads, wide, value_wide = keys
    sizes = [(31, 4, wide), (31, heads, wide), (31, heads, value_wide), (4,)]
    given = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    form = FORMS[name]
    packed = packed_rows(torch.tensor(spans if shared else [0, 11, 12, 31]))
    if "blocks" in name:
        packed = replace(packed, fused=False)
    assert packed.spans.tolist() == spans and packed.longest == (18 if shared else 19)
    assert packed.parts[1] == ([[0, 7, 7, 22], [25, 30, 30, 31]] if shared else []), "suffixes that follow each other are one"
    asked = {"s_aux": None if form.sinks is None else given[3], "softcap": form.cap, "sliding_window": form.window}
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in given[:3])
    found = packed_attention(LayerOf(form.chunk), q, k, v, None, packed=packed, scaling=form.scale, **asked)[0][0]
    k, v = (tensor.repeat_interleave(4 // heads, 1) for tensor in exact[1:3])
    rows = []
    for first, last, start, stop in spans:
        past, values = (torch.cat([tensor[first:last], tensor[start:stop]]) for tensor in (k, v))
        rows.append(by_hand(exact[0][start:stop], past, values, form, None if form.sinks is None else exact[3], last - first))
    expected = torch.cat(rows)
    push, used = torch.randn(expected.shape), 3 if form.sinks is None else 4
    grads = torch.autograd.grad((found * push).sum(), given[:used])
    wanted = torch.autograd.grad((expected * push).sum(), exact[:used])
    close([found, *grads], [expected, *wanted], 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "prefixes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_packed_rows_are_its_own_rows_alone(family: str, shared: bool) -> None:
    """logprobs and gradients of all parameters against the model's own eager forward of each row, with its own logits."""
    register_packed_attention()
    model = tiny_model(family)
    ids = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    rows = [torch.cat([ids[:9], ids[9 : 9 + n]]) for n in (10, 1, 5)] if shared else [ids[:19], ids[19:21], ids[21:33]]
    weights = torch.linspace(-1.0, 1.0, sum(len(row) - 1 for row in rows))
    alone = torch.cat([row_logprobs(model, row, 0.8) for row in rows])
    wanted = gradients(model, alone, weights)
    model.set_attn_implementation(PACKED)
    found, _ = PolicyModule(model)(micro_of(rows, 9 if shared else 0), 0.8, False)
    assert (found - alone).abs().max() < 1e-5
    largest = max(grad.norm().item() for grad in wanted.values())
    for name, grad in gradients(model, found, weights).items():  # some are zero but for rounding: no bias of keys matters
        assert (grad - wanted[name]).norm() < max(1e-4 * wanted[name].norm().item(), 1e-6 * largest), name
    assert family != "gpt-oss" or wanted["model.layers.0.self_attn.sinks"].norm() > 1e-2


def gradients(model: torch.nn.Module, logprobs: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad((logprobs * weights).sum(), parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def test_a_kernel_without_sinks_computes_them_by_its_sums() -> None:
    """The GPU's way, with the CPU's kernel in the place of the varlen one, which takes and gives the same tensors."""
    torch.manual_seed(0)
    given = [torch.randn(9, 4, 8, requires_grad=True) for _ in range(3)] + [torch.randn(4, requires_grad=True)]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.transpose(0, 1)[None] for tensor in tensors]

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = kernel(*heads_first(q, k, v), 0.0, True, scale=0.4)
        return out[0].transpose(0, 1), lse[0]

    def backward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads = back(*heads_first(*tensors[:5]), tensors[5][None], 0.0, True, scale=0.4)
        return tuple(grad[0].transpose(0, 1) for grad in grads)

    found = WithSinks.apply(*given, forward, backward)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = by_hand(exact[0], exact[1], exact[2], AttentionForm(0.4), exact[3], 0)
    push = torch.randn(expected.shape)
    grads, wanted = (torch.autograd.grad((out * push).sum(), of) for out, of in ((found, given), (expected, exact)))
    close([found, *grads], [expected, *wanted], 1e-5)


@pytest.mark.parametrize(("window", "causal", "back"), [(None, True, -1), (5, False, 4), (9, True, -1)])
def test_the_varlen_operators_are_called_as_they_are_declared(
    monkeypatch: pytest.MonkeyPatch, window: int | None, causal: bool, back: int
) -> None:
    """With sinks, by torch's own schemas of the private operators (they run on GPUs only); a row of 9 tokens."""
    import torch.nn.attention.varlen  # declares them

    asked = []

    def noted(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
        operator = getattr(torch.ops.torch_attn, name)
        arguments = [argument.name for argument in operator.default._schema.arguments]

        def call(*tensors: torch.Tensor, **named: object) -> tuple[torch.Tensor, ...]:
            given = dict(zip(arguments, tensors, strict=False))
            assert not given.keys() & named.keys() and {*given, *named} <= set(arguments)
            asked.append((named["is_causal"], named["window_size"], named["scale"], tuple(given)))
            lse = torch.zeros(4, 9)  # as its declaration for tracing has it: heads first
            return (tensors[0], lse, lse) if name == "_varlen_attn" else tensors[1:4]

        return call

    fakes = SimpleNamespace(**{name: noted(name) for name in ("_varlen_attn", "_varlen_attn_backward")})
    monkeypatch.setattr("agentrl.trainer.attention.torch.ops", SimpleNamespace(torch_attn=fakes))
    q, k, v = (torch.randn(9, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    cu = torch.tensor([0, 9], dtype=torch.int32)
    out = varlen_attention(q, k, v, cu, 9, AttentionForm(0.3, window=window, sinks=torch.zeros(4)))
    out.sum().backward()
    tensors = ("query", "key", "value")
    assert asked == [(causal, [back, 0], 0.3, tensors), (causal, [back, 0], 0.3, ("grad_out", *tensors, "out", "lse"))]
    assert torch.allclose(out, q / 2), "a sum of e^0 and a sink of 0: half of it is the sink's"


def test_scores_of_a_long_row_exist_for_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 500 tokens under a window of 20: 250,000 scores a head, of which 64 x 83 exist at once, and none are kept."""
    made: list[int] = []
    plain = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: made.append(len(a) * a.shape[1] * b.shape[2]) or plain(a, b))
    q, k, v = (torch.randn(1, 2, 500, 4, requires_grad=True) for _ in range(3))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
        out = exact_attention(q, k, v, AttentionForm(0.5, window=20))
    out.sum().backward()
    assert max(made) == 2 * 64 * 83 and max(kept) <= 2 * 500 * 4


def test_what_it_cannot_compute_is_an_error_that_names_the_layer_and_the_argument() -> None:
    inputs = [torch.randn(1, 2, 6, 4) for _ in range(3)]

    def ask(mask: torch.Tensor | None = None, layer: torch.nn.Module | None = None, **asked: object) -> None:
        packed_attention(layer or LayerOf(), *inputs, mask, packed=packed_rows(offsets_for([6])), **asked)

    with pytest.raises(ModelError, match="LayerOf: dropout"):
        ask(dropout=0.1)
    with pytest.raises(ModelError, match=r"LayerOf: .*position_bias is not supported"):
        ask(position_bias=torch.zeros(1))
    with pytest.raises(ModelError, match=r"LayerOf: .*block_indices, indices is not supported"):
        ask(indices=torch.zeros(1), block_indices=torch.zeros(1))
    with pytest.raises(ModelError, match="LayerOf: its model makes an attention mask of its own"):
        ask(torch.zeros(6, 6))
    both_ways = LayerOf()
    both_ways.is_causal = False
    for way in ({"is_causal": False}, {"layer": both_ways}):
        with pytest.raises(ModelError, match="LayerOf: its attention is not causal"):
            ask(**way)
    ask(position_ids=torch.zeros(1), output_attentions=False, is_causal=True, indices=None, softcap=None)


@pytest.mark.parametrize("family", ["phimoe", "doge", "qwen2_moe"])
def test_a_window_that_a_family_puts_only_into_its_mask_is_seen(family: str) -> None:
    """Their layers do not tell their attention function of it."""
    layer = LayerOf()
    layer.config = SimpleNamespace(sliding_window=3, **({"layer_types": ["sliding_attention"]} if family == "qwen2_moe" else {}))
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    found = packed_attention(layer, q, k, v, None, packed=packed_rows(offsets_for([9])))[0]
    expected = packed_attention(LayerOf(), q, k, v, None, packed=packed_rows(offsets_for([9])), sliding_window=3)[0]
    told = packed_attention(layer, q, k, v, None, packed=packed_rows(offsets_for([9])), sliding_window=None)[0]
    assert torch.equal(found, expected) and (found - told).abs().max() > 0.1


def test_the_varlen_kernel_is_asked_for_what_it_takes() -> None:
    """It would end the run ("must be a multiple of 8"; "at most 256"), where the blocks' kernels go on."""
    assert [width for width in (8, 20, 64, 80, 128, 192, 256, 264, 576) if varlen_takes(width)] == [8, 64, 80, 128, 192, 256]


@pytest.mark.parametrize("register", [register_packed_attention, register_slot_attention])
def test_no_kernel_that_prepares_itself_for_each_shape(register: Callable[[], None]) -> None:
    """cuDNN's attention, which torch would prefer on Hopper cards (check_prefer_cudnn_attention, from cuDNN 9.15.1 on)."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    register()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
