"""Update hooks: sections of [algorithm] that add rows to an update, or change its advantages.

Advantages, values and group statistics only use rows played for the update: others are added afterwards, for the actor alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from agentrl.config.schema import TrainConfig
from agentrl.data.expert_routing import free
from agentrl.data.rows import TRUNCATED, Ragged, build, concat, nested_tensor, offsets_of
from agentrl.data.schedule import FRESH, ORIGIN, Mode, with_trees
from agentrl.data.trajectory import Group, Json
from agentrl.rollout.player import RunEnv
from agentrl.rollout.samplers import TaskChoice
from agentrl.trainer.minibatch import SOURCE, TERMS, Term
from agentrl.utils.errors import ConfigError, call_method, place_of, user_code
from agentrl.utils.registry import Registry

if TYPE_CHECKING:
    from tensordict import TensorDict
else:
    TensorDict = Sized  # for the check of a hook's answer; importing TensorDict would load torch's compiler

R = TypeVar("R")

ADDED = ("token_ids", "sampled", "logprobs", "advantages", "experts", "group", "member")
"""Columns of added rows; `experts` only if recorded."""
_ACTOR_COLUMNS = (*ADDED, "old_logprobs", "ref_logprobs", SOURCE, TRUNCATED)
"""Columns of an update that the actor reads."""


class UpdateHook:
    """A hook on the driver that adds rows to updates or changes advantages. Methods are called in the order below."""

    term: Term | None = None
    """Loss of the rows that the hook adds."""

    def note_group(self, group: Group, choice: TaskChoice) -> None:
        """Observe a finished group of task `choice`; it may be dropped before training."""

    async def prepare(self, batch: TensorDict, groups: Sequence[Group], envs: Sequence[RunEnv]) -> TensorDict:
        """Return the batch of the scored members of `groups` with additional columns. `envs`: those of the run."""
        return batch

    def teacher_rows(self, view: Ragged, most: int) -> Ragged:
        """Return the rows for the teacher, of at most `most` tokens each: the same sampled tokens in another context."""
        return view

    def change_advantages(self, view: Ragged) -> tuple[Ragged, dict[str, float]]:
        """Return the batch with its final advantages, and metrics."""
        return view, {}

    def draw(self, step: int, fresh: int) -> tuple[TensorDict | None, dict[str, float]]:
        """Return rows to add to update `step` (from 0), or None, and metrics. Called only if the update trains the policy.

        `fresh`: number of episodes played for the update."""
        return None, {}

    def keep(self, view: Ragged) -> None:
        """Observe the rows played for an update, after the policy has learned from them."""

    def state(self) -> Json:
        """Return state that changes as groups finish, as JSON for a checkpoint; None without state."""
        return None

    def load_state(self, state: Json) -> None:
        """Restore the state from `state`."""

    def save(self, folder: Path) -> None:
        """Write state that changes with updates into a checkpoint."""

    def load(self, folder: Path) -> None:
        """Read the files of `save`. Raises CheckpointError."""


UPDATE_HOOKS: Registry[Callable[[Any, TrainConfig], UpdateHook]] = Registry("algorithm", "UPDATE_HOOKS", "agentrl.trainer")
"""Factories of hooks by name of their [algorithm] section: (section, config) -> hook."""
SECTIONS = ("distillation", "experience", "demonstrations")


def call_hook(hook: UpdateHook, method: Callable[..., R], *args: Any) -> R:
    """Call a hook's override of an UpdateHook method. Raises CallbackError and ConfigError as `call_method` does."""
    return call_method(_label(hook), method, hook, *args)


async def prepare_batch(hook: UpdateHook, batch: TensorDict, groups: Sequence[Group], envs: Sequence[RunEnv]) -> TensorDict:
    """Call `prepare` of a hook and return its batch. Raises as `call_hook`."""
    with user_code(f"{_label(hook)}: prepare", hook.prepare, hook):
        answer: Any = hook.prepare(batch, groups, envs)
        answer = await answer if inspect.isawaitable(answer) else answer
    if type(answer) is not type(batch):
        raise ConfigError(
            f"{_label(hook)}: prepare returned {answer!r:.80}, expected the batch. Correct it at {place_of(hook.prepare)}"
        )
    return answer


def _label(hook: UpdateHook) -> str:
    return f"update hook {type(hook).__name__}"


def join_rows(view: Ragged, added: Sequence[tuple[Term, TensorDict]], sharing: Mode) -> Ragged:
    """Append added rows to those of an update, with the columns for the actor.

    Defaults of added rows: `old_logprobs` are their `logprobs`, `ref_logprobs` are 0 (unused), experts are free."""
    fresh = view.batch.select(*(name for name in _ACTOR_COLUMNS if name in view))
    fresh[ORIGIN] = torch.full((len(fresh),), FRESH)
    joined = [fresh]
    for number, (_, rows) in enumerate(added, FRESH + 1):
        offsets, count = offsets_of(rows["token_ids"]), len(rows)
        nothing = nested_tensor(torch.zeros(int(offsets[-1])), offsets)
        columns = {ORIGIN: torch.full((count,), number), "old_logprobs": rows["logprobs"], SOURCE: torch.full((count,), -1)}
        columns[TRUNCATED] = torch.zeros(count, dtype=torch.bool)  # added rows are never masked
        if "experts" in fresh.keys():  # noqa: SIM118 - TensorDict does not support `in`
            columns["experts"] = nested_tensor(free(fresh["experts"].values()[:0], int(offsets[-1])), offsets)
        columns |= dict(rows.items())
        joined.append(build({name: columns.get(name, nothing) for name in fresh.keys()}, count))  # noqa: SIM118
    return with_trees(Ragged.of(concat(joined)), sharing).with_rows(**{TERMS: tuple(term for term, _ in added)})
