"""A run from start to summary: phases, Ctrl-C, lost workers, and the closing message."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl.cluster.group import check_arrived
from agentrl.cluster.ray_cluster import exit_message, while_ray_lives
from agentrl.cluster.ray_parent import LOSSES, report_error, report_to_parent, restarting, silent_exit_message
from agentrl.config.origin import Origins, to_toml
from agentrl.config.schema import TrainConfig
from agentrl.run.assembly import RunStart
from agentrl.run.callbacks import Callback
from agentrl.run.checks import run_checks
from agentrl.run.checks.size_checks import start_notes
from agentrl.run.display import Display, percent
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.folder import BEFORE_SFT, LogFile, RunFolder, stored_object
from agentrl.run.interrupt import SAME_SIGNAL_S, Interrupt, ignore_first_signal
from agentrl.run.loop import evaluate_now, train_loop
from agentrl.run.outcomes import EVALUATED, draw_curve, points, summary_of
from agentrl.run.provenance import Provenance, updates_done
from agentrl.run.run_log import MOSTLY_UNSCORED, Health, RunLog, Unhealthy, check_any_scored, finding_text, thrown_away
from agentrl.run.session import Session, needs_warm_start, open_session
from agentrl.run.sft import warm_start
from agentrl.run.trackers import Status, TrackedRun, makers
from agentrl.trainer.actor import Actor
from agentrl.trainer.checkpoint import newest_checkpoint, seal
from agentrl.trainer.families import packing_of
from agentrl.utils.errors import (
    FULL,
    AgentrlError,
    CallbackError,
    DiskFullError,
    EngineError,
    JudgeBudgetError,
    NoRoomLeftError,
    NothingScoredError,
    ResourceError,
    RunFolderError,
    StalledError,
    WorkerDiedError,
    fault_text,
)
from agentrl.utils.event_loop import run_loop
from agentrl.utils.files import explain_full_disk
from agentrl.utils.processor import raise_gc_threshold
from agentrl.utils.registry import Registry
from agentrl.utils.terminal import quiet_libraries
from agentrl.utils.threads import in_thread, share_the_lock

log = logging.getLogger(__name__)

RUN_KINDS: Registry[Callable[[TrainConfig], Any]] = Registry("run", "RUN_KINDS", "agentrl.run")
"""Makers, from a config, of runs that learn without playing episodes. Such a run checks the config, prepares a folder's data,
trains (False if interrupted) and summarizes metrics.jsonl; `relevant_sections` is the config with the sections that it reads."""
DATA = "data"
"""Name of training on [data] in `RUN_KINDS`."""


@dataclass(slots=True)
class RunOutcome:
    """State of a run, written to summary.json. `cause`: why a completed run did not learn. `findings`: as `Health.findings`."""

    status: Status | Unhealthy = "failed"
    error: str | None = None
    cause: str | None = None
    findings: Sequence[Mapping[str, Any]] = ()
    restarts: int = 0
    engine: str = ""
    full: OSError | None = None
    started: float = field(default_factory=time.monotonic)


def execute(
    config: TrainConfig,
    folder: RunFolder,
    *,
    resumed: bool,
    notes: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    interrupt: Interrupt | None = None,
    origins: Origins | None = None,
    restarts: int = 0,
) -> int:
    """Run all phases of `config` in `folder`, or only its warm start; returns 0 (done), 1 (failed) or 130 (interrupted).

    `notes`: the caller's warnings, for display and log. `callbacks`: in addition to the config's. `interrupt`: stops the run
    without a signal. `origins`: sources of a resumed run's config values; `config` replaces the one in the folder. `restarts`:
    number of earlier restarts. Raises UserError if the user can fix the problem, for example ConfigError if another process
    writes this run. Otherwise always writes the summary.
    """
    quiet_libraries()
    raise_gc_threshold()
    share_the_lock()
    outcome = RunOutcome(restarts=restarts)
    trackers = makers(config.trackers, TrackedRun(folder, config, resumed))
    with (
        explain_full_disk(folder.path, f"continue with: {folder.resume_command()}"),
        folder.lock(),
        _log_to(folder),
        Display() as display,
        RunLog(folder, display, trackers, resumed, Health(config, display.warn), config.prometheus, config.keep) as run_log,
    ):
        folder.check_places()
        config = config.with_date(folder.day())
        outcome.started -= _seconds_before(folder) if resumed else 0.0
        folder.summary.unlink(missing_ok=True)  # no summary means that the run is running or was killed
        folder.reserve()
        command = "sft" if folder.only_warm_start or config.data else "train"
        display.say(f"agentrl {command}: {folder.path} ({'resumed' if resumed else 'new'})")
        if not folder.trajectories.is_dir():
            folder.trajectories.mkdir()
            note = "the folder was deleted and is made again; the episodes of earlier updates are lost"
            display.say(f"{folder.trajectories}: {note}")
        if resumed and (old := folder.keep_config(to_toml(config, origins), updates_done(folder))) is not None:
            log.info("the config has changed; the previous one is in %s", old)
        shown = config if config.data is None else RUN_KINDS[DATA](config).relevant_sections()
        packing = packing_of(shown)
        log.info("packing: %s", packing.reason)
        # Decide once for all roles and ranks, before any of them starts.
        config, shown = (one.model_copy(update=packing_of(one).sections(one.model, one.optim)) for one in (config, shown))
        display.say(EngineChoice(config).computation_line(trains=True))
        for line in () if resumed else run_checks(RunStart(shown), "start"):
            display.say(line)
        slower = [f"model.packing: {packing.reason}"] if packing.way != "packed" or not packing.shares else []
        for line in (*notes, *slower, *start_notes(RunStart(shown))):
            display.warn(line)
        run = RunDriver(config, folder, display, run_log, outcome, interrupt or Interrupt(display.say), callbacks)
        try:
            with exit_message(silent_exit_message(f"continue with: {folder.resume_command()}")):
                run_loop(run.train())
        except (asyncio.CancelledError, KeyboardInterrupt):
            outcome.status = "interrupted"
        except BaseException as error:
            outcome.error = fault_text(error)
            if isinstance(error, NothingScoredError):
                outcome.status = MOSTLY_UNSCORED
            elif isinstance(error, (WorkerDiedError, NoRoomLeftError, EngineError, StalledError)):  # infrastructure faults
                then = "\n" if "\n" in str(error) else "; "  # a message with a table gets a new line
                raise type(error)(f"{error}{then}continue with: {folder.resume_command()}") from error
            elif isinstance(error, CallbackError) or not (
                isinstance(error, AgentrlError) or (isinstance(error, OSError) and error.errno in FULL)
            ):
                log.exception("the run failed")  # the terminal shows one line; the log needs the traceback of user code
            raise
        finally:
            with ignore_first_signal(display.say):
                run.finish()
        if outcome.full is not None:
            raise outcome.full
        run.say_end()
    return {"done": 0, "interrupted": 130}.get(outcome.status, 1)


@dataclass(slots=True)
class RunDriver:
    config: TrainConfig
    folder: RunFolder
    display: Display
    run_log: RunLog
    outcome: RunOutcome
    interrupt: Interrupt
    callbacks: Sequence[Callback] = ()

    async def train(self) -> None:
        """Train until the run ends; after the loss of a worker, restart from the newest checkpoint. Raises the error once
        `cluster.max_restarts` is used up."""
        self.interrupt.install()
        outcome, most = self.outcome, self.config.cluster.max_restarts
        while True:
            # Close and reopen everything, because torch.distributed groups do not survive the loss of a rank.
            try:
                await while_ray_lives(self._attempt())
                return
            except (*LOSSES, NothingScoredError) as error:
                if isinstance(error, DiskFullError):
                    raise
                await asyncio.sleep(SAME_SIGNAL_S)  # a stop signal to the process group may have ended the worker first
                if self.interrupt.requested:
                    log.warning("stopped on request, before the end of the step: %s", error)
                    outcome.status = "interrupted"
                    return
                if not isinstance(error, WorkerDiedError) or outcome.restarts >= most:
                    raise
                outcome.restarts += 1
                self.display.say(restarting(error, outcome.restarts, most))
            except asyncio.CancelledError as error:
                if self.interrupt.requested:
                    raise
                raise RuntimeError("the run was cancelled by code inside of it, not by a stop signal") from error

    async def _attempt(self) -> None:
        config, folder, outcome = self.config, self.folder, self.outcome
        then = f"continue with: {folder.resume_command()}"
        report_to_parent(folder=str(folder.path), restarts=outcome.restarts, max_restarts=config.cluster.max_restarts, then=then)
        if outcome.restarts:
            Provenance(folder, config).check_contents()  # a restart reads the files again
        if config.data is not None:
            outcome.engine, outcome.status = "none", "interrupted"
            if await RUN_KINDS[DATA](config).train(folder, self.display, self.run_log, self.interrupt):
                outcome.status = "done"
            return
        try:
            session = await open_session(config, folder, self.display, self.callbacks)
        except ResourceError as error:
            if not outcome.restarts or isinstance(error, DiskFullError):
                raise
            raise NoRoomLeftError(f"the remaining nodes have no room for the run: {error}") from error
        outcome.engine = session.engine_name
        self.run_log.live(session)
        try:
            with report_error():
                await self._phases(session)
        finally:
            self.run_log.live(None)
            await session.close()

    async def _phases(self, session: Session) -> None:
        config, folder = session.config, session.folder
        run_log, outcome, interrupt = self.run_log, self.outcome, self.interrupt
        if config.rollout.colocate:
            await session.publisher.sleep()  # until the first publish, because warm start and loading use the same memory
        outcome.status = "interrupted"  # the early returns below follow Ctrl-C, except the one for only a warm start
        if needs_warm_start(config, folder):
            folder.rewind(BEFORE_SFT)  # drop rows of an attempt that ended in its warm start: they are written again
            run_log.rewound(BEFORE_SFT)
            await warm_start(session, run_log, interrupt)
            if interrupt.requested:
                return
        if folder.only_warm_start:
            outcome.status = "done"
            return
        loaded = await session.begin()
        run_log.rewound(session.collector.version if loaded else -1)
        if loaded:
            for step, success in points(folder.read_metrics(), EVALUATED, "success"):
                session.display.show_evaluation(step, success)
        else:
            session.display.phase("before", 1)
            before = await evaluate_now(session, run_log, "before")
            check_any_scored(before)
            await session.saver.save(before)
        if run_log.health is not None:
            run_log.health.begin(session.collector.version, folder.read_metrics(), session.collector.stats)
        try:
            await train_loop(session, run_log, interrupt)
        except JudgeBudgetError as error:
            step = await session.saver.save_missing()
            raise JudgeBudgetError(
                f"{error}, and continue from the checkpoint of step {step}: {folder.resume_command()} reward.judge..."
            ) from error
        if session.collector.ledger.version >= config.steps or not interrupt.requested:
            session.display.phase("finish", 1)
            await session.saver.rate(await evaluate_now(session, run_log, "after"))
            await run_log.writes.wait()
            if config.rollout.colocate:
                await session.rest()
            with session.display.doing("writing the trained model"):
                folder.clear_final()
                await session.actors.arun(Actor.export_hf, str(folder.final))
            await check_arrived(session.actors, folder.final, "the trained model")
            await in_thread("files", seal, folder.final, session.collector.version)
            outcome.status = "done"

    def finish(self) -> None:
        """Decide the final status, draw the curve and write the summary."""
        config, folder, outcome, run_log = self.config, self.folder, self.outcome, self.run_log
        rows = folder.read_metrics()
        if outcome.error is not None and outcome.status != MOSTLY_UNSCORED:
            outcome.status = "failed"
        ended = outcome.status == "done" and not folder.only_warm_start and config.data is None
        if ended and run_log.health is not None and (finding := run_log.health.verdict(rows)) is not None:
            outcome.cause = str(finding)
            outcome.status = finding.status if finding.fails else "done"
        outcome.findings = [] if run_log.health is None else run_log.health.findings
        with _log_write_errors(outcome, "the curve is not drawn"):
            if config.data is None:
                draw_curve(rows, folder.curve, f"{config.name}: {', '.join(env.id for env in config.envs)}")
        with _log_write_errors(outcome, "summary.json is not written"):
            folder.write_summary(summary := self._summary(rows))
            run_log.end(outcome.status if outcome.status in ("done", "interrupted") else "failed", summary)

    def _summary(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        config, outcome = self.config, self.outcome
        updates = [row for row in rows if row["phase"] == "train"]
        success = {row["phase"]: row.get("success") for row in rows if row["phase"] in ("before", "after")}
        return {
            "name": config.name,
            "status": outcome.status,
            "error": outcome.error,
            **({"cause": outcome.cause} if outcome.cause is not None else {}),
            **({"findings": outcome.findings} if outcome.findings else {}),
            "engine": outcome.engine,
            "seed": config.seed,
            "steps": updates[-1]["step"] if updates else 0,
            "success_before": success.get("before"),
            "success_after": success.get("after"),
            **({"envs": {env.called: _env_summary(rows, env.called) for env in config.envs}} if len(config.envs) > 1 else {}),
            **({"horizons": horizons} if (horizons := summary_of(rows)) else {}),
            "tokens": sum(row.get("tokens") or 0 for row in updates),
            **thrown_away(updates),
            "seconds": round(time.monotonic() - outcome.started, 1),
            "restarts": outcome.restarts,
            **(RUN_KINDS[DATA](config).summary(rows) if config.data is not None else {}),
        }

    def say_end(self) -> None:
        """Show the result of the run and the commands to try next."""
        config, display, folder, outcome = self.config, self.display, self.folder, self.outcome
        if outcome.status == "interrupted":
            display.say(f"newest checkpoint           {newest_checkpoint(folder.path)}")
            display.say(f"interrupted. Continue with: {folder.resume_command()}")
            return
        if config.data is not None:
            where = shlex.quote(str(folder.final))
            use = f"reward_model.path={where}" if config.data.loss == "reward" else f"agentrl eval ENV --model {where}"
            display.say(f"the trained model is in {folder.final}; next: {use}")
            return
        if folder.only_warm_start:
            display.say(f"the warmed-up model is in {folder.warm_start}")
            return
        rows = folder.read_metrics()
        summary = self._summary(rows)
        display.say("")
        for name, part in {"": summary, **summary.get("envs", {})}.items():
            head = f"  {name:<26}" if name else "success on held-out tasks   "
            tokens = f"   {part['tokens']:,} tokens sampled" if name else ""
            display.say(f"{head}before {percent(part['success_before'])}   after {percent(part['success_after'])}{tokens}")
            # One line per number of calls in the solution, if tasks differ in it.
            horizons = part.get("horizons", {})
            for label, one in horizons.items() if len(horizons) > 1 else ():
                ends = f"before {percent(one['success_before'])}   after {percent(one['success_after'])}"
                display.say(f"  {label + (' call' if label == '1' else ' calls'):<26}{ends}   of {one['tasks']} tasks")
        if summary.get("tokens_thrown") and summary["tokens_sampled"]:
            away, of = summary["tokens_thrown"], summary["tokens_sampled"]
            causes = ", ".join(f"{why} {percent(count / of)}" for why, count in summary["thrown"].items())
            display.say(f"thrown away                 {away:,} of {of:,} sampled tokens ({percent(away / of)}: {causes})")
        display.say(f"run folder                  {folder.path}  (curve.png, metrics.jsonl, trajectories/, checkpoints/)")
        if outcome.status == "done":
            display.say(f"trained model               {folder.final}")
        for tracker in self.run_log.trackers:
            if tracker.look:
                display.say(f"look at it                  {tracker.look}")
        for finding in outcome.findings:
            display.say(f"but                         {finding_text(finding)}")
        # Suggest to evaluate and continue, or to find out why it did not learn. Every command works from any folder.
        run = shlex.quote(str(folder.path))
        # A finished run may have more updates than its config's `steps` if it was resumed with fewer.
        more = 2 * max(config.steps, summary["steps"])
        if outcome.status != "done":
            display.say("")
            display.say(f"THIS RUN FAILED: {outcome.status}. {outcome.cause}")
            display.say(f"look at its episodes        agentrl view {run};  agentrl runs failures {run}")
            display.say(f"after fixing it             agentrl train --resume {run} steps={more}   (or start over: --overwrite)")
            return
        if outcome.cause is not None:
            display.say(f"but                         {outcome.cause}")
        display.say(f"look at it                  agentrl view {run};  agentrl show {run}")
        if any(row["phase"] == "after" and not row.get("success") for row in rows):
            display.say(f"why nothing is solved       agentrl runs failures {run}")
        display.say(f"try next                    agentrl eval --run {run} --checkpoint 0 --checkpoint last")
        display.say(f"                            agentrl train --resume {run} steps={more}")
        display.say("                            agentrl env list;  agentrl env new my_env")


def _seconds_before(folder: RunFolder) -> float:
    """Return the seconds of the run's earlier processes, as its summary has them; after a kill those of its rows."""
    parts = ("rollout", "batch", "update", "publish", "eval", "data")
    counted = sum(row.get(f"time/{part}_s") or 0.0 for row in folder.read_metrics() for part in parts)
    with suppress(RunFolderError, TypeError):  # a summary that was edited
        counted = max(counted, (stored_object(folder.summary, "") or {}).get("seconds") or 0.0)
    return counted


@contextmanager
def _log_write_errors(outcome: RunOutcome, what: str) -> Iterator[None]:
    """Log write errors (such as a full disk) after a failed run, so that they do not hide the cause. Of a run that has not
    failed, a full disk makes it a failed one; any other OSError is raised."""
    try:
        yield
    except OSError as problem:
        if outcome.error is None:
            if problem.errno not in FULL:
                raise
            outcome.status, outcome.error, outcome.full = "failed", f"{what}: {problem}", problem
        log.warning("%s: %s", what, problem)


def _env_summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Summarize an environment: held-out success before, after and at best (with its step), and tokens sampled in training."""
    key = f"env/{name}/success"
    of = {phase: dict(points(rows, (phase,), key)) for phase in EVALUATED}
    found = {step: value for phase in of.values() for step, value in phase.items()}
    best = max(found, key=lambda step: (found[step], -step), default=None)
    return {
        "success_before": next(iter(of["before"].values()), None),
        "success_after": next(reversed(of["after"].values()), None),
        "best": None if best is None else {"step": best, "success": found[best]},
        **({"horizons": horizons} if (horizons := summary_of(rows, name)) else {}),
        "tokens": sum(row.get(f"env/{name}/tokens") or 0 for row in rows if row["phase"] == "train"),
    }


@contextmanager
def _log_to(folder: RunFolder) -> Iterator[None]:
    handler = LogFile(folder.log)
    logging.getLogger("agentrl").setLevel(logging.INFO)
    # The OpenTelemetry exporter logs to its own logger, for example that it finds no collector.
    loggers = [logging.getLogger("agentrl"), logging.getLogger("opentelemetry")]
    for logger in loggers:
        logger.propagate = False  # only to the file: lines on the console would garble the live display
        logger.addHandler(handler)
    try:
        yield
    finally:
        # The process may outlive the run, and its folder may be deleted.
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
        handler.close()
