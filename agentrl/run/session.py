"""The session: the live parts of a run, connected. Environment, scorer, renderer, engine, actors, collector.

The checkpoints of all parts, the session, and the engine's news during a rollout."""

from __future__ import annotations

import asyncio
import io
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
from agentrl.run.assembly import RunStart
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
from agentrl.utils.event_loop import SLOW_LOOP, LoopWatchdog, OwnedTasks
from agentrl.utils.files import naming
from agentrl.utils.parsing import json_text, read_json
from agentrl.utils.search_path import pack_given, unpack
from agentrl.utils.search_path import used_names as used
from agentrl.utils.spans import at, here, in_span, note, now
from agentrl.utils.threads import in_thread

# Checkpoints

GROUPS = "groups.jsonl"
_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""Errors of reading a file of another shape."""
POLL = 0.05
_NAMED = 5
P = ParamSpec("P")


class Writes:
    """Writes in order, one at a time. At most one is in progress, so the memory they hold is bounded.

    A write that fails raises at the next `begin`, `check` or `wait`, and only once.
    """

    def __init__(self) -> None:
        self._last: asyncio.Task[object] | None = None

    async def begin(self, write: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Start `write(*args, **kwargs)` in a thread, after the previous one is done."""
        await self.wait()
        self._last = asyncio.create_task(in_thread("files", write, *args, **kwargs), name="write")

    async def check(self) -> None:
        """Raise the error of a failed write, without waiting for one in progress."""
        if self._last is not None and self._last.done():
            await self.wait()

    async def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._last is not None:
            last = self._last
            try:
                # Shielded: cancelling the caller must not lose a file that is half written.
                await asyncio.shield(last)
            finally:
                if last.done():
                    self._last = None


class Saver(Writes):
    """Saves and loads a run's checkpoints; at most one is being written.

    A checkpoint holds model, optimizer, schedule and RNG of the training roles, and the driver's group
    ledger, which is also the data cursor, with its finished but untrained groups (`groups.jsonl`), and the state of the
    learner's hooks. With `checkpoint.asynchronous` its files are written while
    training continues; it is valid from the moment when its manifest exists, so a kill before that loses only this one.
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
        """`identity`: the run's; `limit`: seconds that ranks have to write."""
        self._config, self._identity, self._limit = config, identity, limit
        self._folder, self._learner, self._collector, self._say = folder, learner, collector, say
        self._checkpoints = Checkpoints(folder.checkpoints, config.keep, config.keep_best)
        super().__init__()

    @in_span("checkpoint")
    async def save(self, evaluated: Evaluation | None = None) -> None:
        """Start the checkpoint of the ledger's version, after the previous one is complete. Cancelled once, it still does.

        `evaluated`: the evaluation of exactly these weights, if there is one. Raises the error of the previous
        checkpoint if writing it failed; ResourceError if the disk is full.
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
        aside = self._checkpoints.begin(step)
        try:
            await self._learner.begin_save(aside)
            # No await between these two: a group that ended in between would be in neither of them, or in both.
            state = {"step": step, "ledger": self._collector.to_json()}
            groups = self._collector.ledger.complete_groups()
            kept = ((name, call_hook(hook, UpdateHook.state)) for name, hook in self._learner.hooks.items())
            state |= {name: found for name, found in kept if found is not None}
            state |= {"metrics": self._folder.metrics_seal(), "identity": self._identity}
            await in_thread("files", _write_driver, aside, state, groups)
        except Exception as error:
            self._checkpoints.give_up(step, error)
        place, since = here(), now()
        with at(None):  # what asks whether it is written is no part of the step
            writing = asyncio.create_task(self._finish(step, aside, self._score(evaluated)), name=f"checkpoint {step}")
        written = partial(note, "checkpoint", f"write checkpoint {step}", since, track="checkpoints", place=place)
        writing.add_done_callback(lambda _: written())
        self._last = writing
        if not self._config.asynchronous:
            await self.wait()

    async def save_missing(self) -> int:
        """Ensure a complete checkpoint of the ledger's version; returns that version."""
        await self.wait()
        step, newest = self._collector.version, self._checkpoints.newest()
        if newest is None or newest.name != f"step_{step:06d}":
            await self.save()
            await self.wait()
        return step

    async def close(self) -> None:
        """Cancel a save that is not finished; it is lost, unless the run was stopped once."""
        if self._last is not None:
            if (task := asyncio.current_task()) is not None and task.cancelling() == 1:
                await self._finish_stopped(self._last)
            self._last.cancel()
            await asyncio.gather(self._last, return_exceptions=True)

    async def _finish_stopped(self, saving: asyncio.Task[Any]) -> None:
        """Wait for a save although the run was stopped. Stopped again, it is lost."""
        try:
            if not saving.done():
                self._say("interrupted: waiting for the checkpoint that is being written (Ctrl-C again loses it)")
                await asyncio.wait([saving])
        finally:
            saving.cancel()

    async def rate(self, evaluated: Evaluation) -> None:
        """Record the evaluation of the ledger's version, whose checkpoint exists already."""
        await self.wait()
        score = self._score(evaluated)
        if score is not None:
            self._checkpoints.rate(self._collector.version, score)

    def deserves(self, evaluated: Evaluation) -> bool:
        """Return True if these weights deserve a checkpoint of their own: better than all that are kept as best."""
        score = self._score(evaluated) if self._config.keep_best > 0 else None
        return score is not None and ((best := self._checkpoints.best()) is None or score > best[1])

    async def load(self) -> bool:
        """Load the newest complete checkpoint; False without one. Metrics after it are removed."""
        # Before `newest`: it may move back a checkpoint, which is then the newest one.
        lost = self._checkpoints.recover_interrupted()
        newest, damaged = await in_thread("files", self._checkpoints.newest_intact)
        faults = [f"a checkpoint is damaged: {problem}" for problem in damaged]
        faults += [f"checkpoint {step} was being written when the run ended and is lost" for step in lost]
        for fault in faults:
            self._say(f"{fault}; going on from {newest.name if newest else 'the start'}")
        if newest is None:
            return False
        try:
            await self._learner.load(newest)
            state = read_json((newest / DRIVER).read_text())
            groups = newest / GROUPS  # an older checkpoint has none
            with groups.open() if groups.exists() else io.StringIO() as file:  # one group at a time in memory
                self._collector.load_json(state["ledger"], (Group.from_json(read_json(line)) for line in file))
            for name, hook in self._learner.hooks.items():
                if name in state:  # an older checkpoint has none
                    call_hook(hook, UpdateHook.load_state, state[name])
        except _NOT_OURS as problem:  # sealed as it is, so not damaged on a disk
            what = f"{type(problem).__name__}: {problem}"[:200]
            raise CheckpointError(f"{newest}: not a checkpoint of agentrl: {what}. Remove it to resume an older one") from None
        if "metrics" in state and self._folder.metrics_seal(state["metrics"]["size"]) != state["metrics"]:
            self._say(
                f"{self._folder.metrics}: not as written up to step {state['step']}: rows are missing or changed, and "
                "stay so; training does not depend on them"
            )
        if torn := self._folder.rewind(state["step"]):
            at = ", ".join(map(str, torn[:_NAMED])) + (", ..." if len(torn) > _NAMED else "")
            self._say(
                f"{self._folder.metrics}: {len(torn)} damaged or cut {'line' if len(torn) == 1 else 'lines'} removed ({at})"
            )
        return True

    async def _finish(self, step: int, aside: Path, score: float | None) -> None:
        limit = self._limit
        try:
            try:
                # Around the waiting alone: a TimeoutError of the commit has another cause.
                async with asyncio.timeout(limit):
                    while not await self._learner.is_saved():
                        await asyncio.sleep(POLL)
            except TimeoutError:
                raise CheckpointError(f"checkpoint {step} was not written within {limit:g} s (cluster.call_timeout)") from None
            # Before the commit, which seals what the driver sees: files on a rank's own disk would be missing from it unnoticed.
            await self._learner.check_saved(aside)
            await in_thread("files", self._folder.sync_metrics)
            await in_thread("files", self._checkpoints.commit, step, score)
        except Exception as error:
            self._checkpoints.give_up(step, error)

    def _score(self, evaluated: Evaluation | None) -> float | None:
        if evaluated is None:
            return None
        return evaluated.success if self._config.best == "success" else evaluated.reward


def _write_driver(folder: Path, state: dict[str, Any], groups: Iterable[Group]) -> None:
    """The driver's state, and its groups one per line; at most one column is in memory as text."""
    with naming(folder / GROUPS), (folder / GROUPS).open("w") as file:
        file.writelines(lines(groups))
    try:
        text = json_text(state)
    except TypeError as problem:
        raise CallbackError(
            f"{DRIVER}: what state() of a sampler, a mixture or a callback returns is no JSON value: {problem}. Make it of "
            "dicts, lists, texts and numbers (float(x) of numpy's)"
        ) from problem
    (folder / DRIVER).write_text(text)


# The session


@dataclass(slots=True)
class Session:
    """Parts of a training loop. `open_session` makes it; the caller closes it, also after an error."""

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
    """Of `TRACING`, if [traces] or [profile] asks for it."""
    services: RunServices
    opened: AsyncExitStack
    sft_threads: int | None = None
    """Threads per training process while the engine rests; None: as in an update."""

    async def begin(self) -> bool:
        """Open the training roles on the run's model, and bring the engine its first weights: those of the newest checkpoint
        (True), or of the start."""
        with self.display.doing("loading roles and checkpoint"):
            await self.learner.open(model_folder(self.config.seed, self.config.model, self.folder), self.folder.path)
            resumed = await self.saver.load()
        if not resumed:
            self.folder.rewind(-1)  # rows of an attempt that ended before its first checkpoint would be written twice
        with self.display.doing("publish"):
            await self.publish()
        return resumed

    async def publish(self) -> None:
        """Publish the actors' weights to the engine, with the group ledger's version."""
        await self.collector.exchange(self.publisher.send)
        for service in self.services.values():
            await service.forget()

    async def rest(self) -> None:
        """Free the engine's memory until the next `publish`, during an update in which no episode runs."""
        await self.collector.rest()
        await self.publisher.sleep()

    async def close(self) -> None:
        """Stop episodes, engine, workers and Ray, the others also if one of them fails. A checkpoint that is being written is
        lost, as `Saver.close` says."""
        with self.display.doing("ending the engine and the started processes"):
            await self.opened.aclose()


def warmed_up(folder: RunFolder) -> bool:
    """Return True if the warm start's model is there. Its manifest comes last: one that was cut short while it was written (by
    a kill, or a full disk) is not one. Older versions wrote no manifest; theirs is whole if training went on from it."""
    whole = os.path.lexists(folder.warm_start / MANIFEST) or folder.checkpoints.is_dir()
    return whole and (folder.warm_start / "config.json").is_file()


def needs_warm_start(config: TrainConfig, folder: RunFolder) -> bool:
    """Return True if the warm start of [sft] is still to be done. Raises CheckpointError if its model was lost after updates."""
    if config.sft is None or warmed_up(folder):
        return False
    if (newest := Checkpoints(folder.checkpoints, 1).newest()) is not None:
        raise CheckpointError(
            f"{folder.warm_start}: the warm start's model is gone, from which {newest.name} was trained: a new one would be "
            "another. Copy the folder back, or start over with --overwrite"
        )
    return True


def model_folder(seed: int, model: ModelConfig, folder: RunFolder) -> str:
    """The folder or hub name of a session's initial model: the warm start's result, `model.path`, or a newly built one. Raises
    CheckpointError if the first or the last is not as it was written."""
    # First, because a warm start begins with one of the models below and is what the run goes on from.
    if warmed_up(folder):
        check_model(folder.warm_start)
        return str(folder.warm_start)
    if model.path is not None:
        return named_anywhere(model.path)
    assert model.init is not None
    if os.path.lexists(folder.model / MANIFEST):
        check_model(folder.model)
    elif not (folder.model / "config.json").is_file() or not folder.checkpoints.is_dir():  # else an older version's, without one
        init_model(model.init, folder.model, seed, model.chat_template)
        seal(folder.model, 0)
    return str(folder.model)


async def open_session(config: TrainConfig, folder: RunFolder, display: Display, callbacks: Sequence[Callback] = ()) -> Session:
    """Start every part; `callbacks`: next to those of the config. If one fails, the parts that were started are closed."""
    choice = EngineChoice(config)
    sft_threads, config = choice.with_threads(samples=False).model.threads, choice.with_threads()
    choice = EngineChoice(config)
    needs_warm_start(config, folder)  # before any process is started
    async with AsyncExitStack() as opened:  # closes users before what they use
        opened.callback(stop_asking)
        accept, watching = config.rollout.accept, Callbacks(config.callbacks, callbacks)
        display.phase("start", 1)
        with display.doing("making the model"):
            path = model_folder(config.seed, config.model, folder)
        engine_name = choice.name
        if config.cluster.backend == "ray" or choice.samples_on_ray():
            with display.doing("starting Ray"):
                if start_ray(config.cluster):
                    opened.callback(stop_ray)
        room = engine_room(choice, trains=True)  # before the processes that take the rest
        inputs = RunStart(config).inputs(path)  # before any process is started, so that a missing file fails fast
        # All roles at once, before any process: a run that got only some of its places would wait and keep others from starting.
        with display.doing("starting the training processes"):
            pools = RunRoles(choice).open_pools()
            if pools is not None:
                opened.callback(pools.close)
            actors = start_actors(config.model, config.cluster, pools)
            opened.callback(actors.close)
            # Runs after all calls that the one thread of this purpose has begun: cancelled callers do not wait for them.
            opened.push_async_callback(in_thread, "batch", lambda: None)
        learner = Learner(config, actors, pools)
        learner.hooks |= {name: one for name, one in watching.all if isinstance(one, UpdateHook)}
        opened.callback(learner.close)
        await check_shared(actors, folder.path, "out")
        parts = inputs.assemble(pools=pools, room=room)
        if config.rollout.workers:
            parts = with_workers(inputs, parts, display.say)
        opened.push_async_callback(parts.close)
        # A loss of the user's own, which only this process knows.
        await actors.in_processes(unpack, pack_given(used(config.model_dump(mode="json", exclude_none=True)["algorithm"])))
        with display.doing("loading the model"):
            await actors.arun(Actor.init_model, path, config.model, config.optim, policy_updates(config.steps, config.critic))
        # Before the engine starts, which takes its part of the GPU's memory from what it finds free.
        if offloads_when_idle(config, "actor"):
            await actors.arun(Actor.offload)
        others = "".join(f", {one.name}" for one in RunServices(config).engines())
        with display.doing(f"starting the engine ({engine_name}){others}", parts.starting):
            await parts.start()

        async def on_group(group: Group) -> None:
            for hook in learner.hooks.values():
                call_hook(hook, UpdateHook.note_group, group, collector.tasks.draw(group.index))  # drawn already: its task
            await watching.call("on_group", group)

        tasks = MixedTasks(parts_of(config), config.rollout.mixture, config.seed)
        with display.doing("choosing the tasks"):
            await in_thread("batch", tasks.fill_pools, display.warn)
        collector = Collector(
            parts.player,
            parts.envs,
            tasks,
            config.rollout,
            seed=config.seed,
            greedy=[env.called for env in config.envs if needs_greedy(config.alone(env).algorithm.advantage)],
            accept=None if accept is None else Acceptance(accept),
            on_group=on_group,
            say=display.warn,
        )
        opened.push_async_callback(collector.close)
        display.trouble = collector.stats.trouble
        offload, colocated = offloads_when_idle(config, "actor"), config.rollout.colocate
        # All machines see the run's folder, if `out` is right.
        weights = config.weights.model_copy(update={"folder": config.weights.folder or str(folder.path)})
        publisher = Publisher(actors, parts.policy.engine, weights, offload=offload, colocated=colocated)
        identity, limit = identity_of(config, "train"), config.cluster.call_timeout
        saver = Saver(config.checkpoint, identity, folder, learner, collector, display.say, limit)
        opened.push_async_callback(saver.close)
        tracing = None
        if config.traces is not None or config.profile is not None:
            tracing = TRACING.entry(SPANS).make(TrackedRun(folder, config), engine_name, learner.groups, display.warn)
            opened.callback(tracing.close)
        # Last: a start loads libraries on the loop, and no episode waits for it.
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


# Episodes


async def play_tasks(session: Session, env: str, tasks: Sequence[tuple[int, int]], **options: Any) -> list[Trajectory]:
    """Play episodes of an environment under the engine's weights; `options`: others of `run_tasks`."""
    options = {"seed": session.config.seed, "max_episodes": session.config.rollout.max_episodes, **options}
    return await republish_to_new_replicas(session, run_tasks(session.player, env, tasks, **options))


async def evaluate_env(session: Session, env: str, own: EvalConfig, **options: Any) -> Evaluation:
    """Play one held-out episode per task, as [eval] says; `options` as in `play_tasks`."""
    tasks = [(index, 0) for index in range(own.tasks)]
    return summarize(await play_tasks(session, env, tasks, split=own.split, temperature=own.temperature, **options))


async def forget_evaluation(session: Session) -> None:
    """Drop cached answers of an evaluation: a resumed run does not repeat it, and its rollouts must not differ."""
    if session.config.rollout.max_staleness == 0:
        await session.engine.forget()
        for service in session.services.values():
            await service.forget()


T = TypeVar("T")
LOOK_S = 2.0


async def republish_to_new_replicas(session: Session, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which samples episodes.

    With `rollout.max_staleness` 0 the actors wait meanwhile, and their weights are those of the ledger's version: they are
    published again, under the same version, as soon as a process of the engine lacks them. Otherwise the actors may be learning,
    and their next publish brings it new ones.
    """
    engine = session.engine
    async with OwnedTasks() as tasks:
        tasks.start(_look(session), "a look at the engine")
        try:
            if session.config.rollout.max_staleness > 0 or not isinstance(engine, WeightTarget):
                return await work
            doing = tasks.start(work, "episodes")
            while not doing.done():
                starved = tasks.start(engine.wait_until_starved(), "a wait for a replica without weights")
                await asyncio.wait({doing, starved}, return_when=asyncio.FIRST_COMPLETED)
                if starved.done() and not doing.done():
                    await session.publisher.send(session.collector.ledger.version)
                starved.cancel()
            return doing.result()
        finally:
            session.display.engine("")


async def _look(session: Session) -> None:
    """Tell the display what the engine does, every few seconds."""
    last, when = 0, 0.0
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            stats = await session.engine.stats()
        except AgentrlError:  # it is being mended, or whoever samples is told soon
            continue
        now = time.monotonic()
        speed = f", {(stats.sampled_tokens - last) / (now - when):,.0f} tokens/s" if when else ""
        used = "" if stats.kv_used is None else f", KV cache {percent(stats.kv_used)}"
        said = f"{stats.running} running, {stats.waiting} waiting{speed}{used}"
        session.display.engine(said, stats.extra.get("respawns", 0))
        last, when = stats.sampled_tokens, now
