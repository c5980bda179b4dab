"""Traces of a run: timelines of single steps (`[profile]`), OpenTelemetry (`[traces]`)."""

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
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.cluster.group import Shard, WorkerGroup
from agentrl.cluster.host import AROUND_CALLS
from agentrl.cluster.worker import Worker
from agentrl.config.schema import ProfileConfig, TracesConfig
from agentrl.run.trackers import TRACING, TrackedRun
from agentrl.utils.errors import ConfigError, DependencyError, WorkerError
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
"""Begin and end in nanoseconds, name, category and arguments."""
Track = tuple[str, str]
"""Process and track, as they are named."""
PLAYED = ("episode", "turn", "generation", "environment", "tool", "scoring")


class Timeline:
    """Collects what happened since `zero`, in nanoseconds of the driver's clock; at most `most` events, the longest."""

    def __init__(self, zero: int, engine: str, most: int) -> None:
        self._zero, self._most = zero, most
        self._engine = f"engine {engine}"
        self._events: list[tuple[Track, Event]] = []

    def span(self, found: TraceSpan) -> None:
        """Add a span of the driver, or of a rollout worker in the driver's time."""
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
        """The file; one of that name is replaced at the end. Raises OSError."""
        # The shortest are left out: what they lie in is longer and stays.
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
        """Number of turns asked of the engine at each moment, as a counter."""
        asked = [event for _, event in self._events if event[3] == "generation"]
        changes = sorted([*((since, 1) for since, *_ in asked), *((end, -1) for _, end, *_ in asked)])[: self._most]
        rows, running = [_name("process_name", 0, 0, f"{self._engine}: turns")] if asked else [], 0
        for when, change in changes:
            running += change
            values = {"ts": (when - self._zero) / 1000, "args": {"turns": running}}
            rows.append({"ph": "C", "pid": 0, "tid": 0, "name": "turns being sampled", **values})
        return rows


def lanes(events: list[Event]) -> list[list[Event]]:
    """The events of a track in as few lanes as needed for each to lie in or after the others of its lane."""
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


# Calls of training roles, recorded by torch in the processes that they are in

_recording: tuple[Callable[[Worker, str], AbstractContextManager[None]], dict[str, Any]] | None = None
"""Recorder of this process's calls, and its profiles by the files that they become."""


def begin_recording(prefix: str) -> None:
    """From now on, have torch record the calls that compute on a batch, for files whose names begin with `prefix`. Idempotent."""
    global _recording
    if _recording is None:
        load_profiler()
        profiles: dict[str, Any] = {}

        @contextmanager
        def record(worker: Worker, method: str) -> Iterator[None]:
            # Only a call that gets a part of a batch computes for long.
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
    """Load torch's profiler, in the thread that asks first: it complains about calls of other threads, and would time them with
    it. Its notes of every start and stop go nowhere."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        pass


def end_recording(write: bool = True) -> None:
    """Record no more, and write the recorded calls, once for all roles of this process."""
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
"""Of one timeline: the longest are kept, and the file counts the others."""


class Profile:
    """Listens before and during the steps of `profile.steps`, and writes a timeline for each; of the calls of its training roles
    torch writes files of its own."""

    def __init__(
        self, run: TrackedRun, engine: str, groups: Callable[[], Sequence[WorkerGroup[Any]]], warn: Callable[[str], None]
    ) -> None:
        """`groups`: the training roles that there are."""
        config = run.config
        assert config.profile is not None
        self._config, self._cfg, self._folder = config, config.profile, run.folder.path / FOLDER
        self._groups, self._engine, self._warn = groups, engine, warn
        self._found: list[TraceSpan] = []
        self._leave: Callable[[], None] | None = None
        self._step, self._begun = 0, 0
        if config.cluster.backend == "inline":
            load_profiler()  # now, and not on the event loop while episodes wait for it

    @property
    def listens(self) -> bool:
        """True if spans are to be made."""
        return self._leave is not None

    async def begin(self, step: int) -> None:
        """Update number `step` begins."""
        # Episodes of a step may have begun as many steps before as their weights may be old.
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
                    begin_recording(str(self._path()))  # its roles are in this process
            self._begun = now()

    def _path(self) -> Path:
        """The timeline's path, without its ending."""
        return self._folder / f"step_{self._step:06d}"

    async def end(self) -> None:
        """Write the timeline, if the step that is over is to have one."""
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
        except (OSError, ValueError, WorkerError) as problem:  # a run does not end because nobody can look at it
            log.exception("the timeline of step %d", self._step)
            self._warn(f"profile: the timeline of step {self._step} is not written: {problem}")
        self._step = 0

    def close(self) -> None:
        """Listen no more; a step that was left in the middle has no timeline."""
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
"""What our values of a span are called there."""


class Traces:
    """Exports the spans that are sampled, from its making to `close`. `model`: the policy's name."""

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
        """Export what waits, for a few seconds at most."""
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


# Listeners


@TRACING.register("steps")
class Tracing:
    """Begins and ends the spans of steps; their parts open their own."""

    @classmethod
    def check(cls, steps: int, traces: TracesConfig | None, profile: ProfileConfig | None) -> None:
        """Raise a UserError if traces cannot be exported, or a timeline is asked for of a step that the run has not."""
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
        """Update number `step` begins, in the caller's task."""
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
        """The step is over, with its evaluation and the beginning of its checkpoint."""
        self._finish()
        if self._profile is not None:
            await self._profile.end()

    def close(self) -> None:
        """The run is over; a step that was left in the middle ends here."""
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
