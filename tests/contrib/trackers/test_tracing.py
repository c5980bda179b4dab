"""One small run in OpenTelemetry, Prometheus and a timeline: each says what was really done, and when."""

import gzip
import json
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import torch
from tensordict import TensorDict

from agentrl.cluster.group import Shard
from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Broadcast, Strategy, Worker
from agentrl.config.load import config_from
from agentrl.config.schema import PrometheusConfig
from agentrl.contrib.trackers import tracing as otel
from agentrl.contrib.trackers.prometheus import MetricsEndpoint, metric_of_key
from agentrl.contrib.trackers.tracing import Timeline, Tracing, attributes_of, lanes, name_of
from agentrl.data.trajectory import Trajectory
from agentrl.run.assembly import RunStart
from agentrl.run.folder import RunFolder
from agentrl.run.run_log import RunLog
from agentrl.run.trackers import TRACKERS, TrackedRun, Tracker, check_trackers
from agentrl.utils.errors import ConfigError, DependencyError, ResourceError
from agentrl.utils.redaction import remember
from agentrl.utils.spans import TraceSpan, here
from tests.conftest import proof
from tests.e2e.inside import config_of, episodes, execute, updates
from tests.rollout.loopback import LoopbackServer
from tests.run.timelines import Shown, check_update, inside, nested, read

TINY = "model.init={layers=1,hidden=16,mlp=16,heads=2,kv_heads=1,head_dim=8}"


@dataclass(frozen=True)
class Told:
    """A run's folder, and the spans that the collector got, as OTLP's own messages."""

    folder: Path
    spans: list[Any]
    service: str
    scraped: list[str]


@TRACKERS.register("tracing_lossy")
class Lossy(Tracker):
    """Takes no row of step 2."""

    def __init__(self, run: TrackedRun) -> None:
        pass

    def row(self, phase: str, step: int, values: Any) -> None:
        if step == 2:
            raise ConnectionError("lost")

    def close(self, status: str, summary: Any) -> None:
        pass


class Collector(LoopbackServer):
    """An OTLP endpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        assert handler.path == "/v1/traces"
        self.bodies.append(gzip.decompress(body) if handler.headers.get("Content-Encoding") == "gzip" else body)
        self.send(handler, "")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs agentrl[otel]")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs agentrl[otel]")
    with Collector() as server, pytest.MonkeyPatch.context() as patch:
        for name in ("OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
            patch.delenv(name, raising=False)
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url.removesuffix("/v1"))
        port = free_port()
        every = ("traces={every=2}", "profile.steps=[2]", "eval.every=2", "checkpoint.every=2", "eval.tasks=2")
        more = (*every, "health.lint=false", f"prometheus.port={port}", "trackers=[{name='tracing_lossy'}]")
        scraped, evaluation = list[str](), RunLog.evaluation

        async def scraping(run_log: RunLog, phase: str, *args: Any) -> None:
            await evaluation(run_log, phase, *args)
            if phase == "after":  # the run goes on, and its loop answers
                async with httpx.AsyncClient(trust_env=False) as client:
                    scraped.append((await client.get(f"http://127.0.0.1:{port}/metrics")).text)

        patch.setattr(RunLog, "evaluation", scraping)
        folder = execute(config_of(tmp_path_factory.mktemp("traced"), "traced", "steps=3", TINY, *more))
    messages = [proto.ExportTraceServiceRequest.FromString(body) for body in server.bodies]
    resources = [resource for message in messages for resource in message.resource_spans]
    [service] = {a.value.string_value for r in resources for a in r.resource.attributes if a.key == "service.name"}
    yield Told(folder, [one for r in resources for scope in r.scope_spans for one in scope.spans], service, scraped)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def values(one: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(inner) for inner in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {attribute.key: plain(attribute.value) for attribute in one.attributes}


def test_a_traced_step_is_one_trace_with_a_span_of_everything(run: Told) -> None:
    traces: dict[bytes, list[Any]] = defaultdict(list)
    for one in run.spans:
        traces[one.trace_id].append(one)
    roots = {one.name: trace for trace, spans in traces.items() for one in spans if not one.parent_span_id}
    assert sorted(roots) == ["evaluation", "step 2"]
    assert run.service == "agentrl" and len(traces) == 3  # before, step 2 of 3, after
    step = traces[roots["step 2"]]
    ids = {one.span_id: one for one in step}
    kinds = {one.span_id: values(one)["agentrl.kind"] for one in step}
    lies_in = {(kinds[one.span_id], kinds.get(one.parent_span_id)) for one in step}
    assert lies_in >= {
        ("step", None), ("rollout", "step"), ("batch", "step"), ("update", "step"), ("publish", "step"), ("log", "step"),
        ("evaluation", "step"), ("checkpoint", "step"), ("episode", "rollout"), ("episode", "evaluation"),
        ("turn", "episode"), ("generation", "turn"), ("environment", "turn"), ("tool", "environment"), ("scoring", "episode"),
        ("call", "update"), ("bucket", "publish"), ("environment", "episode"),
    }  # fmt: skip
    for one in step:  # what ended before the step did lies in its parent's time too
        parent = ids.get(one.parent_span_id)
        assert one.start_time_unix_nano <= one.end_time_unix_nano
        if parent is not None and kinds[one.span_id] != "checkpoint":
            assert parent.start_time_unix_nano - 1000 <= one.start_time_unix_nano <= parent.end_time_unix_nano + 1000
    [root] = [one for one in step if not one.parent_span_id]
    assert values(root)["agentrl.step"] == 2 and values(root)["agentrl.run"] == "traced"


def test_what_spans_say_is_what_the_trajectories_say(run: Told) -> None:
    [trace] = {one.trace_id for one in run.spans if one.name == "step 2"}
    spans = [one for one in run.spans if one.trace_id == trace]
    by_id = {one.span_id: one for one in spans}
    played = {values(one)["gen_ai.conversation.id"]: one for one in spans if values(one)["agentrl.kind"] == "episode"}
    rolled = {key: one for key, one in played.items() if key.startswith("g")}
    members = episodes(run.folder, 2)
    assert len(members) == len(rolled) == 12 and len(played) == 14
    rewards = sorted((values(one)["agentrl.task"], values(one)["agentrl.reward"]) for one in rolled.values())
    assert rewards == sorted((t.task.id, t.reward) for t in members)

    def of(kind: str) -> list[Any]:
        inside = [one for one in spans if values(one)["agentrl.kind"] == kind]
        return [one for one in inside if episode_of(one, by_id) in {each.span_id for each in rolled.values()}]

    turns = sum(len(t.turns) for t in members)
    assert len(of("generation")) == len(of("turn")) == turns
    assert sum(values(one)["gen_ai.usage.output_tokens"] for one in of("generation")) == sum(t.sampled_tokens for t in members)
    called = sorted(result.name or "tool" for t in members for turn in t.turns for result in turn.results)
    assert sorted(values(one)["gen_ai.tool.name"] for one in of("tool")) == called and called
    one = of("generation")[0]
    assert one.name == "text_completion turn" and values(one)["gen_ai.operation.name"] == "text_completion"
    assert values(one)["gen_ai.request.max_tokens"] == 24 and values(one)["gen_ai.provider.name"] == "embedded"
    assert one.kind == 3, "a client's"  # SPAN_KIND_CLIENT
    assert {one.name for one in rolled.values()} == {"invoke_agent key_value"}


def episode_of(one: Any, by_id: dict[bytes, Any]) -> bytes | None:
    while one is not None and values(one)["agentrl.kind"] != "episode":
        one = by_id.get(one.parent_span_id)
    return None if one is None else bytes(one.span_id)


def test_the_names_of_attributes_are_those_of_the_conventions() -> None:
    known = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes", reason="needs agentrl[otel]")
    official = {value for name, value in vars(known).items() if name.startswith("GEN_AI_") and isinstance(value, str)}
    used = {name for names in otel.NAMES.values() for name in names.values()}
    for kind in ("episode", "generation", "tool", "scoring"):
        one = TraceSpan(kind, "x", 1, 2, 0, 0, "run", True)  # type: ignore[arg-type]
        one.set(finish="stop")
        used |= set(attributes_of(one, {"gen_ai.request.model": "m", "gen_ai.provider.name": "e"}))
    assert {name for name in used if name.startswith("gen_ai")} <= official
    operations = {value.value for value in known.GenAiOperationNameValues}
    assert set(otel.OPERATIONS.values()) <= operations
    failed = TraceSpan("tool", "look", 1, 2, 0, 0, "run", True, error="EnvError: gone")
    assert (name_of(failed), attributes_of(failed, {})["error.type"]) == ("execute_tool look", "EnvError")


# -- timelines ---------------------------------------------------------------------------------------


def test_a_timeline_has_every_episode_and_its_parts_lie_in_the_step(run: Told) -> None:
    file = run.folder / "profile" / "step_000002.json.gz"
    shown = read(file)
    check_update(file)
    check_timeline(shown, episodes(run.folder, 2), updates(run.folder)[1])
    assert (shown.about["run"], shown.about["step"], shown.about["dropped_events"]) == ("traced", 2, 0)
    step = shown.one("driver", "run", "step 2")
    assert [inside(shown.one("driver", "run", name), step) for name in ("evaluation", "checkpoint")] == [True, True]
    assert {name for process, name in shown.tracks if process == "episodes in the driver"} >= {"heldout0.m0", "heldout1.m0"}
    counts = [event["args"]["turns"] for event in shown.of("engine embedded: turns")]
    assert 1 <= max(counts) <= 12 and min(counts) == 0 == counts[-1]


def check_timeline(shown: Shown, members: list[Trajectory], row: dict[str, Any]) -> None:
    """That of step 2 of a run with `members` and its metrics."""
    assert all(nested([e for e in events if e["ph"] == "X"]) for events in shown.tracks.values())
    step = shown.one("driver", "run", f"step {row['step']}")
    parts = [shown.one("driver", "run", name) for name in ("rollout", "batch", "update", "publish", "log")]
    assert all(inside(part, step) for part in parts)
    assert sum(part["dur"] for part in parts) <= step["dur"]
    for part in parts[:4]:  # the clock of the metrics row saw the same
        assert part["dur"] / 1e6 == pytest.approx(row[f"time/{part['name']}_s"], abs=0.02)
    played = [events for (at, name), events in shown.tracks.items() if at.startswith("episodes in") and name.startswith("g")]
    whole = {e["args"]["key"]: e["args"] for events in played for e in events if e["cat"] == "episode"}
    assert sorted((e["task"], e["tokens"]) for e in whole.values()) == sorted((t.task.id, t.sampled_tokens) for t in members)
    turns = [e for events in played for e in events if e["cat"] == "turn"]
    assert len(turns) == sum(len(t.turns) for t in members)
    assert {at for at, name in shown.tracks if name.startswith("g")} == {"episodes in the driver"}
    buckets = [e for (at, name), events in shown.tracks.items() if "buckets" in name for e in events]
    publish = shown.one("driver", "run", "publish")
    assert buckets and all(inside(event, publish, 1.0) for event in buckets)


def test_what_overlaps_on_a_track_gets_lanes_and_what_is_too_much_is_left_out_and_counted(tmp_path: Path) -> None:
    def event(begin: int, end: int) -> Any:
        return (begin, end, f"{begin}-{end}", "tool", {})

    found = lanes([event(5, 9), event(0, 10), event(1, 4), event(2, 6), event(4, 5), event(10, 12)])
    assert [[name for _, _, name, _, _ in lane] for lane in found] == [["0-10", "1-4", "4-5", "5-9", "10-12"], ["2-6"]]
    timeline = Timeline(0, "embedded", 5)
    for number in range(10):
        timeline.span(TraceSpan("tool", f"t{number}", 1, number + 1, 0, 100 * number, "g0", True, end=100 * number + number + 1))
    timeline.write(tmp_path / "few.json.gz", {})
    shown = read(tmp_path / "few.json.gz")
    assert [event["name"] for event in shown.of("episodes in the driver")] == ["t5", "t6", "t7", "t8", "t9"]
    assert shown.about["dropped_events"] == 5


# -- Prometheus --------------------------------------------------------------------------------------


def scraped(text: str) -> tuple[dict[str, Any], dict[tuple[str, Any], float]]:
    """The families of a scrape by name, and its samples by name and labels."""
    parser = pytest.importorskip("prometheus_client.parser", reason="needs agentrl[prometheus]")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    return families, {(s.name, tuple(sorted(s.labels.items()))): s.value for one in families.values() for s in one.samples}


def test_a_scrape_says_what_the_rows_say(run: Told) -> None:
    [text] = run.scraped
    families, found = scraped(text)

    def of(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    trained, last = updates(run.folder), updates(run.folder)[-1]
    assert of("agentrl_updates_total") == 3 and of("agentrl_weights_version") == 3 and of("agentrl_restarts_total") == 0
    assert of("agentrl_episodes_total", phase="train") == sum(row["scored"] + row["unscored"] for row in trained) == 36
    assert of("agentrl_rollout_episodes_total") == 36 and of("agentrl_groups", state="trained") == 9
    assert of("agentrl_tokens_sampled_total", phase="train") == sum(row["tokens"] for row in trained)
    assert of("agentrl_rollout_tokens_total") == sum(row["tokens"] for row in trained)
    seconds = sum(row[f"time/{part}_s"] for row in trained for part in ("rollout", "batch", "update", "publish"))
    assert of("agentrl_step_seconds_total") == pytest.approx(seconds)
    assert of("agentrl_row_reward", phase="train", env="") == last["reward"]
    assert of("agentrl_row_time_update_seconds", phase="train", env="") == last["time/update_s"]
    assert of("agentrl_row_staleness_max", phase="train", env="") == 0
    assert of("agentrl_row_step", phase="train") == 3 and of("agentrl_row_step", phase="eval") == 2
    stops = {key.partition("/")[2]: value for key, value in last.items() if key.startswith("stop/")}
    got = {s.labels["reason"]: s.value for s in families["agentrl_row_stop"].samples if s.labels["phase"] == "train"}
    assert got == stops and stops
    assert of("agentrl_engine_requests", state="running") == 0 == of("agentrl_engine_requests", state="waiting")
    assert of("agentrl_tracker_losses_total", tracker="tracing_lossy") == 2  # the rows of step 2
    kinds = {name: family.type for name, family in families.items()}
    assert kinds["agentrl_updates"] == "counter" and kinds["agentrl_row_reward"] == "gauge"
    assert "share of successes" in families["agentrl_row_success"].documentation


@pytest.mark.parametrize(
    ("key", "name", "labels", "scale"),
    [("reward", "reward", {"env": ""}, 1), ("env/a,b.c/reward", "reward", {"env": "a,b.c"}, 1),
     ("term/exact/deep", "term", {"env": "", "id": "exact/deep"}, 1), ("env/a/term/x", "term", {"env": "a", "id": "x"}, 1),
     ("env/a/groups_failed", "groups", {"env": "a", "state": "failed"}, 1), ("unscored", "unscored", {"env": ""}, 1),
     ("env/a/unscored/no_key", "unscored_by_cause", {"env": "a", "cause": "no_key"}, 1),
     ("tokens_thrown/stale", "tokens_thrown_by_why", {"env": "", "why": "stale"}, 1),
     ("sampler/up/success", "sampler_success_by_arm", {"env": "", "arm": "up"}, 1),
     ("experience/nll", "experience_nll", {"env": ""}, 1), ("experience/ratio", "experience", {"env": "", "metric": "ratio"}, 1),
     ("rollout/worker_12/lag_ms", "rollout_worker_lag_seconds", {"env": "", "i": "12"}, 1e-3),
     ("throughput/sampled_tokens_per_s", "throughput_sampled_tokens_per_second", {"env": ""}, 1),
     ("mixture/a/share", "mixture_share", {"env": "a"}, 1), ("my plug-in's/value", "my_plug_in_s_value", {"env": ""}, 1)],
)  # fmt: skip
def test_a_key_of_a_row_is_a_family_with_base_units_and_labels(key: str, name: str, labels: Any, scale: float) -> None:
    found, given, factor, _ = metric_of_key(key)
    assert (found, given, factor) == (f"agentrl_row_{name}", labels, scale)


def test_unscored_episodes_are_counted_by_cause_and_restarts_too() -> None:
    pytest.importorskip("prometheus_client", reason="needs agentrl[prometheus]")
    endpoint = MetricsEndpoint(PrometheusConfig(port=0))
    for _ in range(2):
        endpoint.row("train", 1, {"scored": 3, "unscored": 2, "unscored/env_error": 2, "faults/env_error": 5, "reward": None})
    _, found = scraped(httpx.get(endpoint.url, trust_env=False).text)
    endpoint.close()
    train = ("phase", "train")
    assert found["agentrl_episodes_unscored_total", (("cause", "env_error"), train)] == 4
    assert found["agentrl_episodes_faulty_total", (("cause", "env_error"), train)] == 10
    assert found["agentrl_episodes_total", (train,)] == 10
    assert not any(name == "agentrl_row_reward" for name, _ in found), "an unknown value is not a number"


def test_a_port_that_is_taken_and_a_host_that_is_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="needs agentrl[prometheus]")
    check_trackers(RunStart(of(prometheus={"port": free_port()})))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"prometheus.port = {port}: 127.0.0.1:{port} cannot be listened at .*in use"):
            check_trackers(RunStart(of(prometheus={"port": port})))
        with pytest.raises(ResourceError, match=f"prometheus.port = {port}"):
            MetricsEndpoint(PrometheusConfig(port=port))
    with pytest.raises(ConfigError, match=r"prometheus.host = 'no.such.host.invalid': not an address"):
        check_trackers(RunStart(of(prometheus={"host": "no.such.host.invalid"})))
    monkeypatch.setattr("agentrl.utils.errors.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"pip install 'agentrl\[prometheus\]'"):
        check_trackers(RunStart(of(prometheus={})))


# -- what is recorded --------------------------------------------------------------------------------


def made(config: Any, *groups: Any) -> Tracing:
    run = TrackedRun(RunFolder(Path(config.out) / config.name), config)
    return Tracing(run, "embedded", lambda: groups, print)


def test_a_secret_in_a_span_is_not_exported() -> None:
    remember("planted-tool-0123456789")
    values = {"call": "x planted-tool-0123456789"}
    found = attributes_of(TraceSpan("tool", "t", 1, 2, 0, 0, "", True, values=values), {})
    assert found["gen_ai.tool.call.id"].startswith("x ") and "planted" not in str(found)


async def test_every_and_episodes_say_what_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs agentrl[otel]")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    for every, share in [(1, 1.0), (2, 0.25)]:
        tracing, places = made(of(traces={"every": every, "episodes": share})), []
        for step in (1, 2, 3):
            await tracing.begin(step)
            places.append(here())
            await tracing.end()
        tracing.close()
        assert [place is not None for place in places] == [step % every == 0 for step in (1, 2, 3)]
        assert {(place.sampled, place.episodes) for place in places if place is not None} == {(True, share)}
        assert here() is None


class Summer(Worker):
    """Computes on a batch."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"total": Shard("metrics", "column"), "name": Broadcast()}

    def total(self, batch: TensorDict) -> dict[str, float]:
        for _ in range(400):
            found = batch["x"] @ batch["x"].T
        return {"sum": float(found.sum())}

    def name(self) -> str:
        return "summer"


@proof  # another start of torch's profiler takes half a minute; the timeline above holds one
async def test_torch_says_what_ranks_record(tmp_path: Path) -> None:
    config = of(profile={"steps": [1]}, out=str(tmp_path), name="profiled")
    folder = tmp_path / "profiled" / "profile"
    folder.parent.mkdir()
    with launch(Summer, name="summer", backend="inline") as group:
        tracing = made(config, group)
        await tracing.begin(1)
        for _ in range(3):
            await group.arun(Summer.total, TensorDict({"x": torch.ones(4, 2), "dp_rank": torch.zeros(4)}, [4]))
        assert await group.arun(Summer.name) == "summer"
        await tracing.end()
        tracing.close()
    recorded = sorted(folder.glob("step_000001.summer.0.*"))
    assert [path.name.split(".")[3:5] for path in recorded] == [[str(n), "total"] for n in range(1, 4)]
    for path in recorded:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert sum(event["name"] == "aten::matmul" for event in events) == 400
    calls = read(folder / "step_000001.json.gz").of("driver")
    assert Counter(event["name"] for event in calls if event["cat"] == "call") == {"summer: total": 3, "summer: name": 1}


# -- refused -----------------------------------------------------------------------------------------


def of(**sections: Any) -> Any:
    return config_from({"env": {"id": "key_value"}, "model": {"init": {}}, "steps": 3, **sections}, [])


def test_what_cannot_be_traced_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"profile.steps = \[2, 4\]: the run has steps = 3"):
        check_trackers(RunStart(of(profile={"steps": [2, 4]})))
    check_trackers(RunStart(of(profile={"steps": [3]})))
    check_trackers(RunStart(of()))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    pytest.importorskip("opentelemetry.sdk", reason="needs agentrl[otel]")
    check_trackers(RunStart(of(traces={})))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkn")
    with pytest.raises(ConfigError, match=r"no installed package has the OpenTelemetry exporter 'zipkn'; there are: .*console"):
        check_trackers(RunStart(of(traces={})))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier pigeon")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL = 'carrier pigeon': expected one of http/protobuf, grpc"):
        check_trackers(RunStart(of(traces={})))
    monkeypatch.setattr("agentrl.utils.errors.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"pip install 'agentrl\[otel\]'"):
        check_trackers(RunStart(of(traces={})))
