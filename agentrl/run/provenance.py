"""What a run was started with: `provenance.json` in the run folder holds the working folder, and digests of the files
that the config only names. A run is one experiment, so it does not continue with another reward spec or another model under
the old path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from agentrl.config import TrainConfig
from agentrl.config.identity import Identity, differences, identity_of
from agentrl.errors import CatalogError, ConfigError, ModelError, RewardSpecError, RunFolderError
from agentrl.files import atomic_write, read_plain
from agentrl.plain_data import read_json
from agentrl.redaction import redacted
from agentrl.run.checks import check_train
from agentrl.run.contents import code_of, contents_of
from agentrl.run.folder import DRIVER, RunFolder, stored_object
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.learner import policy_updates
from agentrl.train.optim import rate

FILE = "provenance.json"


def write_provenance(config: TrainConfig, folder: RunFolder) -> None:
    """Record what a new run is started with. Raises a UserError if a file that the config names is missing."""
    provenance = {"folder": str(Path.cwd()), "contents": contents_of(config, "train")}
    atomic_write(folder.path / FILE, json.dumps(redacted(provenance), indent=2) + "\n")


def check_resumable(
    before: TrainConfig, config: TrainConfig, folder: RunFolder, check: Callable[[TrainConfig], list[str]] = check_train
) -> tuple[str, ...]:
    """All checks before a run that was started with `before` continues with `config`, `check` among them; returns what its user
    should know.

    Raises a UserError if something that the run needs is missing (the message then says where it was started), and ConfigError if
    a file has other content than at the start, or config.toml other values than the newest checkpoint was trained with.
    """
    _check_own_config(before, folder)
    try:
        notes = check(config)
    except (CatalogError, ConfigError, ModelError, RewardSpecError) as error:
        raise type(error)(f"{error}{origin_hint(folder)}") from None
    now = contents_of(config, "train")
    if (recorded := _recorded(folder)) is None:
        write_provenance(config, folder)
        # Recorded from here on, so that the next resume can compare.
        note = f"{folder.path}: started by an older agentrl, which did not record the reward spec; it is now taken to be the same"
        return (note, *notes, *_steps_note(config, folder), *_schedule_note(before, config, folder))
    check_contents(config, folder)
    # Code may change: a run that stopped at a bug in its environment must be able to continue with the bug fixed.
    changed = [key for key in code_of(config) if recorded["contents"].get(key) != now.get(key)]
    said = [f"{key} have changed since the run began" for key in changed]
    return (*said, *notes, *_steps_note(config, folder), *_schedule_note(before, config, folder))


def check_unchanged(before: TrainConfig, config: TrainConfig, folder: RunFolder) -> None:
    """What `check_resumable` checks of a run's files, and nothing else. Raises as it does."""
    _check_own_config(before, folder)
    check_contents(config, folder)


def check_contents(config: TrainConfig, folder: RunFolder) -> None:
    """Raises ConfigError if the reward spec or the model's files changed since the run in `folder` began."""
    if (recorded := _recorded(folder)) is None:
        return
    then, now = (
        {k: v for k, v in found.items() if k not in code_of(config)}
        for found in (recorded["contents"], contents_of(config, "train"))
    )
    if found := differences(then, now):
        named = [value for value in (*(env.reward for env in config.envs), config.model.path) if value is not None]
        raise ConfigError(
            f"{folder.path / FILE}: what the run has learned so far was learned with other files: {found}; restore "
            f"{' or '.join(named) or 'the reward spec of the environment'}, or start another run"
        )


def _recorded(folder: RunFolder) -> dict[str, Identity] | None:
    """What `write_provenance` wrote; None if nothing is there. Raises RunFolderError if it is damaged."""
    mend = "restore it, or remove it: the files that the config names are then taken to be the same"
    found = stored_object(folder.path / FILE, mend)
    if found is not None and not (isinstance(found.get("contents"), dict) and isinstance(found.get("folder"), str)):
        raise RunFolderError(f"{folder.path / FILE}: damaged: it lacks what agentrl writes there; {mend}")
    return found


def recorded_contents(folder: RunFolder) -> Identity:
    """The digests of the files with which a run was started; empty if it was started by an older agentrl."""
    recorded = _recorded(folder)
    return {} if recorded is None else recorded["contents"]


def origin_hint(folder: RunFolder) -> str:
    """From where to resume instead, if this is not the working folder in which the run was started."""
    recorded = _recorded(folder)
    if recorded is None or Path(str(recorded["folder"])) == Path.cwd():
        return ""
    path = os.pathsep.join(part for part in (str(recorded["folder"]), os.environ.get("AGENTRL_PATH", "")) if part)
    return f"\nthe run began in {recorded['folder']}; if the cause is a file there, resume from there or with AGENTRL_PATH={path}"


def _check_own_config(before: TrainConfig, folder: RunFolder) -> None:
    """Raises ConfigError if config.toml was changed by hand or is another run's. Keys that one lacks are another version's."""
    newest = Checkpoints(folder.checkpoints, keep=1).newest()
    try:
        then: Identity = {} if newest is None else read_json(read_plain(newest / DRIVER)).get("identity", {})
    except (OSError, ValueError, AttributeError):
        return  # damaged: it is not loaded either, which is said then
    now = identity_of(before, "train")
    both = then.keys() & now.keys()
    if newest is not None and (found := differences({k: then[k] for k in both}, {k: now[k] for k in both})):
        raise ConfigError(
            f"{folder.config}: {newest} was trained with other values: {found}; put them back (what the file was is in "
            f"{folder.history.name}/ if a resume changed it), or start another run"
        )


def updates_done(folder: RunFolder) -> int:
    """The updates that the newest checkpoint of a run has had; 0 if it has none."""
    newest = Checkpoints(folder.checkpoints, keep=1).newest()
    return 0 if newest is None else int(newest.name.rpartition("_")[2])


def _steps_note(config: TrainConfig, folder: RunFolder) -> tuple[str, ...]:
    """A note if the run is to end before where it is: then it only ends again, and trains nothing."""
    done = updates_done(folder)
    if config.steps >= done or config.data is not None:
        return ()
    return (
        f"steps = {config.steps}, and the run has done {done} updates: it is over; to go on give more, such as steps={done + 10}",
    )


def _schedule_note(before: TrainConfig, config: TrainConfig, folder: RunFolder) -> tuple[str, ...]:
    """A note if the schedule of a decaying learning rate changes, because it ends with the run's number of steps."""
    optim = config.optim
    if optim.schedule == "constant" or before.steps == config.steps:
        return ()
    done = updates_done(folder)
    # Updates in which only the critic learns do not count for the policy's schedule.
    past = max(done - (config.critic.warmup if config.critic is not None else 0), 0)
    was, now = (rate(past, optim.warmup, optim.schedule, policy_updates(each)) for each in (before, config))
    return (
        f'optim.schedule = "{optim.schedule}" ends with the run, which has {config.steps} steps now and had {before.steps}: '
        f"after update {done} it is {now:.3g} of optim.lr; it would have been {was:.3g}",
    )
