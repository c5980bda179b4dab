"""Train on data (`agentrl sft` with [data]): steps over stored token rows, held-out losses, checkpoints, the final model."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.cluster.group import check_arrived, check_shared
from agentrl.cluster.placement import has_gpus
from agentrl.cluster.ray_cluster import ray_of
from agentrl.config import TrainConfig
from agentrl.config.identity import Identity, check_references, identity_of
from agentrl.config.load import check_unread
from agentrl.config.schema import DataConfig, ModelConfig
from agentrl.contrib.offline.objectives import OBJECTIVES, Found, Objective, classifier_of
from agentrl.contrib.offline.prepare import Preparation
from agentrl.contrib.offline.store import About, RowStore, sources
from agentrl.data.schedule import Mode, effective_mode
from agentrl.run.assembly import RunStart, longest_row, renderer_of, tokenizer_of
from agentrl.run.checks.model_checks import check_models, check_vision
from agentrl.run.checks.size_checks import check_capacity, check_placement
from agentrl.run.display import Count, Display
from agentrl.run.driver import RUN_KINDS
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.folder import DRIVER, RunFolder
from agentrl.run.interrupt import Interrupt
from agentrl.run.role_placement import RunRoles, start_actors
from agentrl.run.run_log import RunLog
from agentrl.run.session import model_folder
from agentrl.run.trackers import check_trackers
from agentrl.trainer.checkpoint import Checkpoints, seal
from agentrl.trainer.families import packing_of
from agentrl.trainer.learner import check_learner
from agentrl.trainer.optim import optims_of
from agentrl.trainer.roles import SavedRole
from agentrl.trainer.train_engine import TRAIN_ENGINES, check_train_engine
from agentrl.utils.errors import ConfigError
from agentrl.utils.parsing import json_text, read_json
from agentrl.utils.terminal import quiet_libraries
from agentrl.utils.threads import in_thread

ENGINE = "embedded"
"""Inference engine of the reduced config: nothing is sampled, and this one starts no processes."""
READ = ("name", "out", "seed", "trackers", "prometheus", "model", "data", "optim", "cluster", "eval", "checkpoint")
"""Keys and sections that a run on data reads."""
ROLE = "actor"
"""Folder of the trained role in a checkpoint; `agentrl export` reads it."""


@dataclass(slots=True)
class DataRun:
    """The parts of a run on data. `total`: its optimizer steps."""

    config: TrainConfig
    folder: RunFolder
    display: Display
    run_log: RunLog
    identity: Identity
    objective: Objective
    checkpoints: Checkpoints
    total: int


async def _run(run: DataRun, interrupt: Interrupt) -> bool:
    display, objective, eval_every = run.display, run.objective, run.config.eval.every
    data, store, group = objective.data, objective.store, objective.group
    ended, pairs = Count(store.about.examples, "examples"), data.loss == "dpo"
    what, look = ("the start model's log probabilities", ended.__str__) if pairs else ("beginning", str)
    with display.doing(what, look):
        await objective.begin(ended)  # before a checkpoint is loaded
    step = await _load(run)
    display.phase("training", run.total, step)
    if not step:
        await _measure(run, 0)
    interrupt.in_step = True
    while step < run.total and not interrupt.requested:
        began = time.monotonic()
        with display.doing("a step"):
            found = await objective.step(store.drawn(step, data.batch, run.config.seed))
        step += 1
        passes = step / store.steps(data.batch)
        run.run_log.row("data", step, {**found, "epoch": passes, "time/data_s": time.monotonic() - began})
        display.step(step, {"loss": found["loss"]})
        over = step >= run.total
        measured = over or (eval_every and step % eval_every == 0)
        score = await _measure(run, step) if measured else None
        if over or interrupt.requested or step % run.config.checkpoint.every == 0 or run.checkpoints.is_new_best(score):
            with run.display.doing("checkpoint"):
                aside = run.checkpoints.begin(step)
                try:
                    await group.arun(SavedRole.save, str(aside / ROLE))
                    await check_arrived(group, aside, "a checkpoint")
                    (aside / DRIVER).write_text(json_text({"step": step, "identity": run.identity}))
                    await in_thread("files", run.folder.sync_metrics)
                    await in_thread("files", run.checkpoints.commit, step, score)
                except BaseException as error:
                    run.checkpoints.give_up(step, error)
    interrupt.in_step = False
    if step < run.total:
        return False
    with display.doing("writing the trained model"):
        folder = run.folder
        folder.clear_final()
        role: Any = objective.role
        await group.arun(role.export_hf, str(folder.final))
        await check_arrived(group, folder.final, "the trained model")
        await in_thread("files", seal, folder.final, step)
    return True


async def _measure(run: DataRun, step: int) -> float | None:
    """Log the held-out metrics; return minus the loss (the checkpoint score), or None without a finite held-out loss."""
    held, each = run.objective.store.heldout, run.objective.data.batch
    if not len(held):
        return None
    sums, weights = dict[str, float](), 0.0
    ended = Count(len(held), "examples")
    with run.display.doing("held-out loss", ended.__str__):
        for at in range(0, len(held), each):
            weight, found = await run.objective.measure(held[at : at + each])
            weights += weight
            ended.done = min(at + each, len(held))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + weight * value
    means: Found = {name: value / max(weights, 1.0) for name, value in sums.items()}
    run.run_log.row("heldout", step, {**means, "examples": float(len(held))})
    run.display.say(f"[step {step}] held-out {', '.join(f'{name} {value:.4g}' for name, value in means.items())}")
    return -means["loss"] if math.isfinite(means["loss"]) else None


async def _load(run: DataRun) -> int:
    """Load the newest intact checkpoint and return its step; 0 without one."""
    run.checkpoints.recover_interrupted()  # first: it may move back a checkpoint, which is then the newest one
    newest, damaged = await in_thread("files", run.checkpoints.newest_intact)
    for problem in damaged:
        run.display.say(f"a checkpoint is damaged: {problem}; going on from {newest and newest.name}")
    if newest is None:
        run.folder.rewind(-1)
        run.run_log.rewound(-1)
        return 0
    await run.objective.group.arun(SavedRole.load, str(newest / ROLE))
    step = int(read_json((newest / DRIVER).read_text())["step"])
    run.folder.rewind(step)
    run.run_log.rewound(step)
    return step


# Checks


def _check_loss(data: DataConfig, model: ModelConfig) -> None:
    traits = TRAIN_ENGINES.entry(model.engine).traits
    if data.loss != "dpo":
        check_unread("data", data, ("beta",), 'data.loss = "dpo"')
    if data.loss == "sft":
        check_unread("data", data, ("margin",), "a data.loss of pairs")
    else:
        for key, given in (("min_reward", data.min_reward is not None), ("success", data.success)):
            if given:
                raise ConfigError(
                    f'data.{key} removes episodes before they are paired, so data.loss = "{data.loss}" would find no worse ones. '
                    "Remove it, and set data.margin"
                )
    if data.loss != "reward":
        return
    if model.lora is not None:
        raise ConfigError(
            'model.lora: data.loss = "reward" also trains a new head, which adapters cannot store. Turn it off (model.lora=false)'
        )
    for key in ("sequence_parallel", "tensor_parallel", "expert_parallel"):
        if getattr(model, key) > 1:
            raise ConfigError(f'model.{key}: data.loss = "reward" reads scores of whole rows; use 1')
    if "reward_model" not in traits:
        able = TRAIN_ENGINES.that_are("reward_model")
        raise ConfigError(f'data.loss = "reward": model.engine = "{model.engine}" does not support it; engines that do: {able}')


# The kind of run


@RUN_KINDS.register("data")
class DataRunKind:
    """Training on [data]: `agentrl sft --data`."""

    def __init__(self, config: TrainConfig) -> None:
        assert config.data is not None
        self.config, self.data = config, config.data

    def check(self, *, prepared: bool = False) -> list[str]:
        """Raise a UserError for a config that cannot be trained on its data; return warnings. `prepared`: the store is already
        written, so the source files need not exist."""
        quiet_libraries()
        view = self.relevant_sections()
        check_references(view)
        start = RunStart(view)
        check_trackers(start)
        check_models(start)
        check_vision(start)
        check_capacity(start)
        _check_loss(self.data, view.model)
        if self.data.loss == "reward" and view.optim.prefix_sharing == "on":
            raise ConfigError('optim.prefix_sharing = "on": data.loss = "reward" computes each row by itself; set "auto"')
        check_train_engine(view)
        check_learner(view)
        packing_of(view)
        check_placement(start)
        if not prepared:
            sources(self.data.path)
        renderer_of(view.model, tokenizer_of(view.model))
        notes, steps = list[str](), self.config.steps
        fields = {key: one for key, one in TrainConfig.model_fields.items() if key not in (*READ, "steps")}
        given = [key for key, one in fields.items() if getattr(self.config, key) != one.get_default(call_default_factory=True)]
        if given:
            notes.append(f"not read by a run on data, which trains with [optim]: {', '.join(given)}")
        if steps != TrainConfig.model_fields["steps"].default:
            notes.append(f"steps = {steps} is not read: data.epochs = {self.data.epochs} sets the length of a run on data")
        return notes

    def prepare(self, folder: Path, display: Display) -> About:
        """Read the config's data into a store in `folder` and print a summary. Raises ConfigError for unusable data."""
        config, tokenizer = self.config, tokenizer_of(self.config.model)
        longest = longest_row(config.optim, config.model)
        made = Preparation(self.data, renderer_of(config.model, tokenizer), tokenizer, longest)
        display.phase("data", 1)
        with display.doing("reading the data", lambda: f"{made.rows:,} rows"):
            about = made.write(folder, config.seed)
        display.say(
            f"data: {about.examples:,} {'pairs' if about.each == 2 else 'examples'} of {about.tasks:,} tasks in {about.rows:,} "
            f"rows, {about.tokens:,} tokens, {about.trained_tokens:,} of them trained; {len(about.heldout):,} tasks are held out"
        )
        for why, count in sorted(about.passed.items()):
            display.say(f"  left out: {count:,} {why}")
        for what, count in sorted(about.unread.items()):
            display.say(f"  not trained: {what}, {count:,} times")
        for place, why in about.left_out[:5]:
            display.say(f"  cannot be used: {place}: {why}")
        if len(about.left_out) > 5:
            display.say(f"  ... and {len(about.left_out) - 5:,} more, all in data/data.json")
        return about

    def relevant_sections(self) -> TrainConfig:
        """Return the config with what a run on data reads, the actor as its only role, and defaults of all else."""
        roles = {role: pool for role, pool in self.config.cluster.roles.items() if role == "actor"}
        pools = {name: pool for name, pool in self.config.cluster.pools.items() if name in roles.values()}
        cluster = self.config.cluster.model_copy(update={"roles": roles, "pools": pools})
        read = {key: getattr(self.config, key) for key in READ}
        return TrainConfig(**{**read, "engine": ENGINE, "cluster": cluster})

    async def train(self, folder: RunFolder, display: Display, run_log: RunLog, interrupt: Interrupt) -> bool:
        """Train from the newest checkpoint to the last step; return False if interrupted."""
        identity, config = identity_of(self.config, "train"), EngineChoice(self.relevant_sections()).with_threads()
        data, store = self.data, await in_thread("files", RowStore, folder.data)
        with display.doing("making the model"):
            path = await in_thread("files", model_folder, config.seed, self.config.model, folder)
            if data.loss == "reward":
                path = await in_thread("files", classifier_of, path, folder.path / "classifier", self.config.model)
        with ExitStack() as ends:
            if config.cluster.backend == "ray":
                with display.doing("starting Ray"):
                    ends.enter_context(ray_of(config.cluster))
            kind = OBJECTIVES[data.loss]
            with display.doing("starting the training processes"):
                if (pools := RunRoles(EngineChoice(config)).open_pools()) is not None:
                    ends.callback(pools.close)
                group = ends.enter_context(start_actors(config.model, config.cluster, pools, kind.role))
            await check_shared(group, folder.path, "out")
            with display.doing("loading the model"):
                init: Any = kind.role.init_model  # type: ignore[attr-defined]
                steps = data.epochs * store.steps(data.batch)
                await group.arun(init, path, config.model, optims_of(config)["optim"], steps)
            sharing: Mode = "off"
            if data.loss != "reward" and "prefix_sharing" in TRAIN_ENGINES.entry(config.model.engine).traits:
                sharing = effective_mode(config.optim.prefix_sharing, has_gpus(config.cluster, ROLE))
            objective = kind(data, store, group, sharing)
            checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep, config.checkpoint.keep_best)
            run = DataRun(config, folder, display, run_log, identity, objective, checkpoints, steps)
            return await _run(run, interrupt)

    def summary(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a data run's entries of summary.json, except its final status."""
        steps = [row for row in rows if row["phase"] == "data"]
        held = [row for row in rows if row["phase"] == "heldout"]
        return {
            "steps": steps[-1]["step"] if steps else 0,
            "loss": steps[-1].get("loss") if steps else None,
            "heldout_before": held[0].get("loss") if held else None,
            "heldout_after": held[-1].get("loss") if len(held) > 1 else None,
            "tokens": int(sum(row.get("tokens_trained") or 0 for row in steps)),
        }
