"""Evaluation and rollouts outside a run: `agentrl eval`, `agentrl rollout`, and the report."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, chdir, closing
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from agentrl.cluster.ray_cluster import exit_message, start_ray, stop_asking, stop_ray, while_ray_lives
from agentrl.cluster.ray_parent import report_error, report_to_parent, silent_exit_message
from agentrl.config.envs import eval_weights, one_temperature
from agentrl.config.identity import check_same_identity, identity_of
from agentrl.data.trajectory import Trajectory, Turn
from agentrl.engines.makers import api_name
from agentrl.env.official import success_rates
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.player import SCRIPTS, end_of, fault_of, run_tasks, success_rate
from agentrl.run.assembly import RunStart
from agentrl.run.checks.env_checks import suite_notes
from agentrl.run.compare import mean_of, official
from agentrl.run.digests import contents_of
from agentrl.run.display import Display
from agentrl.run.engine_choice import EngineChoice, claiming_engine
from agentrl.run.folder import lock_folder, stored_object
from agentrl.run.interrupt import Interrupt
from agentrl.run.outcomes import by_label, is_scored
from agentrl.run.reader import episode_of
from agentrl.run.role_placement import engine_room
from agentrl.run.rollout_workers import with_workers
from agentrl.utils.errors import ConfigError, WorkerDiedError
from agentrl.utils.event_loop import SLOW_LOOP, LoopWatchdog
from agentrl.utils.files import atomic_write, naming
from agentrl.utils.parsing import json_text
from agentrl.utils.redaction import redact, redact_json
from agentrl.utils.terminal import cell, folding
from agentrl.utils.threads import share_the_lock

# The report

ABOUT = ("model", "run", "official")
"""Keys of a report that describe its model or run, and the suite's official table, which is printed separately."""

HORIZONS = "horizons"
_COLUMNS = ("success", "reward", "turns", "tokens", "tasks", "unscored")


def make_report(trajectories: Sequence[Trajectory], samples: int) -> dict[str, Any]:
    """Make a report: pass@k and pass^k with 95 % intervals over tasks, reward terms, stop reasons, errors, tokens, cost.
    Latencies are in seconds, costs in US dollars; values are per episode unless stated otherwise."""
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_task[trajectory.task_key].append(trajectory)
    found = [[t.success for t in members if t.success is not None] for members in by_task.values()]
    counts = [(len(known), sum(known)) for known in found if known]
    report: dict[str, Any] = {
        "tasks": len(by_task),
        "episodes": len(trajectories),
        "unscored": sum(not is_scored(t) for t in trajectories),
    }
    report |= success_rates(counts, samples)
    names = sorted({name for t in trajectories for name in t.metrics})
    report["metrics"] = {name: mean_of(t.metrics.get(name) for t in trajectories) for name in names}
    report["reward"] = mean_of(t.reward for t in trajectories)
    report["stops"] = dict(Counter(t.stop.value for t in trajectories))
    # Key: stop reason and the start of the error, so that errors that differ only in details count together.
    errors = (f"{t.stop.value}: {re.split('[:(]', t.error)[0].strip()}" for t in trajectories if t.error)
    report["errors"] = dict(Counter(errors))
    report["tool_errors"] = dict(Counter(r.error for t in trajectories for _, _, r in t.calls() if r and r.error))
    # Without turns that no model sampled: an agent's own words, which cost neither tokens nor money.
    sampled = [[turn for turn in t.turns if turn.ledger >= 0] for t in trajectories]
    turns = [turn for of in sampled for turn in of]
    priced = [turn.usd for turn in turns if turn.usd is not None]
    prices = [[turn.usd for turn in of] for of in sampled]
    spans = {
        # Seconds of the model without tools.
        "turn_seconds": [turn.seconds - sum(r.seconds for r in turn.results) for turn in turns],
        "episode_seconds": [t.timings["episode_s"] for t in trajectories if t.reward is not None and "episode_s" in t.timings],
    }
    report |= {
        "turns": mean_of(float(len(t.turns)) for t in trajectories),
        "tokens": mean_of(_tokens(of, "sampled_tokens") for of in sampled),
        "prompt_tokens": mean_of(_tokens(of, "prompt_tokens") for of in sampled),
        "seconds": mean_of(t.timings.get("episode_s") for t in trajectories),
        **{
            name: dict(zip(("p50", "p95"), np.percentile(of, [50, 95]).tolist() if of else (None, None), strict=True))
            for name, of in spans.items()
        },
        "usd": mean_of(sum(usd for usd in costs if usd is not None) for costs in prices if costs and None not in costs),
        "usd_total": sum(priced) if priced else None,
        "unpriced_turns": len(turns) - len(priced),
    }
    # The same figures for the episodes whose gold solutions have the same number of calls, if they differ in it.
    parts = by_label(t.horizon for t in trajectories)
    if len(parts) > 1:
        each = {label: make_report([trajectories[place] for place in places], 1) for label, places in parts.items()}
        keys = ("tasks", "episodes", "unscored", "success", "reward", "turns", "tokens")
        report[HORIZONS] = {
            label: {key: one["pass@1" if key == "success" else key] for key in keys} for label, one in each.items()
        }
    return report


def unscored_cause(trajectories: Iterable[Trajectory]) -> str | None:
    """Describe the number of unscored episodes and the cause of the first; None if all are scored."""
    found = [t for t in trajectories if not is_scored(t)]
    if not found:
        return None
    return f"{len(found)} episodes are unscored; the first ({found[0].task.id}) ended with {end_of(found[0])}"


def _tokens(turns: Sequence[Turn], kind: Literal["sampled_tokens", "prompt_tokens"]) -> float | None:
    """Sum tokens over turns; None if a turn has no count (recognized by 0 prompt tokens) or there is no turn."""
    if any(turn.prompt_tokens == 0 for turn in turns) or not turns:
        return None
    return float(sum(getattr(turn, kind) for turn in turns))


MAX_ROWS = 8
"""Rows of a report that are printed without `--all`."""
_KEY_ORDER = ("pass@", "pass^", "reward", "usd_total", "unscored", "stops", "turns", "tokens", "errors", "tool_errors", "metrics")
"""Prefixes of the keys that are printed first, in this order."""


def print_report(report: dict[str, Any], console: Console, every: bool = False) -> None:
    """Print the report as a table; "-" is an unknown value. Without `every`: at most MAX_ROWS rows, most important first, without
    unknown values and zeros (except of reward)."""
    table = folding("", "value", "95 % interval", title=f"{report['episodes']} episodes of {report['tasks']} tasks")
    rows: list[tuple[str, str, str]] = []
    for key, value in report.items():
        if isinstance(value, dict) and "mean" in value:
            rows.append((key, f"{value['mean']:.3f}", f"{value['low']:.3f} to {value['high']:.3f}"))
        elif key not in (*ABOUT, HORIZONS, "tasks", "episodes"):
            inner = value.items() if isinstance(value, dict) else ((None, value),)
            rows += [(key if name is None else f"{key} / {name}", _short(number), "") for name, number in inner]
    if not every:
        rows = [row for row in rows if row[1] not in ("-", "0") or row[0] == "reward"]
        rows.sort(key=lambda row: next((at for at, start in enumerate(_KEY_ORDER) if row[0].startswith(start)), len(_KEY_ORDER)))
    for name, shown, interval in rows if every else rows[:MAX_ROWS]:
        table.add_row(cell(name), cell(shown), interval)
    console.print(table)
    if not every and len(rows) > MAX_ROWS:
        console.print(f"{len(rows) - MAX_ROWS} more rows: --all, or report.json", markup=False)
    print_horizons({"": report}, console)


def print_horizons(reports: Mapping[str, Any], console: Console) -> None:
    """Print success by the solution's number of calls, for the environments whose tasks differ in it."""
    for name, report in reports.items():
        table = folding("calls", *_COLUMNS, title=cell(f"{name}{': ' if name else ''}by calls of the solution"))
        for label, one in report.get(HORIZONS, {}).items():
            table.add_row(label, _rate_text(one["success"]), *(_short(one[column]) for column in _COLUMNS[1:]))
        if table.row_count:
            console.print(table)


def print_reports(reports: Mapping[str, Any], success: float | None, console: Console) -> None:
    """Print the reports of several environments, one column each."""
    table = folding("", *map(cell, reports), "mean", title="held-out tasks by environment")
    for key in [name for name in next(iter(reports.values())) if name not in (*ABOUT, HORIZONS)]:
        cells = [report[key] for report in reports.values()]
        if key.startswith("pass"):
            table.add_row(key, *map(_rate_text, cells), _short(success) if key == "pass@1" else "")
        elif not any(isinstance(value, dict) for value in cells) and any(value is not None for value in cells):
            table.add_row(cell(key), *(cell(_short(value)) for value in cells), "")
    console.print(table)
    print_horizons(reports, console)


def _rate_text(rate: Mapping[str, float] | None) -> str:
    return "-" if rate is None else f"{rate['mean']:.3f} ({rate['low']:.2f} to {rate['high']:.2f})"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 3 if abs(value) >= 0.01 or value == 0 else 6
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".")


# The parts


class EvalSession:
    """The parts that play and score episodes, with their engines and Ray; `close` closes all of them."""

    def __init__(self, start: RunStart, temperature: float) -> None:
        """Make the parts; nothing is started. Raises as `RunStart.inputs` and `assemble`."""
        rollout = start.config.rollout.model_copy(update={"router_replay": False})  # only training needs it
        config = EngineChoice(start.config.model_copy(update={"rollout": rollout})).with_threads(trains=False)
        start = replace(start, config=config)
        inputs, choice = start.inputs(temperature=temperature), start.engine
        self.parts = inputs.assemble(room=engine_room(choice, trains=False))
        if workers := config.rollout.workers:
            self.parts = with_workers(inputs, self.parts)
        self._ray, self._cluster, self._started = workers or choice.samples_on_ray(), config.cluster, False
        self._opened = AsyncExitStack()
        self._opened.callback(stop_asking)

    async def start(self) -> None:
        """Start the engines, once. Raises UserError or EngineError; `close` then closes the started parts."""
        if self._started:
            return
        self._started = True
        if self._ray and start_ray(self._cluster):
            self._opened.callback(stop_ray)
        self._opened.push_async_callback(self.parts.close)
        await self.parts.start()

    async def close(self) -> None:
        """Close each part, even if another fails."""
        await self._opened.aclose()


# Rollouts


def check_out(folder: Path) -> None:
    """Raise ConfigError if the folder of `--out` is a file, or would be in one."""
    for file in (one for one in (folder, *folder.parents) if one.is_file()):
        raise ConfigError(f"--out {folder}: {file} is a file, and results are written to a folder. Name another one")


Pair = tuple[int, int]

OTHER_OUT = "use another --out"
RERUN = "the same command runs the missing episodes"


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Request for `samples` episodes of each of `tasks` tasks of a split, written to `out`.

    `chosen`: indices of the tasks in the split; by default the first ones. `values`: continuations per turn, to estimate its
    value. Raises ConfigError if `tasks` or `samples` is below 1, and as `check_out`.
    """

    purpose: Literal["eval", "rollout"]
    model: str
    tasks: int
    samples: int
    split: str
    out: Path
    chosen: tuple[int, ...] = ()
    values: int = 0

    def __post_init__(self) -> None:
        if min(self.tasks, self.samples) < 1:
            raise ConfigError(f"n = {self.tasks}, k = {self.samples}: expected at least 1 of each")
        check_out(self.out)

    @property
    def pairs(self) -> list[Pair]:
        """(task index, member) of every episode, in order."""
        return [(task, member) for task in self.chosen or range(self.tasks) for member in range(self.samples)]

    @property
    def note(self) -> Path:
        """Path of the file with the identity of the episodes in `out`."""
        return self.out / f"{self.purpose}.json"

    def day(self) -> str | None:
        """ISO date of the episodes in `out`, else today; None for episodes of an older agentrl, which recorded no date."""
        note = stored_object(self.note, OTHER_OUT)
        found: str | None = date.today().isoformat() if note is None else (note.get("identity") or {}).get("model.date")
        return found


class RolloutJob:
    """Plays the missing episodes of a request in the only environment of the config.

    `shared`: parts of several environments, which the caller closes; by default the job makes and closes its own. `episodes`: the
    finished ones by (task, member); `interrupted`: Ctrl-C ended it before all were played. Raises ConfigError if `values` are
    requested for episodes that cannot be forked."""

    def __init__(self, start: RunStart, request: RolloutRequest, display: Display, shared: EvalSession | None = None) -> None:
        self.start = replace(start, config=start.config.with_date(request.day()))
        self.config, self.request, self.display, self.shared = self.start.config, request, display, shared
        config = self.config
        evaluates = request.purpose == "eval"  # `eval.temperature` instead of `rollout.temperature`
        self.temperature = config.eval.temperature if evaluates else one_temperature(config.rollout, "a rollout")
        self.file = request.out / "trajectories.jsonl"
        self.script = SCRIPTS["values"](self.start, request.values) if request.values else None
        self.episodes: dict[Pair, Trajectory] = {}
        self.interrupted = False

    async def run(self) -> None:
        """Play the missing episodes. After Ctrl-C finished episodes stay, and the same command continues.

        Raises ConfigError if `out` holds other episodes, WorkerDiedError if a process or Ray is lost.
        """
        share_the_lock()
        config, request, display = self.config, self.request, self.display
        interrupt = Interrupt(display.say)
        interrupt.install()  # Ctrl-C must also end the start of Ray and of the engine
        for note in suite_notes([ref := self.start.env]):
            display.warn(note)
        if ref.at is None:  # before the folder is made; a remote environment reports a wrong split at the first task
            with closing(ref.build()) as env:
                env.check_split(request.split)
        request.out.mkdir(parents=True, exist_ok=True)
        with lock_folder(request.out, OTHER_OUT):
            self.episodes = self._resume()
            session = self.shared or EvalSession(self.start, self.temperature)
            missing = [pair for pair in request.pairs if pair not in self.episodes]
            display.phase(request.purpose, len(request.pairs), first=len(request.pairs) - len(missing))
            if missing:
                claiming = claiming_engine(request.model)  # a scripted policy has no sampling settings
                if api_name(request.model) is not None or claiming is None or "messages" not in claiming.traits:
                    section = "eval" if request.purpose == "eval" else "rollout"
                    limits = (("top_p", config.rollout.top_p), ("top_k", config.rollout.top_k))
                    more = [f", rollout.{name} = {value}" for name, value in limits if value not in (0, 1, None)]
                    greedy = " (greedy)" if self.temperature == 0 else ""
                    display.say(f"[{request.purpose}] {section}.temperature = {self.temperature:g}{greedy}{''.join(more)}")
                    if greedy and request.samples > 1:
                        hardly = f"the {request.samples} greedy episodes of a task hardly differ, and pass@k hardly from pass@1"
                        display.warn(f"{hardly}. Set {section}.temperature=1")
                if computes := self.start.engine.computation_line(trains=False):
                    display.say(computes)
            try:
                try:
                    if missing:
                        report_to_parent(folder=str(request.out), restarts=0, max_restarts=0, then=RERUN)
                        with exit_message(silent_exit_message(RERUN)), chdir("."):  # restore the folder, which a tool may change
                            await while_ray_lives(self.play(session, missing))
                finally:  # Ctrl-C may come here too
                    if session is not self.shared:
                        with display.doing("ending the engine"):
                            await session.close()
            except WorkerDiedError as error:
                raise WorkerDiedError(f"{error}; {RERUN}") from error
            except asyncio.CancelledError:
                if not interrupt.requested:
                    raise
                self.interrupted = True
            # Sorted by task, so that equal runs leave equal files.
            atomic_write(self.file, "".join(_line(self.episodes[pair]) for pair in sorted(self.episodes)))

    async def evaluate(self, about: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Play the missing episodes and write report.json; returns the report, or None after Ctrl-C. For a suite the report
        includes the benchmark's official table ("official"). `about`: further entries. Raises as `run`."""
        await self.run()
        if self.interrupted:
            return None
        request, episodes = self.request, [self.episodes[pair] for pair in self.request.pairs]
        found = official([self.config], {self.config.envs[0].called: episodes}, request.split)
        tables = {"official": found} if found else {}
        report = {**make_report(episodes, request.samples), "model": request.model, **(about or {}), **tables}
        _write_report(request.out / "report.json", report)
        return report

    async def play(self, session: EvalSession, missing: list[Pair]) -> None:
        """Play the missing episodes; adds each to the file and to `episodes` when it ends."""
        config, request, display = self.config, self.request, self.display
        parts, done = session.parts, len(request.pairs) - len(missing)
        watch, lost, wanted = Watch(), list[str](), set(missing)
        display.trouble = lambda: f"{len(lost)} episodes came to no score; the first: {lost[0]}" if lost else ""
        with display.doing("starting the engine", parts.starting):
            await session.start()
        with report_error(), self.file.open("a") as file:

            def keep(trajectory: Trajectory) -> None:
                nonlocal done
                pair = trajectory.task.seed, trajectory.member
                if pair in self.episodes or pair not in wanted:
                    raise ConfigError(f"{config.envs[0].id}: two tasks have seed {pair[0]}. Hand make_task's rng_seed on to Task")
                with naming(self.file):
                    file.write(_line(trajectory))
                    file.flush()
                self.episodes[pair] = trajectory
                done += 1
                if not is_scored(trajectory):
                    lost.append(fault_of(trajectory))
                display.step(done, {"success": success_rate(self.episodes.values()), "unscored": len(lost)})

            with LoopWatchdog(SLOW_LOOP, display.warn), display.doing("episodes", waits=watch.waiting):
                await run_tasks(
                    parts.player,
                    config.the_env.called,
                    missing,
                    seed=config.seed,
                    max_episodes=max(config.rollout.max_episodes // max(request.values, 1), 1),
                    split=request.split,
                    temperature=self.temperature,
                    on_episode=keep,
                    watch=watch,
                    script=self.script,
                )

    def _resume(self) -> dict[Pair, Trajectory]:
        """Read the scored episodes in `out`; the unscored ones are played again. Raises ConfigError if `out` holds other
        episodes."""
        request, purpose = self.request, self.request.purpose
        # Everything that an episode depends on; `-n` and `-k` only select episodes.
        options = {"command": purpose, "--split": request.split, **({"--values": request.values} if request.values else {})}
        identity = {**identity_of(self.config, purpose), **options, **contents_of(self.config, purpose).digests}
        note, path = request.note, self.file
        if (before := stored_object(note, OTHER_OUT)) is not None:
            kind = "an evaluation" if purpose == "eval" else "a rollout"
            check_same_identity(before.get("identity") or {}, identity, f"{kind} of something else ({note})", request.out)
        elif path.exists():
            raise ConfigError(f"{request.out}: it holds trajectories of something else; use another --out")
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        found = [episode_of(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
        scored = {(t.task.seed, t.member): t for t in found if is_scored(t)}
        atomic_write(note, json.dumps({"identity": identity, "episodes": len(request.pairs)}, indent=2) + "\n")
        atomic_write(path, "".join(map(_line, scored.values())))
        return scored


def _line(trajectory: Trajectory) -> str:
    return redact(json_text(trajectory.to_json())) + "\n"


def _write_report(file: Path, report: Mapping[str, Any]) -> None:
    atomic_write(file, json_text(redact_json(report, said=True), indent=2) + "\n")


# Evaluation


async def run_evals(
    start: RunStart, requests: Mapping[str, RolloutRequest], display: Display, about: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any] | None, RolloutJob]:
    """Evaluate several environments, one after the other with one engine, and write a common report. `requests`: by
    environment name, each with its folder in one root, which gets the report. Returns the report (None after Ctrl-C) and the
    last job."""
    config = start.config.with_date(next(iter(requests.values())).day())
    start = replace(start, config=config)
    envs = {env.called: env for env in config.envs}
    interrupt = Interrupt(display.say)
    interrupt.install()  # until each job installs its own
    shared = EvalSession(start, config.eval.temperature)
    reports: dict[str, Any] = {}
    episodes: dict[str, list[Trajectory]] = {}
    try:
        try:
            for name, request in requests.items():
                display.say(f"[{name}] {request.tasks} tasks of {envs[name].id}")
                job = RolloutJob(replace(start, config=config.alone(envs[name])), request, display, shared)
                report = await job.evaluate()
                if report is None:
                    return None, job
                reports[name], episodes[name] = report, [job.episodes[pair] for pair in request.pairs]
        finally:
            interrupt.install()
            with display.doing("ending the engine"):
                await shared.close()
    except asyncio.CancelledError:
        if not interrupt.requested:
            raise
        return None, job
    found = official(config.each(), episodes, request.split)
    tables = {"official": found} if found else {}
    # Weighted mean of the environments' pass@1; None if one with a positive weight is unknown.
    rates = [(weight, reports[name]["pass@1"]) for name, weight in eval_weights(config.envs).items() if weight > 0]
    success = None
    if rates and all(rate is not None for _, rate in rates):
        success = float(sum(weight * rate["mean"] for weight, rate in rates) / sum(weight for weight, _ in rates))
    whole = {"success": success, "model": request.model, **(about or {}), **tables, "envs": reports}
    _write_report(request.out.parent / "report.json", whole)
    return whole, job


def write_comparison(folder: Path, comparison: Mapping[str, Any]) -> Path:
    check_out(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "comparison.json"
    _write_report(file, comparison)
    return file
