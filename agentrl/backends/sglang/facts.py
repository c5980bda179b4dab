"""What a server says of itself, and why it cannot be used for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from agentrl.backends.sglang.http import Json, headers, read
from agentrl.config.schema import SglangConfig
from agentrl.errors import EngineError

MODEL, SERVER = "/model_info", "/server_info"


@dataclass(frozen=True, slots=True)
class Facts:
    """`context`: tokens that a prompt and its turn may have together; `workers`: the tensor-parallel ranks; `replicas`: its
    data-parallel copies of the model; `incremental`: whether the parts of a streamed answer have the new tokens only; `seeds`:
    whether its noise takes seeds."""

    address: str
    version: str
    model_type: str | None
    context: int
    workers: int
    replicas: int
    incremental: bool
    seeds: bool
    refused: tuple[str, ...]

    @classmethod
    def of(cls, address: str, model: Json, server: Json) -> Facts:
        """From the answers to MODEL and SERVER. Raises EngineError if a field is missing, as from another server."""
        try:
            return cls(
                address=address,
                version=str(server["version"]),
                model_type=model.get("model_type"),
                # A prompt must be shorter, and SGLang keeps a few more tokens for itself: below this all is within its limits.
                context=int(server["max_req_input_len"]),
                workers=int(server["tp_size"]),
                replicas=int(server["dp_size"]),
                incremental=bool(server["incremental_streaming_output"]),
                seeds=bool(server["enable_deterministic_inference"]),
                refused=tuple(_refused(model, server)),
            )
        except KeyError as missing:
            raise EngineError(f"{address}{MODEL} and {SERVER} do not give {missing}: is it SGLang 0.5.23 or newer?") from missing


def _refused(model: Json, server: Json) -> Iterator[str]:
    if not model["is_generation"]:
        yield "it serves a model that does not generate"
    if server["allow_auto_truncate"]:
        yield "--allow-auto-truncate cuts prompts that are too long without a word"
    if server["speculative_algorithm"]:
        yield "--speculative-algorithm: that the logprobs of drafted tokens are those of the policy was not checked"
    if server["disaggregation_mode"] != "null":
        yield f"--disaggregation-mode {server['disaggregation_mode']}: it must compute both prompts and answers"
    if server["skip_tokenizer_init"]:
        yield "--skip-tokenizer-init"  # its answers and stop conditions take another way through the server


def check(facts: Facts, cfg: SglangConfig, model_type: str | None) -> None:
    """Raise EngineError if the server cannot be used. `model_type`: of the run's model; None if it is not known."""
    where = f"sglang.servers: {facts.address} (SGLang {facts.version})"
    if facts.refused:
        raise EngineError(f"{where} cannot be used: {'; '.join(facts.refused)}")
    if model_type is not None and facts.model_type != model_type:
        raise EngineError(f"{where} serves a model of type {facts.model_type!r}, and the run's is {model_type!r}")
    if cfg.update == "http" and facts.replicas > 1:
        raise EngineError(
            f'{where} has --dp-size {facts.replicas}, with which it takes no weights in requests: use sglang.update = "files"'
        )
    if cfg.seeds and not facts.seeds:
        raise EngineError(
            f"{where} ignores seeds, so no run could be repeated: start it with --enable-deterministic-inference, or set "
            "sglang.seeds = false"
        )


def ask(address: str, cfg: SglangConfig, key: str | None) -> Facts:
    """The facts of a server, before a run and without an event loop. Raises EngineError if it cannot be reached."""
    answers = []
    for route in (MODEL, SERVER):
        try:
            answer = httpx.get(f"{address}{route}", headers=headers(key), timeout=cfg.timeout, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            why = f"no answer within {cfg.timeout:g} s" if isinstance(problem, httpx.TimeoutException) else problem
            raise EngineError(f"sglang.servers: {address}{route} cannot be reached: {why}") from problem
        answers.append(read(address, route, answer))
    return Facts.of(address, *answers)
