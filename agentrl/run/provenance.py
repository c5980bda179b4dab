"""Provenance: the values and files that a run was started with, and the models that runs have made."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config import TrainConfig, load_config
from agentrl.config.identity import LATER, MEASURES, Identity, changes, changes_below, check_resumed, differences, identity_of
from agentrl.config.load import with_absolute_paths
from agentrl.env.catalog import find_env
from agentrl.run.digests import contents_of
from agentrl.run.folder import DRIVER, RunFolder, lock_folder, stored_object
from agentrl.trainer.checkpoint import Checkpoints, check_model
from agentrl.trainer.learner import policy_updates
from agentrl.trainer.model_folder import export_run, retry_if_removed, start_model
from agentrl.trainer.optim import rate
from agentrl.utils.errors import CatalogError, CheckpointError, ConfigError, ModelError, RewardSpecError, RunFolderError
from agentrl.utils.files import atomic_write, read_plain
from agentrl.utils.parsing import read_json
from agentrl.utils.redaction import redact_json

if TYPE_CHECKING:
    from agentrl.run.assembly import RunStart

FILE = "provenance.json"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Compares a config with the values and files with which the run in a folder was started."""

    folder: RunFolder
    config: TrainConfig

    def record(self) -> str:
        """Return the text of FILE for a new run. Raises a UserError if a file that the config names is missing."""
        contents, identity = contents_of(self.config, "train").digests, identity_of(self.config, "train")
        provenance = {"folder": str(Path.cwd()), "contents": contents, "identity": identity}
        return json.dumps(redact_json(provenance), indent=2) + "\n"

    def check_resumable(self, before: TrainConfig, check: Callable[[], list[str]]) -> tuple[str, ...]:
        """Check that a run started with the config `before` can continue with this one; returns notes for the user.

        `check`: further checks. Raises a UserError if a needed file is missing (the message names the folder in which the run was
        started), and ConfigError if a file's content has changed (of files over 1 GiB only sampled parts count) or config.toml
        differs from the values of the newest checkpoint.
        """
        config, folder, steps = self.config, self.folder, self.config.steps
        folder.check_places()
        check_resumed(before, config, folder.path)
        check_own_config(identity_of(before, "train"), folder)
        try:
            notes = [*check()]
        except (CatalogError, ConfigError, ModelError, RewardSpecError) as error:
            raise type(error)(f"{error}{origin_hint(folder)}") from None
        if _read_provenance(folder) is None:
            atomic_write(folder.path / FILE, self.record())  # so that the next resume can compare
            warnings = [f"{folder.path}: no {FILE}: the files of the config are assumed to be the same"]
        else:
            warnings = self.check_contents()
        # Changed keys that affect only later updates, and the end of the run.
        done = updates_done(folder)
        notes += [f"{change} from update {done + 1} on" for change in changes_below(LATER, before, config)]
        measured = "evaluations before and after this resume, and the scores of checkpoints, do not compare"
        notes += [f"{change}: {measured}" for change in changes_below(MEASURES, before, config)]
        if steps < done and config.data is None:
            notes.append(f"steps = {steps}, and the run has done {done} updates: it is complete; to continue: steps={done + 10}")
        last = max((row["step"] for row in folder.read_metrics() if row["phase"] == "train"), default=0)
        if last > done:
            notes.append(f"updates {done + 1} to {last} are in no checkpoint of {folder.checkpoints}; they are repeated")
        optim = config.optim
        if optim.schedule != "constant" and before.steps != steps:
            # The policy's schedule does not count updates in which only the critic learns.
            past = max(done - (config.critic.warmup if config.critic is not None else 0), 0)
            ends = [policy_updates(each.steps, each.critic) for each in (before, config)]
            was, now = (rate(past, optim.warmup, optim.schedule, end) for end in ends)
            notes.append(
                f'optim.schedule = "{optim.schedule}" ends with the run, which has {steps} steps now and had {before.steps}: '
                f"after update {done} it is {now:.3g} of optim.lr; it would have been {was:.3g}"
            )
        return (*warnings, *notes)

    def check_unchanged(self, before: TrainConfig) -> None:
        """Check only a run's files and values, as `check_resumable`, and raise as it does."""
        self.folder.check_places()
        check_resumed(before, self.config, self.folder.path)
        check_own_config(identity_of(before, "train"), self.folder)
        self.check_contents()

    def check_contents(self) -> list[str]:
        """Return notes on changed code. Raises ConfigError if the reward spec, data or a model has changed."""
        if (recorded := _read_provenance(self.folder)) is None:
            return []
        found_now = contents_of(self.config, "train")
        then, now, code = recorded["contents"], found_now.digests, found_now.code
        # Compare only digests that the run's version of agentrl recorded.
        both = ({key: one.get(key) for key in then if key not in code} for one in (then, now))
        if found := changes(*both):
            keys = tuple(f"{line.split(' was ')[0].rpartition(' ')[2]}." for line in found)
            named = [v for k, v in identity_of(self.config, "train").items() if f"{k}.".startswith(keys) and isinstance(v, str)]
            raise ConfigError(
                f"{self.folder.path / FILE}: the run was trained with other files: {'; '.join(found)}; restore "
                f"{' or '.join(named) or 'the reward spec of the environment'}, start a new run, or delete this file to continue"
            )
        # Code may change, so that a run that stopped at a bug can continue after the fix.
        return [f"{key} have changed since the run began" for key in code if then.get(key, now.get(key)) != now.get(key)]

    def differences(self) -> list[str]:
        """List the differences from the run's own evaluations, per environment. Compares with the run's environment of the
        same name, else of the same id."""
        before, found = with_absolute_paths(load_config(self.folder.config)), list[str]()
        for env in self.config.envs:
            theirs = [e for e in before.envs if e.called == env.called] or [e for e in before.envs if _same_env(e.id, env.id)]
            if theirs:
                then, now = (
                    {key: value for key, value in identity_of(c.alone(e), "eval").items() if not f"{key}.".startswith(_OF_MODEL)}
                    for c, e in ((before, theirs[0]), (self.config, env))
                )
                if _same_env(str(then["env.id"]), str(now["env.id"])):
                    then["env.id"] = now["env.id"]
                found += changes(then, now)
        return found

    def changed_files(self) -> list[str]:
        """List files of the run's config (reward specs, environments, tool sets) that have changed since its start.

        Raises CatalogError or ConfigError, with the folder in which the run was started, if a file is not found from here.
        """
        then = (_read_provenance(self.folder) or {"contents": {}})["contents"]
        try:
            now = contents_of(self.config, "eval").digests if then else {}
        except (CatalogError, ConfigError) as error:
            raise type(error)(f"{error}{origin_hint(self.folder)}") from None
        keys = [key for key in now if key in then and not key.startswith(_MODEL)]
        return [f"{key}: changed since the run began" for key in keys if then[key] != now[key]]


def _read_provenance(folder: RunFolder) -> dict[str, Identity] | None:
    """Read the record of `Provenance.write`; None without one. Raises RunFolderError if it is damaged."""
    fix = "restore it, or remove it: the files that the config names are then assumed to be the same"
    found = stored_object(folder.path / FILE, fix)
    if found is not None and not (isinstance(found.get("contents"), dict) and isinstance(found.get("folder"), str)):
        raise RunFolderError(f"{folder.path / FILE}: damaged: it lacks contents or folder; {fix}")
    return found


def origin_hint(folder: RunFolder) -> str:
    """Suggest the folder in which the run was started, if it is not the working directory; else ""."""
    recorded = _read_provenance(folder)
    if recorded is None or Path(str(recorded["folder"])) == Path.cwd():
        return ""
    path = os.pathsep.join(part for part in (str(recorded["folder"]), os.environ.get("AGENTRL_PATH", "")) if part)
    return f"\nthe run began in {recorded['folder']}; if a file there is missing, resume from there or with AGENTRL_PATH={path}"


def check_own_config(now: Identity, folder: RunFolder) -> None:
    """Raise ConfigError if config.toml was edited by hand or belongs to another run. Ignores keys that only one side has: they
    come from another version."""
    newest = Checkpoints(folder.checkpoints, keep=1).newest()
    try:
        began = (_read_provenance(folder) or {}).get("identity", {})
        then: Identity = began if newest is None else read_json(read_plain(newest / DRIVER)).get("identity", {})
    except (OSError, ValueError, AttributeError):
        return  # damaged: loading it reports the error
    both = then.keys() & now.keys()
    if found := differences({k: then[k] for k in both}, {k: now[k] for k in both}):
        raise ConfigError(
            f"{folder.config}: {newest or 'the run'} was trained with other values: {found}; put them back (after a resume the "
            f"earlier files are in {folder.history.name}/), or start another run"
        )


def updates_done(folder: RunFolder) -> int:
    """Return the number of updates in the run's newest checkpoint; 0 without one."""
    newest = Checkpoints(folder.checkpoints, keep=1).newest()
    return 0 if newest is None else int(newest.name.rpartition("_")[2])


# Models of a run

_MODEL = ("model.path", "the files of model.path", "model.init", "model.lora")
_OF_MODEL = tuple(f"{key}." for key in _MODEL)


@dataclass(frozen=True, slots=True)
class RunModel:
    """A model of a run: `path`: Hugging Face folder, `step`: number of updates, `label`: name in tables."""

    label: str
    path: str
    step: int


def run_folder(path: str | Path) -> RunFolder:
    """Open the run in a folder. Raises ConfigError, with the names of nearby runs, if it is not a run."""
    folder = RunFolder(Path(path).expanduser())
    if not folder.config.is_file():
        inside, siblings = (
            sorted(found.parent.name for found in at.glob("*/config.toml")) for at in (folder.path, folder.path.parent)
        )
        at, near = (folder.path, inside) if inside else (folder.path.parent, siblings)
        hint = f"; runs in {at}: {', '.join(near[:20])}" if near else ""
        raise ConfigError(f"{path}: not a run folder (it has no config.toml){hint}")
    return folder


def model_of(folder: RunFolder, which: str) -> RunModel:
    """Return a run's model: "last", "best" (by the run's evaluations) or of a step; 0 is the start of training.

    Exports a checkpoint once, as a model folder in the run's `exports`. Raises CheckpointError if there is no such checkpoint,
    ConfigError for any other `which`.
    """
    return retry_if_removed(lambda: _model_of(folder, str(which)), named=which not in ("last", "best"))


def _model_of(folder: RunFolder, which: str) -> RunModel:
    if which not in ("last", "best") and not which.isdigit():
        raise ConfigError(f"--checkpoint {which}: expected last, best or the number of a step, as in {folder.checkpoints}")
    # Number of updates of the model in `final`; None without one, or if the run has continued since.
    summary = folder.read_summary() if (folder.final / "config.json").is_file() else None
    ends = None if summary is None or summary["status"] in ("failed", "interrupted") else int(summary["steps"])
    checkpoints = Checkpoints(folder.checkpoints, keep=1)
    if which == "best":
        top = checkpoints.best()
        if top is None:
            raise CheckpointError(f"{folder.path}: no checkpoint was evaluated, so none is best; use --checkpoint last or a step")
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
    return RunModel(label, str(_export_path(folder, step)), step)


def _export_path(folder: RunFolder, step: int) -> Path:
    out = folder.exports / f"step_{step:06d}"
    if (out / "config.json").is_file():
        return out
    staging = out.with_name(f".{out.name}")  # an interrupted export must not pass for a model
    staging.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(staging.parent, "repeat this later", wait=True):
        if not (out / "config.json").is_file():  # else another evaluation wrote it while this one waited
            shutil.rmtree(staging, ignore_errors=True)
            export_run(folder.path, staging, step)
            staging.rename(out)
    return out


def model_label(model: str) -> str:
    """Make a model's name for file names: the last part of a path, with the run's name if every run has that part."""
    parts = list(Path(model).absolute().parts[1:]) if Path(model).exists() else [model]
    kept = parts[-1:]
    while len(kept) < len(parts) and re.fullmatch(r"final|warm_start|model|exports|checkpoints|step_\d+", kept[0]):
        kept = parts[-len(kept) - 1 :]
    words = [part for part in kept if part not in ("exports", "checkpoints")]
    return re.sub(r"[^\w.-]+", "_", "_".join(words)).strip("._")[-80:] or "model"


def model_note(start: RunStart) -> str | None:
    """Warn if a model in a run's folder is evaluated with other settings than the run's own evaluations; else None."""
    model = str(start.config.model.path)
    path = Path(model).absolute()
    for above in path.parents[:3] if path.is_dir() else ():
        if not ((above / "config.toml").is_file() and (above / FILE).is_file()):
            continue
        run = Provenance(RunFolder(above), start.config)
        if not (differs := run.differences()):
            return None
        return (
            f"{model} is a model of the run {run.folder.path}, whose evaluations differ: {'; '.join(differs)}. To evaluate as "
            f"the run does: agentrl eval --run {shlex.quote(str(run.folder.path))}"
        )
    return None


def _same_env(one: str, other: str) -> bool:
    """Return True if two ids (or short names on the shelves) name the same environment."""
    if one == other:
        return True
    try:
        return find_env(one).id == find_env(other).id
    except CatalogError:
        return False
