"""Traces of a run: timelines of single steps (`[profile]`), spans for OpenTelemetry (`[traces]`)."""

from __future__ import annotations

import gzip
import heapq
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.cluster.group import Shard, WorkerGroup
from agentrl.cluster.host import AROUND_CALLS
from agentrl.cluster.worker import Worker
from agentrl.config.schema import ProfileConfig, TracesConfig
from agentrl.run.trackers import TRACING, TrackedRun
from agentrl.utils.errors import ConfigError, DependencyError, WorkerError, need_package
from agentrl.utils.parsing import json_text
from agentrl.utils.redaction import redact_said
from agentrl.utils.spans import (
    Kind,
    TracePlace,
    TraceSpan,
    Value,
    add_listener,
    begin,
    finish,
    new_id,
    now,
    open_spans,
    set_place,
)
from agentrl.utils.threads import in_thread

# A timeline as a file

Event = tuple[int, int, str, str, dict[str, Any]]
"""Begin and end in nanoseconds, name, category, arguments."""
Track = tuple[str, str]
"""Names of a process and of a track in it."""
PLAYED = ("episode", "turn", "generation", "environment", "tool", "scoring")


class Timeline:
    """Collects events since `zero` (nanoseconds of the driver's clock); writes the longest `most` of them."""

    def __init__(self, zero: int, engine: str, most: int) -> None:
        self._zero, self._most = zero, most
        self._engine = f"engine {engine}"
        self._events: list[tuple[Track, Event]] = []

    def span(self, found: TraceSpan) -> None:
        """Add a span of the driver, or of a rollout worker with times on the driver's clock."""
        values = {key: value for key, value in found.values.items() if value is not None}
        if found.error:
            values["error"] = found.error
        if found.kind == "bucket" and found.track.endswith("engine"):
            track = self._engine, "buckets"
        elif found.kind in PLAYED and found.track != "groups":
            track = f"episodes in {found.place or 'the driver'}", found.track
        else:
            track = found.place or "driver", found.track
        self._events.append((track, (found.begin, found.end, found.name, found.kind, values)))

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the timeline, replacing an existing file only at the end. Raises OSError."""
        # Drop the shortest events: those that enclose them are longer and stay.
        kept = heapq.nlargest(self._most, self._events, key=lambda one: one[1][1] - one[1][0])
        tracks: dict[Track, list[Event]] = defaultdict(list)
        for place, event in kept:
            tracks[place].append(event)
        rows, ids, threads = self._turns(), dict[str, int](), count(1)
        for process, track in sorted(tracks):
            if process not in ids:
                ids[process] = len(ids) + 1
                rows.append(_name("process_name", ids[process], 0, process))
            for number, events in enumerate(lanes(tracks[process, track]), 1):
                thread = next(threads)
                rows.append(_name("thread_name", ids[process], thread, track if number == 1 else f"{track} ({number})"))
                for since, end, name, kind, values in events:
                    at = {"pid": ids[process], "tid": thread, "ts": (since - self._zero) / 1000, "dur": (end - since) / 1000}
                    rows.append({"ph": "X", **at, "name": name, "cat": kind, "args": values})
        about = {**about, "dropped_events": len(self._events) - len(kept)}
        text = json_text({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": about})
        aside = path.with_name(f".{path.name}")
        aside.write_bytes(gzip.compress(text.encode(), compresslevel=5))
        aside.replace(path)

    def _turns(self) -> list[dict[str, Any]]:
        """Return counter events of the number of turns in progress at the engine."""
        asked = [event for _, event in self._events if event[3] == "generation"]
        changes = sorted([*((since, 1) for since, *_ in asked), *((end, -1) for _, end, *_ in asked)])[: self._most]
        rows, running = [_name("process_name", 0, 0, f"{self._engine}: turns")] if asked else [], 0
        for when, change in changes:
            running += change
            values = {"ts": (when - self._zero) / 1000, "args": {"turns": running}}
            rows.append({"ph": "C", "pid": 0, "tid": 0, "name": "turns being sampled", **values})
        return rows


def lanes(events: list[Event]) -> list[list[Event]]:
    """Distribute a track's events over few lanes, so that those of a lane are nested or disjoint."""
    found: list[tuple[list[int], list[Event]]] = []
    for event in sorted(events, key=lambda one: (one[0], -one[1])):
        for open_until, lane in found:
            while open_until and open_until[-1] <= event[0]:
                open_until.pop()
            if not open_until or event[1] <= open_until[-1]:
                open_until.append(event[1])
                lane.append(event)
                break
        else:
            found.append(([event[1]], [event]))
    return [lane for _, lane in found]


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


# Calls of training roles, recorded by torch in the processes of the roles

_recording: tuple[Callable[[Worker, str], AbstractContextManager[None]], dict[str, Any]] | None = None
"""Recorder of this process's calls, and its profiles by file path."""


def begin_recording(prefix: str) -> None:
    """Start recording calls that compute on a batch with torch's profiler; file names start with `prefix`. Idempotent."""
    global _recording
    if _recording is None:
        load_profiler()
        profiles: dict[str, Any] = {}

        @contextmanager
        def record(worker: Worker, method: str) -> Iterator[None]:
            # Only calls that get a shard of a batch compute for long.
            if not isinstance(type(worker).dispatch_table.get(method), Shard):
                yield
                return
            import torch
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
            with profile(activities=activities, acc_events=True) as recorded:
                yield
            number = len(profiles) + 1
            profiles[f"{prefix}.{worker.context.group}.{worker.rank}.{number}.{method}.json.gz"] = recorded

        _recording = record, profiles
        AROUND_CALLS.append(_recording[0])


@cache
def load_profiler() -> None:
    """Load torch's profiler in the current thread, with its start and stop messages off. It warns of calls from other threads;
    loading it early keeps its load time out of the recorded calls."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        pass


def end_recording(write: bool = True) -> None:
    """Stop recording and write the recorded calls, once for all roles of this process."""
    global _recording
    if _recording is None:
        return
    (around, profiles), _recording = _recording, None
    AROUND_CALLS.remove(around)
    for path, profile in profiles.items() if write else ():
        profile.export_chrome_trace(path)


# Timelines of steps

log = logging.getLogger(__name__)

FOLDER = "profile"
MAX_EVENTS = 500_000
"""Events per timeline; the longest are kept, and the file has the number of dropped ones."""


class Profile:
    """Writes a timeline for each step in `profile.steps`; torch's profiler writes separate files for training roles. Listens to
    spans also before a step, for episodes that start earlier."""

    def __init__(
        self, run: TrackedRun, engine: str, groups: Callable[[], Sequence[WorkerGroup[Any]]], warn: Callable[[str], None]
    ) -> None:
        """`groups`: returns the current training roles."""
        config = run.config
        assert config.profile is not None
        self._config, self._cfg, self._folder = config, config.profile, run.folder.path / FOLDER
        self._groups, self._engine, self._warn = groups, engine, warn
        self._found: list[TraceSpan] = []
        self._leave: Callable[[], None] | None = None
        self._step, self._begun = 0, 0
        if config.cluster.backend == "inline":
            load_profiler()  # now, since later it would block the event loop of the episodes

    @property
    def listens(self) -> bool:
        """True if this profile needs spans now."""
        return self._leave is not None

    async def begin(self, step: int) -> None:
        """Prepare for update number `step`."""
        # Episodes of a step may have started up to `max_staleness` steps earlier.
        before = self._config.rollout.max_staleness
        wanted = any(one - before <= step <= one for one in self._cfg.steps)
        if wanted and self._leave is None:
            self._leave = add_listener(self._keep, all=True)
        elif not wanted:
            self.close()
        self._step = step if step in self._cfg.steps else 0
        if self._step:
            self._folder.mkdir(exist_ok=True)
            for group in self._groups():
                if not await group.in_processes(begin_recording, str(self._path())):
                    begin_recording(str(self._path()))  # the roles run in this process
            self._begun = now()

    def _path(self) -> Path:
        return self._folder / f"step_{self._step:06d}"

    async def end(self) -> None:
        """Write the timeline of the finished step, if one is due."""
        if not self._step:
            return
        ended, spans, self._found = now(), self._found, []
        spans += [replace(one, end=ended, values={**one.values, "unfinished": True}) for one in open_spans()]

        def write() -> None:
            timeline = Timeline(self._begun, self._engine, MAX_EVENTS)
            for found in spans:
                if found.end > self._begun:
                    timeline.span(found)
            about = {"run": self._config.name, "step": self._step, "began": time.time() - (now() - self._begun) / 1e9}
            timeline.write(Path(f"{self._path()}.json.gz"), {**about, "seconds": (ended - self._begun) / 1e9})

        try:
            for group in self._groups():
                await group.in_processes(end_recording)
            await in_thread("files", end_recording)
            await in_thread("files", write)
        except (OSError, ValueError, WorkerError) as problem:  # a lost timeline must not end the run
            log.exception("the timeline of step %d", self._step)
            self._warn(f"profile: the timeline of step {self._step} is not written: {problem}")
        self._step = 0

    def close(self) -> None:
        """Stop listening; an unfinished step has no timeline."""
        if self._step:
            end_recording(write=False)
            self._step = 0
        if self._leave is not None:
            self._leave()
            self._leave = None
        self._found = []

    def _keep(self, found: TraceSpan) -> None:
        if len(self._found) < 4 * MAX_EVENTS:
            self._found.append(found)


# OpenTelemetry

PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
GROUP = "opentelemetry_traces_exporter"
FLUSH_MS = 10_000
OPERATIONS: Mapping[Kind, str] = {"episode": "invoke_agent", "generation": "text_completion", "tool": "execute_tool"}
NAMES: Mapping[Kind, Mapping[str, str]] = {
    "generation": {name: f"gen_ai.usage.{name}" for name in ("input_tokens", "output_tokens")}
    | {name: f"gen_ai.request.{name}" for name in ("temperature", "top_p", "top_k", "max_tokens")},
    "episode": {"key": "gen_ai.conversation.id"},
    "tool": {"call": "gen_ai.tool.call.id"},
    "scoring": {"reward": "gen_ai.evaluation.score.value"},
}
"""OpenTelemetry attribute names of our span values, by kind of span."""


class Traces:
    """Exports the sampled spans until `close`. `model`: name of the policy."""

    def __init__(self, model: str, engine: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        point, default = _exporter(), {"service.name": "agentrl"}
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._resource = Resource.create({} if named else default)
        self._processor = None if point is None else BatchSpanProcessor(point.load()())
        self._common = {"gen_ai.request.model": model, "gen_ai.provider.name": engine}
        self._leave = add_listener(self._finish_span)

    def close(self) -> None:
        """Export the queued spans, for at most `FLUSH_MS`."""
        self._leave()
        if self._processor is not None:
            self._processor.force_flush(FLUSH_MS)
            self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _finish_span(self, found: TraceSpan) -> None:
        if not found.sampled or self._processor is None:
            return
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        epoch, flags = time.time_ns() - now(), TraceFlags(TraceFlags.SAMPLED)
        error = found.error or found.values.get("error")
        self._processor.on_end(
            ReadableSpan(
                name_of(found),
                context=SpanContext(found.trace, found.id, is_remote=False, trace_flags=flags),
                parent=SpanContext(found.trace, found.parent, is_remote=False, trace_flags=flags) if found.parent else None,
                resource=self._resource,
                attributes=attributes_of(found, self._common),
                kind=SpanKind.CLIENT if found.kind == "generation" else SpanKind.INTERNAL,
                instrumentation_scope=InstrumentationScope("agentrl"),
                status=Status(StatusCode.ERROR, redact_said(str(error))) if error else Status(),
                start_time=found.begin + epoch,
                end_time=found.end + epoch,
            )
        )


def name_of(found: TraceSpan) -> str:
    """Return a span's name by the OpenTelemetry conventions: operation, then its object."""
    operation = OPERATIONS.get(found.kind)
    if found.kind == "episode":
        return f"{operation} {found.values.get('env', '')}".strip()
    return found.name if operation is None else f"{operation} {found.name}"


def attributes_of(found: TraceSpan, common: Mapping[str, str]) -> dict[str, Value | tuple[str, ...]]:
    """Return a span's attributes. `common`: attributes of every generation and episode."""
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
    """Return the exporter that OTEL_TRACES_EXPORTER names (default: otlp), or None for "none". Raises DependencyError for a
    missing package, ConfigError for an exporter that no installed package has."""
    for package in ("opentelemetry", "opentelemetry.sdk"):
        need_package(package, "[traces] needs opentelemetry-sdk: pip install 'agentrl[otel]'")
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


# Listeners


@TRACING.register("steps")
class Tracing:
    """Begins and ends the spans of steps; the parts of a step open their own spans."""

    @classmethod
    def check(cls, steps: int, traces: TracesConfig | None, profile: ProfileConfig | None) -> None:
        """Raise a UserError if traces cannot be exported, or if `profile.steps` exceeds the run's steps."""
        if traces is not None:
            _exporter()
        if profile is not None and max(profile.steps) > steps:
            raise ConfigError(f"profile.steps = {profile.steps}: the run has steps = {steps}")

    def __init__(
        self, run: TrackedRun, engine: str, groups: Callable[[], Sequence[WorkerGroup[Any]]], warn: Callable[[str], None]
    ) -> None:
        config = self._config = run.config
        self._profile = None if config.profile is None else Profile(run, engine, groups, warn)
        self._traces = None if config.traces is None else Traces(config.model.path or config.name, engine)
        self._step: TraceSpan | None = None

    async def begin(self, step: int) -> None:
        """Begin the span of update number `step`, as the parent of spans in the caller's task."""
        if self._profile is not None:
            await self._profile.begin(step)
        traces = self._config.traces
        sampled = traces is not None and step % traces.every == 0
        if not sampled and not (self._profile is not None and self._profile.listens):
            return
        place = TracePlace(new_id(128), 0, "run", sampled, episodes=1.0 if traces is None else traces.episodes)
        self._step = begin("step", f"step {step}", place)
        self._step.set(step=step, run=self._config.name)
        set_place(place.within(self._step))

    async def end(self) -> None:
        """End the step's span, which includes its evaluation and the start of its checkpoint."""
        self._finish()
        if self._profile is not None:
            await self._profile.end()

    def close(self) -> None:
        """Close profile and traces; end the span of an unfinished step."""
        self._finish()
        if self._profile is not None:
            self._profile.close()
        if self._traces is not None:
            self._traces.close()

    def _finish(self) -> None:
        if self._step is not None:
            finish(self._step)
            self._step = None
            set_place(None)
