"""What a run began with, and what its config only names: `began.json` in the run folder holds the working folder and digests
of the files. A run is one experiment, so it does not go on with another reward spec or another model under the old path."""

from __future__ import annotations

import json
import os
from pathlib import Path

from agentrl.config import TrainConfig
from agentrl.config.identity import Identity, differences
from agentrl.errors import CatalogError, ConfigError, ModelError, RewardSpecError
from agentrl.run.checks import check_train
from agentrl.run.contents import contents_of
from agentrl.run.folder import RunFolder, atomic_write
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.learner import policy_updates
from agentrl.train.optim import rate

FILE = "began.json"
_CODE = ("the files of env.id", "the files of tools.sets")
"""What may be mended on the way: a run that stopped at a fault in its environment must be able to go on without it."""


def write_began(config: TrainConfig, folder: RunFolder) -> None:
    """Record what a new run begins with. Raises a UserError if a file that the config names is missing."""
    began = {"folder": str(Path.cwd()), "contents": contents_of(config, "train")}
    atomic_write(folder.path / FILE, json.dumps(began, indent=2) + "\n")


def check_went_on(before: TrainConfig, config: TrainConfig, folder: RunFolder) -> tuple[str, ...]:
    """All checks before a run goes on with `config`, which began with `before`; returns what its user should know.

    Raises a UserError if something that the run needs is missing, which then says where it began, and ConfigError if a file
    has another content than when the run began.
    """
    try:
        check_train(config)
    except (CatalogError, ConfigError, ModelError, RewardSpecError) as error:
        raise type(error)(f"{error}{_elsewhere(folder)}") from None
    now = contents_of(config, "train")
    if (began := _began(folder)) is None:
        write_began(config, folder)
        note = f"{folder.path}: begun by an older agentrl, which did not record the reward spec; it is now taken to be the same"
        return (note, *_stretched(before, config, folder))
    check_contents(config, folder)
    changed = [key for key in _CODE if began["contents"].get(key) != now.get(key)]
    return (*(f"{key} have changed since the run began" for key in changed), *_stretched(before, config, folder))


def check_contents(config: TrainConfig, folder: RunFolder) -> None:
    """Raises ConfigError if the reward spec or the model's files changed since the run in `folder` began."""
    if (began := _began(folder)) is None:
        return
    then, now = (
        {k: v for k, v in found.items() if k not in _CODE} for found in (began["contents"], contents_of(config, "train"))
    )
    if found := differences(then, now):
        named = [value for value in (config.env.reward, config.model.path) if value is not None]
        raise ConfigError(
            f"{folder.path / FILE}: what the run has learned so far was learned with other files: {found}; restore "
            f"{' or '.join(named) or 'the reward spec of the environment'}, or start another run"
        )


def _began(folder: RunFolder) -> dict[str, Identity] | None:
    file = folder.path / FILE
    return json.loads(file.read_text()) if file.is_file() else None


def _elsewhere(folder: RunFolder) -> str:
    """Where else to go on, if this is not the working folder in which the run began."""
    began = _began(folder)
    if began is None or Path(str(began["folder"])) == Path.cwd():
        return ""
    path = os.pathsep.join(part for part in (str(began["folder"]), os.environ.get("AGENTRL_PATH", "")) if part)
    return f"\nthe run began in {began['folder']}; if the cause is a file there, go on from there or with AGENTRL_PATH={path}"


def _stretched(before: TrainConfig, config: TrainConfig, folder: RunFolder) -> tuple[str, ...]:
    """That a decaying learning rate is another from here on, because it ends with another number of steps."""
    optim, newest = config.optim, Checkpoints(folder.checkpoints, config.checkpoint.keep).newest()
    if optim.schedule == "constant" or before.steps == config.steps:
        return ()
    done = 0 if newest is None else int(newest.name.rpartition("_")[2])
    past = max(done - (config.critic.warmup if config.critic is not None else 0), 0)
    was, now = (rate(past, optim.warmup, optim.schedule, policy_updates(each)) for each in (before, config))
    return (
        f'optim.schedule = "{optim.schedule}" ends with the run, which has {config.steps} steps now and had {before.steps}: '
        f"after update {done} it is {now:.3g} of optim.lr; it would have been {was:.3g}",
    )
