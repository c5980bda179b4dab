"""What is behind the stand-in: a tiny model that samples for real, in the embedded engine, with noise as SGLang's."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.engines.embedded.scheduler import Drawn, Request
from agentrl.engines.weights.base import Bucket
from agentrl.engines.weights.host_routes import MemorySender
from agentrl.rollout.engine import Sampling
from agentrl.utils.errors import AgentrlError


class Model:
    """Weights, requests by id, and their versions by name."""

    def __init__(self, folder: str) -> None:
        self.engine = EmbeddedEngine(folder, device="cpu", max_slots=96)
        self.plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.names = {0: "default"}
        eos = self.plain.config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self._cached = 0
        self._watched: dict[int, tuple[Request, int, asyncio.Event]] = {}

    async def start(self) -> None:
        await self.engine.start()
        batcher = self.engine._batcher
        assert batcher is not None
        settle = batcher.settle

        def watched(drawn: Drawn) -> None:
            settle(drawn)
            for request, tokens, event in self._watched.values():
                if len(request.logprobs) >= tokens:
                    event.set()

        batcher.settle = watched  # type: ignore[method-assign]

    async def until(self, request: Request, tokens: int) -> None:
        """Return once a request has that many tokens, or is over."""
        event = asyncio.Event()
        self._watched[id(event)] = (request, tokens, event)
        request.done.add_done_callback(lambda _: event.set())
        try:
            if not request.done.done() and len(request.logprobs) < tokens:
                await event.wait()
        finally:
            del self._watched[id(event)]

    def submit(self, rid: str, prompt: list[int], sampling: Sampling, seed: int | None) -> Request:
        """Queue a request. SGLang's noise is a function of seed and position."""
        start = len(prompt)
        if seed is None:
            uniforms = np.random.default_rng().random(sampling.max_tokens)
        else:
            uniforms = np.array([np.random.default_rng([seed, at]).random() for at in range(start, start + sampling.max_tokens)])
        done = asyncio.get_running_loop().create_future()
        request = Request(key=rid, tokens=list(prompt), prompt=start, sampling=sampling, uniforms=uniforms, done=done)
        batcher = self.engine._batcher
        assert batcher is not None
        batcher.waiting.append(request)
        self.engine._wake.set()
        return request

    def drop(self, request: Request) -> None:
        """Forget a request whose caller is gone."""
        if self.engine._batcher is not None:
            self.engine._batcher.drop(request)

    @property
    def requests(self) -> list[Request]:
        return [] if self.engine._batcher is None else self.engine._batcher.requests()

    def cached(self) -> int:
        """Prompt tokens found in a cache since the last call."""
        assert self.engine._batcher is not None
        now = self.engine._batcher.cached_tokens
        since, self._cached = now - self._cached, now
        return since

    def spans(self, request: Request) -> list[dict[str, object]]:
        """As SGLang names them: the version of each stretch of tokens, and one without tokens if there are none."""
        versions = request.versions
        cuts = [0, *(at for at in range(1, len(versions)) if versions[at] != versions[at - 1]), len(versions)]
        first = versions or [max(self.names)]
        return [{"version": self.names[first[a]], "start": a, "end": b} for a, b in pairwise(cuts)]

    @torch.inference_mode()
    def top(self, prompt: list[int], temperature: float, count: int) -> list[tuple[float, int, None]]:
        """The likeliest next tokens."""
        logits = self.plain(torch.tensor([prompt])).logits[0, -1].double()
        values, ids = (logits / temperature).log_softmax(-1).topk(count)
        return [(float(value), int(token), None) for value, token in zip(values, ids, strict=True)]

    async def load(self, folder: str, name: str | None) -> str:
        """Load the files of a folder; why not, or an empty text. Weights that these do not name stay as they are."""
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            return f"Failed to get weights iterator: Cannot find any model weights with `{folder}`."
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            tensors |= load_file(file)
        own = {key: value.detach() for key, value in self.plain.named_parameters(remove_duplicate=False)}
        for key, tensor in tensors.items():
            # SGLang's loaders pass over names that they do not know.
            if key in own and own[key].shape != tensor.shape:
                return f"Failed to update weights: {key}: {tuple(tensor.shape)}.\nRolling back to original weights."
        with torch.no_grad():
            for key, tensor in tensors.items():
                if key in own:
                    own[key].copy_(tensor)
        sender = MemorySender(1 << 26, 1)
        await self.engine.attach(sender.open())
        held = [(key, value.detach()) for key, value in self.plain.named_parameters()]

        async def buckets() -> AsyncIterator[Bucket]:
            for bucket in sender.buckets(iter(held)):
                assert bucket is not None
                yield bucket

        version = max(self.names) + 1
        try:
            await self.engine.receive(version, buckets())
        except AgentrlError as problem:
            return f"Failed to update weights: {problem}"
        finally:
            sender.close()
        # Without a new name SGLang's version does not change.
        self.names[version] = self.names[version - 1] if name is None else name
        return ""
