"""Episodes of a model on an environment's tasks, into a folder: resumable, recorded or replayed.

trajectories.jsonl   one episode per line, in the order of tasks once all are there
eval.json            what was requested (rollout.json for `agentrl rollout`): a different run does not continue there
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.backends.api.make import api_name
from agentrl.cluster.ray_life import while_ray_lives
from agentrl.cluster.ray_parent import error_told, tell, unsaid
from agentrl.cluster.runtime import last_words
from agentrl.config import TrainConfig
from agentrl.config.envs import the_env
from agentrl.config.identity import Identity, check_same_identity, identity_of
from agentrl.config.temperature import one_temperature
from agentrl.errors import ConfigError, WorkerDiedError
from agentrl.executors import share_the_lock
from agentrl.files import atomic_write, naming
from agentrl.plain_data import json_text, read_json
from agentrl.redaction import redact
from agentrl.rollout.clock import Watch
from agentrl.rollout.evaluate import fault_of, run_tasks, success_rate
from agentrl.run.checks.suite import suite_notes
from agentrl.run.contents import contents_of
from agentrl.run.display import Display
from agentrl.run.engines import engine_computes, talks_in_messages
from agentrl.run.eval_session import EvalSession, open_live, open_replay
from agentrl.run.folder import dated
from agentrl.run.interrupt import Interrupt
from agentrl.run.record_folder import RecordFolder
from agentrl.trajectory import Trajectory
from agentrl.watchdog import watched

Pair = tuple[int, int]

LATER = "the same command runs what is missing"


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """What to run: `tasks` tasks of a split, `samples` episodes each, written to `out`.

    `record`: also record every answer there; `replay`: run from such a folder instead of live. `chosen`: the numbers of those
    tasks in the split, if they are not the first ones.
    """

    purpose: Literal["eval", "rollout"]
    model: str
    tasks: int
    samples: int
    split: str
    out: Path
    record: Path | None = None
    replay: Path | None = None
    chosen: tuple[int, ...] = ()

    @property
    def pairs(self) -> list[Pair]:
        """(task, member) of every episode, in order."""
        return [(task, member) for task in self.chosen or range(self.tasks) for member in range(self.samples)]

    def temperature(self, config: TrainConfig) -> float:
        """The sampling temperature; an evaluation has its own."""
        return config.eval.temperature if self.purpose == "eval" else one_temperature(config.rollout, "a rollout")


@dataclass(slots=True)
class RolloutOutcome:
    """The episodes that are there, by (task, member)."""

    episodes: dict[Pair, Trajectory] = field(default_factory=dict)
    interrupted: bool = False


async def run_rollout(
    config: TrainConfig, request: RolloutRequest, display: Display, shared: EvalSession | None = None
) -> RolloutOutcome:
    """Run what is missing, in the only environment of `config`. Ctrl-C ends it early: finished episodes are kept, and the same
    command continues. `shared`: parts of several environments, which the caller closes; by default its own are made.

    Raises ConfigError if `out` or `record` holds something else, or workers would play what is recorded, ReplayError if a replay
    diverges, WorkerDiedError if a process or Ray is lost.
    """
    if config.rollout.workers and request.record is not None:
        raise ConfigError(
            f"rollout.workers = {config.rollout.workers}: a record is one file, in the order of arrival in one process; set "
            "rollout.workers = 0, or leave out --record"
        )
    share_the_lock()
    config = dated_as(config, request)
    interrupt = Interrupt(display.say)
    interrupt.install()  # the start of Ray and of the engine is to be ended too
    if request.replay is None:
        for note in suite_notes(config):
            display.warn(note)
        done = _resume(config, request)
        session = shared or _open(config, request)
    else:
        session = _open(config, request)  # first, so that an invalid record leaves no folder behind
        done = _resume(config, request)
    outcome = RolloutOutcome(done)
    missing = [pair for pair in request.pairs if pair not in outcome.episodes]
    display.phase(request.purpose, len(request.pairs), first=len(request.pairs) - len(missing))
    if missing:
        if request.replay is None and (api_name(request.model) is not None or not talks_in_messages(request.model)):
            display.say(f"[{request.purpose}] {sampling_line(config, request)}")
        if request.replay is None and (computes := engine_computes(config)):
            display.say(computes)
        try:
            tell(folder=str(request.out), restarts=0, max_restarts=0, then=LATER)
            with last_words(unsaid(LATER)):
                await while_ray_lives(_play(config, request, session, missing, outcome, display))
        except WorkerDiedError as error:
            raise WorkerDiedError(f"{error}; {LATER}") from error
        except asyncio.CancelledError:
            if not interrupt.requested:
                raise
            outcome.interrupted = True
        finally:
            if session is not shared:
                await session.close()
    elif session is not shared:
        await session.close()
    _sort(request, outcome)
    return outcome


def dated_as(config: TrainConfig, request: RolloutRequest) -> TrainConfig:
    """`config` with the date of the episodes that are in the request's folder, or else today's; a record has its own."""
    if request.replay is not None:
        return config
    if not (note := _note(request)).exists():
        return dated(config)
    day = (read_json(note.read_text()).get("identity") or {}).get("model.date")
    return config if day is None else dated(config, day)  # an older agentrl kept none: what it began goes on without


def _note(request: RolloutRequest) -> Path:
    return request.out / f"{request.purpose}.json"


def sampling_line(config: TrainConfig, request: RolloutRequest) -> str:
    """The model's sampling parameters, by their keys."""
    section, temperature = "eval" if request.purpose == "eval" else "rollout", request.temperature(config)
    limits = (("top_p", config.rollout.top_p), ("top_k", config.rollout.top_k))
    more = [f"rollout.{name} = {value}" for name, value in limits if value not in (0, 1, None)]
    greedy = " (greedy)" if temperature == 0 else ""
    return ", ".join([f"{section}.temperature = {temperature:g}{greedy}", *more])


def _open(config: TrainConfig, request: RolloutRequest) -> EvalSession:
    temperature = request.temperature(config)
    if request.replay is not None:
        return open_replay(config, temperature, RecordFolder(request.replay))
    record = None if request.record is None else RecordFolder(request.record, asked(config, request))
    return open_live(config, temperature, record)


def asked(config: TrainConfig, request: RolloutRequest) -> dict[str, Any]:
    """The request as a record's manifest keeps it; `agentrl.cli.rollout` reads it back."""
    return {
        "purpose": request.purpose,
        "model": request.model,
        "tasks": request.tasks,
        **({"chosen": list(request.chosen)} if request.chosen else {}),
        "samples": request.samples,
        "split": request.split,
        "identity": _identity(config, request),
    }


async def _play(
    config: TrainConfig,
    request: RolloutRequest,
    session: EvalSession,
    missing: list[Pair],
    outcome: RolloutOutcome,
    display: Display,
) -> None:
    parts, done = session.parts, len(request.pairs) - len(missing)
    scored = done
    watch, lost = Watch(), list[str]()
    display.trouble = lambda: f"{len(lost)} episodes came to no score; the first: {lost[0]}" if lost else ""
    with display.doing("starting the engine", parts.starting):
        await session.start(config)
    with error_told(), (request.out / "trajectories.jsonl").open("a") as file:

        def keep(trajectory: Trajectory) -> None:
            nonlocal done, scored
            with naming(Path(file.name)):
                file.write(redact(json_text(trajectory.to_json())) + "\n")
                file.flush()
            outcome.episodes[trajectory.task.seed, trajectory.member] = trajectory
            done += 1
            scored += _scored(trajectory)
            if not _scored(trajectory):
                lost.append(fault_of(trajectory))
            display.step(done, {"success": success_rate(outcome.episodes.values()), "unscored": done - scored})

        with watched(config.rollout.slow_loop, display.warn), display.doing("episodes", waits=watch.waiting):
            await run_tasks(
                parts.player,
                the_env(config).called,
                missing,
                seed=config.seed,
                max_episodes=config.rollout.max_episodes,
                split=request.split,
                temperature=request.temperature(config),
                on_episode=keep,
                watch=watch,
            )


def _resume(config: TrainConfig, request: RolloutRequest) -> dict[Pair, Trajectory]:
    """The scored episodes that are there; an outage is run again. Raises ConfigError if `out` holds something else,
    or episodes that the record lacks."""
    request.out.mkdir(parents=True, exist_ok=True)
    note, path = _note(request), request.out / "trajectories.jsonl"
    identity = _identity(config, request)
    if request.replay is not None:  # a replay is always whole, and quick
        path.unlink(missing_ok=True)
    elif note.exists():
        kind = "an evaluation" if request.purpose == "eval" else "a rollout"
        before = read_json(note.read_text()).get("identity")
        check_same_identity(before, identity, f"{kind} of something else ({note})", request.out, "--out")
    elif path.exists() and not note.exists():
        raise ConfigError(f"{request.out}: it holds trajectories of something else; use another --out")
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    there = [Trajectory.from_json(read_json(line)) for line in lines]
    scored = {(t.task.seed, t.member): t for t in there if _scored(t)}
    if request.record is not None:
        ended = RecordFolder(request.record).ended()
        if lacking := [pair for pair in scored if "{}{}.m{}".format(request.split, *pair) not in ended]:
            raise ConfigError(
                f"{request.out}: {len(lacking)} of its episodes are not in the record {request.record}; use "
                "another --out, so that the record is whole"
            )
    atomic_write(note, json.dumps({"identity": identity}, indent=2) + "\n")
    atomic_write(path, "".join(redact(json_text(t.to_json())) + "\n" for t in scored.values()))
    return scored


def _scored(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None or trajectory.success is not None


def _identity(config: TrainConfig, request: RolloutRequest) -> Identity:
    """All that an episode depends on; `-n` and `-k` only say which episodes there are."""
    identity = {**identity_of(config, request.purpose), "command": request.purpose, "--split": request.split}
    if request.replay is None:  # a replay has the spec and the answers of its record
        identity |= contents_of(config, request.purpose)
    return identity


def _sort(request: RolloutRequest, outcome: RolloutOutcome) -> None:
    """Rewrite the file in the order of tasks, so that equal runs leave equal files."""
    rows = [redact(json_text(outcome.episodes[pair].to_json())) + "\n" for pair in sorted(outcome.episodes)]
    atomic_write(request.out / "trajectories.jsonl", "".join(rows))
