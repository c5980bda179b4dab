"""What an episode is, whoever plays it: its place in the run, its limits, its policy, and how its end is recorded.

The built-in loop (`rollout.episode`) and agents of somebody else's (`harness.episode`) are played by `played`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Protocol

from agentrl.config import RolloutConfig
from agentrl.env import ToolEnv
from agentrl.errors import AgentFaultError, AgentrlError, EngineError, EnvError, ToolTimeoutError
from agentrl.render.base import Renderer
from agentrl.reward import Scorer
from agentrl.rollout.clock import EpisodeClock, Watch
from agentrl.rollout.context.base import ContextPolicy, Stop
from agentrl.rollout.engine import Engine, Generation, Sampling
from agentrl.rollout.scoring import score_episode
from agentrl.rollout.waits import CutError
from agentrl.trajectory import Json, StopReason, Task, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """What identifies an episode: its task and its position in the run. `key` routes it to one prefix cache. `given`: so many
    gold calls are made before the policy begins (`rollout.start`)."""

    task_seed: int
    split: str
    seed: int
    member: int
    key: str
    given: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one episode; times in seconds, lengths in tokens.

    `context`: the most tokens that the model can take, which bounds each ledger. `max_episode_tokens`: the most
    that all ledgers of the episode may hold together, which is what training on it computes. `turn_timeout`: without a
    token of the engine for so long, a request is given up. `episode_timeout` limits the policy's own code and, by itself, the
    rest of what is not the engine's (see `rollout.clock`), `env_timeout` the environment's setup and its teardown.
    """

    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int
    turn_timeout: float
    episode_timeout: float
    context: int
    env_timeout: float = 120.0

    @classmethod
    def of(cls, config: RolloutConfig, context: int) -> Limits:
        """The limits that follow from a rollout section and a model's context length."""
        return cls(
            config.max_turns,
            config.max_turn_tokens,
            config.max_episode_tokens,
            config.turn_timeout,
            config.episode_timeout,
            context,
            config.env_timeout,
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """The engine, the renderer and how to sample: everything that turns messages into the next message.

    `context`: what happens to a conversation that outgrows the model's context. `writer`: the policy that writes its
    summaries; None means this policy itself. `router_replay`: ledgers get the experts that the engine sent their tokens to.
    """

    engine: Engine
    renderer: Renderer
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    context: ContextPolicy = field(default_factory=Stop)
    writer: Policy | None = None
    router_replay: bool = False

    def at(self, temperature: float, trained: bool = False) -> Policy:
        """The same policy at another temperature, whose episodes are not trained on unless `trained`; 0 is greedy."""
        return replace(self, temperature=temperature, router_replay=self.router_replay and trained)


class Course(Protocol):
    """How an episode is played: here turn by turn; in `harness.episode` by an agent of somebody else's."""

    error: str | None

    async def run(self) -> StopReason:
        """Play to the end. Raises CutError, AgentFaultError, EngineError or EnvError if something cuts the episode short."""
        ...

    async def end(self, stop: StopReason, error: str | None) -> Trajectory:
        """Tear the environment down and complete the record."""
        ...


async def played(
    episode: Course, env: ToolEnv, spec: EpisodeSpec, limits: Limits, scorer: Scorer | None, watch: Watch
) -> Trajectory:
    """Play an episode to its end and score it, as `run_episode` says."""
    started = time.monotonic()
    env.teardown_timeout = env.opening_timeout = limits.env_timeout
    error: str | None = None
    try:
        stop = await episode.run()
        error = episode.error
    except CutError as cut:
        stop, error = cut.stop, str(cut)
    except EngineError as fault:
        stop, error = StopReason.ENGINE_ERROR, str(fault)
    except AgentFaultError as fault:
        stop, error = StopReason.AGENT_ERROR, str(fault)
    except ToolTimeoutError as fault:
        stop, error = StopReason.TOOL_TIMEOUT, str(fault)
    except EnvError as fault:
        stop, error = StopReason.ENV_ERROR, str(fault)
    except BaseException:
        await _close(env)
        raise
    # Also after a fault: the environment is torn down and the record completed in any case.
    with watch.waits(spec.key, lambda: f"the end of environment {env.id}"):
        trajectory = await episode.end(stop, error)
    trajectory.timings["episode_s"] = time.monotonic() - started
    if scorer is not None:
        await score_episode(trajectory, scorer, spec.key, watch)
    return trajectory


async def _close(env: ToolEnv) -> None:
    try:
        await env.aclose()
    except Exception:  # it must not replace the error that ends the episode, which may be its cancellation
        log.exception("the teardown of environment %s failed", env.id)


def sampled(generation: Generation, sampling: Sampling, prompt: int) -> dict[str, str | float | None]:
    """What a span says of a turn's sampling."""
    return {
        "input_tokens": prompt,
        "output_tokens": len(generation.token_ids),
        "finish": generation.finish,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "version": generation.versions[-1] if generation.versions else None,
    }


async def complete(
    env: ToolEnv, record: Trajectory | None, spec: EpisodeSpec, stop: StopReason, error: str | None, clock: EpisodeClock
) -> Trajectory:
    """Tear the environment down and record how the episode ended; its ledgers and timings are left to the caller. `record`: None
    if the reset itself failed."""
    if record is None:  # there is no task to name
        trajectory = Trajectory(env.id, Task("", spec.task_seed, spec.split))
        trajectory.stop, trajectory.error = stop, error
    else:
        trajectory = record
        try:
            await env.aend(stop, error)
        except AgentrlError as fault:
            trajectory.stop, trajectory.error = StopReason.ENV_ERROR, f"environment {env.id}: {fault}"
        except Exception as fault:
            log.exception("the end of environment %s failed (task seed %d)", env.id, spec.task_seed)
            trajectory.stop = StopReason.ENV_ERROR
            trajectory.error = f"environment {env.id}: its end failed: {type(fault).__name__}: {fault}"
    trajectory.cause = _cause(trajectory.stop, clock)
    trajectory.seed, trajectory.member = spec.seed, spec.member
    return trajectory


def _cause(stop: StopReason, clock: EpisodeClock) -> dict[str, Json] | None:
    """See `Trajectory.cause`."""
    timed = stop in (StopReason.MAX_EPISODE_TIME, StopReason.EPISODE_TIMEOUT)
    used = {f"{who}_s": seconds for who, seconds in clock.used.items()} if timed else {}
    return None if stop.blame is None else {"blame": stop.blame, **used}
