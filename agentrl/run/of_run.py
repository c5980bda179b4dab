"""A run's models, and how its own evaluations were made: for `agentrl eval --run`, and for models that lie in a run folder."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.catalog import find_env
from agentrl.config import TrainConfig, load_config
from agentrl.config.envs import alone
from agentrl.config.identity import Identity, changes, identity_of
from agentrl.config.paths import with_absolute_paths
from agentrl.errors import CatalogError, CheckpointError, ConfigError
from agentrl.run.contents import contents_of
from agentrl.run.engines import engine_name
from agentrl.run.folder import RunFolder
from agentrl.run.provenance import origin_hint, recorded_contents
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.export import export_run, start_model, while_chosen
from agentrl.train.seal import check_model

_UNFIT = re.compile(r"[^\w.-]+")
_COMMON = ("final", "warm_start", "model")
_STEP = re.compile(r"step_\d+")
_LONGEST = 80
_MODEL = ("model.path", "the files of model.path", "model.init", "model.lora")
_ABOVE = 3


@dataclass(frozen=True, slots=True)
class RunModel:
    """A model of a run: `path` is its Hugging Face folder, `step` the updates that it has had, `label` what tables call it."""

    label: str
    path: str
    step: int | None


def run_folder(path: str | Path) -> RunFolder:
    """The run in this folder. Raises ConfigError, naming the runs beside it, if it is none."""
    folder = RunFolder(Path(path))
    if not folder.config.is_file():
        inside, beside = (
            sorted(found.parent.name for found in at.glob("*/config.toml")) for at in (folder.path, folder.path.parent)
        )
        at, near = (folder.path, inside) if inside else (folder.path.parent, beside)
        hint = f"; runs in {at}: {', '.join(near[:20])}" if near else ""
        raise ConfigError(f"{path}: not a run folder (it has no config.toml){hint}")
    return folder


def run_of(model: str) -> RunFolder | None:
    """The run in whose folder the model lies; None if it lies in none."""
    path = Path(model).absolute()
    for above in list(path.parents)[:_ABOVE] if path.is_dir() else []:
        if (above / "config.toml").is_file() and (above / "provenance.json").is_file():
            return RunFolder(above)
    return None


def config_of(folder: RunFolder) -> TrainConfig:
    """The config that the run in `folder` has."""
    return with_absolute_paths(load_config(folder.config))


def model_of(folder: RunFolder, which: str) -> RunModel:
    """The model of a run that `which` names: the "last", the "best" by the run's own evaluations, or that of a step; 0 is what
    the updates started from. A checkpoint is written as a model folder into the run's `exports`, once.

    Raises CheckpointError if there is no such checkpoint, ConfigError if `which` is none of these.
    """
    return while_chosen(lambda: _model_of(folder, which), named=which not in ("last", "best"))


def _model_of(folder: RunFolder, which: str) -> RunModel:
    if which not in ("last", "best") and not which.isdigit():
        raise ConfigError(f"--checkpoint {which}: expected last, best or the number of a step, as in {folder.checkpoints}")
    ends = _final_step(folder)
    checkpoints = Checkpoints(folder.checkpoints, keep=1)
    if which == "best":
        top = checkpoints.best()
        if top is None:
            raise CheckpointError(f"{folder.path}: no checkpoint was evaluated, so none is the best; --checkpoint last or a step")
        step = top[0]
    elif which == "last":
        newest = checkpoints.newest()
        if ends is not None:
            step = ends
        elif newest is not None:
            step = int(newest.name.rpartition("_")[2])
        else:
            raise CheckpointError(f"{folder.path}: the run has no checkpoint yet")
    else:
        step = int(which)
    label = f"{which}_{step}" if which == "best" else f"step_{step}" if which != "last" or ends is None else "final"
    if step == ends:
        check_model(folder.final)
        return RunModel(label, str(folder.final), step)
    if step == 0 and not (folder.checkpoints / "step_000000").is_dir():
        return RunModel("start", start_model(folder.path, load_config(folder.config)), 0)
    return RunModel(label, str(_exported(folder, step)), step)


def _final_step(folder: RunFolder) -> int | None:
    """The updates that the model in `final` has had; None if there is none, or the run went on after it."""
    if not (folder.final / "config.json").is_file() or (summary := folder.read_summary()) is None:
        return None
    return None if summary["status"] in ("failed", "interrupted") else int(summary["steps"])


def _exported(folder: RunFolder, step: int) -> Path:
    out = folder.exports / f"step_{step:06d}"
    if (out / "config.json").is_file():
        return out
    aside = out.with_name(f".{out.name}")  # an export that was cut short must not be taken for a model
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    export_run(folder.path, aside, step)
    aside.rename(out)
    return out


def model_label(model: str) -> str:
    """A model's name as part of a file name: of a path its last part, with the run's name if that is one that every run has."""
    parts = list(Path(model).absolute().parts[1:]) if Path(model).exists() else [model]
    kept = parts[-1:]
    while len(kept) < len(parts) and (kept[0] in (*_COMMON, "exports", "checkpoints") or _STEP.fullmatch(kept[0])):
        kept = parts[-len(kept) - 1 :]
    words = [part for part in kept if part not in ("exports", "checkpoints")]
    return _UNFIT.sub("_", "_".join(words)).strip("._")[-_LONGEST:] or "model"


def differences_from_run(folder: RunFolder, config: TrainConfig, env: str) -> list[str]:
    """What is otherwise than in the run's own evaluations of an environment: the entry `env` of `config`, compared with the
    run's entry of that name, or else with that of the same id. Empty if nothing is, or if the run has no such environment."""
    before = config_of(folder)
    (own,) = [entry for entry in config.envs if entry.called == env]
    theirs = [entry for entry in before.envs if entry.called == env] or [e for e in before.envs if _same_env(e.id, own.id)]
    if not theirs:
        return []
    then, now = (_plain(identity_of(alone(c, e), "eval")) for c, e in ((before, theirs[0]), (config, own)))
    then["env.id"] = now["env.id"] if _same_env(str(then["env.id"]), str(now["env.id"])) else then["env.id"]
    return changes(then, now)


def model_note(model: str, config: TrainConfig) -> str | None:
    """A warning for a model that lies in a run's folder and is played otherwise than the run's evaluations play; else None."""
    of = run_of(model)
    differs = [] if of is None else [line for env in config.envs for line in differences_from_run(of, config, env.called)]
    if of is None or not differs:
        return None
    return (
        f"{model} is a model of the run {of.path}, which evaluates otherwise: {'; '.join(differs)}. To evaluate as it does: "
        f"agentrl eval --run {shlex.quote(str(of.path))}"
    )


def other_engine(folder: RunFolder, config: TrainConfig) -> list[str]:
    """That the run sampled with another engine, whose numbers differ in their last digits, if it did."""
    if (summary := folder.read_summary()) is None:
        return []
    was, now = summary["engine"], engine_name(config)
    return [f"engine was {was}, is {now}"] if was and was != now else []


def changed_files(folder: RunFolder, config: TrainConfig) -> list[str]:
    """The files named by the run's config (reward specs, environments, tool sets) that have other content than at its start.

    Raises CatalogError or ConfigError, saying where the run began, if one of them is not found from here.
    """
    then = recorded_contents(folder)
    try:
        now = contents_of(config, "eval") if then else {}
    except (CatalogError, ConfigError) as error:
        raise type(error)(f"{error}{origin_hint(folder)}") from None
    keys = [key for key in now if key in then and not key.startswith(_MODEL)]
    return [f"{key}: changed since the run began" for key in keys if then[key] != now[key]]


def _plain(identity: Identity) -> dict[str, Any]:
    return {key: value for key, value in identity.items() if not any(key == of or key.startswith(f"{of}.") for of in _MODEL)}


def _same_env(one: str, other: str) -> bool:
    """Whether two ids are of one environment: its id, or its short name on the shelves."""
    if one == other:
        return True
    try:
        return find_env(one).id == find_env(other).id
    except CatalogError:
        return False
