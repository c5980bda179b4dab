"""Evaluations, rollouts and runs as Python calls: `evaluate`, `rollout`, `train`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from agentrl.config import TrainConfig
from agentrl.config.envs import entry_of
from agentrl.config.identity import check_overrides
from agentrl.data.trajectory import Group, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.reward.explain import reasons
from agentrl.run.api.base import Both, Config, Table, config_of, env_table, wait_to_the_end
from agentrl.run.callbacks import Callback, Functions
from agentrl.run.checks import check_config, check_eval
from agentrl.run.compare import choose_tasks
from agentrl.run.config_file import load_whole, open_folder
from agentrl.run.display import Display
from agentrl.run.driver import execute
from agentrl.run.evaluate import RolloutJob, RolloutRequest, unscored_cause
from agentrl.run.folder import RunFolder
from agentrl.run.interrupt import Interrupt
from agentrl.run.provenance import Provenance, model_of, run_folder
from agentrl.run.reader import RunRecord, load_run
from agentrl.utils.errors import AgentrlError, CallbackError, ConfigError
from agentrl.utils.search_path import PREFIX, give, is_given
from agentrl.utils.terminal import console, say
from agentrl.utils.threads import in_thread

Model = str | Path | Callable[..., Any]
"""A folder or hub name, `api:NAME`, a run's folder, or a policy: `policy(messages, tools)` returns the next message."""


@dataclass(frozen=True)
class EvalReport:
    """Result of an evaluation: episodes ordered by task and sample, and the report of `agentrl eval`."""

    episodes: list[Trajectory]
    report: dict[str, Any]

    @property
    def success(self) -> float | None:
        """pass@1: mean over tasks of the share of successes; None if unknown."""
        found = self.report["pass@1"]
        return None if found is None else float(found["mean"])

    @property
    def reward(self) -> float | None:
        """Mean reward of the scored episodes; None if there are none."""
        return cast("float | None", self.report["reward"])

    def __repr__(self) -> str:
        shown = "unknown" if self.success is None else f"{self.success:.3f}"
        why = unscored_cause(self.episodes)
        unscored = "" if why is None else f", for instance {why}"
        return f"<EvalReport: success {shown} over {self.report['tasks']} tasks, {len(self.episodes)} episodes{unscored}>"


@Both
async def evaluate(
    model: Model,
    env: Any = None,
    *,
    n: int | None = None,
    k: int = 1,
    split: str | None = None,
    checkpoint: str = "last",
    reward: Any = None,
    params: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    quiet: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> EvalReport:
    """Evaluate a model or a policy: play `k` episodes on each of `n` held-out tasks; reports pass@k with its interval.

    `n`: by default 100; the first tasks of the split, or for a benchmark at most all its tasks, fewer spread over its kinds of
    tasks. `model`: a folder or hub name, `api:NAME`, or a function `policy(messages, tools)` (sync or async) that gets messages
    and function schemas in OpenAI's format and returns a string, a message in that format or a `Message`; or a run's folder, to
    evaluate its model (`checkpoint`: "last", "best" or a step) with the run's settings, in its environment or the one named by
    `env`. `env`: an id, a class, or a factory function, with `params`; `reward`: another spec or function. `overrides`:
    config keys that it reads. `out`: folder that keeps the episodes; only missing ones are played. By default nothing is kept.

    Raises a UserError if the call cannot work, CallbackError if the policy raised.
    """
    config, name = _eval_config(model, env, params, reward, overrides, checkpoint, "eval")
    settings, ref = config.alone(config.envs[0]).eval, EnvRef.of(config.envs[0], config.tools)
    split, wanted = split or settings.split, settings.tasks if n is None else n
    first = not callable(model) and (Path(model).expanduser() / "config.toml").is_file()  # a run evaluates on the first tasks
    tasks, chosen = await in_thread("load", choose_tasks, ref, split, wanted, config.seed, first)
    return await _play(config, RolloutRequest("eval", name, tasks or wanted, k, split, Path(out or ""), chosen), out, quiet)


@Both
async def rollout(
    model: Model,
    env: Any = None,
    *,
    n: int = 16,
    k: int = 1,
    split: str = "train",
    checkpoint: str = "last",
    reward: Any = None,
    params: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    quiet: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> list[Trajectory]:
    """Play and score `k` episodes of a model or policy on each of the first `n` tasks of a split, in the order of tasks.
    Arguments as in `evaluate`; sampled as in training (`rollout.temperature`)."""
    config, name = _eval_config(model, env, params, reward, overrides, checkpoint, "rollout")
    return (await _play(config, RolloutRequest("rollout", name, n, k, split, Path(out or "")), out, quiet)).episodes


def _eval_config(
    model: Model,
    env: Any,
    params: Mapping[str, Any] | None,
    reward: Any,
    overrides: Mapping[str, Any] | None,
    checkpoint: str,
    purpose: Literal["eval", "rollout"],
) -> tuple[TrainConfig, str]:
    """Make the config with one environment, and return it with the model's name; for a run's folder with its settings."""
    check_overrides([(key.split("."), value) for key, value in (overrides or {}).items()], purpose)
    name = give(model) if callable(model) else str(Path(model).expanduser() if str(model)[:1] == "~" else model)
    if is_given(name) or not (Path(name) / "config.toml").is_file():
        if checkpoint != "last":
            raise ConfigError(f"{purpose}: checkpoint = {checkpoint!r} needs a run's folder, and {name} is not one")
        if env is None:
            raise ConfigError(f"{purpose}: env is missing: give an environment's id or class (only a run's folder has its own)")
        table: Table = {"name": purpose, "env": env_table(env, params, reward), "model": {"path": name}}
        return config_of(table, overrides), name
    folder = run_folder(name)
    config, path = load_whole(folder.config), model_of(folder, checkpoint).path
    known = [{"name": one.called} for one in config.envs]
    if env is None and len(known) > 1:
        raise ConfigError(f"{folder.path}: it has several environments ({', '.join(e['name'] for e in known)}); name one as env")
    one = config.envs[0 if env is None else entry_of(known, str(env))]
    section = config.model.model_copy(update={"path": path, "init": None, "lora": None})
    made = config.model_copy(update={"model": section}).alone(one)
    table = env_table(made.model_dump(mode="json", exclude_none=True)["env"], params, reward)
    return config_of(made, {"env": table, **(overrides or {})}), path


async def _play(config: TrainConfig, request: RolloutRequest, out: str | Path | None, quiet: bool) -> EvalReport:
    """Play the episodes of a request, with a report if it is an evaluation; without `out` nothing is kept. Raises
    CallbackError if the user's policy or reward function raised."""
    with tempfile.TemporaryDirectory(prefix=f"agentrl-{request.purpose}-") as folder:
        request = replace(request, out=Path(folder if out is None else out).expanduser())
        start = await in_thread("load", check_eval, config, request.purpose)
        job = RolloutJob(start, request, Display(console(quiet=True) if quiet else None))
        report: dict[str, Any] | None = {}
        if request.purpose == "eval":
            report = await job.evaluate()
        else:
            await job.run()
    assert report is not None
    episodes = [job.episodes[pair] for pair in request.pairs if pair in job.episodes]
    # A policy that raised, or a reward function that scored no episode, is a bug in user code, not an outage.
    is_function = is_given(request.model)
    faults = [t.error for t in episodes if is_function and t.error is not None and t.error.startswith(f"policy {request.model}")]
    if not faults and all(t.reward is None for t in episodes):
        whys = [next(reasons(t.evidence), "") for t in episodes if t.error is None]
        faults = [f"reward {why}" for why in whys if is_given(why)]
    if faults:
        raise CallbackError(f"{faults[0].replace(PREFIX, '')} (in {len(faults)} of {len(episodes)} episodes)")
    return EvalReport(episodes, report)


@Both
async def train(
    config: Config | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: str | Path | None = None,
    overwrite: bool = False,
    on_step: Callable[[Mapping[str, Any], Any], Any] | None = None,
    on_group: Callable[[Group], Any] | None = None,
    accept: Callable[[Group], Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **sections: Any,
) -> RunRecord:
    """Train as `agentrl train`, in a fresh folder or from the newest checkpoint of the run in `resume`.

    `config`: a TOML file, a shelf's name, or a table, which may have a `base`; `overrides` (keys may be dotted) and keyword
    arguments replace keys: `train("quickstart", steps=5, env=MyEnv, rollout={"groups": 4})`. A class or function may replace the
    name of a component: an environment's class, a reward function or a spec as a dict, a loss, an estimator, a sampler.

    `on_step(row, session)` is called after each update, `on_group(group)` for each finished group; `accept(group)` decides
    whether a group is trained (refused groups are replaced). Ctrl-C finishes the step and writes a checkpoint. Returns the run,
    as `load_run`. Raises the error that ended the run: a UserError if the user can fix it.
    """
    top = {**(overrides or {}), **sections}
    if accept is not None:
        unnamed = getattr(accept, "__name__", "") == "<lambda>"
        top["rollout.accept"] = {"name": give(accept, "accept")} if unnamed else accept
    made, folder, notes, resumed = await in_thread("load", _prepare_run, config, top, resume, overwrite)
    watching = [*callbacks, *([Functions(on_step, on_group)] if on_step or on_group else [])]
    interrupt = Interrupt(say)
    work = partial(execute, made, folder, resumed=resumed, notes=notes, callbacks=watching, interrupt=interrupt)
    # In a separate thread, because a run has its own event loop, and this loop may serve a session at the same time.
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-train") as threads:
        running = asyncio.get_running_loop().run_in_executor(threads, copy_context().run, work)
        # The first cancellation stops after the step, with a checkpoint; the second at once.
        cancelled = await wait_to_the_end(running, interrupt.press)
    code = running.result()
    if cancelled:
        raise asyncio.CancelledError
    run = load_run(folder.path)
    if code == 1:
        summary = run.summary or {}
        why = summary.get("cause") or "see its log.txt"
        raise AgentrlError(f"{folder.path}: the run ended as {summary.get('status')!r}: {why}")
    return run


def _prepare_run(
    config: Config | None, top: Mapping[str, Any], resume: str | Path | None, overwrite: bool
) -> tuple[TrainConfig, RunFolder, Sequence[str], bool]:
    """Check the config and open the run's folder; returns config, folder, notes, and True for a resumed run."""
    if resume is None:
        if config is None:
            raise ConfigError('train: a config is needed, for example agentrl.train("quickstart"); or resume=RUN')
        made = config_of(config, top)
        notes = check_config(made, capacity=True)
        return made, open_folder(made, overwrite=overwrite), notes, False
    if config is not None or overwrite:
        raise ConfigError("train: a resumed run has its config in its folder, and goes on; leave out config and overwrite")
    folder = run_folder(resume)
    made = config_of(before := load_whole(folder.config), top)
    return made, folder, Provenance(folder, made).check_resumable(before, partial(check_config, made, capacity=True)), True


__all__ = ["EvalReport", "evaluate", "rollout", "train"]
