"""Metrics endpoint of a live run for Prometheus (`[prometheus]`), by its conventions: base units, counters end in `_total`.

agentrl_row_*          values of the last row of each phase, named as in run/metrics.py; <> placeholders become labels
agentrl_*_total        counters of this process, which restart at 0 after a resume
all others             gauges at the time of the scrape"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.config.schema import PrometheusConfig
from agentrl.contrib.toolkit.http_server import ThreadServer
from agentrl.rollout.engine import EngineStats
from agentrl.run.metrics import info_of, metrics_table
from agentrl.run.trackers import LIVE_METRICS, Outlet
from agentrl.utils.errors import ConfigError, ResourceError, need_package

if TYPE_CHECKING:
    from agentrl.run.session import Session

STATS_S = 1.0
"""Seconds for the engine to answer a scrape, which otherwise has no request counts."""
MAX_BODY = 1 << 10
"""Largest request body in bytes; a scrape has none."""
PARTS = ("rollout", "batch", "update", "publish")
UNITS = {"s": ("_s", "_seconds", 1.0), "ms": ("_ms", "_seconds", 1e-3), "tokens/s": ("_per_s", "_per_second", 1.0)}
"""Conversion to Prometheus units: suffix of our name, suffix in Prometheus, factor of the values."""
Labels = tuple[tuple[str, str], ...]


def _open_port(cfg: PrometheusConfig) -> socket.socket:
    """Open the listening socket. Raises ConfigError for an invalid host, ResourceError if the port is taken."""
    try:
        found = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as problem:
        raise ConfigError(f"prometheus.host = {cfg.host!r}: not an address of this machine ({problem})") from None
    try:
        return socket.create_server(found[4], family=found[0])
    except OSError as problem:
        why = f"{cfg.host}:{cfg.port} cannot be listened at ({problem.strerror or problem})"
        raise ResourceError(f"prometheus.port = {cfg.port}: {why}; set another port, or 0 for any that is free") from None


@LIVE_METRICS.register("prometheus")
class MetricsEndpoint:
    """Serves metrics to Prometheus. Gets rows as a tracker does; the server's threads read them."""

    @classmethod
    def check(cls, cfg: PrometheusConfig) -> None:
        """Raise a UserError if the endpoint cannot be opened."""
        need_package("prometheus_client", "[prometheus] needs prometheus-client: pip install 'agentrl[prometheus]'")
        _open_port(cfg).close()

    def __init__(self, cfg: PrometheusConfig, trackers: Sequence[Outlet] = ()) -> None:
        """Start serving. Raises ResourceError if the port is taken."""
        from prometheus_client import CollectorRegistry

        self._lock, self._trackers = threading.Lock(), trackers
        self._rows: dict[str, tuple[int, dict[str, float | None]]] = {}
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        registry = CollectorRegistry()
        registry.register(self)
        listener = _open_port(cfg)
        name = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
        self.url = f"http://{name}:{listener.getsockname()[1]}/metrics"
        self._server = ThreadServer(_app(registry), cfg.host, listener, max_body=MAX_BODY)

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._server.close()

    def watch(self, session: Session | None) -> None:
        """Include this session, which runs on the caller's event loop, in scrapes; None: include none."""
        if session is not None and self._session is None and self._loop is not None:
            self.count("restarts")
        self._session = session
        if session is not None:
            self._loop = asyncio.get_running_loop()

    def row(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        """Record a row, and count its episodes, tokens and updates."""
        known = {key: float(value) for key, value in values.items() if value is not None}
        with self._lock:
            self._rows[phase] = (step, dict(values))
        for key, value in known.items():
            kind, _, cause = key.partition("/")
            if kind in ("unscored", "faults") and cause:
                self.count(f"episodes_{'unscored' if kind == 'unscored' else 'faulty'}", value, cause=cause, phase=phase)
        if "scored" in known:
            self.count("episodes", known["scored"] + known.get("unscored", 0.0), phase=phase)
            self.count("tokens_sampled", known.get("tokens_sampled", known.get("tokens", 0.0)), phase=phase)
        if phase == "train":
            self.count("updates")
            self.count("tokens_trained", known.get("tokens_trained", 0.0))
            self.count("step_seconds", sum(known.get(f"time/{part}_s", 0.0) for part in PARTS))

    def count(self, name: str, by: float = 1.0, **labels: str) -> None:
        """Increment a counter."""
        with self._lock:
            self._counts[name, tuple(sorted(labels.items()))] += by  # type: ignore[assignment]

    # -- a scrape ----------------------------------------------------------------------------------

    def collect(self) -> Iterable[Any]:
        """Yield the metric families, as prometheus_client calls it for a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            rows, counts = dict(self._rows), dict(self._counts)
        for name, about in COUNTERS.items():
            found = [(labels, value) for (of, labels), value in counts.items() if of == name]
            names = [key for key, _ in found[0][0]] if found else []
            family = CounterMetricFamily(f"agentrl_{name}", about, labels=names)
            for labels, value in found:
                family.add_metric([text for _, text in labels], value)
            if not found and name in ("updates", "restarts", "step_seconds", "tokens_trained"):
                family.add_metric([], 0.0)
            yield family
        # Values of the last rows: one family per metric name, with its placeholders as labels.
        families: dict[str, Any] = {}
        steps = GaugeMetricFamily("agentrl_row_step", "updates done at the last row of each phase", labels=["phase"])
        for phase, (step, values) in rows.items():
            steps.add_metric([phase], step)
            for key, number in values.items():
                name, placed, scale, about = metric_of_key(key)
                placed = {"phase": phase, **placed}
                if name not in families:
                    families[name] = GaugeMetricFamily(name, about, labels=list(placed))
                if number is not None:
                    families[name].add_metric(list(placed.values()), number * scale)
        yield steps
        yield from families.values()
        losses = CounterMetricFamily("agentrl_tracker_losses", "rows, tables and pictures not written", labels=["tracker"])
        for tracker in self._trackers:
            losses.add_metric([tracker.name], tracker.lost)
        yield losses
        session, loop = self._session, self._loop
        if session is None:
            return
        stats: EngineStats | None = None
        if loop is not None and loop.is_running():
            asked: Future[EngineStats] = asyncio.run_coroutine_threadsafe(session.engine.stats(), loop)
            try:
                stats = asked.result(STATS_S)
            except Exception:  # the engine is busy or closing: leave its numbers out of this scrape
                asked.cancel()
        played = session.collector.stats
        for name, value in (("episodes", played.episodes), ("turns", played.turns), ("tokens", played.tokens)):
            yield CounterMetricFamily(f"agentrl_rollout_{name}", f"{name} of rollouts, also of the update in progress", value)
        yield GaugeMetricFamily("agentrl_weights_version", "updates done: the version of the weights", session.collector.version)
        requests = GaugeMetricFamily("agentrl_engine_requests", "requests at the engine", labels=["state"])
        if stats is not None:
            requests.add_metric(["running"], stats.running)
            requests.add_metric(["waiting"], stats.waiting)
        groups = GaugeMetricFamily("agentrl_groups", "groups by state", labels=["state"])
        for state, count in session.collector.ledger.counts().items():
            groups.add_metric([state], count)
        yield requests
        yield groups


def _app(registry: Any) -> Any:
    """Return the ASGI app for GET and HEAD of /metrics, in the format that the client accepts. It handles one scrape at a time,
    in a thread, so that the event loop is not blocked."""
    from prometheus_client.exposition import choose_encoder
    from starlette.datastructures import Headers
    from starlette.responses import PlainTextResponse, Response

    one = asyncio.Lock()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] not in ("/", "/metrics"):
            answer: Response = PlainTextResponse("the metrics are at /metrics\n", 404)
        elif scope["method"] not in ("GET", "HEAD"):
            answer = PlainTextResponse("only GET and HEAD\n", 405, {"allow": "GET, HEAD"})
        else:
            encode, kind = choose_encoder(",".join(Headers(scope=scope).getlist("accept")))
            async with one:
                answer = Response(await asyncio.to_thread(encode, registry), headers={"content-type": kind})
        await answer(scope, receive, send)

    return app


COUNTERS: Mapping[str, str] = {
    "episodes": "episodes of finished rows: of updates, and of evaluations",
    "episodes_unscored": "of these, those without a reward, by cause",
    "episodes_faulty": "attempts at an episode that came to no score, by cause, also those that were tried again",
    "tokens_sampled": "tokens sampled for them, and for updates also those that were thrown away",
    "tokens_trained": "tokens that updates were computed over",
    "updates": "updates",
    "step_seconds": "seconds of the updates' steps, without evaluations and checkpoints",
    "restarts": "times that the run began again after a process was lost",
}


_stem = partial(re.sub, r"[\W_]+", "_")
_PLAIN = frozenset(_stem(entry.name) for _, entry in metrics_table())


def metric_of_key(key: str) -> tuple[str, dict[str, str], float, str]:
    """Return the family name, labels, value factor and description of a row's key.

    Label `env`: the environment of a key `env/<name>/...`, else ""."""
    info, env, plain = info_of(key), "", key
    pattern = key if info is None else info.name
    if found := re.fullmatch(r"env/([^/]+)/(.+)", key):
        env, plain = found[1], found[2]
        pattern = plain if info is None else pattern.removeprefix("env/<name>/")
    parts = re.split(r"(<\w+>)", pattern)
    match = re.fullmatch("".join("(.+)" if part.startswith("<") else re.escape(part) for part in parts), plain)
    values = match.groups() if match is not None else ()
    labels = {"env": env} | {part[1:-1]: text for part, text in zip(parts[1::2], values, strict=True)}
    stem = _stem("".join(parts[::2])).strip("_")
    if parts[1:] and stem in _PLAIN:  # a family has one set of labels
        stem += f"_by_{parts[-2][1:-1]}"
    if info is None:
        return f"agentrl_row_{stem}", labels, 1.0, key
    ending, base, scale = UNITS.get(info.unit, ("", "", 1.0))
    stem = stem.removesuffix(ending) + base
    return f"agentrl_row_{stem}", labels, scale, f"{info.meaning} [{info.unit}]"
