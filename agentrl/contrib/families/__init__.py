"""Probe model families: test packed rows and shared prefixes on a small version of a model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.data.rows import Ragged, build, nested_tensor
from agentrl.data.schedule import Tree
from agentrl.trainer.attention import PACKED, keep_rows_apart, register_packed_attention
from agentrl.trainer.families import FAMILIES, RIGHT, Kind, Measured, Probed, parts_of
from agentrl.trainer.language_model import Micro, PolicyModule, ScoreModule, ValueModule, backbone, layers_of
from agentrl.trainer.update import Pack
from agentrl.utils.errors import AgentrlError, ModelError

# A small version ("cut") of a model

VOCABULARY = 96
POSITIONS = 256
WIDTH = 32
"""Largest inner width of MLPs and low-rank projections, which no other size depends on."""
WINDOW = 8
EXPERTS = 8
HEADS = 4
LEAST = 64
"""Hidden size of a model without heads."""
KEPT = 2
"""Minimum number of layers: a leak in one layer is only mixed into other tokens by the next."""

_HIDDEN = ("hidden_size", "dim_model", "embedding_dim", "lru_width", "attention_hidden_size", "word_embed_proj_dim")
_HEADS = (
    "num_attention_heads", "swa_num_attention_heads", "linear_num_heads", "num_decoder_attention_heads",
    "num_attention_heads_per_layer",
)  # fmt: skip
_KEY_HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_query_groups")
_INNER = (
    "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size",
    "shared_intermediate_size", "dense_intermediate_size", "prefix_dense_intermediate_size", "expert_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "ffn_hidden_size", "ffn_dim", "dff", "dim_ff", "d_inner", "n_inner", "decoder_ffn_dim",
    "encoder_ffn_dim", "feed_forward_size", "router_hidden_size", "q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input",
    "laurel_rank", "adapter_rank", "o_lora_rank",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_WINDOWS = (
    "sliding_window", "attention_window_size", "sliding_window_size", "local_attention", "attention_chunk_size", "floor_scale",
    "window_size",
)  # fmt: skip
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions", "context_length")
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size")


def cut(config: Any) -> Any:
    """Return a copy of a model's config with small layers of every kind."""
    found = copy.deepcopy(config)
    for part in parts_of(found):
        _fix(part, _VOCABULARIES, VOCABULARY)
        _fix(part, _POSITIONS, POSITIONS)
        _set(part, (*_WINDOWS, *_CHUNKS, "index_topk"), lambda old: min(old, WINDOW))
        for name, value in list(vars(part).items()):
            if name.endswith("token_id") and (isinstance(value, list) or (isinstance(value, int) and value >= VOCABULARY)):
                setattr(part, name, 1)
        chosen = next((getattr(part, name) for name in _CHOSEN if isinstance(getattr(part, name, None), int)), 1)
        groups = getattr(part, "n_group", None) or getattr(part, "num_expert_group", None) or 1
        if groups > 1:
            _fix(part, ("n_group", "num_expert_group"), 2)
            _fix(part, ("topk_group",), 1)
        _set(part, _CHOSEN, lambda old: min(old, 2))
        _set(part, _EXPERTS, partial(min, EXPERTS if chosen > 1 else EXPERTS // 2))
        _shrink_heads(part)
        _set(part, _INNER, lambda old: min(old, WIDTH))
    return found


def _shrink_heads(part: Any) -> None:
    heads, hidden = _number(part, "num_attention_heads"), _number(part, "hidden_size")
    # A head's size may follow from either number, so both keep their proportion.
    scale = 1 if not heads or heads <= HEADS else heads // next(n for n in range(HEADS, heads + 1) if heads % n == 0)
    if not heads and hidden and hidden > LEAST and hidden % LEAST == 0:
        scale = hidden // LEAST
    if hidden and scale > 1 and hidden % scale:
        if not _number(part, "head_dim"):
            return
        _fix(part, _HIDDEN[:1], HEADS * LEAST)  # with `head_dim`, the hidden size is free
    if scale == 1:
        return
    keys = {name: _number(part, name) for name in _KEY_HEADS}
    _set(part, _HEADS, lambda old: old // scale if old % scale == 0 else old)
    _set(part, _HIDDEN, lambda old: old // scale if old % scale == 0 else old)
    now = (heads or 0) // scale
    for name, old in keys.items():
        if old and heads:
            _fix(part, (name,), now if old == heads else 1 if old == 1 else max(now // 2, 1))
    _shrink_mixers(part, scale)


def _shrink_mixers(part: Any, scale: int) -> None:
    keys, values = _number(part, "linear_num_key_heads"), _number(part, "linear_num_value_heads")
    if keys and values and values % keys == 0 and keys > 2:
        _fix(part, ("linear_num_key_heads",), 2)
        _fix(part, ("linear_num_value_heads",), 2 * (values // keys))
    hidden = _number(part, "hidden_size") or 0
    for names in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("num_heads", "head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
    ):
        heads, width = (_number(part, name) for name in names)
        expand = next((v for v in (getattr(part, n, None) for n in ("mamba_expand", "expand")) if isinstance(v, int)), None)
        if heads and width and expand:
            inner = expand * hidden
            count = next((n for n in (4, 2, 8, 1) if inner % n == 0), 1)
            _fix(part, names[:1], count)
            _fix(part, names[1:], inner // count)
    _set(part, ("mamba_n_groups", "n_groups", "mamba_ngroups"), lambda old: min(old, 2))
    _fix(part, ("mamba_d_ssm",), (_number(part, "mamba_n_heads") or 0) * (_number(part, "mamba_d_head") or 0))
    _set(part, ("time_step_rank", "mamba_dt_rank"), lambda old: min(old, 4))


def keep_layers(config: Any, count: int, every: int) -> Any:
    """Return a copy with the first `count` of a text config's `every` layers."""
    found = copy.deepcopy(config)
    text = found.get_text_config(decoder=True)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == every:
            setattr(text, name, value[:count])
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks"):
        if _number(text, name) == every:
            setattr(text, name, count)
    return found


def kinds_needed(layers: list[nn.Module]) -> int:
    """Return the number of leading layers that include every kind of layer."""
    kinds: list[str] = []
    for layer in layers:
        lines = []  # the layer's modules without its number: their classes, flags and strings
        for name, module in layer.named_modules():
            plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | str | None) or "window" in k or "theta" in k}
            plain.pop("_is_hf_initialized", None)
            lines.append(f"{name} {type(module).__name__} {sorted((k, str(v)) for k, v in plain.items())}")
        kinds.append("\n".join(lines))
    return max(max(map(kinds.index, kinds)) + 1, min(KEPT, len(layers)))


def _number(part: Any, name: str) -> int | None:
    try:
        value = getattr(part, name, None)
    except (AttributeError, RuntimeError):  # a number per layer, without a single value
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _fix(part: Any, names: tuple[str, ...], value: int) -> None:
    """Set the config's numbers with these names to a value."""
    _set(part, names, lambda _: value)


def _set(part: Any, names: tuple[str, ...], change: Callable[[int], int]) -> None:
    """Change the config's numbers with these names, also under a family's own names."""
    for name in dict.fromkeys(getattr(part, "attribute_map", {}).get(name, name) for name in names):
        old = _number(part, name)
        if old:
            try:
                setattr(part, name, change(old))
            except (AttributeError, RuntimeError, ValueError, TypeError):
                continue
        values = vars(part).get(name)
        if isinstance(values, list) and all(isinstance(value, int) for value in values):
            setattr(part, name, [change(value) if value else value for value in values])


# The probe

TEMPERATURE = 0.7
PREFIX, ENDS, ALONE = 17, (9, 14, 3), 11
"""Token counts: three rows share a prefix and have these ends, one is shorter. All exceed the windows of `cut`."""
LARGEST = 1 << 27
"""Maximum parameters of a cut model (half a GiB in float32)."""


class Sample:
    """Small model of a family with a few rows: reference results, and the trainer's ways to compute them."""

    def __init__(self, config: Any, kind: Kind = "policy") -> None:
        """Build the model and the reference. Raises ModelError if no small model can be built or its forward pass fails."""
        self.kind = kind
        self.config = run_guarded(lambda: small(config, kind))
        self.rows, self.view = rows_of(int(self.config.get_text_config(decoder=True).vocab_size))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = run_guarded(lambda: _build_model(self.config, kind, "eager"))
            perturb(model)
            self.head = torch.randn(1, model.config.get_text_config().hidden_size) / 8
        self.state = model.state_dict()
        self.model = model
        self.reference = [run_guarded(lambda row=row: self.alone(row)) for row in self.rows]  # type: ignore[misc]

    @torch.no_grad()
    def alone(self, row: Tensor) -> Tensor:
        """Compute a row by transformers alone: the logprobs of its tokens after the first, its values, or its score."""
        if self.kind == "value":
            hidden = backbone(self.model)(input_ids=row[None], use_cache=False).last_hidden_state[0]
            values: Tensor = (hidden @ self.head.T)[:-1, 0].float()
            return values
        logits: Tensor = self.model(input_ids=row[None], use_cache=False).logits[0].float()
        if self.kind == "score":
            return logits.reshape(-1)
        return (logits[:-1] / TEMPERATURE).log_softmax(-1).gather(1, row[1:, None])[:, 0]

    def measure(self, attention: str | None, together: bool, trees: tuple[Tree, ...] = ()) -> Measured:
        """Compare all rows in one pass (`together`), or one pass per row, with the reference. `attention`: an attention function
        of transformers, None: its default; `trees`: shared prefixes that are computed once."""
        passes: list[tuple[int, ...]] = [(0, 1, 2, 3)] if together else [(0,), (1,), (2,), (3,)]
        return _compare_results(lambda: self._compute_with_trainer(attention, passes, trees), torch.cat(self.reference))

    @torch.no_grad()
    def _compute_with_trainer(self, attention: str | None, passes: list[tuple[int, ...]], trees: tuple[Tree, ...]) -> Tensor:
        module = self.module(attention)
        results = []
        for rows in passes:
            micro = micro_of(self.view, rows, trees)
            out = module(micro, TEMPERATURE, True)[0] if self.kind == "policy" else module(micro)
            results.append(out.float())
        return torch.cat(results)

    def module(self, attention: str | None) -> nn.Module:
        """Return the trainer's module with the reference's weights."""
        register_packed_attention()
        model = _build_model(self.config, self.kind, attention)
        model.load_state_dict(self.state, assign=True)
        if attention == PACKED:
            keep_rows_apart(backbone(model))
        module: nn.Module = {"policy": PolicyModule, "value": ValueModule, "score": ScoreModule}[self.kind](model)
        if isinstance(module, ValueModule):
            module.head.weight.data.copy_(self.head)
        return module.train()


def micro_of(view: Ragged, rows: tuple[int, ...], trees: tuple[Tree, ...]) -> Micro:
    """Pack rows as in an update: end to end, or as trees (of all rows). The results of all tokens but the first of each row are
    requested."""
    together, prefix = torch.full((len(view),), -1), torch.zeros(len(view), dtype=torch.int64)
    for number, tree in enumerate(trees):
        together[list(tree.rows)], prefix[list(tree.rows)] = number, tree.prefix
    return Pack(view.with_rows(together=together, prefix=prefix), list(rows), torch.device("cpu")).micro


def rows_of(vocabulary: int) -> tuple[list[Tensor], Ragged]:
    """Return the probe's rows, separately and as a batch."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, vocabulary, (PREFIX + sum(ENDS) + ALONE,), generator=draw)
    begin, *parts = torch.split(ids, [PREFIX, *ENDS, ALONE])
    rows = [torch.cat([begin, parts[0]]), torch.cat([begin, parts[1]]), parts[3], torch.cat([begin, parts[2]])]
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    wanted = torch.ones(int(offsets[-1]), dtype=torch.bool).index_fill_(0, offsets[:-1], 0)
    columns = {"token_ids": torch.cat(rows), "sampled": wanted}
    return rows, Ragged.of(build({name: nested_tensor(values, offsets) for name, values in columns.items()}, len(rows)))


def small(config: Any, kind: Kind) -> Any:
    """Return the config of a model of at most LARGEST parameters. Raises ModelError if that is impossible."""
    shrunk = cut(config)
    with torch.device("meta"):
        layers = layers_of(backbone(_build_model(shrunk, kind, "eager")))
        few = keep_layers(shrunk, kinds_needed(layers), len(layers))
        size = sum(p.numel() for p in _build_model(few, kind, "eager").parameters())
    if size > LARGEST:
        raise ModelError(f"cut to its kinds of layers it still has {size} parameters")
    return few


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Randomize all parameters, and biases that are buffers (of routers), so that each has an effect."""
    parts = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.endswith("bias") and b.dim() == 1}}
    for tensor in parts.values():
        if not tensor.is_floating_point():
            continue
        if tensor.dim() < 2:
            tensor.add_(0.3 * torch.randn_like(tensor))
        else:
            tensor.normal_(0.0, 1.3 / math.sqrt(tensor[0].numel() if tensor.dim() != 3 else tensor.shape[-1]))


def run_guarded(call: Callable[[], Any]) -> Any:
    """Return the call's result. Raises ModelError for any exception of the model's code."""
    try:
        return call()
    except AgentrlError:
        raise
    except Exception as error:
        raise ModelError(brief(error)) from error


def brief(error: Exception) -> str:
    """Format an error in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _compare_results(call: Callable[[], Tensor], reference: Tensor) -> Measured:
    try:
        found = call()
    except ModelError as error:
        return Measured(math.inf, str(error))
    except Exception as error:
        return Measured(math.inf, brief(error))
    if found.shape != reference.shape:
        return Measured(math.inf, f"{tuple(found.shape)} numbers in place of {tuple(reference.shape)}")
    # Some families scale logits down, and errors with them.
    spread = float(reference.std()) if len(reference) > 1 else 1.0
    return Measured(float((found - reference).abs().max()) / min(spread, 1.0))


def _build_model(config: Any, kind: Kind, attention: str | None) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if kind == "score" else AutoModelForCausalLM
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    # Copy the config, since a model writes its attention function into it.
    options["trust_remote_code"] = hasattr(config, "auto_map")  # `load_model_config` keeps it for trusted models only
    return auto.from_config(copy.deepcopy(config), dtype=torch.float32, **options).train()


@FAMILIES.register("small_cut")
def probe(config: Any, kind: Kind, name: str, one_row: bool) -> Probed:
    """Probe the model of a config. Raises ModelError if it is not causal or cannot be tested."""
    try:
        sample = Sample(config, kind)
    except ModelError as error:
        raise ModelError(f"{name} cannot be tried: {error}; take another model ({RIGHT})") from error
    row, whole = sample.rows[1], sample.reference[1]
    ahead = Measured(0.0)  # influence of a row's end on the results at its beginning; a score has none
    if kind != "score":
        ahead = _compare_results(lambda: sample.alone(row[: PREFIX + 2]), whole[: PREFIX + 1])
    if not ahead.right:
        raise ModelError(
            f"{name} is not causal: with another end of a row, its own code's values at the beginning {ahead}, so the "
            f"sampled policy is not the trained one; take another model ({RIGHT})"
        )
    packed = sample.measure(PACKED, True)
    shared = sample.measure(PACKED, True, (Tree((0, 1, 3), PREFIX), Tree((2,), 0)))
    own = sample.measure(None, False) if one_row or not packed.right else None
    eager = sample.measure("eager", False) if own is not None else None
    return Probed(name, packed, shared, own, eager)
