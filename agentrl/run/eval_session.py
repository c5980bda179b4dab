"""The parts of `agentrl eval` and `agentrl rollout`: a model or an API, live, recorded, or replayed."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from agentrl.cluster.runtime import start_ray, stop_asking, stop_ray
from agentrl.config import TrainConfig
from agentrl.rollout.replay.io import EpisodeIO
from agentrl.rollout.replay.play import Replayer
from agentrl.run.assembly import Assembly, assemble, read_inputs
from agentrl.run.engines import samples_on_ray, with_threads
from agentrl.run.memory import engine_room
from agentrl.run.record_folder import RecordFolder
from agentrl.run.workers import with_workers


@dataclass(slots=True)
class EvalSession:
    """The parts that episodes need, and their connection to the outside; `close` closes all of them."""

    parts: Assembly
    io: EpisodeIO
    ray: bool = False
    started: bool = False
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __post_init__(self) -> None:
        self.opened.callback(stop_asking)
        self.opened.callback(self.io.close)

    async def start(self, config: TrainConfig) -> None:
        """Start the engines, once. Raises UserError or EngineError; `close` then closes what was started."""
        if self.started:
            return
        self.started = True
        if self.ray and start_ray(config.cluster):
            self.opened.callback(stop_ray)
        self.opened.push_async_callback(self.parts.close)
        await self.parts.start()

    async def close(self) -> None:
        """Close everything, the others also if one of them fails."""
        await self.opened.aclose()


def untrained(config: TrainConfig) -> TrainConfig:
    """The config without what is told for the trainer alone."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"router_replay": False})})


def open_live(config: TrainConfig, temperature: float, record: RecordFolder | None) -> EvalSession:
    """The parts, live; with `record` every answer is recorded there."""
    config = with_threads(untrained(config), trains=False)
    inputs = read_inputs(config)
    io = EpisodeIO() if record is None else record.open(config, inputs)
    room = engine_room(config, trains=False)
    parts = assemble(config, inputs, io=io, temperature=temperature, room=room)
    workers = config.rollout.workers > 0
    if workers:
        assert config.model.path is not None
        parts = with_workers(config, inputs, parts, config.model.path, temperature=temperature)
    return EvalSession(parts, io, workers or samples_on_ray(config))


def open_replay(config: TrainConfig, temperature: float, folder: RecordFolder) -> EvalSession:
    """The parts, all of them from the record. Raises ReplayError if `folder` is not a record, or was changed."""
    config = untrained(config)
    io = Replayer(folder.read())
    return EvalSession(assemble(config, folder.inputs(), io=io, temperature=temperature), io)
