"""The session: the connected live parts of a run (environments, engine, actors, collector), and their checkpoints."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from agentrl.cluster.group import WorkerGroup, check_shared
from agentrl.cluster.ray_cluster import start_ray, stop_asking, stop_ray
from agentrl.config import EvalConfig, ModelConfig, TrainConfig
from agentrl.config.identity import Identity, identity_of
from agentrl.config.schema import CheckpointConfig
from agentrl.data.trajectory import Group, Trajectory
from agentrl.engines.weights.base import WeightTarget
from agentrl.rollout.collector import Acceptance, Collector
from agentrl.rollout.engine import Engine
from agentrl.rollout.mixtures import MixedTasks, parts_of
from agentrl.rollout.player import Evaluation, Player, RunEnv, run_tasks, summarize
from agentrl.run.assembly import Assembly, RunStart
from agentrl.run.callbacks import Callback, Callbacks
from agentrl.run.display import Display, percent
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.folder import DRIVER, RunFolder, lines
from agentrl.run.role_placement import RunRoles, engine_room, start_actors
from agentrl.run.rollout_workers import with_workers
from agentrl.run.services import RunServices
from agentrl.run.trackers import SPANS, TRACING, TrackedRun
from agentrl.trainer.actor import Actor
from agentrl.trainer.checkpoint import MANIFEST, Checkpoints, check_model, seal
from agentrl.trainer.estimator_inputs import needs_greedy
from agentrl.trainer.learner import Learner, policy_updates
from agentrl.trainer.pretrained import init_model, named_anywhere
from agentrl.trainer.publish import Publisher
from agentrl.trainer.train_engine import offloads_when_idle
from agentrl.trainer.update_hooks import UpdateHook, call_hook
from agentrl.utils.errors import AgentrlError, CallbackError, CheckpointError
from agentrl.utils.event_loop import SLOW_LOOP, LoopWatchdog, OwnedTasks, cancel_all
from agentrl.utils.files import naming
from agentrl.utils.parsing import json_text, read_json
from agentrl.utils.search_path import pack_given, unpack
from agentrl.utils.search_path import used_names as used
from agentrl.utils.spans import at, here, in_span, note, now
from agentrl.utils.threads import in_thread

# Checkpoints

GROUPS = "groups.jsonl"
_DRIVER_KEYS = ("step", "ledger", "metrics", "identity")
_FORMAT_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""Errors raised when a file has an unexpected format."""
POLL = 0.05
_LISTED_LINES = 5
P = ParamSpec("P")


class Writes:
    """Queue of writes in a thread, one at a time and in order, which bounds the memory that they hold.

    A failed write raises its error once, at the next `begin`, `check` or `wait`.
    """

    def __init__(self) -> None:
        self._last: asyncio.Task[object] | None = None

    async def begin(self, write: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Start `write(*args, **kwargs)` in a thread once the previous write is done."""
        await self.wait()
        self._last = asyncio.create_task(in_thread("files", write, *args, **kwargs), name="write")

    async def check(self) -> None:
        """Raise the error of a failed write; do not wait for a write in progress."""
        if self._last is not None and self._last.done():
            await self.wait()

    async def wait(self) -> None:
        """Wait until no write is in progress."""
        if self._last is not None:
            last = self._last
            try:
                # Shielded, so that cancelling the caller does not leave a half-written file.
                await asyncio.shield(last)
            finally:
                if last.done():
                    self._last = None


class Saver(Writes):
    """Saves and loads a run's checkpoints, one at a time.

    A checkpoint holds model, optimizer, schedule and RNG of the training roles, the driver's group ledger (also the data
    cursor), its finished but untrained groups (`groups.jsonl`), and the state of the learner's hooks. With
    `checkpoint.asynchronous` training continues while its files are written. It is valid once its manifest exists, so a kill
    before that loses only this checkpoint.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        identity: Identity,
        folder: RunFolder,
        learner: Learner,
        collector: Collector,
        say: Callable[[str], None],
        limit: float,
    ) -> None:
        """`identity`: the run's identity; `limit`: seconds for the ranks to write."""
        self._config, self._identity, self._limit = config, identity, limit
        self._folder, self._learner, self._collector, self._say = folder, learner, collector, say
        self._checkpoints = Checkpoints(folder.checkpoints, config.keep, config.keep_best)
        super().__init__()

    @in_span("checkpoint")
    async def save(self, evaluated: Evaluation | None = None) -> None:
        """Start a checkpoint of the ledger's version once the previous one is complete; one cancellation does not stop it.

        `evaluated`: the evaluation of these weights, if any. Raises the previous checkpoint's error if it failed, and
        ResourceError if the disk is full.
        """
        saving = asyncio.create_task(self._save(evaluated), name="save")
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            await self._finish_stopped(saving)
            raise

    async def _save(self, evaluated: Evaluation | None) -> None:
        await self.wait()
        step = self._collector.version
        staging = self._checkpoints.begin(step)
        try:
            await self._learner.begin_save(staging)
            # No await between these two: a group that ended in between would be saved in neither or in both.
            state = {"step": step, "ledger": self._collector.to_json()}
            groups = self._collector.ledger.complete_groups()
            kept = ((name, call_hook(hook, UpdateHook.state)) for name, hook in self._learner.hooks.items())
            state |= {name: found for name, found in kept if found is not None}
            state |= {"metrics": self._folder.metrics_seal(), "identity": self._identity}
            await in_thread("files", _write_driver, staging, state, groups)
        except Exception as error:
            self._checkpoints.give_up(step, error)
        place, since = here(), now()
        with at(None):  # the polling for the end of the write is not a span of the step
            writing = asyncio.create_task(self._finish(step, staging, self._score(evaluated)), name=f"checkpoint {step}")
        written = partial(note, "checkpoint", f"write checkpoint {step}", since, track="checkpoints", place=place)
        writing.add_done_callback(lambda _: written())
        self._last = writing
        if not self._config.asynchronous:
            await self.wait()

    async def save_missing(self) -> int:
        """Ensure that the ledger's version has a complete checkpoint; returns that version."""
        await self.wait()
        step, newest = self._collector.version, self._checkpoints.newest()
        if newest is None or newest.name != f"step_{step:06d}":
            await self.save()
            await self.wait()
        return step

    async def close(self) -> None:
        """Cancel an unfinished save, which is lost, unless the run was stopped once."""
        if self._last is not None:
            if (task := asyncio.current_task()) is not None and task.cancelling() == 1:
                await self._finish_stopped(self._last)
            await cancel_all([self._last])

    async def _finish_stopped(self, saving: asyncio.Task[Any]) -> None:
        """Wait for a save after the run was stopped; a second stop cancels it."""
        try:
            if not saving.done():
                self._say("interrupted: waiting for the checkpoint that is being written (Ctrl-C again loses it)")
                await asyncio.wait([saving])
                if not saving.cancelled() and (fault := saving.exception()) is not None:
                    self._say(f"the checkpoint was not written: {fault}")
        finally:
            await cancel_all([saving])  # its parts must not be closed under it

    async def rate(self, evaluated: Evaluation) -> None:
        """Record an evaluation of the ledger's version, whose checkpoint exists already."""
        await self.wait()
        score = self._score(evaluated)
        if score is not None:
            await in_thread("files", self._checkpoints.rate, self._collector.version, score)

    def is_new_best(self, evaluated: Evaluation) -> bool:
        """Return True if the evaluated weights are better than every checkpoint kept as best."""
        return self._checkpoints.is_new_best(self._score(evaluated))

    async def load(self) -> bool:
        """Load the newest intact checkpoint and remove later metrics; returns False without one. Raises CheckpointError
        if its files have an unexpected format."""
        # First, because it may restore a checkpoint that is then the newest one.
        lost = self._checkpoints.recover_interrupted()
        newest, damaged = await in_thread("files", self._checkpoints.newest_intact)
        faults = [f"a checkpoint is damaged: {problem}" for problem in damaged]
        faults += [f"checkpoint {step} was being written when the run ended and is lost" for step in lost]
        for fault in faults:
            self._say(f"{fault}; continuing from {newest.name if newest else 'the start'}")
        if newest is None:
            return False
        try:
            await self._learner.load(newest)
            state = read_json((newest / DRIVER).read_text())
            with (newest / GROUPS).open() as file:  # hold one group at a time in memory
                self._collector.load_json(state["ledger"], (Group.from_json(read_json(line)) for line in file))
            for name, hook in self._learner.hooks.items():
                if name in state:
                    call_hook(hook, UpdateHook.load_state, state[name])
        except _FORMAT_ERRORS as problem:  # its seal is intact, so the disk did not damage it
            what = f"{type(problem).__name__}: {problem}"[:200]
            raise CheckpointError(f"{newest}: not a checkpoint of agentrl: {what}. Remove it to resume an older one") from None
        if "metrics" in state and self._folder.metrics_seal(state["metrics"]["size"]) != state["metrics"]:
            self._say(
                f"{self._folder.metrics}: not as written up to step {state['step']}: rows are missing or changed, and "
                "stay so; training does not depend on them"
            )
        if torn := self._folder.rewind(state["step"]):
            at = ", ".join(map(str, torn[:_LISTED_LINES])) + (", ..." if len(torn) > _LISTED_LINES else "")
            self._say(
                f"{self._folder.metrics}: {len(torn)} damaged or cut {'line' if len(torn) == 1 else 'lines'} removed ({at})"
            )
        return True

    async def _finish(self, step: int, staging: Path, score: float | None) -> None:
        limit = self._limit
        try:
            try:
                # Only around the wait: a TimeoutError of the commit has another cause.
                async with asyncio.timeout(limit):
                    while not await self._learner.is_saved():
                        await asyncio.sleep(POLL)
            except TimeoutError:
                raise CheckpointError(f"checkpoint {step} was not written within {limit:g} s (cluster.call_timeout)") from None
            # Before the commit, which seals only files that the driver sees: a file on a rank's local disk would be missed.
            await self._learner.check_saved(staging)
            await in_thread("files", self._folder.sync_metrics)
            await in_thread("files", self._checkpoints.commit, step, score)
        except Exception as error:
            self._checkpoints.give_up(step, error)

    def _score(self, evaluated: Evaluation | None) -> float | None:
        if evaluated is None:
            return None
        return evaluated.success if self._config.best == "success" else evaluated.reward


def _write_driver(folder: Path, state: dict[str, Any], groups: Iterable[Group]) -> None:
    """Write the driver's state, and its groups one per line; holds at most one column in memory as text."""
    with naming(folder / GROUPS), (folder / GROUPS).open("w") as file:
        file.writelines(lines(groups))
    try:
        text = json_text(state)
    except TypeError as problem:
        raise CallbackError(
            f"{DRIVER}: state() of a sampler, a mixture or a callback returned a value that is not JSON: {problem}. Return "
            "dicts, lists, strings and numbers (float(x) for a NumPy number)"
        ) from problem
    (folder / DRIVER).write_text(text)


# The session


@dataclass(slots=True)
class Session:
    """Connected parts of a training loop, made by `open_session`; the caller closes it, also after an error."""

    config: TrainConfig
    folder: RunFolder
    display: Display
    envs: tuple[RunEnv, ...]
    player: Player
    engine: Engine
    actors: WorkerGroup
    learner: Learner
    collector: Collector
    engine_name: str
    saver: Saver
    publisher: Publisher
    watchdog: LoopWatchdog
    callbacks: Callbacks
    tracing: Any
    """Entry of `TRACING`; None without [traces] and [profile]."""
    services: RunServices
    opened: AsyncExitStack
    sft_threads: int | None = None
    """Threads per training process while the engine rests; None: as in an update."""

    async def begin(self) -> bool:
        """Open the training roles on the run's model, load the newest checkpoint, and publish the weights to the engine.
        Returns True if there was a checkpoint, False for a fresh start."""
        with self.display.doing("loading roles and checkpoint"):
            await self.learner.open(model_folder(self.config.seed, self.config.model, self.folder), self.folder.path)
            resumed = await self.saver.load()
        if not resumed:
            self.folder.rewind(-1)  # drop rows of an attempt that ended before its first checkpoint: they are written again
        with self.display.doing("publish"):
            await self.publish()
        return resumed

    async def publish(self) -> None:
        """Publish the actors' weights to the engine under the group ledger's version."""
        await self.collector.exchange(self.publisher.send)
        for service in self.services.values():
            await service.forget()

    async def rest(self) -> None:
        """Free the engine's memory until the next `publish`, for an update during which no episode runs."""
        await self.collector.rest()
        await self.publisher.sleep()

    async def close(self) -> None:
        """Stop episodes, engine, workers and Ray, each even if another fails. An unfinished checkpoint is treated as in
        `Saver.close`."""
        with self.display.doing("ending the engine and the started processes"):
            await self.opened.aclose()


def warmed_up(folder: RunFolder) -> bool:
    """Return True if the warm start's model is complete. Its manifest is written last, so a model without one was cut short by
    a kill or a full disk."""
    return os.path.lexists(folder.warm_start / MANIFEST)


def needs_warm_start(config: TrainConfig, folder: RunFolder) -> bool:
    """Return True if the warm start of [sft] must still run. Raises CheckpointError if its model was lost after updates."""
    if config.sft is None or warmed_up(folder):
        return False
    if (newest := Checkpoints(folder.checkpoints, 1).newest()) is not None:
        raise CheckpointError(
            f"{folder.warm_start}: the model of the warm start, from which {newest.name} was trained, is missing, and a new one "
            "would differ. Copy the folder back, or start over with --overwrite"
        )
    return True


def model_folder(seed: int, model: ModelConfig, folder: RunFolder) -> str:
    """Return folder or hub name of the initial model: the warm start's result, `model.path`, or a newly built model. Raises
    CheckpointError if the warm start's or the built model is damaged."""
    # First, because a warm start begins with one of the models below, and the run continues from its result.
    if warmed_up(folder):
        check_model(folder.warm_start)
        return str(folder.warm_start)
    if model.path is not None:
        return named_anywhere(model.path)
    assert model.init is not None
    if os.path.lexists(folder.model / MANIFEST):
        check_model(folder.model)
    else:
        init_model(model.init, folder.model, seed, model.chat_template)
        seal(folder.model, 0)
    return str(folder.model)


async def open_session(config: TrainConfig, folder: RunFolder, display: Display, callbacks: Sequence[Callback] = ()) -> Session:
    """Start every part of a run; if one fails, close those already started. `callbacks`: in addition to the config's."""
    choice = EngineChoice(config)
    sft_threads, config = choice.with_threads(samples=False).model.threads, choice.with_threads()
    choice = EngineChoice(config)
    needs_warm_start(config, folder)  # before any process is started
    async with AsyncExitStack() as opened:  # closes each part before the parts that it uses
        opened.callback(stop_asking)
        watching = Callbacks(config.callbacks, callbacks)
        display.phase("start", 1)
        with display.doing("making the model"):
            path = model_folder(config.seed, config.model, folder)
        engine_name = choice.name
        if config.cluster.backend == "ray" or choice.samples_on_ray():
            with display.doing("starting Ray"):
                if start_ray(config.cluster):
                    opened.callback(stop_ray)
        room = engine_room(choice, trains=True)  # before the training processes take the remaining memory
        inputs = RunStart(config).inputs(path)  # before any process is started, so that a missing file fails fast
        # Reserve all roles at once, before any process: a run with only some of its places would wait and block other runs.
        with display.doing("starting the training processes"):
            pools = RunRoles(choice).open_pools()
            if pools is not None:
                opened.callback(pools.close)
            actors = start_actors(config.model, config.cluster, pools)
            opened.callback(actors.close)
            # Wait for running calls on the "batch" thread, for which cancelled callers do not wait.
            opened.push_async_callback(in_thread, "batch", lambda: None)
        learner = Learner(config, actors, pools)
        for name, one in watching.all:
            if isinstance(one, UpdateHook):
                while name in learner.hooks or name in _DRIVER_KEYS:
                    name += "'"  # each has its own state in checkpoints
                learner.hooks[name] = one
        opened.callback(learner.close)
        await check_shared(actors, folder.path, "out")
        parts = inputs.assemble(pools=pools, room=room)
        if config.rollout.workers:
            parts = with_workers(inputs, parts, display.say)
        opened.push_async_callback(parts.close)
        # Only this process knows losses from user plug-ins: send them to the actors.
        await actors.in_processes(unpack, pack_given(used(config.model_dump(mode="json", exclude_none=True)["algorithm"])))
        with display.doing("loading the model"):
            await actors.arun(Actor.init_model, path, config.model, config.optim, policy_updates(config.steps, config.critic))
        # Before the engine starts, because it sizes its share of GPU memory by what is free.
        if offloads_when_idle(config, "actor"):
            await actors.arun(Actor.offload)
        others = "".join(f", {one.name}" for one in RunServices(config).engines())
        with display.doing(f"starting the engine ({engine_name}){others}", parts.starting):
            await parts.start()
        collector = await _make_collector(config, parts, learner, watching, display)
        opened.push_async_callback(collector.close)
        display.trouble = collector.stats.trouble
        offload, colocated = offloads_when_idle(config, "actor"), config.rollout.colocate
        # Default to the run's folder: all machines see it if `out` is on a shared file system.
        weights = config.weights.model_copy(update={"folder": config.weights.folder or str(folder.path)})
        publisher = Publisher(actors, parts.policy.engine, weights, offload=offload, colocated=colocated)
        identity, limit = identity_of(config, "train"), config.cluster.call_timeout
        saver = Saver(config.checkpoint, identity, folder, learner, collector, display.say, limit)
        opened.push_async_callback(saver.close)
        tracing = None
        if config.traces is not None or config.profile is not None:
            tracing = TRACING.entry(SPANS).make(TrackedRun(folder, config), engine_name, learner.groups, display.warn)
            opened.callback(tracing.close)
        # Last, because a start loads libraries on the event loop while no episode waits for it.
        watchdog = opened.enter_context(LoopWatchdog(SLOW_LOOP, display.warn))
        return Session(
            config,
            folder,
            display,
            parts.envs,
            parts.player,
            parts.policy.engine,
            actors,
            learner,
            collector,
            engine_name,
            saver,
            publisher,
            watchdog,
            watching,
            tracing,
            parts.services,
            opened.pop_all(),
            None if sft_threads == "auto" else sft_threads,
        )


async def _make_collector(
    config: TrainConfig, parts: Assembly, learner: Learner, watching: Callbacks, display: Display
) -> Collector:

    async def on_group(group: Group) -> None:
        for hook in learner.hooks.values():
            call_hook(hook, UpdateHook.note_group, group, tasks.draw(group.index))  # the task drawn before
        await watching.call("on_group", group)

    seed, rollout = config.seed, config.rollout
    tasks = MixedTasks(parts_of(config), rollout.mixture, seed)
    with display.doing("choosing the tasks"):
        await in_thread("batch", tasks.fill_pools, [env.called for env in config.trained_envs], display.warn)
    greedy = [env.called for env in config.envs if needs_greedy(config.alone(env).algorithm.advantage)]
    accept = None if rollout.accept is None else Acceptance(rollout.accept)
    return Collector(
        parts.player, parts.envs, tasks, rollout, seed=seed, greedy=greedy, accept=accept, on_group=on_group, say=display.warn
    )


# Episodes


async def play_tasks(session: Session, env: str, tasks: Sequence[tuple[int, int]], **options: Any) -> list[Trajectory]:
    """Play episodes of an environment under the engine's weights; `options`: further arguments of `run_tasks`."""
    options = {"seed": session.config.seed, "max_episodes": session.config.rollout.max_episodes, **options}
    return await republish_to_new_replicas(session, run_tasks(session.player, env, tasks, **options))


async def evaluate_env(session: Session, env: str, settings: EvalConfig, **options: Any) -> Evaluation:
    """Play one held-out episode per task, as in [eval]; `options` as in `play_tasks`."""
    tasks = [(index, 0) for index in range(settings.tasks)]
    return summarize(await play_tasks(session, env, tasks, split=settings.split, temperature=settings.temperature, **options))


async def forget_evaluation(session: Session) -> None:
    """Drop cached answers of an evaluation: a resumed run skips it, and its rollouts must be the same."""
    if session.config.rollout.max_staleness == 0:
        await session.engine.forget()
        for service in session.services.values():
            await service.forget()


T = TypeVar("T")
REPORT_S = 2.0


async def republish_to_new_replicas(session: Session, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which samples episodes, and publish the weights to each engine replica that lacks them.

    Only with `rollout.max_staleness` 0, where the actors wait and hold the weights of the ledger's version. Otherwise the actors
    may be learning, and their next publish serves a new replica.
    """
    engine = session.engine
    async with OwnedTasks() as tasks:
        tasks.start(_report_engine(session), "engine report")
        try:
            if session.config.rollout.max_staleness > 0 or not isinstance(engine, WeightTarget):
                return await work
            doing = tasks.start(work, "episodes")
            while not doing.done():
                starved = tasks.start(engine.wait_until_starved(), "wait for a replica without weights")
                await asyncio.wait({doing, starved}, return_when=asyncio.FIRST_COMPLETED)
                if starved.done() and not doing.done():
                    await session.publisher.send(session.collector.ledger.version)
                starved.cancel()
            return doing.result()
        finally:
            session.display.engine("")


async def _report_engine(session: Session) -> None:
    """Show the engine's load and speed on the display every few seconds."""
    last, when = 0, 0.0
    while True:
        await asyncio.sleep(REPORT_S)
        try:
            stats = await session.engine.stats()
        except AgentrlError:  # a replica is being replaced, or the episodes soon raise the error
            continue
        now = time.monotonic()
        speed = f", {(stats.sampled_tokens - last) / (now - when):,.0f} tokens/s" if when else ""
        used = "" if stats.kv_used is None else f", KV cache {percent(stats.kv_used)}"
        status = f"{stats.running} running, {stats.waiting} waiting{speed}{used}"
        session.display.engine(status, stats.extra.get("respawns", 0))
        last, when = stats.sampled_tokens, now
