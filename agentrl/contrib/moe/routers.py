"""Experts of each token in a transformers mixture-of-experts model: reported, counted, or dictated.

A router scores all experts for each token and takes the `k` with the highest scores, by one `torch.topk` over a [tokens, experts]
tensor; what it does with the scores before and after differs between families (softmax over all or over the chosen ones,
sigmoids, a bias for the choice alone, groups, renormalization). `Routers` stands in for that one call and leaves all else as it
is: if choices are dictated, the values that it returns are the scores of the dictated experts, so that their gates are
computed from the current scores, and their gradient flows to the router.
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
"""Arguments of vLLM with which a step's tokens are spread over processes, computed in vain, or come from elsewhere."""


class _Router(TorchFunctionMode):
    """One layer's router, which stands in for its topk while its forward runs. `asked` returns what all routers are to choose,
    [tokens, routers, k], or None; `told` is called with what it chose; `strict`: it is an error if that cannot be seen."""

    def __init__(self, name: str, module: nn.Module, layer: int, experts: int, asked: Asked) -> None:
        super().__init__()
        self.name, self.module, self.layer, self.experts, self.asked = name, module, layer, experts, asked
        self.dictated: Tensor | None = None
        self.told: Callable[[Tensor], None] | None = None
        self.strict = False
        self._choices = 0
        self._masked: tuple[Tensor, Tensor] | None = None

    def wrap(self) -> None:
        """Let the module's forward pass run under this object from now on."""
        plain = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            every = self.asked()
            self.dictated = None if every is None else every[:, self.layer]
            if self.dictated is None and self.told is None:
                return plain(*args, **kwargs)
            self._choices = 0
            with self:
                out = plain(*args, **kwargs)
            self._masked = None  # else it would hold the pass's graph
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
                scores = self._masked[1]  # a mask says what may be chosen; the score of a dictated expert is the one before it
            return self.chose(scores, out)
        if func in (torch.Tensor.masked_fill, torch.masked_fill) and self._over_experts(args[0]):
            self._masked = (out, args[0])
        return out

    def _over_experts(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[-1] == self.experts

    def chose(self, scores: Tensor, own: Any) -> Any:
        """Result of the router's topk: `own`, or the dictated experts with their `scores`."""
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
        if self.told is not None:
            self.told(indices)
        return own


class Routers:
    """The routers of a model, in the order of its layers; a dense model has none. Make it before modules are wrapped or sharded;
    it stays valid then. `problem`: why the choices of this mixture of experts can be neither reported nor dictated, or "".

    `asked`: called whenever a router computes, also when a checkpointed layer is computed again for the backward pass; returns
    what all routers are to choose, [tokens, routers, k] uint8 or int16, or None."""

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
        """The most experts that a layer has."""
        return max(router.experts for router in self._routers)

    @contextmanager
    def tell(self, told: Callable[[int, Tensor], None], strict: bool = True) -> Iterator[None]:
        """Call `told(router, indices [tokens, k])` for each router's choice meanwhile. Raises ModelError in a pass in which
        that cannot be seen, if `strict`."""
        for router in self._routers:
            router.told, router.strict = partial(told, router.layer), strict
        try:
            yield
        finally:
            for router in self._routers:
                router.told, router.strict = None, False

    def probe(self) -> None:
        """Raise ModelError if choices can be neither reported nor dictated. For a model on the meta device: computes nothing."""
        if self.problem:
            self.check(torch.empty(0))
        with self.tell(lambda *_: None):
            for router in self._routers:
                [width] = {p.shape[1] for p in router.module.parameters() if p.dim() == 2 and p.shape[0] == router.experts}
                router.module(torch.empty(2, width, device="meta"))

    def check(self, dictated: Tensor) -> None:
        """Raise ModelError for choices of another model, [tokens, routers, k], and for a model whose choices cannot be
        dictated."""
        if self.problem:
            raise ModelError(f"{self.problem}: its choices cannot be repeated; set rollout.router_replay = false")
        if dictated.dim() != 3 or dictated.shape[1] != len(self):
            raise ModelError(f"choices of shape {tuple(dictated.shape)} for a model with {len(self)} routers")


def _found(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, int]]:
    """Name, router and number of experts of each mixture of experts; a router that is not known is None."""
    for name, block in model.named_modules():
        stacked = [child for child in block.children() if _experts(child)]
        if len(stacked) != 1:
            continue
        experts = _experts(stacked[0])
        others = [(key, child) for key, child in block.named_children() if child is not stacked[0]]
        # A router scores that many experts, by one row of a matrix each.
        routers = [(k, one) for k, one in others if any(p.dim() == 2 and p.shape[0] == experts for p in one.parameters())]
        if len(routers) == 1:
            yield f"{name}.{routers[0][0]}", routers[0][1], experts
        else:
            yield name, None, experts


def _experts(module: nn.Module) -> int:
    """Number of experts that a module holds in one tensor [experts, out, in]; 0 if it is something else."""
    if not type(module).__name__.endswith("Experts"):
        return 0
    counts = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3}
    return counts.pop() if len(counts) == 1 else 0


class RouterWatch:
    """Notes which experts the tokens of a pass go to."""

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
        """Note those of the pass inside."""
        self._seen = []
        with self.routers.tell(lambda _, indices: self._seen.append(indices)):
            yield

    def experts(self) -> npt.NDArray[Any]:
        """Those of the pass that was watched last: [tokens, routers, k], uint8 or int16."""
        return torch.stack(self._seen, dim=1).to(narrow(self.routers.experts)).cpu().numpy()


def load_metrics(counts: np.ndarray) -> dict[str, float]:
    """Evenness of the experts' use, means over layers of `counts` [routers, experts]: `experts_max_violation`, the largest load
    over the mean load less 1 (MaxVio, Wang et al. 2024, arXiv:2408.15664; 0: even); `experts_entropy`, the entropy of the
    shares over that of even ones (1: even); `experts_unused`, the share of experts that no token went to."""
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
    """One rank's routers. `counts`: choices of each expert of each router, float64 [routers, experts], on the routers' device."""

    def __init__(self, routers: Routers, group: Ulysses | None) -> None:
        self._routers, self._group = routers, group
        self.counts: Tensor | None = None

    @contextmanager
    def passing(self, micro: Micro) -> Iterator[None]:
        """Around a forward pass over `micro`, as the caller gave it. Passes with gradient are counted, unless nothing in them is
        trained, as in the dummy of a rank that has no more rows. Raises ModelError if choices to repeat do not fit the model."""
        if micro.experts is not None:
            self._routers.check(micro.experts)
        if torch.is_grad_enabled() and len(micro.targets):
            first, stop = 0, (tokens := len(micro.input_ids))
            if self._group is not None:  # those of this rank; what pads its share comes after them
                local = self._group.slice_of(tokens + -tokens % self._group.size)
                first, stop = min(tokens, local.start), min(tokens, local.stop)
            # A shared prefix counts for each of its rows: how often it is computed hangs on ranks and micro-batches.
            with self.counting(stop - first, None if micro.row_counts is None else micro.row_counts[first:stop]):
                yield
        else:
            yield

    @contextmanager
    def counting(self, tokens: int, times: Tensor | None = None) -> Iterator[None]:
        """Count the chosen experts of the first `tokens` tokens of a pass; the rest is padding. `times` int64 [tokens]: how often
        each counts; None: once."""

        def count(layer: int, indices: Tensor) -> None:
            if self.counts is None:
                self.counts = torch.zeros(len(self._routers), self._routers.experts, dtype=torch.float64, device=indices.device)
            chosen = indices[:tokens]
            once = torch.ones_like(chosen, dtype=torch.float64)
            weights = once if times is None else once * times[:, None]
            # Not bincount, which makes the host wait for a GPU.
            self.counts[layer].scatter_add_(0, chosen.reshape(-1), weights.reshape(-1))

        with self._routers.tell(count, strict=False):
            yield

    def take_load(self) -> Tensor:
        """Number of choices of each expert since the last call: float64 [routers, experts] on the host, over the ranks that
        share tokens."""
        counts, self.counts = self.counts, None
        if counts is None:
            counts = torch.zeros(len(self._routers), self._routers.experts, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(counts, group=self._group.group)
        return counts.cpu()


def routing_of(model: nn.Module, group: Ulysses | None) -> Routing | None:
    """The model's routers, if it has any. Make it before sharding: the routers stay valid."""
    # The routers read the request of the current pass, or of its recomputation.
    routers = Routers(model, lambda: None if (packed := layout()) is None else packed.experts)
    return Routing(routers, group) if len(routers) else None


def check_model(model: nn.Module, name: str) -> None:
    """Raise ConfigError for a model on the meta device whose choices cannot be repeated."""
    routers = Routers(model)
    if not len(routers) and not routers.problem:
        raise ConfigError(f"rollout.router_replay: {name} is a dense model, which has no routers; set it to false")
    try:
        routers.probe()
    except ModelError as problem:
        raise ConfigError(f"rollout.router_replay: {name}: {problem}") from None


def check_vllm(vllm: VllmConfig) -> None:
    """Raise ConfigError for keys of vLLM with which choices are not all seen."""
    for name in NOT_REPLAYED:
        if name in vllm.args:
            raise ConfigError(
                f"vllm.args.{name}: with rollout.router_replay each process must see which experts all tokens of a request "
                "go to, each once; unset one of the two"
            )


@ROUTERS.register("topk")
def topk_routers() -> RouterCode:
    """The code for routers that choose by one `torch.topk`."""
    receiver = "agentrl.contrib.moe.vllm_worker.ExpertReceiver"
    return RouterCode(check_model, check_vllm, receiver, RouterWatch, routing_of, load_metrics)


# Experts of each token of a request, as the steps of an engine report them
#
# A request keeps the choices of each of its tokens as they were computed *first*: a recomputation, after a publish or a
# preemption, may go elsewhere, and later tokens were sampled with the first. Tokens that the prefix cache gave were computed for
# an earlier request; theirs are found by the cache's slots, where they lie next to the keys and values.


Rows = npt.NDArray[Any]
"""[tokens, routers, k], uint8 or int16."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A step's result for one request: `count` tokens from position `start` on, and the cache slots of all its tokens up to
    there. `asked`: whether its choices will be asked for."""

    request: str
    start: int
    count: int
    slots: npt.NDArray[np.int64]
    asked: bool


@dataclass(slots=True)
class ExpertLog:
    """The choices of requests. `slots`: of the whole KV cache; `unread`: how many ended requests are kept for whoever asks."""

    slots: int
    unread: int = 1024
    _by_slot: Rows | None = None
    _running: dict[str, list[Rows]] = field(default_factory=dict)
    _ended: OrderedDict[str, list[Rows]] = field(default_factory=OrderedDict)

    def add(self, step: Sequence[Computed], rows: Rows) -> None:
        """The choices of one step's tokens, in the order of its requests."""
        if self._by_slot is None:  # pages that are never written take no memory
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
        """These requests are over."""
        for request in requests:
            if (kept := self._running.pop(request, None)) is not None:
                self._ended[request] = kept
        while len(self._ended) > self.unread:  # of requests that were cancelled
            self._ended.popitem(last=False)

    def take(self, request: str, start: int, stop: int) -> Rows | None:
        """The choices of a request's tokens [start, stop), or as many as were computed; None if it is not known. vLLM calls a
        request `request-SUFFIX`."""
        for held in (self._ended, self._running):
            name = next((name for name in reversed(held) if name.rpartition("-")[0] == request or name == request), None)
            if name is not None:
                return np.concatenate(held.pop(name))[start:stop]
        return None
