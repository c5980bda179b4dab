"""The live parts of a run, connected: environment, scorer, renderer, engine, actors, collector."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.runtime import start_ray, stop_asking, stop_ray
from agentrl.cluster.shared_folder import check_shared
from agentrl.cluster.store_pages import StorePages
from agentrl.config import TrainConfig
from agentrl.config.envs import alone
from agentrl.executors import in_thread
from agentrl.given import packed, unpack, used
from agentrl.rollout.accept import Acceptance
from agentrl.rollout.collect import Collector
from agentrl.rollout.engine import Engine
from agentrl.rollout.mixture.source import MixedTasks, parts_of
from agentrl.rollout.player import Player, RunEnv
from agentrl.run.assembly import assemble, longest_row, read_inputs
from agentrl.run.callbacks import Callback, Callbacks
from agentrl.run.checkpoint import Saver
from agentrl.run.demonstrations import Demonstrations
from agentrl.run.display import Display
from agentrl.run.engines import needs_ray, resolve_engine, with_threads
from agentrl.run.folder import RunFolder
from agentrl.run.horizon import Bins, run_bins
from agentrl.run.judges import Judges, place_of
from agentrl.run.memory import engine_room
from agentrl.run.placement import open_pools, start_actors
from agentrl.run.profile import profile_of
from agentrl.run.tracing import Tracing
from agentrl.run.workers import with_workers
from agentrl.train.actor import Actor
from agentrl.train.estimator_inputs import needs_greedy
from agentrl.train.init_model import init_model
from agentrl.train.learner import Learner, policy_updates
from agentrl.train.pretrained import named_anywhere
from agentrl.train.publish import Publisher
from agentrl.train.role_layout import rests
from agentrl.train.seal import MANIFEST, check_model, seal
from agentrl.trajectory import Group
from agentrl.watchdog import LoopWatchdog

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Session:
    """What a training loop needs. `open_session` makes it; the caller closes it, also after an error."""

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
    tracing: Tracing
    horizons: Mapping[str, Bins]
    judges: Judges
    opened: AsyncExitStack
    demonstrations: Demonstrations | None = None

    async def begin(self) -> bool:
        """Open the training roles on the run's model, and bring the engine its first weights: those of the newest checkpoint
        (True), or of the start."""
        with self.display.doing("loading roles and checkpoint"):
            await self.learner.open(model_folder(self.config, self.folder), self.folder.path)
            resumed = await self.saver.load()
        if not resumed:
            self.folder.rewind(-1)  # rows of an attempt that ended before its first checkpoint would be written twice
        with self.display.doing("publish"):
            await self.publish()
        return resumed

    async def publish(self) -> None:
        """Publish the actors' weights to the engine, with the group ledger's version."""
        await self.collector.exchange(self.publisher.send)
        await self.judges.forget()

    async def rest(self) -> None:
        """Free the engine's memory until the next `publish`, during an update in which no episode runs."""
        await self.collector.rest()
        await self.publisher.sleep()

    async def close(self) -> None:
        """Stop episodes, engine, workers and Ray, the others also if one of them fails. A checkpoint that is being written is
        lost."""
        await self.opened.aclose()


def warmed_up(folder: RunFolder) -> bool:
    """Whether the warm start's model is there. Its manifest comes last: one that was cut short while it was written (by a kill,
    or a full disk) is none. Older versions wrote no manifest; what they left is whole if training went on from it."""
    whole = os.path.lexists(folder.warm_start / MANIFEST) or folder.checkpoints.is_dir()
    return whole and (folder.warm_start / "config.json").is_file()


def model_folder(config: TrainConfig, folder: RunFolder) -> str:
    """The folder or hub name of a session's initial model: the warm start's result, `model.path`, or a newly built one. Raises
    CheckpointError if the first or the last is not as it was written."""
    # First, because a warm start begins with one of the models below and is what the run goes on from.
    if warmed_up(folder):
        check_model(folder.warm_start)
        return str(folder.warm_start)
    if config.model.path is not None:
        return named_anywhere(config.model.path)
    assert config.model.init is not None
    if os.path.lexists(folder.model / MANIFEST):
        check_model(folder.model)
    elif not (folder.model / "config.json").is_file() or not folder.checkpoints.is_dir():  # else an older version's, without one
        init_model(config.model.init, folder.model, config.seed, config.model.chat_template)
        seal(folder.model, 0)
    return str(folder.model)


async def open_session(config: TrainConfig, folder: RunFolder, display: Display, callbacks: Sequence[Callback] = ()) -> Session:
    """Start every part; `callbacks`: beside those that the config names. If one fails, the parts that were already started are
    closed."""
    config = with_threads(config)
    async with AsyncExitStack() as opened:  # closes users before what they use
        opened.callback(stop_asking)
        accept, watching = config.rollout.accept, Callbacks(config.callbacks, callbacks)
        display.phase("start", 1)
        with display.doing("making the model"):
            path = model_folder(config, folder)
        engine_name = resolve_engine(config)
        if needs_ray(config):
            with display.doing("starting Ray"):
                if start_ray(config.cluster):
                    opened.callback(stop_ray)
        horizons = run_bins(config, folder.path)
        room = engine_room(config, trains=True)  # before the processes that take the rest
        inputs = read_inputs(config, path)  # before any process is started, so that a missing file fails fast
        # All roles at once, before any process: a run that got only some of its places would wait and keep others from starting.
        with display.doing("starting the training processes"):
            pools = open_pools(config, engine_name)
            if pools is not None:
                opened.callback(pools.close)
            actors = start_actors(config, pools)
            opened.callback(actors.close)
            opened.push_async_callback(in_thread, "batch", _calls_are_sent)
        learner = Learner(config, actors, pools)
        opened.callback(learner.close)
        await check_shared(actors, folder.path, "out")
        parts = assemble(config, inputs, model=path, pools=pools, room=room)
        if config.rollout.workers:
            parts = with_workers(
                config, inputs, parts, path, rows=folder.parts, wanted=lambda: collector.version, say=display.say
            )
        opened.push_async_callback(parts.close)
        # A loss of the user's own, which only this process knows.
        await actors.in_processes(unpack, packed(used(config.model_dump(mode="json", exclude_none=True)["algorithm"])))
        with display.doing("loading the model"):
            await actors.arun(Actor.init_model, path, config.model, config.optim, policy_updates(config))
        # Before the engine starts, which takes its part of the GPU's memory from what it finds free.
        if rests(config, "actor"):
            await actors.arun(Actor.offload)
        judged = f" and {', '.join(map(place_of, parts.judges.names))}" if parts.judges.names else ""
        with display.doing(f"starting the engine ({engine_name}){judged}", parts.starting):
            await parts.start()
        pages = StorePages() if config.cluster.backend == "ray" else None

        asked = config.algorithm.demonstrations
        demonstrations = None if asked is None else Demonstrations(parts.envs, asked.episodes, longest_row(config))

        async def seen(group: Group) -> None:
            if demonstrations is not None:
                demonstrations.seen(group, collector.tasks.draw(group.index))  # drawn already: its task
            if pages is not None:
                pages.played(collector.version, sum(one.tokens for one in group.trajectories))
            await watching.group(group)

        collector = Collector(
            parts.player,
            parts.envs,
            MixedTasks(parts_of(config), config.rollout.mixture, config.seed),
            config.rollout,
            seed=config.seed,
            greedy=[env.called for env in config.envs if needs_greedy(alone(config, env).algorithm.advantage)],
            accept=None if accept is None else Acceptance(accept),
            on_group=seen,
            say=display.warn,
        )
        opened.push_async_callback(collector.close)
        display.trouble = collector.trouble
        offload, colocated = rests(config, "actor"), config.rollout.colocate
        publisher = Publisher(actors, parts.policy.engine, config.weights, offload=offload, colocated=colocated)
        saver = Saver(config, folder, learner, collector, display.say, demonstrations)
        opened.push_async_callback(saver.close)
        tracing = Tracing(config, engine_name, profile_of(config, folder, learner, engine_name, display.warn))
        opened.callback(tracing.close)
        watchdog = LoopWatchdog(config.rollout.slow_loop, display.warn)
        opened.callback(watchdog.stop)
        watchdog.start()  # last: a start loads libraries on the loop, and no episode waits for it
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
            horizons,
            parts.judges,
            opened.pop_all(),
            demonstrations,
        )


def _calls_are_sent() -> None:
    """Runs after all calls that the one thread of this purpose has begun: cancelled callers do not wait for them."""
