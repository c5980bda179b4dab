"""Export a run's checkpoint as a Hugging Face model folder, in one process, whatever number of ranks wrote it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from agentrl.config.load import load_config
from agentrl.config.schema import LoraSection, TrainConfig
from agentrl.errors import CheckpointError, ModelError
from agentrl.files import full_disk_said
from agentrl.quiet import quiet_libraries
from agentrl.train.checkpoint import Checkpoints
from agentrl.train.lora import adapter_of, merged
from agentrl.train.pretrained import load_model_config, load_tokenizer
from agentrl.train.saving import save_model
from agentrl.train.seal import check_intact
from agentrl.train.state import saved_tensors
from agentrl.weights.peft_folder import write_adapter
from agentrl.weights.target import Adapter

T = TypeVar("T")
TRIES = 5
"""Of the newest or best checkpoint of a run that goes on, which removes them."""
REMOVING = 0.5
"""Seconds in which one that a run has begun to remove is gone."""


class CheckpointGoneError(CheckpointError):
    """The checkpoint was there, and was removed while it was read."""


MODEL = "model."  # how an engine's state names the model's part


def export_run(run: str | Path, out: str | Path, step: int | None = None, *, best: bool = False, adapter: bool = False) -> int:
    """Write the checkpoint of `step` (by default the newest, with `best` the one with the best evaluation) of
    a run folder to `out`; returns its step. `adapter`: not the model but what `model.lora` trained, in peft's format.

    Raises CheckpointError if there is no such checkpoint or it is damaged, ModelError if `out` exists and is not an empty folder
    or the run trained no adapters.
    """
    quiet_libraries()
    return while_chosen(lambda: _export_run(Path(run), Path(out), step, best=best, adapter=adapter), named=step is not None)


def while_chosen(read: Callable[[], T], *, named: bool) -> T:
    """What `read` makes of a checkpoint; again if the run removes it meanwhile, since another is the newest or best then, unless
    the user `named` it. Raises as `read`."""
    for _ in range(0 if named else TRIES - 1):
        with suppress(CheckpointGoneError):
            return read()
    return read()


def _export_run(folder: Path, target: Path, step: int | None, *, best: bool, adapter: bool) -> int:
    if not (folder / "config.toml").is_file():
        raise CheckpointError(f"{folder}: not a run folder (it has no config.toml)")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target}: already exists; give a path that does not exist")
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    if best:
        top = checkpoints.best()
        if top is None:
            raise CheckpointError(f"{folder}: no checkpoint was evaluated (eval.every is 0, or there was no evaluation yet)")
        step = top[0]
    chosen = checkpoints.newest() if step is None else checkpoints.at(step)
    if chosen is None:
        raise CheckpointError(f"{folder}: the run has no checkpoint yet")
    config = load_config(folder / "config.toml")
    with _while_there(chosen):
        check_intact(chosen)
        _write(folder, chosen, target, config, adapter)
    return int(chosen.name.rpartition("_")[2])


def _write(folder: Path, chosen: Path, target: Path, config: TrainConfig, adapter: bool) -> None:
    source = start_model(folder, config)
    if adapter and config.model.lora is None:
        raise ModelError(f"{folder}: the run trained all weights and has no adapter (model.lora); export the model: no --adapter")
    trust, template = config.model.trust_remote_code, config.model.chat_template
    tensors = saved_weights(chosen / "actor", config.model.lora)
    with full_disk_said(target, "repeat the command"), _made_or_removed(target):
        if adapter and config.model.lora is not None:
            write_adapter(target, saved_adapter(chosen / "actor", config.model.lora), source)
            if template is not None:  # else the base model's own serves it
                load_tokenizer(source, trust, template).save_pretrained(target)
            return
        scores = config.data is not None and config.data.loss == "reward"
        about = load_model_config(source, trust)
        save_model(source, about, tensors, torch.float32, target, trust=trust, classifier=scores, chat_template=template)


@contextmanager
def _while_there(chosen: Path) -> Iterator[None]:
    """A run that goes on removes its older checkpoints; what then cannot be read is not damaged."""
    try:
        yield
    except (CheckpointError, OSError):
        if chosen.is_dir():
            time.sleep(REMOVING)
        if chosen.is_dir():
            raise  # it is there, and damaged, or it is something else
        raise CheckpointGoneError(
            f"{chosen}: it was removed while it was read, by the run, which keeps the newest checkpoint.keep of them"
        ) from None


@contextmanager
def _made_or_removed(folder: Path) -> Iterator[None]:
    """What is half of a model has no weights or no tokenizer, and would keep the command from being repeated."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def saved_adapter(folder: Path, lora: LoraSection) -> Adapter:
    """The adapters alone of a folder that `save_state` wrote. Raises CheckpointError."""
    names, read = saved_tensors(folder)
    held = [name.removeprefix(MODEL) for name in names if name.startswith(MODEL)]
    return Adapter(lora.rank, lora.alpha, tuple(lora.modules), adapter_of(held, lambda name: read(MODEL + name)))


def saved_weights(folder: Path, lora: LoraSection | None) -> Iterator[tuple[str, Tensor]]:
    """The full weights in a folder that `save_state` wrote, read one at a time; adapters merged. Raises CheckpointError."""
    names, read = saved_tensors(folder)
    held = [name.removeprefix(MODEL) for name in names if name.startswith(MODEL)]

    def full(name: str) -> Tensor:
        return read(MODEL + name)

    return merged(held, full, lora) if lora is not None else ((name, full(name)) for name in held)


def start_model(folder: Path, config: TrainConfig) -> str:
    """The model that a run's training started from. Raises ModelError if it no longer exists."""
    for built in (folder / "classifier", folder / "warm_start", folder / "model"):
        if (built / "config.json").is_file():
            return str(built)
    if config.model.path is None:
        raise ModelError(f"{folder}: the model that the run started from no longer exists (no warm_start, no model)")
    return config.model.path
