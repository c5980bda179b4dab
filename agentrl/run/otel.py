"""Spans to OpenTelemetry: exporter, batches and resource are those of the standard environment variables OTEL_*.

Attributes are those of the semantic conventions for generative AI where they have a name for it, else `agentrl.*`
(https://opentelemetry.io/docs/specs/semconv/gen-ai/).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, DependencyError
from agentrl.redaction import redact_said
from agentrl.spans import Kind, TraceSpan, Value, listen, now

PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
GROUP = "opentelemetry_traces_exporter"
FLUSH_MS = 10_000
OPERATIONS: Mapping[Kind, str] = {"episode": "invoke_agent", "generation": "text_completion", "tool": "execute_tool"}
NAMES: Mapping[Kind, Mapping[str, str]] = {
    "generation": {
        "input_tokens": "gen_ai.usage.input_tokens",
        "output_tokens": "gen_ai.usage.output_tokens",
        "temperature": "gen_ai.request.temperature",
        "top_p": "gen_ai.request.top_p",
        "top_k": "gen_ai.request.top_k",
        "max_tokens": "gen_ai.request.max_tokens",
    },
    "episode": {"key": "gen_ai.conversation.id"},
    "tool": {"call": "gen_ai.tool.call.id"},
    "scoring": {"reward": "gen_ai.evaluation.score.value"},
}
"""What our values of a span are called there."""


def check_traces(config: TrainConfig) -> None:
    """Raise a UserError if traces are asked for and cannot be exported.

    Reads: traces.
    """
    if config.traces is not None:
        _exporter()


class Traces:
    """Exports the spans that are sampled, from its making to `close`. `model`: the policy's name."""

    def __init__(self, model: str, engine: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        point, default = _exporter(), {"service.name": "agentrl"}
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._resource = Resource.create({} if named else default)
        self._processor = None if point is None else BatchSpanProcessor(point.load()())
        self._span, self._context, self._flags = ReadableSpan, SpanContext, TraceFlags(TraceFlags.SAMPLED)
        self._kinds, self._status, self._codes = SpanKind, Status, StatusCode
        self._scope = InstrumentationScope("agentrl")
        self._common = {"gen_ai.request.model": model, "gen_ai.provider.name": engine}
        self._leave = listen(self._finished)

    def close(self) -> None:
        """Export what waits, for a few seconds at most."""
        self._leave()
        if self._processor is not None:
            self._processor.force_flush(FLUSH_MS)
            self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _finished(self, found: TraceSpan) -> None:
        if not found.sampled or self._processor is None:
            return
        epoch = time.time_ns() - now()
        error = found.error or found.values.get("error")
        self._processor.on_end(
            self._span(
                name_of(found),
                context=self._place(found.trace, found.id),
                parent=self._place(found.trace, found.parent) if found.parent else None,
                resource=self._resource,
                attributes=attributes_of(found, self._common),
                kind=self._kinds.CLIENT if found.kind == "generation" else self._kinds.INTERNAL,
                instrumentation_scope=self._scope,
                status=self._status(self._codes.ERROR, redact_said(str(error))) if error else self._status(),
                start_time=found.begin + epoch,
                end_time=found.end + epoch,
            )
        )

    def _place(self, trace: int, span: int) -> Any:
        return self._context(trace, span, is_remote=False, trace_flags=self._flags)


def name_of(found: TraceSpan) -> str:
    """As the conventions name such spans: the operation, then what it is of."""
    operation = OPERATIONS.get(found.kind)
    if found.kind == "episode":
        return f"{operation} {found.values.get('env', '')}".strip()
    return found.name if operation is None else f"{operation} {found.name}"


def attributes_of(found: TraceSpan, common: Mapping[str, str]) -> dict[str, Value | tuple[str, ...]]:
    """`common`: those of every generation and episode."""
    named: dict[str, Value | tuple[str, ...]] = {"agentrl.kind": found.kind}
    operation = OPERATIONS.get(found.kind)
    if operation is not None:
        named |= {"gen_ai.operation.name": operation, **(common if found.kind != "tool" else {})}
    if found.kind == "tool":
        named |= {"gen_ai.tool.name": found.name, "gen_ai.tool.type": "function"}
    if found.kind == "scoring":
        named["gen_ai.evaluation.name"] = found.name
    if found.kind == "generation" and "finish" in found.values:
        named["gen_ai.response.finish_reasons"] = (str(found.values["finish"]),)
    if found.error:
        named["error.type"] = found.error.partition(":")[0]
    if found.place:
        named["agentrl.process"] = found.place
    known = NAMES.get(found.kind, {})
    named |= {known.get(key, f"agentrl.{key}"): value for key, value in found.values.items() if value is not None}
    return {key: redact_said(value) if isinstance(value, str) else value for key, value in named.items()}


def _exporter() -> EntryPoint | None:
    """The exporter that OTEL_TRACES_EXPORTER names (default: otlp); None for "none". Raises DependencyError if a package is
    missing, ConfigError for an exporter that nothing installed has."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise DependencyError("[traces] needs opentelemetry-sdk: pip install 'agentrl[otel]'")
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "none":
        return None
    if name == "otlp":
        spoken = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        protocol = spoken or "http/protobuf"
        if protocol not in PROTOCOLS:
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL = {protocol!r}: expected one of {', '.join(PROTOCOLS)}")
        name = PROTOCOLS[protocol]
    found = [point for point in entry_points(group=GROUP) if point.name == name]
    if not found:
        if name == PROTOCOLS["http/protobuf"]:
            raise DependencyError("[traces] needs opentelemetry-exporter-otlp-proto-http: pip install 'agentrl[otel]'")
        known = ", ".join(sorted({point.name for point in entry_points(group=GROUP)})) or "none"
        raise ConfigError(f"[traces]: no installed package has the OpenTelemetry exporter {name!r}; there are: {known}")
    return found[0]
