"""Hooks of updates: sections of [algorithm] that add rows to an update, or change its advantages.

Advantages, values and every statistic of a group are of an update's own rows: rows are added after those are known, and for the
actor alone."""

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
    TensorDict = Sized  # what the check of an answer knows of it: to import it loads torch's compiler

R = TypeVar("R")

ADDED = ("token_ids", "sampled", "logprobs", "advantages", "experts", "group", "member")
"""Columns that rows bring along to be added."""
_TRAINED = (*ADDED, "old_logprobs", "ref_logprobs", SOURCE, TRUNCATED)
"""Of an update's columns, those that the actor reads."""


class UpdateHook:
    """A hook in the driver adds rows to updates, or changes their advantages. Its methods are called in this order."""

    term: Term | None = None
    """Loss of the rows that it adds."""

    def note_group(self, group: Group, choice: TaskChoice) -> None:
        """Note a group that has ended, whose task is `choice`; it may be dropped."""

    async def prepare(self, batch: TensorDict, groups: Sequence[Group], envs: Sequence[RunEnv]) -> TensorDict:
        """Return the batch of the scored members of `groups`, with columns of the hook's own. `envs`: the run's."""
        return batch

    def teacher_rows(self, view: Ragged, most: int) -> Ragged:
        """Return the rows as the teacher reads them, of `most` tokens at most: the same sampled tokens in another context."""
        return view

    def change_advantages(self, view: Ragged) -> tuple[Ragged, dict[str, float]]:
        """Return the batch with its final advantages, and metrics."""
        return view, {}

    def draw(self, step: int, fresh: int) -> tuple[TensorDict | None, dict[str, float]]:
        """Rows for update `step` (0 is the first), which has `fresh` episodes of its own, and metrics; None adds nothing. Called
        only if the policy learns in it."""
        return None, {}

    def keep(self, view: Ragged) -> None:
        """See an update's own rows, from which the policy has learned."""

    def state(self) -> Json:
        """State that changes as groups end, as JSON for a checkpoint; None without any."""
        return None

    def load_state(self, state: Json) -> None:
        """Inverse of `state`."""

    def save(self, folder: Path) -> None:
        """Write state that changes with updates into a checkpoint."""

    def load(self, folder: Path) -> None:
        """Inverse of `save`. Raises CheckpointError."""


UPDATE_HOOKS: Registry[Callable[[Any, TrainConfig], UpdateHook]] = Registry("algorithm", "UPDATE_HOOKS", "agentrl.trainer")
"""Makers of hooks from the section of [algorithm] with their name, and the config."""
SECTIONS = ("distillation", "experience", "demonstrations")


def ask_hook(hook: UpdateHook, method: Callable[..., R], *args: Any) -> R:
    """Call a hook's own version of a method. Raises CallbackError and ConfigError as `call_method` does."""
    return call_method(_label(hook), method, hook, *args)


async def prepare_batch(hook: UpdateHook, batch: TensorDict, groups: Sequence[Group], envs: Sequence[RunEnv]) -> TensorDict:
    """The batch as a hook prepares it. Raises as `ask_hook`."""
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
    """The rows of an update, and behind them those that are added, with the columns that the actor reads.

    What added rows lack: their proximal policy is the one that sampled them unless they have `old_logprobs`; a reference is not
    asked about them; experts that nobody recorded are free."""
    fresh = view.batch.select(*(name for name in _TRAINED if name in view))
    fresh[ORIGIN] = torch.full((len(fresh),), FRESH)
    joined = [fresh]
    for number, (_, rows) in enumerate(added, FRESH + 1):
        offsets, count = offsets_of(rows["token_ids"]), len(rows)
        nothing = nested_tensor(torch.zeros(int(offsets[-1])), offsets)
        columns = {ORIGIN: torch.full((count,), number), "old_logprobs": rows["logprobs"], SOURCE: torch.full((count,), -1)}
        columns[TRUNCATED] = torch.zeros(count, dtype=torch.bool)  # what is added is never masked
        if "experts" in fresh.keys():  # noqa: SIM118 - `in` of a batch asks for an item
            columns["experts"] = nested_tensor(free(fresh["experts"].values()[:0], int(offsets[-1])), offsets)
        columns |= dict(rows.items())
        joined.append(build({name: columns.get(name, nothing) for name in fresh.keys()}, count))  # noqa: SIM118
    return with_trees(Ragged.of(concat(joined)), sharing).with_rows(**{TERMS: tuple(term for term, _ in added)})
