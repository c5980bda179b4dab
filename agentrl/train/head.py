"""From hidden states to logits, as a family's own forward does it: logits = c tanh((a s h W^T + s b) / c).

Families scale the hidden states (a) or the logits (s), or cap them (c), each under a config key of its own, by which some
multiply and others divide. So the rule is not read from configs but measured: the model's own forward runs on made-up hidden
states, with a stand-in for the backbone and one for the output embedding. That costs a few additions, needs no weights, and
fails for whatever this form cannot express. It says nothing about the backbone: that it returns what the head sees is for a
pass of the whole model to show (some families call a part of the backbone, `model.get_decoder()`, in its place).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ModelError
from agentrl.train.logprobs import PLAIN, HeadKernels, token_logprobs

_EXPONENTS = range(-20, 21)
"""Of the made-up logits, powers of two of either sign: the least are far below any cap, and the largest far above."""
_NEAR = 1e-5
"""The largest relative difference between a logit by the rule and the model's own; some families compute it in float32."""


@dataclass(frozen=True, slots=True)
class HeadRule:
    """`hidden` is what hidden states are multiplied by before the output embedding, `scale` what logits are multiplied by
    after it (its bias included), and `cap` bounds the scaled logits by cap tanh(x / cap)."""

    hidden: float = 1.0
    scale: float = 1.0
    cap: float | None = None

    def logprobs(
        self,
        hidden: Tensor,
        head: nn.Linear,
        targets: Tensor,
        temperature: float,
        *,
        entropy: bool = True,
        kernels: HeadKernels = PLAIN,
    ) -> tuple[Tensor, Tensor]:
        """`token_logprobs` of the model's logits after `hidden` [M, E]."""
        # With k = a s, c tanh((k x + s b) / c) / t is c/k tanh((x + b/a) / (c/k)) / (t/k): the products x = h W^T stay as they
        # are, and what is rounded in bfloat16 is not rounded again.
        factor = self.hidden * self.scale
        bias = None if head.bias is None else head.bias.float() / self.hidden
        return token_logprobs(
            hidden,
            head.weight.to(hidden.dtype),
            targets,
            temperature / factor,
            entropy=entropy,
            kernels=kernels,
            bias=bias,
            cap=None if self.cap is None else self.cap / factor,
        )

    def logits(self, products: Tensor) -> Tensor:
        """The model's logits for the output embedding's results."""
        scaled = products * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def head_rule(model: Any) -> HeadRule:
    """The rule of a causal language model, on whatever device its weights are.

    Raises ModelError, which names the family, if its logits are not of that form.
    """
    name = f"{type(model).__name__} ({getattr(model.config, 'model_type', 'no model_type')})"
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ModelError(f"{name} has no output embedding, so it is not a causal language model that can be trained here")
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        kind = f"{type(head).__module__}.{type(head).__qualname__}"  # an adapter's class is called Linear, too
        raise ModelError(f"{name}: its output embedding is a {kind}; only a plain linear layer is supported")
    hidden, products, seen, logits = _measured(model, head, name)
    before = _ratio(seen, hidden)
    if before is None or not before > 0:
        raise ModelError(f"{name}: between its last hidden states and its output embedding there is more than a scale")
    rule = _fitted(products, logits) if logits.shape == products.shape else None
    if rule is None or not rule.scale > 0:
        raise ModelError(f"{name}: its logits are neither a scale nor a tanh cap of its output embedding's results")
    return HeadRule(before, rule.scale, rule.cap)


def _ratio(found: Tensor, given: Tensor) -> float | None:
    """r if `found` = r `given`."""
    if found.shape != given.shape:
        return None
    factor = float(found.flatten()[0] / given.flatten()[0])
    return factor if torch.allclose(found, factor * given, rtol=_NEAR, atol=0.0) else None


def _fitted(products: Tensor, logits: Tensor) -> HeadRule | None:
    x, y = products.flatten(), logits.flatten()
    least, most = int(x.abs().argmin()), int(x.argmax())
    scale = float(y[least] / x[least])
    capped = not torch.isclose(y[most], scale * x[most], rtol=_NEAR, atol=0.0)
    rule = HeadRule(scale=scale, cap=float(y[most]) if capped else None)
    return rule if torch.allclose(rule.logits(x), y, rtol=_NEAR, atol=0.0) else None


def _measured(model: Any, head: nn.Linear, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Made-up hidden states and results of the output embedding; what the output embedding was given, and the logits."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class States(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:  # router logits, states of recurrent layers and the like: there are none
            return None

    # Numbers are needed, also if the caller makes everything else on the meta device (train/memory.py).
    with torch.device("cpu"):
        return _seen(model, head, name, States)


def _seen(model: Any, head: nn.Linear, name: str, states_of: type) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grid = torch.tensor([sign * 2.0**power for power in _EXPONENTS for sign in (1, -1)], dtype=torch.float64)
    vocab, width = head.weight.shape
    tokens = -(-len(grid) // vocab) + 1
    # Powers of two: a family may round them to its weights' type on the way.
    hidden = grid[torch.arange(tokens * width) % 8].reshape(1, tokens, width)
    products = grid[torch.arange(tokens * vocab) % len(grid)].reshape(1, tokens, vocab)
    seen: list[Tensor] = []

    def embedding(states: Tensor) -> Tensor:
        seen.append(states.double())
        return products.clone()

    with ExitStack() as stack, torch.no_grad():
        for part in {id(part): part for part in (backbone(model), _decoder(model)) if part is not None}.values():
            stack.enter_context(_instead(part, lambda *_, **__: states_of(last_hidden_state=hidden)))
        stack.enter_context(_instead(head, embedding))
        try:
            found = model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).logits
        except Exception as error:  # whatever a family's own code raises on states that its backbone did not compute
            raise ModelError(f"{name}: how it gets logits from hidden states cannot be measured ({error})") from error
    if len(seen) != 1:
        raise ModelError(f"{name}: its forward pass applies its output embedding {len(seen)} times, not once")
    return hidden, products, seen[0], found.double().cpu()


def backbone(model: Any) -> Any:
    """The part of a transformers model that makes the last hidden states."""
    # `base_model` is the model itself if its prefix, as that of Llama 4's text model, names a part of a larger model.
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def _decoder(model: Any) -> Any:
    """The part that some families call in place of the base model that holds it."""
    try:
        found = model.get_decoder()
    except (AttributeError, NotImplementedError):
        return None
    return None if found is model else found


@contextmanager
def _instead(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """In this context, calls of `module` are calls of `function`."""
    own = module.__dict__.get("forward")
    module.forward = function
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
