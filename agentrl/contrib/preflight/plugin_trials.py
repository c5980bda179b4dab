"""Trial of a user's plug-ins before a run: each is called once on made-up data, and its answer is checked."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.config import Choice, RolloutConfig
from agentrl.data.trajectory import Group, Message, Task, ToolCall, Trajectory
from agentrl.engines.weights.base import Sender
from agentrl.rollout.context import Moment
from agentrl.rollout.engine import EngineMaker
from agentrl.rollout.mixtures import EnvOutcome
from agentrl.rollout.samplers import GroupOutcome, TaskChoice
from agentrl.run.callbacks import Callback
from agentrl.run.checks import RUN_CHECKS, RunStart
from agentrl.run.checks.reward_checks import in_daemon_thread
from agentrl.run.registries import registry_of
from agentrl.run.trackers import Tracker
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput, LossInput, LossOutput, anchors_of, call_component
from agentrl.trainer.algorithms.losses import POLICY_LOSSES
from agentrl.trainer.train_engine import BaseEngine
from agentrl.utils.errors import CallbackError, ConfigError, UserError, fault_text, is_users, place_of
from agentrl.utils.files import shown_path
from agentrl.utils.registry import second_load

TURNS = [0, 0, 0, 0, 1, 1]
SAMPLED = [False, True, True, False, False, True]
"""Tokens of each made-up episode: the turn of each, and whether the policy sampled it."""

UNCALLED = ("engine", "model.engine", "weights.route", "trackers")
"""Keys of classes that start processes: only their form is checked."""


class TrialError(Exception):
    """An answer that a run could not use: names it and the expected form."""


@RUN_CHECKS.register("plugins", traits={"first"})
def check_plugins(start: RunStart) -> list[str]:
    """Raise ConfigError with key, file and line if a plug-in of the user fails on made-up data, or gives an unusable answer. A
    second load of its file is called, so nothing that it keeps is left. In a plan callbacks are made too; a start makes them
    itself. An evaluation calls none of them.
    """
    limit = start.config.rollout.env_timeout + start.config.rollout.episode_timeout
    for key, choice, trial in _trials(start) if start.purpose == "train" else ():
        registry = registry_of(key)
        assert registry is not None
        if choice is not None and choice.name in registry and is_users(registry.entry(choice.name).make):
            make = registry.entry(choice.name).make
            if key not in UNCALLED:
                registry.bind(choice.name, choice.args)
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            try:
                with second_load(registry, choice.name) as again:
                    make = again
                    whole = again if key in UNCALLED else registry.bind(choice.name, choice.args)
                    in_daemon_thread(partial(trial, whole, choice), limit)
            except Exception as fault:
                if isinstance(fault, UserError) and not isinstance(fault, CallbackError):
                    raise
                problem = fault.__cause__ if isinstance(fault, CallbackError) and fault.__cause__ else fault
                said = str(problem) if isinstance(problem, TrialError) else f"raised {fault_text(problem)}"
                place = shown_path(place_of(make, problem))
                raise ConfigError(
                    f"{key}: {place}: {choice.name!r} {said} (a trial on made-up data). Correct it there"
                ) from problem
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])
    return []


def _trials(start: RunStart) -> Iterator[tuple[str, Choice | None, Callable[[Any, Choice], Any]]]:
    """Each choice of the config with its key, and the call that its component gets."""
    config = start.config
    algorithm, rollout = config.algorithm, config.rollout
    yield "algorithm.advantage", algorithm.advantage, partial(_advantage, rollout.group_size)
    yield "algorithm.loss", algorithm.loss, _loss
    yield "algorithm.correction", algorithm.correction, _correction
    yield "rollout.sampler", rollout.sampler, _sampler
    yield "rollout.accept", rollout.accept, partial(_filter, rollout.group_size)
    yield "rollout.mixture", rollout.mixture, partial(_mixture, [env.called for env in config.envs])
    for choice in config.callbacks if start.planned else ():
        yield "callbacks", choice, _callback
    for key, name, kind in (
        ("engine", config.engine, EngineMaker),
        ("model.engine", config.model.engine, BaseEngine),
        ("weights.route", config.weights.route, Sender),
        *(("trackers", tracker.name, Tracker) for tracker in config.trackers),
    ):
        yield key, Choice(name=name), partial(_class, kind)
    for env in config.envs:
        one = config.alone(env)
        if env.advantage is not None:
            yield "env.advantage", env.advantage, partial(_advantage, one.rollout.group_size)
        if env.sandbox is not None:
            yield "env.sandbox.provider", Choice(name=env.sandbox.provider, args=env.sandbox.args), _sandbox
        yield "env.sampler", env.sampler, _sampler
        yield "rollout.context", one.rollout.context, partial(_context, one.rollout)


def expect_type(kind: type, answer: Any) -> None:
    """Raise TrialError for an answer of another type."""
    if not isinstance(answer, kind):
        raise TrialError(f"returned {answer!r:.60}, expected {kind.__name__}")


def _check_column(name: str, column: Any, mask: Tensor) -> None:
    """Raise TrialError unless a column has a finite number for each sampled token, and room for the others."""
    expect_type(Tensor, column)
    if column.shape != mask.shape or not column.is_floating_point():
        found = f"{str(column.dtype).removeprefix('torch.')} {list(column.shape)}"
        raise TrialError(f"returned {name} {found}, expected floating point numbers {list(mask.shape)}, one per token")
    if not bool(torch.isfinite(column[mask]).all()):
        raise TrialError(f"returned {name} that are not finite (NaN or infinite)")


def _check_numbers(name: str, numbers: Mapping[str, float]) -> None:
    if not all(math.isfinite(value) for value in numbers.values()):
        raise TrialError(f"returned {name} {dict(numbers)!r:.80}, expected finite numbers")


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    """Mask [T] and offsets [N + 1] of made-up episodes."""
    return torch.tensor(SAMPLED * rows), torch.arange(rows + 1) * len(SAMPLED)


def _advantage(group_size: int, estimate: Any, choice: Choice) -> None:
    """Two groups: each second episode of the first succeeds, and all of the other fail."""
    mask, offsets = _batch(rows := 2 * group_size)
    member = torch.arange(rows) % group_size
    group, reward = torch.arange(rows) // group_size, (member % 2).float()
    reward[group == 1] = 0.0
    rewards = torch.zeros(len(mask)).index_copy(0, offsets[1:] - 1, reward)
    needs = ADVANTAGES.entry(choice.name).needs
    made = AdvantageInput(
        token_rewards=rewards,
        mask=mask,
        offsets=offsets,
        group=group,
        reward=reward,
        turns=torch.tensor(TURNS * rows),
        member=member,
        values=torch.linspace(0.0, 1.0, len(mask)) if "values" in needs else None,
        baseline=torch.full((rows,), 0.5) if "baseline" in needs else None,
        terms=reward[:, None].repeat(1, len(choice.args["terms"])) if "terms" in needs else None,
        anchors=anchors_of(torch.arange(len(mask)) % len(TURNS), mask, offsets) if "anchors" in needs else None,
    )
    expect_type(AdvantageOutput, answer := call_component(f"algorithm.advantage {choice.name!r}", estimate, made))
    _check_column("advantages", answer.advantages, mask)
    if answer.returns is not None:
        _check_column("returns", answer.returns, mask)


def _loss(loss: Any, choice: Choice) -> None:
    mask, offsets = _batch(4)
    logprobs, old, behaviour, advantages = _logprobs(mask)
    logprobs.requires_grad_()
    picked = mask & (torch.arange(len(mask)) % 2 == 0) if "picked" in POLICY_LOSSES.entry(choice.name).needs else None
    given, label = LossInput(logprobs, old, behaviour, advantages, mask, offsets, picked), f"algorithm.loss {choice.name!r}"
    expect_type(LossOutput, answer := call_component(label, loss, given))
    _check_column("a loss", answer.loss, mask)
    for name, column in answer.metrics.items():
        if torch.as_tensor(column).numel() != 1:  # one number is of the whole micro-batch
            _check_column(f"the metric {name}", column, mask)
    if not answer.loss.requires_grad:
        raise TrialError("returned a loss without a gradient by the log probabilities")
    _check_column("gradients", torch.autograd.grad(answer.loss[mask].sum(), logprobs)[0], mask)


def _correction(weigh: Any, choice: Choice) -> None:
    mask, offsets = _batch(4)
    _, old, behaviour, _ = _logprobs(mask)
    _check_column("weights", weigh(old, behaviour, mask, offsets), mask)


def _logprobs(mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Columns of a made-up update: log probabilities (current, proximal, of behavior) and advantages."""
    steps = torch.linspace(0.0, 1.0, len(mask))
    current = torch.where(mask, -0.1 - steps, 0.0)
    return current, current - 0.1 * mask * steps, current + 0.05 * mask, torch.where(mask, 2 * steps - 1, 0.0)


def _mixture(names: Sequence[str], make: Any, choice: Choice) -> None:
    mixture, weights = make(), dict.fromkeys([*names, "other"], 1.0)
    for _ in range(2):
        _check_numbers("shares", shares := mixture.shares(weights))
        if shares.keys() != weights.keys() or min(shares.values()) < 0 or not sum(shares.values()):
            raise TrialError(f"returned shares {shares!r:.80}, expected one >= 0 for each of {', '.join(weights)}, not all 0")
        mixture.observe([EnvOutcome(0, names[0], 0.5, 100), EnvOutcome(1, "other", None, 50)])
    make().load(json.loads(json.dumps(mixture.state())))
    _check_numbers("metrics", mixture.metrics())


def _class(kind: type, made: Any, choice: Choice) -> None:
    if not (isinstance(made, type) and issubclass(made, kind)):
        raise TrialError(f"is {made!r:.60}, expected a subclass of {kind.__name__}")
    if missing := sorted(made.__abstractmethods__):  # type: ignore[attr-defined]
        raise TrialError(f"lacks {', '.join(missing)}, which {kind.__name__} demands")
    for name, method in vars(kind).items():
        own = inspect.getattr_static(made, name)
        if inspect.isfunction(method) and inspect.isfunction(own) and not name.startswith("_"):
            _check_call(method, own)


def _check_call(method: Any, own: Any, bound: int = 0) -> None:
    """Raise TrialError for a method that cannot be called as the contract's is; `bound`: arguments that it has already."""
    expected, found = list(inspect.signature(method).parameters.values())[bound:], inspect.signature(own)
    try:
        found.bind(*(one for one in expected if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD))
    except TypeError:
        name, there, wanted = method.__name__, ", ".join(found.parameters), ", ".join(one.name for one in expected)
        raise TrialError(f"has {name}({there}), expected {name}({wanted})") from None


def _sampler(make: Any, choice: Choice) -> None:
    sampler, again = make(), make()
    for one in (sampler, again):
        if one.wants() is not None:
            one.use(range(8))
    expect_type(TaskChoice, chosen := sampler.choose(0, 0))
    sampler.observe([GroupOutcome(0, chosen.bucket, 0.5)])
    again.load(json.loads(json.dumps(sampler.state())))
    _check_numbers("metrics", sampler.metrics())


def _filter(group_size: int, ask: Any, choice: Choice) -> None:
    for best in (1.0, 0.0):
        rewards = [best, *[0.0] * (group_size - 1)]
        members = [Trajectory("made-up", Task("made-up", 0), member=n, reward=r, success=r > 0) for n, r in enumerate(rewards)]
        try:
            answer = ask(Group(0, 0, members))
            answer = asyncio.run(answer) if inspect.iscoroutine(answer) else answer
        except (LookupError, TypeError, ValueError, ArithmeticError):
            return  # of data that only real tasks have
        if not isinstance(answer, bool | np.bool_):
            raise TrialError(f"returned {answer!r:.60}, expected True or False")


def _callback(make: Any, choice: Choice) -> None:
    made = make()
    if not all(callable(getattr(made, call, None)) for call in ("on_step", "on_group")):
        raise TrialError(f"makes {made!r:.60}, expected a Callback with on_step and on_group")
    for method in (Callback.on_step, Callback.on_group):
        _check_call(method, getattr(made, method.__name__), 1)


def _context(rollout: RolloutConfig, make: Any, choice: Choice) -> None:
    """A conversation that has room, and one that has none left."""
    call = ToolCall("look", {"at": "it"}, "1")
    turn = [Message("assistant", "", (call,)), Message("tool", "It is there.", tool_call_id="1", name="look")]
    talk, policy = [Message("system", "Instructions"), Message("user", "Question"), *turn * 3], make()
    most = rollout.max_episode_tokens

    async def ask(instruction: Message, tokens: int) -> str | None:
        return "A summary."

    for tokens in (len(talk), most):
        answer = asyncio.run(policy.rewrite(Moment(talk, 2, 1, tokens, rollout.max_turn_tokens, most, ask)))
        for message in () if answer is None else answer:
            expect_type(Message, message)


def _sandbox(make: Any, choice: Choice) -> None:
    """A command and a file of a sandbox that starts here; one on other machines costs money, and is not started."""
    from agentrl.contrib.sandboxes.contract import SANDBOXES, ExecResult, Sandbox, SandboxProvider, SandboxSpec

    expect_type(SandboxProvider, provider := make())
    if (reason := provider.unavailable()) is not None:
        return expect_type(str, reason)  # the check of environments says it

    async def use() -> None:
        expect_type(Sandbox, sandbox := await provider.start(SandboxSpec()))
        try:
            expect_type(ExecResult, await sandbox.exec(["true"]))
            await sandbox.write({"a": b"text"})
            if (content := await sandbox.read("a")) != b"text":
                raise TrialError(f"reads {content!r:.60} from a file, expected b'text', which was written")
        finally:
            await sandbox.stop()

    if "remote" not in SANDBOXES.entry(choice.name).traits:
        asyncio.run(use())
