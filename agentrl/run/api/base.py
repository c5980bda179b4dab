"""Building blocks of the Python API: blocking and awaited calls, configs from Python, environments ready to play."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError

from agentrl.config import TrainConfig
from agentrl.config.load import IN_PYTHON, config_from, join_layers, read_layers, with_absolute_paths
from agentrl.env import ToolEnv
from agentrl.env.catalog import make_env
from agentrl.run.config_file import find_config_file
from agentrl.utils.errors import ConfigError, check_arguments, checks_arguments
from agentrl.utils.event_loop import GRACE
from agentrl.utils.search_path import give, holding
from agentrl.utils.threads import LoopThread, background, share_the_lock

# Blocking and awaited forms of the same call, for scripts, notebooks and programs with their own event loop.
#
# All live parts run in one event loop, in a background thread, since a notebook runs its own in the thread of its cells.
# `policy.play(...)` blocks until the result is there; `await policy.play.aio(...)` awaits it from another event loop.

S = TypeVar("S")
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Both(Generic[P, R]):
    """Blocking function or method, with its awaitable form as `aio`."""

    def __init__(self, work: Callable[P, Coroutine[Any, Any, R]]) -> None:
        self._work = work
        update_wrapper(self, work)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Block until the result is there. Ctrl-C cancels the work and waits for its end."""
        check_arguments(self._work, args, kwargs)
        return run_blocking(self._hold(*args, **kwargs))

    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Await the result in any event loop. If the caller is cancelled, cancels the work too and awaits its end."""
        check_arguments(self._work, args, kwargs)
        work, held, begun = self._hold(*args, **kwargs), background(), list[asyncio.Task[Any]]()
        if held.here:
            return await work
        share_the_lock()
        running = _run_cancellable(work, begun, threading.Event())
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, held.loop))
        cancelled = await wait_to_the_end(future, partial(_cancel, held, begun))
        if cancelled and not future.cancelled():
            future.exception()  # mark as retrieved: errors during cancellation are not the cause
            raise asyncio.CancelledError
        return future.result()

    async def _hold(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the work with the objects given in it, or in the call that opened its session."""
        with holding(getattr(getattr(self._work, "__self__", None), "held", None)):
            return await self._work(*args, **kwargs)

    def __get__(self: Both[Concatenate[S, Q], R], instance: S | None, owner: type[S] | None = None) -> Both[Q, R]:
        """Bind a method to its instance; accessed on the class it stays unbound."""
        return Both(MethodType(self._work, instance)) if instance is not None else self  # type: ignore[return-value]


async def wait_to_the_end(future: asyncio.Future[Any], cancel: Callable[[], object]) -> bool:
    """Wait until `future` is done, and call `cancel` each time the caller is cancelled; returns True if it was."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
            cancel()
    return cancelled


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in the background loop and block for its result. Raises the error of `work`, and RuntimeError if called in
    the background loop."""
    held = background()
    if held.here:
        work.close()
        raise RuntimeError("a blocking call inside of agentrl's own event loop (a callback, a tool): await NAME.aio(...) there")
    share_the_lock()
    begun: list[asyncio.Task[Any]] = []
    ended = threading.Event()
    future = asyncio.run_coroutine_threadsafe(_run_cancellable(work, begun, ended), held.loop)
    # Make Ctrl-C raise KeyboardInterrupt here. The handler of `asyncio.run` would only cancel the calling task, which is blocked
    # and would notice too late.
    before = signal.getsignal(signal.SIGINT)
    mine = False
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        mine = threading.current_thread() is threading.main_thread() and before is not None
    if mine:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return future.result()
    except KeyboardInterrupt:
        # Cancel the task and wait until it has stopped its parts; a second Ctrl-C cancels once more, a third gives up.
        for patience in (None, GRACE):
            _cancel(held, begun)
            try:
                ended.wait(patience)
                break
            except KeyboardInterrupt:
                continue
        raise
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


async def _run_cancellable(work: Coroutine[Any, Any, T], begun: list[asyncio.Task[Any]], ended: threading.Event) -> T:
    """Run `work` and publish its task in `begun` and its end in `ended`, so that another thread can cancel and await it."""
    task = asyncio.current_task()
    assert task is not None
    begun.append(task)
    try:
        return await work
    finally:
        ended.set()


def _cancel(held: LoopThread, begun: list[asyncio.Task[Any]]) -> None:
    """Cancel the task in `begun`, from another thread."""
    # Two turns of the loop later, because work that was only just submitted has no task in `begun` yet.
    held.loop.call_soon_threadsafe(held.loop.call_soon, lambda: begun[0].cancel())


# Configs from Python

Table = dict[str, Any]
Config = TrainConfig | Mapping[str, Any] | str | Path

OVERRIDES, HERE = IN_PYTHON


def config_of(config: Config, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Make a validated config from a file, a shelf's name, a table (which may have a `base`) or a config, with `overrides`.

    `overrides`: sections are merged key by key, keys may be dotted, and None or False removes an optional section. A table may
    contain a component instead of its name: an environment's class or factory, a reward function, a spec as a dict, a function
    for any registered name (`algorithm.loss`, `rollout.sampler`, ...). Raises ConfigError.
    """
    layers = []
    if overrides:
        layers.append((OVERRIDES, _table(overrides)))
    if isinstance(config, TrainConfig):
        layers.append((HERE, config.model_dump()))
    elif isinstance(config, Mapping):
        table = _table(config)
        base = table.pop("base", None)
        layers += [(HERE, table), *([] if base is None else read_layers(find_config_file(str(base)), find_config_file))]
    else:
        layers += read_layers(find_config_file(str(config)), find_config_file)
    return with_absolute_paths(config_from(join_layers(layers), (), layers))


def section_of_call(call: str, section: type[M], table: Mapping[str, Any]) -> M:
    """Validate a call's arguments as a config section. Raises ConfigError that names the first wrong key."""
    try:
        return section.model_validate(table)
    except ValidationError as problem:
        first = problem.errors()[0]
        key, text = str(first["loc"][0]) if first["loc"] else section.__name__, first["msg"]
        raise ConfigError(f"{call}: {key}: {text[0].lower()}{text[1:]}, got {first['input']!r:.80}") from None


def env_table(env: Any, params: Mapping[str, Any] | None = None, reward: Any = None) -> Table:
    """Make the [env] section of an environment given by id, class, factory function, or section as a dict."""
    if not (isinstance(env, str | Mapping) or callable(env)):
        named = f"the class {type(env.unwrapped).__name__} itself" if isinstance(env, ToolEnv) else "one of these"
        fix = ", its parameters as params={...} and its reward as reward=..." if isinstance(env, ToolEnv) else ""
        raise ConfigError(
            f"env = {env!r:.80}: expected an environment's id, its class, a function that makes one, or an [env] section as a "
            f"dict. Give {named}{fix}"
        )
    table: Table = {"id": env} if isinstance(env, str) else _plain(env, ("env",))
    if params:
        table["params"] = {**table.get("params", {}), **params}
    if reward is not None:
        if not (isinstance(reward, str | Path | Mapping) or callable(reward)):
            raise ConfigError(f"reward = {reward!r:.80}: expected a spec's name or path, a spec as a dict, or a function")
        table["reward"] = _plain(reward, ("env", "reward"))
    return table


def _table(given: Mapping[str, Any]) -> Table:
    """Convert to a nested table of plain values: split dotted keys, replace Python objects by names."""
    nested: Table = {}
    for key, value in given.items():
        *path, last = str(key).split(".")
        inner = nested
        if key == "env" and not isinstance(value, Mapping | list | tuple | bool | None):  # further dotted keys may extend it
            value = env_table(value)
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{HERE}: {key}: {part!r} is a value, not a section")
        inner[last] = {**inner[last], **value} if isinstance(value, Mapping) and isinstance(inner.get(last), dict) else value
    return {key: _plain(value, (key,)) for key, value in nested.items()}


def _plain(value: Any, at: tuple[str, ...]) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        table = {str(key): _plain(inner, (*at, str(key))) for key, inner in value.items()}
        return give(table) if at[0] == "env" and at[-1] == "reward" else table
    if isinstance(value, list | tuple):
        return [env_table(inner) if at == ("env",) else _plain(inner, at) for inner in value]
    if not callable(value):
        return value
    name = give(value)
    if at == ("env",):
        return {"id": name, "name": name.partition(":")[2]}
    if at[-1] in ("id", "name", "python", "path", "reward", "use") or "python" in at or at[-1] == "args":
        return name
    return {"name": name}


# An environment ready to play


@checks_arguments
def make(env: Any, *, reward: Any = None, **params: Any) -> ToolEnv:
    """Make an environment that scores its own episodes: the last step of the gold solution has the reward 1.0.

    `env`: an id, a class, or a factory function; `params`: its parameters. `reward`: another spec (name, path or dict) or a
    function; by default the environment's own. Raises CatalogError for an unknown id or unsuitable parameters, RewardSpecError
    for a bad spec.
    """
    table = env_table(env, reward=reward)
    return make_env(table["id"], reward=table.get("reward"), **{**table.get("params", {}), **params})
