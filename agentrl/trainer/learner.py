"""The learner: checks of algorithm and roles, and one training step over all roles, on the driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch

from agentrl.cluster.group import WorkerGroup, check_arrived, check_shared
from agentrl.cluster.launch import launch
from agentrl.cluster.placement import has_gpus
from agentrl.config.envs import own_advantages, scheduled_temperature, weight_at
from agentrl.config.load import check_idle_keys, check_unread
from agentrl.config.schema import AlgorithmConfig, Choice, CriticConfig, TrainConfig
from agentrl.data.rows import Ragged
from agentrl.data.schedule import effective_mode, token_ratio, with_trees
from agentrl.trainer.actor import Actor
from agentrl.trainer.algorithms import advantages
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput
from agentrl.trainer.estimator_inputs import critic_rows, with_advantages
from agentrl.trainer.minibatch import SOURCE, LogRatios, Term, TrainedTokens, adapted_kl_coef, broken_rows, cut_update
from agentrl.trainer.optim import optims_of
from agentrl.trainer.pretrained import named_anywhere
from agentrl.trainer.roles import Critic, ModelRole, Reference, RewardModel, SavedRole, check_moving, with_scores
from agentrl.trainer.train_engine import TRAIN_ENGINES, mesh_of, offloads_when_idle, separate_reference
from agentrl.trainer.update import check_algorithm, mismatch
from agentrl.trainer.update_hooks import SECTIONS, UPDATE_HOOKS, UpdateHook, call_hook, join_rows
from agentrl.utils.errors import CheckpointError, ConfigError, NonFiniteError
from agentrl.utils.parsing import json_text, read_json
from agentrl.utils.threads import in_thread

if TYPE_CHECKING:
    from tensordict import TensorDict

    from agentrl.cluster.placement import Pools


# Checks before a run


def check_learner(config: TrainConfig) -> None:
    """Raise ConfigError if settings of algorithm and roles contradict each other or are unused."""
    optims = optims_of(config)
    for section, given, key in (("optim", config.optim, "optim.name"), ("sft", config.sft, "sft.optimizer")):
        if given is not None and optims[section].name != "muon":
            check_unread(section, given, ("matrix_lr",), f'{key} = "muon"')
    check_algorithm(config.settled_algorithm())
    check_idle_keys(config)
    mesh_of(config.model, config.cluster)
    if config.model.offload == "idle" and not offloads_when_idle(config, "actor"):
        raise ConfigError(
            'model.offload = "idle": the actor never waits for another role on its GPU (no [critic], [reward_model], '
            "algorithm.distillation or algorithm.kl.coef without a pool of its own, and the engine has other GPUs without "
            "rollout.colocate); unset it"
        )
    check_moving(config.algorithm, config.model, config.cluster)
    for env in config.trained_envs:
        with config.name_entry_in_errors(env) as one:
            name, kl = one.algorithm.advantage.name, one.algorithm.kl
            advantages(name, one.algorithm.advantage.args)
            needs = ADVANTAGES.entry(name).needs
            if "values" in needs and config.critic is None:
                raise ConfigError(f'algorithm.advantage "{name}" needs a critic: add a [critic] section')
            if needs & {"baseline", "terms"} and config.reward_model is not None:
                raise ConfigError(
                    f'algorithm.advantage "{name}" reads scores of the reward spec, and the score of a [reward_model] is not '
                    "part of it"
                )
            if "terms" in needs and kl.coef > 0 and kl.where == "reward":
                raise ConfigError(
                    f'algorithm.advantage "{name}" reads single reward terms, to which algorithm.kl.where = "reward" is '
                    'not applied; use where = "loss"'
                )
    names = {config.alone(env).algorithm.advantage.name for env in config.trained_envs}
    if config.critic is not None and not any("values" in ADVANTAGES.entry(name).needs for name in names):
        users, listed = ADVANTAGES.that_are("values"), ", ".join(f'"{name}"' for name in sorted(names))
        raise ConfigError(
            f"there is a [critic] section, but algorithm.advantage {listed} does not use a critic; use one of {users}"
        )
    if config.critic is not None and config.critic.warmup >= config.steps:
        raise ConfigError(
            f"critic.warmup = {config.critic.warmup}: during these steps only the critic learns, and the run has steps = "
            f"{config.steps}, so the policy would never learn"
        )


# The learner

log = logging.getLogger(__name__)

STATE = "learner.json"
"""File of a checkpoint with the adaptive KL coefficient and its initial value."""
MAX_SKIPPED = 3
"""Number of consecutive training steps that may be skipped for non-finite numbers; one more ends the run."""
R = TypeVar("R", Critic, Reference, RewardModel)


def policy_updates(steps: int, critic: CriticConfig | None) -> int:
    """Return the number of training steps that update the policy: all but the critic's warm-up."""
    return max(steps - (critic.warmup if critic is not None else 0), 1)


class Learner:
    """The training roles of a run: the actor and the configured critic, reference, reward model and teacher."""

    def __init__(self, config: TrainConfig, actors: WorkerGroup[Actor], pools: Pools | None = None) -> None:
        """`pools`: resource pools, for roles that do not share the actors' processes."""
        check_learner(config)
        self.config, self.actors, self.pools = config, actors, pools
        self.critics: WorkerGroup[Critic] | None = None
        self.references: WorkerGroup[Reference] | None = None
        self._moving: WorkerGroup[Reference] | None = None  # `references` if they follow the policy; then checkpoints save them
        self.reward_models: WorkerGroup[RewardModel] | None = None
        self.teachers: WorkerGroup[Reference] | None = None
        self.algorithm, self._by_env = config.settled_algorithm(), own_advantages(config.envs)
        self.kl_coef = config.algorithm.kl.coef
        mode = effective_mode(config.optim.prefix_sharing, has_gpus(config.cluster, "actor"))
        self.sharing = mode if "prefix_sharing" in TRAIN_ENGINES.entry(config.model.engine).traits else "off"
        self._skipped, self._name = 0, uuid4().hex
        self.tokens: TrainedTokens | None = None
        self.hooks = {
            name: UPDATE_HOOKS.entry(name).make(section, config)
            for name in SECTIONS
            if (section := getattr(config.algorithm, name)) is not None
        }

    async def open(self, path: str, folder: Path | None = None) -> None:
        """Start the other roles from the model at `path`, in pools or the actors' processes.

        `folder`: the run folder. Raises ConfigError if a process does not share it with the driver.
        """
        config = self.config
        await self._offload_idle("actor", self.actors)
        if (critic := config.critic) is not None:
            source = named_anywhere(critic.path or path)
            self.critics = await self._start_role("critic", Critic, source, critic, config.steps, shared=folder)
        if config.reward_model is not None:
            self.reward_models = await self._start_role("reward_model", RewardModel, named_anywhere(config.reward_model.path))
        if (taught := config.algorithm.distillation) is not None:
            self.teachers = await self._start_role("teacher", Reference, named_anywhere(taught.path))
        if separate_reference(config.model, config.algorithm):
            self.references = await self._start_role("reference", Reference, path, shared=folder)
            if config.algorithm.kl.reference == "moving":
                self._moving = self.references
                await self.actors.arun(Actor.show, self._name)

    async def _start_role(self, role: str, cls: type[R], path: str, *more: Any, shared: Path | None = None) -> WorkerGroup[R]:
        """Start a role and load its model, offloaded if configured. `shared`: folder that it must share with the driver."""
        model, cluster = self.config.model, self.config.cluster
        if self.pools is not None and role in self.pools:
            group = self.pools.launch(role, cls, mesh_of(model, cluster, self.pools.slots(role)))
        else:
            group = launch(
                cls,
                name=role,
                backend=cluster.backend,
                world_size=self.actors.world_size,
                mesh=mesh_of(model, cluster),
                on=self.actors if cluster.backend == "ray" else None,
                call_timeout=cluster.call_timeout,
            )
        if shared is not None:  # before the model is loaded, which may take minutes
            await check_shared(group, shared, "out")
        if role == "teacher":
            model = model.model_copy(update={"lora": None})
        await group.arun(cls.init_model, path, model, self.config.optim, *more)
        await self._offload_idle(role, group)
        return group

    async def _offload_idle(self, role: str, group: WorkerGroup[Any]) -> None:
        """Offload a role after its pass, if configured, to free memory for the next role."""
        if offloads_when_idle(self.config, role):
            await group.arun(ModelRole.offload)

    async def step(self, batch: TensorDict, step: int, keep: bool = False) -> dict[str, float]:
        """Run one training step on a batch from `collate`. Returns the metrics of all roles.

        `keep`: set `tokens` to the advantages and log ratios of the sampled tokens; without `keep` or after a skipped step it is
        None. A step with a number that is not finite is skipped: nothing is trained, and `skipped_steps` is 1. Raises
        NonFiniteError after more than MAX_SKIPPED skipped steps in a row, BrokenWeightsError if the weights are not finite.
        """
        self.tokens = None
        view, metrics, broken = await self.ready(batch, step=step)
        return metrics | self._skip(step, broken) if broken else await self.learn(view, step, metrics, keep)

    async def ready(
        self,
        batch: TensorDict,
        algorithm: AlgorithmConfig | None = None,
        by_env: Mapping[str, Choice] | None = None,
        estimator: Callable[[AdvantageInput], AdvantageOutput] | None = None,
        step: int = 0,
    ) -> tuple[Ragged, dict[str, float], str]:
        """Run the first half of `step`: add all columns that the updates of critic and actor read.

        Returns the batch, the metrics so far, and a description of non-finite numbers ("" without any). `algorithm` and `by_env`
        replace the run's algorithm and the estimators by environment; the function `estimator` replaces both estimators."""
        algorithm, by_env = algorithm or self.algorithm, self._by_env if by_env is None else by_env
        view, metrics = await self._prepare(Ragged.of(batch), weight_at(self.config.rollout.temperature, step))
        # Checked before the advantages too: whitening and group means would spread one NaN over all rows and hide its source.
        if broken := await in_thread("batch", broken_rows, view):
            return view, metrics, broken
        hooks = tuple(self.hooks.values())
        view, formed = await in_thread("batch", with_advantages, view, algorithm, self.kl_coef, by_env, estimator, hooks)
        metrics |= formed
        metrics["prefix_ratio_possible"] = await in_thread("batch", token_ratio, view)
        return view, metrics, await in_thread("batch", broken_rows, view)

    async def learn(self, view: Ragged, step: int, metrics: Mapping[str, float], keep: bool = False) -> dict[str, float]:
        """Run the second half of `step`: update critic and actor on a batch from `ready`, then hooks and the KL coefficient.

        `metrics`: those of `ready`. Returns the metrics of both halves; `keep` and errors as for `step`."""
        if keep and self.algorithm.proximal != "recompute":
            view = view.with_rows(**{SOURCE: torch.arange(len(view))})
        learns = self.config.critic is None or step >= self.config.critic.warmup
        learned = await self._learn(view, step, learns)
        metrics = {**metrics, **learned}
        for hook in self.hooks.values() if learns else ():
            await in_thread("batch", call_hook, hook, UpdateHook.keep, view)
        if self.algorithm.proximal == "recompute":
            metrics |= await in_thread("batch", mismatch, view)
        if keep:  # log ratios that the actors recorded on all ranks, or those of the recomputed proximal policy
            ratios = None
            if self.algorithm.proximal != "recompute":
                ratios = LogRatios()
                for found in await in_thread("batch", self.actors.run_all, Actor.take_visits):
                    ratios |= found
            self.tokens = await in_thread("batch", TrainedTokens.of, view, ratios)
        if self.config.algorithm.kl.coef > 0:
            metrics["kl_coef"] = self.kl_coef
            measured = metrics.get("kl_reward" if self.algorithm.kl.where == "reward" else "kl_reference")
            # Only after an optimizer step: otherwise the policy, and so its KL, has not changed.
            if measured is not None and learned.get("optimizer_steps", 0) > 0:
                self.kl_coef = adapted_kl_coef(self.kl_coef, measured, int(view.episode.max()) + 1, self.algorithm.kl)
        if (temperature := scheduled_temperature(self.config.rollout, step)) is not None:
            metrics["temperature"] = temperature
        for role in ("", "critic/"):
            if learned.get(f"{role}skipped_optimizer_steps") and not learned[f"{role}optimizer_steps"]:
                return metrics | self._skip(step, "every optimizer step; the actors' log names the rows")
        self._skipped = 0
        return metrics | {"skipped_steps": 0.0}

    async def _prepare(self, view: Ragged, temperature: float) -> tuple[Ragged, dict[str, float]]:
        """Add the configured inputs of advantages: reward model scores, proximal, reference and teacher logprobs, values.

        Returns the batch and the metrics. `temperature`: that of the rollout."""
        # Trees first, so that each of the forward passes below computes a shared prefix once.
        view = await in_thread("batch", with_trees, view, self.sharing)
        metrics: dict[str, float] = {}
        if self.reward_models is not None and self.config.reward_model is not None:
            scores = (await self.reward_models.arun(RewardModel.compute_scores, view.batch))["score"]
            view, mean = await in_thread("batch", with_scores, view, scores, self.config.reward_model.weight)
            metrics["reward_model/score"] = mean
            await self._offload_idle("reward_model", self.reward_models)
        if self.algorithm.proximal == "recompute":
            now = await self.actors.arun(Actor.compute_logprob, view.batch, temperature)
            view = view.with_tokens(old_logprobs=now["logprobs"].values())
            if any(group is not None for group in (self.references, self.teachers, self.critics)):
                await self._offload_idle("actor", self.actors)
        if self.config.algorithm.kl.coef > 0 and self.references is None:
            reference = await self.actors.arun(Actor.compute_reference, view.batch, temperature)
            view = view.with_tokens(ref_logprobs=reference["logprobs"].values())
        frozen: dict[str, tuple[str, WorkerGroup[Any] | None]] = {
            "reference": ("ref_logprobs", self.references),
            "teacher": ("teacher_logprobs", self.teachers),
        }
        for role, (column, group) in frozen.items():
            if group is not None:
                rows = view
                for hook in self.hooks.values() if role == "teacher" else ():
                    cap = self.config.optim.micro_tokens
                    rows = await in_thread("batch", call_hook, hook, UpdateHook.teacher_rows, rows, cap)
                if rows is not view:
                    rows = await in_thread("batch", with_trees, rows, self.sharing)
                logs = (await group.arun(Reference.compute_logprob, rows.batch, temperature))["logprobs"].values()
                if rows is not view:
                    sampled = view.tokens("sampled")
                    logs = torch.zeros(len(sampled)).masked_scatter(sampled, logs[rows.tokens("sampled")])
                view = view.with_tokens(**{column: logs})
                await self._offload_idle(role, group)
        if self.critics is not None:
            values = await self.critics.arun(Critic.compute_values, view.batch)
            view = view.with_tokens(values=values["values"].values())
        return view, metrics

    async def _learn(self, view: Ragged, step: int, learns: bool) -> dict[str, float]:
        """Update the critic and, if the policy `learns`, the actor. Returns their metrics.

        The actor's batch also has the rows that hooks add. Both get the same batch and advantages: values were computed before
        either update."""
        metrics, seed = dict[str, float](), self.config.seed
        temperature = weight_at(self.config.rollout.temperature, step)
        added: list[tuple[Term, TensorDict]] = []
        for hook in self.hooks.values() if learns else ():
            rows, drawn = call_hook(hook, UpdateHook.draw, step, int(view.episode.max()) + 1)
            metrics |= drawn
            if rows is None or hook.term is None:
                continue
            if self.algorithm.proximal == "recompute" and not hook.term.supervised:
                now = await self.actors.arun(Actor.compute_logprob, rows, temperature)
                rows = Ragged.of(rows).with_tokens(old_logprobs=now["logprobs"].values()).batch
                if self.critics is not None:
                    await self._offload_idle("actor", self.actors)
            added.append((hook.term, rows))
        whole = await in_thread("batch", join_rows, view, added, self.sharing) if added else view
        if self.critics is not None:
            batch = view.batch
            if self._by_env:
                batch = await in_thread("batch", critic_rows, batch, self.algorithm.advantage, self._by_env)
            if len(batch):
                metrics |= await self.update_critic(batch, step)
            await self._offload_idle("critic", self.critics)
        if learns:
            algorithm, ranks = self.algorithm, self.actors.mesh.size("dp")
            metrics |= await self.actors.arun(
                Actor.update,
                await in_thread("batch", cut_update, whole.batch, algorithm, ranks, step=step, seed=seed),
                algorithm,
                step=step,
                seed=seed,
                temperature=temperature,
                kl_coef=self.kl_coef,
            )
            if self._moving is not None and metrics.get("optimizer_steps", 0) > 0:
                await self._moving.arun(Reference.follow, self._name, algorithm.kl.decay)
        return metrics

    async def update_critic(self, batch: TensorDict, step: int) -> dict[str, float]:
        """Run one training step of the critic on all rows of a batch. The config must have a critic."""
        assert self.critics is not None
        seed, ranks = self.config.seed, self.critics.mesh.size("dp")
        rows = await in_thread("batch", cut_update, batch, self.algorithm, ranks, step=step, seed=seed, policy=False)
        return await self.critics.arun(Critic.update, rows, self.algorithm, step=step, seed=seed)

    def _skip(self, step: int, what: str) -> dict[str, float]:
        """Count a skipped step and return its metrics. Raises NonFiniteError after MAX_SKIPPED in a row."""
        self._skipped += 1
        message = f"step {step} is skipped ({self._skipped} in a row) because of non-finite numbers: {what}"
        log.error(message)
        if self._skipped > MAX_SKIPPED:
            raise NonFiniteError(f"{message}. The run ends; the weights are those of the last step that was not skipped")
        return {"skipped_steps": 1.0}

    def _saved_roles(self) -> dict[str, WorkerGroup[Any]]:
        """Return the roles with changing weights by the name of their checkpoint folder."""
        groups = {"actor": self.actors, "critic": self.critics, "reference": self._moving}
        return {name: group for name, group in groups.items() if group is not None}

    async def begin_save(self, folder: Path) -> None:
        """Start writing the state of all roles to `folder`; returns once it is copied, or, without `checkpoint.asynchronous`,
        written. `is_saved` reports the end."""
        save = SavedRole.begin_save if self.config.checkpoint.asynchronous else SavedRole.save
        for name, group in self._saved_roles().items():
            await group.arun(save, str(folder / name))
        state = json_text({"kl_coef": self.kl_coef, "begun": [self.config.algorithm.kl.coef]})
        await in_thread("files", (folder / STATE).write_text, state, "utf-8")
        for hook in self.hooks.values():
            await in_thread("files", call_hook, hook, UpdateHook.save, folder)

    async def is_saved(self) -> bool:
        """Return True if the save that `begin_save` started is complete. Raises the error of a role that failed to write."""
        for group in self._saved_roles().values():
            if not await group.arun(SavedRole.is_saved):
                return False
        return True

    async def check_saved(self, folder: Path) -> None:
        """Raise CheckpointError if the driver cannot see a file that a rank wrote to `folder`."""
        for name, group in self._saved_roles().items():
            await check_arrived(group, folder / name, f"the {name}'s checkpoint")

    async def load(self, folder: Path) -> None:
        """Load a checkpoint of `begin_save`. Raises CheckpointError if the files of a role are missing or do not fit."""
        for name, group in self._saved_roles().items():
            await group.arun(SavedRole.load, str(folder / name))
        # An older checkpoint has no coefficient, 0 for none, or a second one.
        path, kl = folder / STATE, self.config.algorithm.kl
        found = read_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
        # Without a target the config's value holds, and if the config's value changed, adaptation restarts from it.
        if kl.target is not None and found.get("begun", [kl.coef])[0] == kl.coef and found.get("kl_coef", 0) != 0:
            if found["kl_coef"] is None:
                raise CheckpointError(f"{path}: kl_coef was not a number when it was saved; resume an older checkpoint")
            self.kl_coef = float(found["kl_coef"])
        for hook in self.hooks.values():
            await in_thread("files", call_hook, hook, UpdateHook.load, folder)

    def groups(self) -> list[WorkerGroup[Any]]:
        """Return the started training roles, the actors first."""
        found = (self.actors, self.critics, self.references, self.reward_models, self.teachers)
        return [group for group in found if group is not None]

    def close(self) -> None:
        """End the other roles; the actors belong to the caller that started them."""
        for group in self.groups()[1:]:
            group.close()
