"""Report, count or dictate the experts of each token in a transformers mixture-of-experts model.

A router scores all experts for each token and takes the `k` with the highest scores, by one `torch.topk` over a [tokens, experts]
tensor; the processing of scores before and after differs between families (softmax over all or over the chosen ones, sigmoids,
a bias for the choice alone, groups, renormalization). `Routers` replaces only that call: for dictated choices it returns the
scores of the dictated experts, so that their gates are computed from the current scores, and their gradient flows to the
router.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.config.schema import VllmConfig
from agentrl.data.expert_routing import FREE, ROUTERS, RouterCode, narrow
from agentrl.trainer.language_model import Micro
from agentrl.trainer.parallel import Ulysses, layout
from agentrl.utils.errors import ConfigError, ModelError

Asked = Callable[[], Tensor | None]
NOT_REPLAYED = (
    "speculative_config",
    "enable_expert_parallel",
    "enable_eplb",
    "enable_dbo",
    "kv_transfer_config",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""vLLM arguments that spread a step's tokens over processes, discard computed ones, or take some from elsewhere."""


class _Router(TorchFunctionMode):
    """Intercepts one router's topk during its forward pass. `asked` returns the dictated experts of all routers, [tokens,
    routers, k], or None; `observer` gets the chosen experts; `strict`: raise ModelError if the choice cannot be seen."""

    def __init__(self, name: str, module: nn.Module, layer: int, experts: int, asked: Asked) -> None:
        super().__init__()
        self.name, self.module, self.layer, self.experts, self.asked = name, module, layer, experts, asked
        self.dictated: Tensor | None = None
        self.observer: Callable[[Tensor], None] | None = None
        self.strict = False
        self._choices = 0
        self._masked: tuple[Tensor, Tensor] | None = None

    def wrap(self) -> None:
        """Replace the module's forward by one that runs under this object."""
        plain = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            every = self.asked()
            self.dictated = None if every is None else every[:, self.layer]
            if self.dictated is None and self.observer is None:
                return plain(*args, **kwargs)
            self._choices = 0
            with self:
                out = plain(*args, **kwargs)
            self._masked = None  # release the graph of the pass
            if self._choices != 1 and (self.dictated is not None or self.strict):
                raise ModelError(
                    f"{self.name}: a {type(self.module).__name__} does not choose experts by one topk: its choices cannot be "
                    "repeated; set rollout.router_replay = false"
                )
            return out

        self.module.forward = forward  # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk) and self._over_experts(args[0]):
            scores = args[0]
            if self._masked is not None and scores is self._masked[0]:
                scores = self._masked[1]  # the mask limits the choice; a dictated expert has its unmasked score
            return self.chose(scores, out)
        if func in (torch.Tensor.masked_fill, torch.masked_fill) and self._over_experts(args[0]):
            self._masked = (out, args[0])
        return out

    def _over_experts(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[-1] == self.experts

    def chose(self, scores: Tensor, own: Any) -> Any:
        """Return the result of the router's topk: `own`, or the dictated experts with their `scores`."""
        self._choices += 1
        indices = own.indices
        if self.dictated is not None:
            if self.dictated.shape != own.indices.shape:
                raise ModelError(
                    f"{self.name} chooses {tuple(own.indices.shape)} experts, and {tuple(self.dictated.shape)} are dictated"
                )
            free = self.dictated == FREE[self.dictated.dtype]
            indices = torch.where(free, own.indices, self.dictated.to(own.indices.dtype))
            own = torch.return_types.topk((scores.gather(-1, indices), indices))  # type: ignore[attr-defined]
        if self.observer is not None:
            self.observer(indices)
        return own


class Routers:
    """Routers of a model, in layer order; a dense model has none. Create it before modules are wrapped or sharded; it stays
    valid afterwards. `problem`: why the choices of this mixture of experts can be neither reported nor dictated, or "".

    `asked`: called whenever a router computes, also for the recomputation of a checkpointed layer; returns the dictated experts
    of all routers, [tokens, routers, k] uint8 or int16, or None."""

    def __init__(self, model: nn.Module, asked: Asked = lambda: None) -> None:
        self.asked = asked
        self._routers: list[_Router] = []
        self.problem = ""
        for name, module, experts in _found(model):
            if module is None:
                self.problem = f"{name}: no router is known in it"
                return
            router = _Router(name, module, len(self._routers), experts, lambda: self.asked())
            router.wrap()
            self._routers.append(router)

    def __len__(self) -> int:
        return len(self._routers)

    @property
    def experts(self) -> int:
        """Largest number of experts in a layer."""
        return max(router.experts for router in self._routers)

    @contextmanager
    def observe(self, observer: Callable[[int, Tensor], None], strict: bool = True) -> Iterator[None]:
        """Call `observer(router, indices [tokens, k])` for each choice of a router inside the context. With `strict`, a pass
        raises ModelError if its choices cannot be seen."""
        for router in self._routers:
            router.observer, router.strict = partial(observer, router.layer), strict
        try:
            yield
        finally:
            for router in self._routers:
                router.observer, router.strict = None, False

    def probe(self) -> None:
        """Raise ModelError if choices can be neither reported nor dictated. The model must be on the meta device."""
        if self.problem:
            self.check(torch.empty(0))
        with self.observe(lambda *_: None):
            for router in self._routers:
                [width] = {p.shape[1] for p in router.module.parameters() if p.dim() == 2 and p.shape[0] == router.experts}
                router.module(torch.empty(2, width, device="meta"))

    def check(self, dictated: Tensor) -> None:
        """Raise ModelError for choices [tokens, routers, k] of a different model, and for a model whose choices cannot be
        dictated."""
        if self.problem:
            raise ModelError(f"{self.problem}: its choices cannot be repeated; set rollout.router_replay = false")
        if dictated.dim() != 3 or dictated.shape[1] != len(self):
            raise ModelError(f"choices of shape {tuple(dictated.shape)} for a model with {len(self)} routers")


def _found(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, int]]:
    """Yield name, router and number of experts of each mixture of experts; an unrecognized router is None."""
    for name, block in model.named_modules():
        stacked = [child for child in block.children() if _experts(child)]
        if len(stacked) != 1:
            continue
        experts = _experts(stacked[0])
        others = [(key, child) for key, child in block.named_children() if child is not stacked[0]]
        # A router has a matrix with one row per expert.
        routers = [(k, one) for k, one in others if any(p.dim() == 2 and p.shape[0] == experts for p in one.parameters())]
        if len(routers) == 1:
            yield f"{name}.{routers[0][0]}", routers[0][1], experts
        else:
            yield name, None, experts


def _experts(module: nn.Module) -> int:
    """Return the number of experts in a module's tensors [experts, out, in]; 0 for any other module."""
    if not type(module).__name__.endswith("Experts"):
        return 0
    counts = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3}
    return counts.pop() if len(counts) == 1 else 0


class RouterWatch:
    """Records the experts of each token in a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ModelError for a dense model."""
        self.routers = Routers(model)
        self._seen: list[Tensor] = []
        if not len(self.routers):
            raise ModelError(
                self.routers.problem or f"a {type(model).__name__} has no routers to replay: set rollout.router_replay = false"
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the experts of the pass inside the context."""
        self._seen = []
        with self.routers.observe(lambda _, indices: self._seen.append(indices)):
            yield

    def experts(self) -> npt.NDArray[Any]:
        """Return the experts of the last recorded pass: [tokens, routers, k], uint8 or int16."""
        return torch.stack(self._seen, dim=1).to(narrow(self.routers.experts)).cpu().numpy()


def load_metrics(counts: np.ndarray) -> dict[str, float]:
    """Return the load balance of experts, averaged over the layers of `counts` [routers, experts]: `experts_max_violation`, the
    largest load / mean load - 1 (MaxVio, Wang et al. 2024, arXiv:2408.15664; 0: even); `experts_entropy`, the entropy of the
    load shares / that of even shares (1: even); `experts_unused`, the share of experts without tokens."""
    total = counts.sum(axis=1, keepdims=True)
    if counts.shape[1] < 2 or not (total > 0).all():
        return {}
    share = counts / total
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return {
        "experts_max_violation": float((share.max(axis=1) * counts.shape[1] - 1).mean()),
        "experts_entropy": float((-(share * logs).sum(axis=1) / np.log(counts.shape[1])).mean()),
        "experts_unused": float((share == 0).mean()),
    }


class Routing:
    """Routers of one rank. `counts`: choices per router and expert, float64 [routers, experts], on the routers' device."""

    def __init__(self, routers: Routers, group: Ulysses | None) -> None:
        self._routers, self._group = routers, group
        self.counts: Tensor | None = None

    @contextmanager
    def passing(self, micro: Micro) -> Iterator[None]:
        """Wrap a forward pass over `micro`, and count the choices of a pass with gradient, unless it has no trained tokens (the
        dummy of a rank without rows). Raises ModelError if the choices to replay do not fit the model."""
        if micro.experts is not None:
            self._routers.check(micro.experts)
        if torch.is_grad_enabled() and len(micro.targets):
            first, stop = 0, (tokens := len(micro.input_ids))
            if self._group is not None:  # this rank's tokens, without the padding at the end
                local = self._group.slice_of(tokens + -tokens % self._group.size)
                first, stop = min(tokens, local.start), min(tokens, local.stop)
            # A shared prefix counts once per row, since how often it is computed depends on ranks and micro-batches.
            with self.counting(stop - first, None if micro.row_counts is None else micro.row_counts[first:stop]):
                yield
        else:
            yield

    @contextmanager
    def counting(self, tokens: int, times: Tensor | None = None) -> Iterator[None]:
        """Count the chosen experts of the first `tokens` tokens of a pass; the rest is padding. `times` int64 [tokens]: weight of
        each token; None: 1."""

        def count(layer: int, indices: Tensor) -> None:
            if self.counts is None:
                self.counts = torch.zeros(len(self._routers), self._routers.experts, dtype=torch.float64, device=indices.device)
            chosen = indices[:tokens]
            once = torch.ones_like(chosen, dtype=torch.float64)
            weights = once if times is None else once * times[:, None]
            # Not bincount, which synchronizes the host with the GPU.
            self.counts[layer].scatter_add_(0, chosen.reshape(-1), weights.reshape(-1))

        with self._routers.observe(count, strict=False):
            yield

    def take_load(self) -> Tensor:
        """Return and reset the number of choices per expert since the last call, summed over the ranks that share tokens:
        float64 [routers, experts] on the host."""
        counts, self.counts = self.counts, None
        if counts is None:
            counts = torch.zeros(len(self._routers), self._routers.experts, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(counts, group=self._group.group)
        return counts.cpu()


def routing_of(model: nn.Module, group: Ulysses | None) -> Routing | None:
    """Return the model's routing, or None for a dense model. Call it before sharding; the routers stay valid."""
    # The routers read the dictated experts of the current pass, or of its recomputation.
    routers = Routers(model, lambda: None if (packed := layout()) is None else packed.experts)
    return Routing(routers, group) if len(routers) else None


def check_model(model: nn.Module, name: str) -> None:
    """Raise ConfigError for a model (on the meta device) whose choices cannot be replayed."""
    routers = Routers(model)
    if not len(routers) and not routers.problem:
        raise ConfigError(f"rollout.router_replay: {name} is a dense model, which has no routers; set it to false")
    try:
        routers.probe()
    except ModelError as problem:
        raise ConfigError(f"rollout.router_replay: {name}: {problem}") from None


def check_vllm(vllm: VllmConfig) -> None:
    """Raise ConfigError for vLLM arguments that hide some choices."""
    for name in NOT_REPLAYED:
        if name in vllm.args:
            raise ConfigError(
                f"vllm.args.{name}: with rollout.router_replay each process must see which experts all tokens of a request "
                "go to, each once; unset one of the two"
            )


@ROUTERS.register("topk")
def topk_routers() -> RouterCode:
    """Return the code for routers that choose by one `torch.topk`."""
    receiver = "agentrl.contrib.moe.vllm_worker.ExpertReceiver"
    return RouterCode(check_model, check_vllm, receiver, RouterWatch, routing_of, load_metrics)


# Experts of each token of a request, as reported by the steps of an engine
#
# A request keeps the choices of the *first* computation of each token: a recomputation, after a publish or a preemption, may
# choose differently, and later tokens were sampled with the first choices. Tokens from the prefix cache were computed for an
# earlier request; their choices are stored per cache slot, like the keys and values.


Rows = npt.NDArray[Any]
"""Experts [tokens, routers, k], uint8 or int16."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Part of a step for one request: `count` tokens from position `start` on, and the cache slots of all its tokens up to
    their end. `asked`: the choices will be requested."""

    request: str
    start: int
    count: int
    slots: npt.NDArray[np.int64]
    asked: bool


@dataclass(slots=True)
class ExpertLog:
    """Choices of requests. `slots`: size of the KV cache; `unread`: number of ended requests that are kept until read."""

    slots: int
    unread: int = 1024
    _by_slot: Rows | None = None
    _running: dict[str, list[Rows]] = field(default_factory=dict)
    _ended: OrderedDict[str, list[Rows]] = field(default_factory=OrderedDict)

    def add(self, step: Sequence[Computed], rows: Rows) -> None:
        """Add the choices of one step's tokens, in the order of its requests."""
        if self._by_slot is None:  # unwritten pages take no memory
            self._by_slot = np.zeros((self.slots, *rows.shape[1:]), rows.dtype)
        at = 0
        for part in step:
            fresh = rows[at : at + part.count]
            at += part.count
            self._by_slot[part.slots[part.start :]] = fresh
            if part.asked:
                assert self._by_slot is not None
                kept = self._running.setdefault(part.request, [])
                have = sum(map(len, kept))
                if have < part.start:
                    kept.append(self._by_slot[part.slots[have : part.start]])
                    have = part.start
                if (new := fresh[have - part.start :]).size:
                    kept.append(new)

    def end(self, requests: Sequence[str]) -> None:
        """Mark requests as ended; their choices stay until read."""
        for request in requests:
            if (kept := self._running.pop(request, None)) is not None:
                self._ended[request] = kept
        while len(self._ended) > self.unread:  # cancelled requests are never read
            self._ended.popitem(last=False)

    def take(self, request: str, start: int, stop: int) -> Rows | None:
        """Remove a request and return the choices of its tokens [start, stop), as far as computed; None if unknown. vLLM's name
        of a request is `request-SUFFIX`."""
        for held in (self._ended, self._running):
            name = next((name for name in reversed(held) if name.rpartition("-")[0] == request or name == request), None)
            if name is not None:
                return np.concatenate(held.pop(name))[start:stop]
        return None
