"""Hooks of updates: replay of rare successes, gold solutions of tasks at which a whole group failed, distillation from a teacher,
and a loss on tool results."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agentrl.config.schema import DemonstrationsConfig, DistillationConfig, ExperienceConfig, TrainConfig
from agentrl.data.rows import TRUNCATED, Ragged, build, collate, concat, is_ragged, nested_tensor, offsets_of, select
from agentrl.data.trajectory import Group, Json, Message, Trajectory
from agentrl.rollout.player import RunEnv, success_rate
from agentrl.rollout.samplers import TaskChoice
from agentrl.rollout.warm_start import transcript, without_random_faults
from agentrl.run.assembly import longest_row
from agentrl.run.callbacks import CALLBACKS, Callback
from agentrl.run.checks import RUN_CHECKS, RunStart
from agentrl.run.checks.env_checks import gold_obstacle
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.minibatch import Term, proximal_of
from agentrl.trainer.update import stale_problem
from agentrl.trainer.update_hooks import ADDED, UPDATE_HOOKS, UpdateHook
from agentrl.utils.errors import CheckpointError, ConfigError, EnvError
from agentrl.utils.threads import in_thread

if TYPE_CHECKING:
    from tensordict import TensorDict

log = logging.getLogger(__name__)

# Stored episodes

RARE = "rare"
FILE = "experience.safetensors"
DRAW = 2
"""Separates the random numbers that draw stored episodes from those that shuffle an update's episodes."""


@UPDATE_HOOKS.register("experience")
class Experience(UpdateHook):
    """At most `size` rare successes, the newest, none older than `max_age` updates. Truncated episodes are not stored if they are
    not trained (`algorithm.truncated`)."""

    def __init__(self, section: ExperienceConfig, config: TrainConfig) -> None:
        self.config, self.seed, self.masked = section, config.seed, config.algorithm.truncated == "mask"
        self.term: Term = Term("experience", section.term == "supervised", section.coef)
        # Per episode: all rows, and the oldest weight version that sampled one of its tokens.
        self._kept: list[tuple[int, TensorDict]] = []

    async def prepare(self, batch: TensorDict, groups: Sequence[Group], envs: Sequence[RunEnv]) -> TensorDict:
        """Add the row column `rare`, bool [N]: successes in groups where few of the members with known success succeeded."""
        found = []
        for group in groups:
            share = success_rate(group.scored())
            found += [bool(one.success) and share is not None and share <= self.config.rare + 1e-9 for one in group.scored()]
        out: TensorDict = batch.copy()
        out[RARE] = torch.tensor(found)[batch.get("trajectory")]
        return out

    def draw(self, step: int, fresh: int) -> tuple[TensorDict | None, dict[str, float]]:
        """Draw without replacement, by the run's seed and the step. Drops episodes whose oldest weights are more than `max_age`
        updates behind."""
        self._kept = [(oldest, rows) for oldest, rows in self._kept if step - oldest <= self.config.max_age]
        count = min(int(self.config.share * fresh + 0.5), len(self._kept))
        found = {"experience/held": float(len(self._kept)), "experience/episodes": float(count)}
        if not count:
            return None, found
        chosen = np.sort(np.random.default_rng([self.seed, step, DRAW]).choice(len(self._kept), count, replace=False))
        drawn = [self._kept[place] for place in chosen.tolist()]
        rows = concat([rows for _, rows in drawn])
        ages = [step - oldest for oldest, _ in drawn]
        found |= {"experience/tokens": float(rows["sampled"].values().sum())}
        return rows, found | {"experience/age_mean": sum(ages) / count, "experience/age_max": float(max(ages))}

    def keep(self, view: Ragged) -> None:
        """Store the rare ones of an update's own episodes, which have advantages; later updates may draw them."""
        rare = view.numbers(RARE) & ~view.numbers(TRUNCATED) if self.masked else view.numbers(RARE)
        for number in np.unique(view.episode[rare]).tolist():
            rows = select(view.batch, np.flatnonzero(view.episode == number))
            sampled = rows["sampled"].values()
            # Nothing to learn from: no token, or, in the policy loss, zero advantage.
            teaches = sampled if self.config.term == "supervised" else sampled & (rows["advantages"].values() != 0)
            if bool(teaches.any()):
                oldest = int(rows["versions"].values()[sampled].min())
                self._kept.append((oldest, rows.select(*ADDED, strict=False)))
        del self._kept[: -self.config.size]

    def save(self, folder: Path) -> None:
        """Write all episodes to one file."""
        tensors = {"oldest": torch.tensor([oldest for oldest, _ in self._kept], dtype=torch.int64)}
        if self._kept:
            rows = concat([rows for _, rows in self._kept])
            counts = torch.tensor([len(rows) for _, rows in self._kept])
            tensors["episode"] = torch.arange(len(counts)).repeat_interleave(counts)
            tensors["offsets"] = offsets_of(rows["token_ids"])
            for name, column in rows.items():
                tensors[f"rows/{name}"] = (column.values() if is_ragged(column) else column).contiguous()
        save_file(tensors, folder / FILE)

    def load(self, folder: Path) -> None:
        path = folder / FILE
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; the checkpoint is of a run without algorithm.experience")
        tensors = load_file(path)
        self._kept = []
        if not len(tensors["oldest"]):
            return
        offsets, dense = tensors["offsets"], ("group", "member")
        columns = {name.removeprefix("rows/"): value for name, value in tensors.items() if name.startswith("rows/")}
        whole = build({k: v if k in dense else nested_tensor(v, offsets) for k, v in columns.items()}, len(offsets) - 1)
        for number, oldest in enumerate(tensors["oldest"].tolist()):
            self._kept.append((oldest, select(whole, np.flatnonzero(tensors["episode"].numpy() == number))))


# Demonstrations

MEMBER = -2
"""Member number of a demonstration, which no episode of a group has."""


def demonstration_rows(batch: TensorDict) -> TensorDict:
    """Convert transcripts (a batch of `collate`) to rows of an update, all of whose sampled tokens are demonstrations."""
    none = torch.zeros(len(batch["sampled"].values()))
    out: TensorDict = batch.select(*ADDED, strict=False)
    return out.update({"advantages": nested_tensor(none, offsets_of(batch["sampled"]))})


@UPDATE_HOOKS.register("demonstrations")
class Demonstrations(UpdateHook):
    """Collects the tasks of groups without a success, also of dropped groups, until the next update.

    With `rollout.max_staleness` above 0 groups end at any time, so checkpoints store the failures since the last update."""

    def __init__(self, section: DemonstrationsConfig, config: TrainConfig) -> None:
        self.config, self.episodes = config, section.episodes
        self.term: Term = Term("demonstrations", True, section.coef)
        self._failed: dict[int, TaskChoice] = {}
        self._ready: tuple[TensorDict | None, dict[str, float]] = None, {}
        self._warned = False

    @cached_property
    def longest(self) -> int:
        """Maximum tokens of a row."""
        return longest_row(self.config.optim, self.config.model)

    def note_group(self, group: Group, choice: TaskChoice) -> None:
        if success_rate(group.scored()) == 0.0:
            self._failed[group.index] = choice

    def state(self) -> Json:
        """The tasks whose solutions the next update will show."""
        return [{"group": index, "choice": asdict(choice)} for index, choice in self._failed.items()]

    def load_state(self, state: Json) -> None:
        self._failed = {one["group"]: TaskChoice(**one["choice"]) for one in state}

    async def prepare(self, batch: TensorDict, groups: Sequence[Group], envs: Sequence[RunEnv]) -> TensorDict:
        """Play the gold solutions for the next update."""
        failed, self._failed = self._failed, {}
        made: list[tuple[int, Trajectory]] = []
        skipped = 0
        for index in sorted(failed):
            if len(made) == self.episodes:
                break
            part = next(env for env in envs if env.name == failed[index].env)
            gold = await gold_of(failed[index], part, self.longest)
            if isinstance(gold, Trajectory):
                made.append((index, gold))
                continue
            skipped += 1
            if not self._warned:  # the metric demonstrations/skipped counts all of them
                log.warning("algorithm.demonstrations: the task of group %d is left out: its gold solution %s", index, gold)
            self._warned = True
        rows, metrics = None, {"demonstrations/episodes": float(len(made)), "demonstrations/skipped": float(skipped)}
        if made:
            rows = demonstration_rows(collate([gold for _, gold in made], [index for index, _ in made], allow_unscored=True))
            metrics["demonstrations/tokens"] = float(sum(gold.sampled_tokens for _, gold in made))
        self._ready = rows, metrics
        return batch

    def draw(self, step: int, fresh: int) -> tuple[TensorDict | None, dict[str, float]]:
        ready, self._ready = self._ready, (None, {})
        return ready


async def gold_of(choice: TaskChoice, part: RunEnv, most: int) -> Trajectory | str:
    """Return the gold solution of a task in ledgers of at most `most` tokens, or the reason why it cannot be shown."""
    env = without_random_faults(part.env.with_params(choice.params)).build()
    policy, limit = part.policy, part.limits.episode_timeout
    try:
        async with asyncio.timeout(limit):
            gold = await transcript(env, policy.renderer, choice.seed, "train", policy.context, part.limits)
    except TimeoutError:
        return f"was not played within rollout.episode_timeout = {limit:g} s"
    except (NotImplementedError, EnvError) as fault:
        return f"cannot be played: {fault}"
    if (longest := max(map(len, gold.ledgers))) > most:
        return f"has {longest} tokens, and a row may have {most}"
    gold.member = MEMBER
    return gold


# Distillation


@UPDATE_HOOKS.register("distillation")
class Distillation(UpdateHook):
    """Distillation changes the advantage of each sampled token to

        A = reward_coef A_estimator + coef (log pi_teacher - log pi_old),

    with pi_old the proximal policy, both at the temperature of the rollouts. Without rewards this is the policy gradient of the
    reverse KL of policy and teacher at each token, E[log pi - log pi_teacher] (Gu et al. 2023, arXiv:2306.08543; Agarwal et al.
    2023, arXiv:2306.13649). Departures: from the former, a token's effect on the KL of later tokens is omitted (a discount of 0),
    and no samples of the teacher are mixed in; from the latter, the sampled token stands for the sum over the vocabulary.
    """

    def __init__(self, section: DistillationConfig, config: TrainConfig) -> None:
        self.coef, self.reward_coef = section.coef, section.reward_coef

    def change_advantages(self, view: Ragged) -> tuple[Ragged, dict[str, float]]:
        mask = view.tokens("sampled")
        ahead = (view.tokens("teacher_logprobs") - proximal_of(view)) * mask
        advantages = self.reward_coef * view.tokens("advantages") + self.coef * ahead
        return view.with_tokens(advantages=advantages), {"teacher/kl": -float(ahead.sum() / mask.sum().clamp(min=1))}


@CALLBACKS.register("opsd")
class Opsd(Callback, UpdateHook):
    """Opsd appends `words` and the task's gold solution to the opening messages, for the teacher only. With the start model as
    the teacher this is OPSD (Zhao et al. 2026, arXiv:2601.18734). Departure: it uses the advantage of `Distillation` instead of
    the divergence over the vocabulary."""

    def __init__(self, words: str = "A correct solution, for reference:") -> None:
        self.words = words
        self._prompts: list[tuple[list[int], list[int]]] = []
        self._shown = 0

    async def prepare(self, batch: TensorDict, groups: Sequence[Group], envs: Sequence[RunEnv]) -> TensorDict:
        await in_thread("batch", self._render, groups, envs)
        return batch

    def _render(self, groups: Sequence[Group], envs: Sequence[RunEnv]) -> None:
        """Store the prompt of each trajectory without and with its solution."""
        parts, self._prompts = {part.name: part for part in envs}, []
        for members in filter(None, (group.scored() for group in groups)):
            part, turns = parts[members[0].env], list[Message]()
            with closing(part.env.build()) as env, suppress(NotImplementedError):
                turns = env.gold_turns(members[0].task)
            calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for turn in turns for call in turn.tool_calls]
            said = [turn.content for turn in turns if turn.content]
            for member in members:
                *before, last = takewhile(lambda message: message.role != "assistant", member.messages)
                hint = replace(last, content="\n".join((last.content, "", self.words, *calls, *said)) if turns else last.content)
                start = part.policy.renderer.with_tools(member.tools).start
                self._prompts.append((start([*before, last], member.tools), start([*before, hint], member.tools)))

    def teacher_rows(self, view: Ragged, most: int) -> Ragged:
        """Return the rows with the longer prompts. Rows that begin differently (after a rewrite) or would be too long stay
        unchanged."""
        ids, sampled, self._shown = [], [], 0
        columns = (view.batch[name].unbind() for name in ("token_ids", "sampled"))
        for place, row, marks in zip(view.numbers("trajectory"), *columns, strict=True):
            plain, hinted = self._prompts[place]
            if hinted != plain == row[: len(plain)].tolist() and len(row) + len(hinted) - len(plain) <= most:
                row = torch.cat([torch.tensor(hinted, dtype=row.dtype), row[len(plain) :]])
                marks = torch.cat([torch.zeros(len(hinted), dtype=torch.bool), marks[len(plain) :]])
                self._shown += 1
            ids.append(row)
            sampled.append(marks)
        offsets = torch.tensor([0, *accumulate(map(len, ids))])
        rows = {"token_ids": nested_tensor(torch.cat(ids), offsets), "sampled": nested_tensor(torch.cat(sampled), offsets)}
        return Ragged.of(build({**rows, "group": view.row("group"), "member": view.row("member")}, len(ids)))

    def change_advantages(self, view: Ragged) -> tuple[Ragged, dict[str, float]]:
        return view, {"opsd/shown": self._shown / len(view)}


# Tool results


@CALLBACKS.register("echo")
class Echo(Callback, UpdateHook):
    """Echo adds a term to the loss of an update, for successes and failures alike,

        coef x mean over o of -log pi(x_o | x_<o),

    with o the tokens of its rows that the policy did not sample, after the first one that it did: tool results, user messages,
    and the template around them (ECHO; Shrivastava et al. 2026, arXiv:2605.24517). Departures: log pi has the temperature of the
    rollouts, and each row is computed a second time unless prefix sharing joins the two. The default of `coef` is ours.
    """

    def __init__(self, coef: float = 0.1) -> None:
        """Raises ConfigError for a coefficient that is not above 0."""
        if not 0 < coef < float("inf"):
            raise ConfigError(f"callbacks.echo.coef: {coef:g} is not a number above 0. Leave echo out to turn it off")
        self.term: Term = Term("echo", True, coef)
        self._rows: TensorDict | None = None

    def change_advantages(self, view: Ragged) -> tuple[Ragged, dict[str, float]]:
        """Store the rows of the update. Raises ConfigError for rows with images."""
        if any(view.images(row) for row in range(len(view))):
            raise ConfigError("callbacks.echo: the episodes hold pictures, whose tokens are not predicted. Leave echo out")
        offsets = offsets_of(view.batch["sampled"])
        rows = [(sampled.cumsum(0) > 0) & ~sampled for sampled in view.batch["sampled"].unbind()]
        observed = torch.cat(rows)
        columns: TensorDict = view.batch.select(*ADDED, strict=False)
        nothing = nested_tensor(torch.zeros(len(observed)), offsets)
        # A separate episode of the group: means over an episode's tokens must not count it, but it may share a prefix.
        columns["member"] = MEMBER - 1 - columns.get("member")
        self._rows = columns.update({"sampled": nested_tensor(observed, offsets), "advantages": nothing, "logprobs": nothing})
        return view, {"echo/tokens": float(observed.sum())}

    def draw(self, step: int, fresh: int) -> tuple[TensorDict | None, dict[str, float]]:
        rows, self._rows = self._rows, None
        return rows, {}


# Checks before a run


@RUN_CHECKS.register("algorithm.experience")
def check_experience(start: RunStart) -> list[str]:
    """Raise ConfigError if stored episodes could not be used as [algorithm.experience] says."""
    one = start.config
    algorithm, staleness = one.algorithm, one.rollout.max_staleness
    experience = algorithm.experience
    assert experience is not None
    if experience.max_age <= staleness:
        raise ConfigError(
            f"algorithm.experience.max_age = {experience.max_age}: an episode may be rollout.max_staleness = "
            f"{staleness} updates old when it is first trained on, so it would be forgotten before it is "
            f"drawn; set max_age to at least {staleness + 1}"
        )
    if experience.term != "policy" or not one.envs[0].trains:
        return []
    why, advantage = stale_problem(algorithm), algorithm.advantage.name
    if "values" in ADVANTAGES.entry(advantage).needs:
        why = f'algorithm.advantage "{advantage}" is of a critic, and what that says of an old episode has changed since'
    if why is not None:
        raise ConfigError(f'algorithm.experience.term = "policy": {why}; or set term = "supervised"')
    return []


@RUN_CHECKS.register("algorithm.distillation")
def check_distillation(start: RunStart) -> list[str]:
    """Raise ConfigError if a setting would drop or keep rows that only the teacher distinguishes."""
    if start.config.rollout.filter_zero_variance:
        raise ConfigError(
            "rollout.filter_zero_variance drops groups whose rewards are equal, from which algorithm.distillation learns as "
            "from any other; unset one of the two"
        )
    kept = start.config.algorithm.experience
    if kept is not None and kept.term == "policy":
        raise ConfigError(
            'algorithm.experience.term = "policy" trains kept episodes with the advantages that they had, and what '
            'algorithm.distillation adds is of the policy as it was; set term = "supervised", or unset one of the two'
        )
    return []


@RUN_CHECKS.register("opsd")
def check_opsd(start: RunStart) -> list[str]:
    """Raise ConfigError if the callback `opsd` has no teacher or no gold solution to show."""
    config = start.config
    if all(choice.name != "opsd" for choice in config.callbacks):
        return []
    if config.algorithm.distillation is None:
        raise ConfigError("callbacks.opsd: the run has no teacher. Set algorithm.distillation.path to the folder of model.path")
    for env in (env for env in config.envs if env.trains):
        with start.alone(env) as one:
            why = gold_obstacle(one, "writes its prompts itself", "rows after a summary lack the solution", played=False)
            if why is not None:
                raise ConfigError(f"callbacks.opsd ({env.called}): {why}. Leave opsd out")
    return []


@RUN_CHECKS.register("algorithm.demonstrations")
def check_demonstrations(start: RunStart) -> list[str]:
    """Raise ConfigError, naming the obstacle, if no gold solution can be shown in an update."""
    one = start.config
    if not one.envs[0].trains:
        return []
    why = gold_obstacle(
        start,
        "writes prompts of its own, which a gold solution does not have",
        "a gold solution has no summaries, which the policy would write",
        played=False,
    )
    if why is not None:
        raise ConfigError(f"algorithm.demonstrations ({one.envs[0].called}): {why}; leave algorithm.demonstrations out")
    return []
