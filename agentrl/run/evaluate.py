"""Evaluation and rollouts outside a run: `agentrl eval`, `agentrl rollout`, and the report."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from rich.console import Console

from agentrl.cluster.ray_cluster import last_words, start_ray, stop_asking, stop_ray, while_ray_lives
from agentrl.cluster.ray_parent import error_told, tell, unsaid
from agentrl.config import ClusterConfig, EvalConfig, RolloutConfig, TrainConfig
from agentrl.config.envs import alone, each, eval_weights, one_temperature, the_env
from agentrl.config.identity import check_same_identity, identity_of
from agentrl.data.trajectory import Trajectory, Turn
from agentrl.engines.makers import api_name
from agentrl.env.official import mean_with_interval, success_rates
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.player import end_of, fault_of, run_tasks, success_rate
from agentrl.run.assembly import Assembly, assemble, read_inputs
from agentrl.run.checks.env_checks import suite_notes
from agentrl.run.compare import official
from agentrl.run.digests import contents_of
from agentrl.run.display import Display
from agentrl.run.engine_choice import computation_line, samples_on_ray, talks_in_messages, with_threads
from agentrl.run.folder import with_date
from agentrl.run.interrupt import Interrupt
from agentrl.run.outcomes import by_label
from agentrl.run.role_placement import engine_room
from agentrl.run.rollout_workers import with_workers
from agentrl.utils.errors import ConfigError, WorkerDiedError
from agentrl.utils.event_loop import SLOW_LOOP, watch_loop
from agentrl.utils.files import atomic_write, naming
from agentrl.utils.parsing import json_text, read_json
from agentrl.utils.redaction import redact, redact_json
from agentrl.utils.terminal import cell, folding
from agentrl.utils.threads import share_the_lock

# The report

ABOUT = ("model", "run", "official")
"""What a report says of its model, and a suite's own table, which has a printed one of its own."""

HORIZONS = "horizons"
_COLUMNS = ("success", "reward", "turns", "tokens", "tasks", "unscored")


def make_report(trajectories: Sequence[Trajectory], samples: int) -> dict[str, Any]:
    """pass@k and pass^k with 95 % intervals over tasks, reward terms, stop reasons, error classes, tokens, latency
    in seconds and cost in US dollars; per episode unless stated otherwise."""
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_task[trajectory.task.id].append(trajectory)
    counts = [
        (len(known), sum(known))
        for members in by_task.values()
        if (known := [t.success for t in members if t.success is not None])
    ]
    report: dict[str, Any] = {
        "tasks": len(by_task),
        "episodes": len(trajectories),
        "unscored": sum(t.reward is None and t.success is None for t in trajectories),
    }
    report |= success_rates(counts, samples)
    names = sorted({name for t in trajectories for name in t.metrics})
    report["metrics"] = {name: _mean(t.metrics.get(name) for t in trajectories) for name in names}
    report["reward"] = _mean(t.reward for t in trajectories)
    report["stops"] = dict(Counter(t.stop.value for t in trajectories))
    report["errors"] = dict(Counter(error_class(t) for t in trajectories if t.error))
    report["tool_errors"] = dict(Counter(r.error for t in trajectories for _, _, r in t.calls() if r and r.error))
    return {**report, **_effort(trajectories), **_by_horizon(trajectories)}


def _by_horizon(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """By the number of calls in the gold solution, if it is known and tasks differ in it: mean success over episodes with its
    95 % interval over tasks, reward, and how long episodes are."""
    parts = by_label(trajectories)
    return {HORIZONS: {label: _of_horizon(members) for label, members in parts.items()}} if len(parts) > 1 else {}


def _of_horizon(members: Sequence[Trajectory]) -> dict[str, Any]:
    known: dict[str, list[bool]] = defaultdict(list)
    for t in members:
        if t.success is not None:
            known[t.task.id].append(t.success)
    means = [statistics.fmean(of) for of in known.values()]
    return {
        "tasks": len({t.task.id for t in members}),
        "episodes": len(members),
        "unscored": sum(t.reward is None and t.success is None for t in members),
        "success": dict(zip(("mean", "low", "high"), mean_with_interval(means), strict=True)) if means else None,
        "reward": _mean(t.reward for t in members),
        "turns": _mean(float(len(t.turns)) for t in members),
        "tokens": _mean(_tokens(t, lambda turn: turn.sampled_tokens) for t in members),
    }


def unscored_cause(trajectories: Iterable[Trajectory]) -> str | None:
    """Number of unscored episodes, and the cause of the first; None if all are scored."""
    found = [t for t in trajectories if t.reward is None and t.success is None]
    if not found:
        return None
    first = found[0]
    return f"{len(found)} episodes are unscored; the first ({first.task.id}) ended with {end_of(first)}"


def error_class(trajectory: Trajectory) -> str:
    """The stop reason and the error's first words, so that errors that differ only in details are counted together."""
    return f"{trajectory.stop.value}: {re.split('[:(]', trajectory.error or '')[0].strip()}"


def _effort(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    turns = [turn for t in trajectories for turn in t.turns]
    priced = [turn.usd for turn in turns if turn.usd is not None]
    episodes = [seconds for t in trajectories if t.reward is not None and (seconds := t.timings.get("episode_s")) is not None]
    return {
        "turns": _mean(float(len(t.turns)) for t in trajectories),
        "tokens": _mean(_tokens(t, lambda turn: turn.sampled_tokens) for t in trajectories),
        "prompt_tokens": _mean(_tokens(t, lambda turn: turn.prompt_tokens) for t in trajectories),
        "seconds": _mean(t.timings.get("episode_s") for t in trajectories),
        "turn_seconds": _percentiles(  # of the model, for the turns that it finished
            [turn.seconds - sum(result.seconds for result in turn.results) for turn in turns if turn.ledger >= 0]
        ),
        "episode_seconds": _percentiles(episodes),
        "usd": _mean(_usd(t) for t in trajectories),
        "usd_total": sum(priced) if priced else None,
        "unpriced_turns": len(turns) - len(priced),
    }


def _tokens(trajectory: Trajectory, count: Callable[[Turn], int]) -> float | None:
    """Sum over the turns; None if a turn was not counted (a prompt is never empty)."""
    if any(turn.prompt_tokens == 0 for turn in trajectory.turns) or not trajectory.turns:
        return None
    return float(sum(count(turn) for turn in trajectory.turns))


def _usd(trajectory: Trajectory) -> float | None:
    prices = [turn.usd for turn in trajectory.turns]
    return sum(price for price in prices if price is not None) if prices and None not in prices else None


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p95": None}
    middle, high = np.percentile(np.asarray(values), [50, 95])
    return {"p50": float(middle), "p95": float(high)}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


FEW = 8
"""Rows of a report that are printed without `--all`."""
_FIRST = ("pass@", "pass^", "reward", "usd_total", "unscored", "stops", "turns", "tokens", "errors", "tool_errors", "metrics")
"""Begins of the keys that come first, in this order."""


def print_report(report: dict[str, Any], console: Console, every: bool = False) -> None:
    """The report as a table, the most wanted rows first; without `every` at most FEW, and none that is unknown or 0 faults. "-"
    stands for an unknown value."""
    table = folding("", "value", "95 % interval", title=f"{report['episodes']} episodes of {report['tasks']} tasks")
    rows = list(_report_rows(report))
    if not every:
        rows = sorted((row for row in rows if row[1] not in ("-", "0") or row[0] == "reward"), key=lambda row: _place(row[0]))
    for name, value, interval in rows if every else rows[:FEW]:
        table.add_row(cell(name), cell(value), interval)
    console.print(table)
    if not every and len(rows) > FEW:
        console.print(f"{len(rows) - FEW} more rows: --all, or report.json", markup=False)
    print_horizons({"": report}, console)


def _report_rows(report: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, value, interval) of each number of a report."""
    for key, value in report.items():
        if key in (HORIZONS, "tasks", "episodes"):
            continue
        if isinstance(value, dict) and "mean" in value:
            yield key, f"{value['mean']:.3f}", f"{value['low']:.3f} to {value['high']:.3f}"
        elif key not in ABOUT:
            inner = value.items() if isinstance(value, dict) else ((None, value),)
            yield from ((key if name is None else f"{key} / {name}", _short(number), "") for name, number in inner)


def _place(name: str) -> int:
    return next((place for place, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))


def print_horizons(reports: Mapping[str, Any], console: Console) -> None:
    """Success by the number of calls of the solution, a line each, of the environments whose tasks differ in it."""
    for name, report in reports.items():
        table = folding("calls", *_COLUMNS, title=cell(f"{name}{': ' if name else ''}by calls of the solution"))
        for label, one in report.get(HORIZONS, {}).items():
            rate = one["success"]
            shown = "-" if rate is None else f"{rate['mean']:.3f} ({rate['low']:.2f} to {rate['high']:.2f})"
            table.add_row(label, shown, *(_short(one[column]) for column in _COLUMNS[1:]))
        if table.row_count:
            console.print(table)


def print_reports(reports: Mapping[str, Any], success: float | None, console: Console) -> None:
    """The reports of several environments, a column each."""
    table = folding("", *map(cell, reports), "mean", title="held-out tasks by environment")
    for key in [name for name in next(iter(reports.values())) if name not in (*ABOUT, HORIZONS)]:
        cells = [report[key] for report in reports.values()]
        if key.startswith("pass"):
            rates = ["-" if v is None else f"{v['mean']:.3f} ({v['low']:.2f} to {v['high']:.2f})" for v in cells]
            table.add_row(key, *rates, _short(success) if key == "pass@1" else "")
        elif not any(isinstance(value, dict) for value in cells) and any(value is not None for value in cells):
            table.add_row(cell(key), *(cell(_short(value)) for value in cells), "")
    console.print(table)
    print_horizons(reports, console)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 3 if abs(value) >= 0.01 or value == 0 else 6
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".")


# The parts


@dataclass(slots=True)
class EvalSession:
    """The parts that episodes need, and their connection to the outside; `close` closes all of them."""

    parts: Assembly
    ray: bool = False
    started: bool = False
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __post_init__(self) -> None:
        self.opened.callback(stop_asking)

    async def start(self, cluster: ClusterConfig) -> None:
        """Start the engines, once. Raises UserError or EngineError; `close` then closes what was started."""
        if self.started:
            return
        self.started = True
        if self.ray and start_ray(cluster):
            self.opened.callback(stop_ray)
        self.opened.push_async_callback(self.parts.close)
        await self.parts.start()

    async def close(self) -> None:
        """Close everything, the others also if one of them fails."""
        await self.opened.aclose()


def open_session(config: TrainConfig, temperature: float) -> EvalSession:
    """The parts of an evaluation, or of rollouts."""
    rollout = config.rollout.model_copy(update={"router_replay": False})  # the trainer's own
    config = with_threads(config.model_copy(update={"rollout": rollout}), trains=False)
    inputs = read_inputs(config)
    room = engine_room(config, trains=False)
    parts = assemble(config, inputs, temperature=temperature, room=room)
    workers = config.rollout.workers > 0
    if workers:
        assert config.model.path is not None
        parts = with_workers(config, inputs, parts, config.model.path, temperature=temperature)
    return EvalSession(parts, workers or samples_on_ray(config))


# Rollouts

Pair = tuple[int, int]

LATER = "the same command runs the missing episodes"


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Request for episodes: `tasks` tasks of a split, `samples` episodes each, written to `out`.

    `chosen`: the numbers of those tasks in the split, if they are not the first ones.
    """

    purpose: Literal["eval", "rollout"]
    model: str
    tasks: int
    samples: int
    split: str
    out: Path
    chosen: tuple[int, ...] = ()

    @property
    def pairs(self) -> list[Pair]:
        """(task, member) of every episode, in order."""
        return [(task, member) for task in self.chosen or range(self.tasks) for member in range(self.samples)]

    def temperature(self, rollout: RolloutConfig, evaluation: EvalConfig) -> float:
        """The sampling temperature; an evaluation has its own."""
        return evaluation.temperature if self.purpose == "eval" else one_temperature(rollout, "a rollout")

    @property
    def note(self) -> Path:
        """The file that says what the episodes in `out` are."""
        return self.out / f"{self.purpose}.json"


@dataclass(slots=True)
class RolloutOutcome:
    """The episodes that are there, by (task, member)."""

    episodes: dict[Pair, Trajectory] = field(default_factory=dict)
    interrupted: bool = False


async def run_rollout(
    config: TrainConfig, request: RolloutRequest, display: Display, shared: EvalSession | None = None
) -> RolloutOutcome:
    """Run the missing episodes of the only environment of `config`. Ctrl-C ends it early: finished episodes stay, and the same
    command continues. `shared`: parts of several environments, which the caller closes; by default its own are made.

    Raises ConfigError if `out` holds something else, WorkerDiedError if a process or Ray is lost.
    """
    share_the_lock()
    config = dated_as(config, request)
    interrupt = Interrupt(display.say)
    interrupt.install()  # the start of Ray and of the engine is to be ended too
    for note in suite_notes(config):
        display.warn(note)
    job = _RolloutJob(config, request, display)
    outcome = job.outcome
    session = shared or open_session(config, job.temperature)
    missing = [pair for pair in request.pairs if pair not in outcome.episodes]
    display.phase(request.purpose, len(request.pairs), first=len(request.pairs) - len(missing))
    if missing:
        if api_name(request.model) is not None or not talks_in_messages(request.model):
            display.say(f"[{request.purpose}] {job.sampling_line()}")
        if computes := computation_line(config, trains=False):
            display.say(computes)
    try:
        if missing:
            tell(folder=str(request.out), restarts=0, max_restarts=0, then=LATER)
            with last_words(unsaid(LATER)):
                await while_ray_lives(job.play(session, missing))
    except WorkerDiedError as error:
        raise WorkerDiedError(f"{error}; {LATER}") from error
    except asyncio.CancelledError:
        if not interrupt.requested:
            raise
        outcome.interrupted = True
    finally:
        if session is not shared:
            await session.close()
    _sort(request, outcome)
    return outcome


def dated_as(config: TrainConfig, request: RolloutRequest) -> TrainConfig:
    """`config` with the date of the episodes that are in the request's folder, or else today's."""
    if not request.note.exists():
        return with_date(config)
    day = (read_json(request.note.read_text()).get("identity") or {}).get("model.date")
    return config if day is None else with_date(config, day)  # an older agentrl kept none: what it began goes on without


class _RolloutJob:
    """Plays the missing episodes of a request; a config with one environment says how."""

    def __init__(self, config: TrainConfig, request: RolloutRequest, display: Display) -> None:
        """Raises ConfigError if `request.out` holds something else."""
        self.config, self.request, self.display = config, request, display
        self.temperature = request.temperature(config.rollout, config.eval)
        self.outcome = RolloutOutcome(self._resume())

    def sampling_line(self) -> str:
        """The model's sampling parameters, by their keys."""
        section, rollout = "eval" if self.request.purpose == "eval" else "rollout", self.config.rollout
        limits = (("top_p", rollout.top_p), ("top_k", rollout.top_k))
        more = [f"rollout.{name} = {value}" for name, value in limits if value not in (0, 1, None)]
        greedy = " (greedy)" if self.temperature == 0 else ""
        return ", ".join([f"{section}.temperature = {self.temperature:g}{greedy}", *more])

    async def play(self, session: EvalSession, missing: list[Pair]) -> None:
        """Play the episodes; each is in the file and in `outcome` once it ends."""
        config, request, outcome, display = self.config, self.request, self.outcome, self.display
        parts, done = session.parts, len(request.pairs) - len(missing)
        scored = done
        watch, lost = Watch(), list[str]()
        display.trouble = lambda: f"{len(lost)} episodes came to no score; the first: {lost[0]}" if lost else ""
        with display.doing("starting the engine", parts.starting):
            await session.start(config.cluster)
        with error_told(), (request.out / "trajectories.jsonl").open("a") as file:

            def keep(trajectory: Trajectory) -> None:
                nonlocal done, scored
                with naming(Path(file.name)):
                    file.write(redact(json_text(trajectory.to_json())) + "\n")
                    file.flush()
                outcome.episodes[trajectory.task.seed, trajectory.member] = trajectory
                done += 1
                scored += _is_scored(trajectory)
                if not _is_scored(trajectory):
                    lost.append(fault_of(trajectory))
                display.step(done, {"success": success_rate(outcome.episodes.values()), "unscored": done - scored})

            with watch_loop(SLOW_LOOP, display.warn), display.doing("episodes", waits=watch.waiting):
                await run_tasks(
                    parts.player,
                    the_env(config.envs).called,
                    missing,
                    seed=config.seed,
                    max_episodes=config.rollout.max_episodes,
                    split=request.split,
                    temperature=self.temperature,
                    on_episode=keep,
                    watch=watch,
                )

    def _resume(self) -> dict[Pair, Trajectory]:
        """The scored episodes that are there; an outage is run again."""
        request, purpose = self.request, self.request.purpose
        request.out.mkdir(parents=True, exist_ok=True)
        # All that an episode depends on; `-n` and `-k` only say which episodes there are.
        own = {"command": purpose, "--split": request.split}
        identity = {**identity_of(self.config, purpose), **own, **contents_of(self.config, purpose)}
        note, path = request.note, request.out / "trajectories.jsonl"
        if note.exists():
            kind = "an evaluation" if purpose == "eval" else "a rollout"
            before = read_json(note.read_text()).get("identity")
            check_same_identity(before, identity, f"{kind} of something else ({note})", request.out)
        elif path.exists():
            raise ConfigError(f"{request.out}: it holds trajectories of something else; use another --out")
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        there = [Trajectory.from_json(read_json(line)) for line in lines]
        scored = {(t.task.seed, t.member): t for t in there if _is_scored(t)}
        atomic_write(note, json.dumps({"identity": identity}, indent=2) + "\n")
        atomic_write(path, "".join(redact(json_text(t.to_json())) + "\n" for t in scored.values()))
        return scored


def _is_scored(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None or trajectory.success is not None


# Evaluation

NOTHING: Mapping[str, Any] = MappingProxyType({})


async def run_eval(
    config: TrainConfig,
    request: RolloutRequest,
    display: Display,
    shared: EvalSession | None = None,
    about: Mapping[str, Any] = NOTHING,
) -> tuple[dict[str, Any] | None, RolloutOutcome]:
    """Run the missing episodes of the evaluation. Returns its report, also written to `request.out` (None after Ctrl-C), and
    the episodes. Of a suite the report has the benchmark's own table, too ("official"). `shared`: as in `run_rollout`; `about`:
    what the report says next to the numbers. Raises ConfigError if `request.out` has an evaluation of something else.
    """
    outcome = await run_rollout(config, request, display, shared)
    if outcome.interrupted:
        return None, outcome
    episodes = [outcome.episodes[pair] for pair in request.pairs]
    found = official([config], {config.envs[0].called: episodes}, request.split)
    own = {"official": found} if found else {}
    report = {**make_report(episodes, request.samples), "model": request.model, **about, **own}
    atomic_write(request.out / "report.json", json_text(redact_json(report, said=True), indent=2) + "\n")
    return report, outcome


async def run_evals(
    config: TrainConfig, requests: Mapping[str, RolloutRequest], display: Display, about: Mapping[str, Any] = NOTHING
) -> tuple[dict[str, Any] | None, RolloutOutcome, RolloutRequest]:
    """The evaluations of several environments, one after the other with one engine, by their names: `requests`, each in a folder
    of one root, into which their common report is written. Returns that (None after Ctrl-C), and the last outcome with its
    request.
    """
    config = dated_as(config, next(iter(requests.values())))
    envs = {env.called: env for env in config.envs}
    Interrupt(display.say).install()  # each of them takes over, once what they share is open
    shared = open_session(config, config.eval.temperature)
    reports: dict[str, Any] = {}
    episodes: dict[str, list[Trajectory]] = {}
    try:
        for name, request in requests.items():
            display.say(f"[{name}] {request.tasks} tasks of {envs[name].id}")
            report, outcome = await run_eval(alone(config, envs[name]), request, display, shared)
            if report is None:
                return None, outcome, request
            reports[name], episodes[name] = report, [outcome.episodes[pair] for pair in request.pairs]
    finally:
        await shared.close()
    found = official(each(config), episodes, request.split)
    own = {"official": found} if found else {}
    whole = {"success": mean_success(reports, eval_weights(config.envs)), "model": request.model, **about, **own, "envs": reports}
    atomic_write(request.out.parent / "report.json", json_text(redact_json(whole, said=True), indent=2) + "\n")
    return whole, outcome, request


def mean_success(reports: Mapping[str, Any], weights: Mapping[str, float]) -> float | None:
    """The mean of the environments' pass@1, by the weights; None if one that counts is unknown."""
    found = {name: report["pass@1"] for name, report in reports.items() if weights[name] > 0}
    if not found or any(value is None for value in found.values()):
        return None
    return float(sum(weights[name] * value["mean"] for name, value in found.items()) / sum(weights[name] for name in found))


def write_comparison(folder: Path, comparison: Mapping[str, Any]) -> Path:
    """Write comparison.json into `folder`; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "comparison.json"
    atomic_write(file, json_text(redact_json(comparison, said=True), indent=2) + "\n")
    return file


def check_request(config: TrainConfig, request: RolloutRequest) -> TrainConfig:
    """The config with its engine settled. Raises a UserError for a request that cannot work, before a folder is created."""
    from agentrl.run.checks import check_eval
    from agentrl.run.engine_choice import without_trainer

    if min(request.tasks, request.samples) < 1:
        raise ConfigError(f"n = {request.tasks}, k = {request.samples}: expected at least 1 of each")
    check_eval(config := without_trainer(config), request.purpose)
    return config


def _sort(request: RolloutRequest, outcome: RolloutOutcome) -> None:
    """Rewrite the file in the order of tasks, so that equal runs leave equal files."""
    rows = [redact(json_text(outcome.episodes[pair].to_json())) + "\n" for pair in sorted(outcome.episodes)]
    atomic_write(request.out / "trajectories.jsonl", "".join(rows))
