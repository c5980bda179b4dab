"""Helpers for commands that take a config: its arguments, its file, and its run folder."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.utils.errors import CatalogError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from agentrl.config import TrainConfig
    from agentrl.config.origin import Origins
    from agentrl.run.folder import RunFolder


def add_config(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the arguments `[CONFIG] a.b=c ...`."""
    parser.add_argument("config", nargs="?", help=help)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace those of the file; ~a.b unsets one")


def is_override(text: str) -> bool:
    """Return True if a command-line word is an override, not a config name, a file or a run folder. Names of folders may
    contain "=", for example `runs/lr=1e-3` of a sweep."""
    if text.startswith(("~/", "~\\")) or Path(text).is_file() or (Path(text) / "config.toml").is_file():
        return False
    key = re.sub(r"""\"[^"]*"|'[^']*'""", "", text.partition("=")[0])
    return text.startswith("~") or ("=" in text and "/" not in key)


def load_whole(file: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load a config file with overrides and absolute paths; its base may be on a shelf. Raises ConfigError or CatalogError."""
    from agentrl.config import load_config
    from agentrl.config.load import with_absolute_paths

    return with_absolute_paths(load_config(file, overrides, find_config_file))


def read_resumed(run: str, texts: list[str]) -> tuple[TrainConfig, TrainConfig]:
    """Load the config of the run in the folder `run`, without and with the overrides `texts`. Raises ConfigError."""
    from agentrl.run.provenance import run_folder

    file = run_folder(run).config
    return load_whole(file), load_whole(file, texts)


def resume_overrides(args: argparse.Namespace) -> list[str]:
    """Return the overrides of `--resume`; argparse takes the first for CONFIG. Raises ConfigError for a real CONFIG,
    or with --overwrite."""
    if args.overwrite:
        raise ConfigError(f"--resume continues {args.resume}, and --overwrite starts over; leave one of the two out")
    if args.config is not None and not is_override(args.config):
        raise ConfigError(f"--resume {args.resume} has its own config: leave {args.config!r} out (a.b=c after it changes a key)")
    return [text for text in (args.config, *args.overrides) if text is not None]


def find_config_file(name: str) -> Path:
    """Find the TOML file at the path `name`, or the config of that name on a shelf. Raises UserError without one."""
    path = Path(name)
    if path.is_file():
        return path
    from agentrl.env.catalog import find_config

    try:
        return Path(find_config(name))
    except CatalogError as error:
        if name and path.is_dir():
            inside, hint = path / "config.toml", "; name a TOML file"
            if inside.is_file():  # a run's folder: the user may mean its config or the run itself
                hint = f"; its config: {shlex.quote(str(inside))}; to continue the run: --resume"
            raise CatalogError(f"{name}: a folder{hint}") from None
        if path.suffix == ".toml":
            return path  # `load_config` raises an error with similar names
        if (file := Path(f"{name}.toml")).is_file():
            raise CatalogError(f"no config {name!r} in a folder configs/; did you mean the file {str(file)!r}?") from None
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.toml")]) if name else ""
        if near:
            raise CatalogError(f"{error}; a file here: {near}") from None
        raise


def check_folder(config: TrainConfig, *, overwrite: bool) -> None:
    """Check that `open_folder` could make the run's folder, and raise as it does; makes and removes nothing."""
    from agentrl.config.load import READ, change_strings
    from agentrl.run.folder import check_free, check_unlocked

    target = Path(config.out) / config.name
    if not (overwrite and (target / "config.toml").is_file()):
        check_free(config.name, config.out)
        return
    check_unlocked(target)

    def outlives(path: str, key: str) -> str:
        if (place := Path(path).resolve()).exists() and place.is_relative_to(target.resolve()):
            raise ConfigError(f"{key} = {path}: --overwrite would remove it. Choose another name: name={config.name}-2")
        return path

    change_strings(config.model_dump(), READ, outlives)


def open_folder(config: TrainConfig, *, overwrite: bool, origins: Origins | None = None) -> RunFolder:
    """Create and lock the run's folder, with digests of the files that the config names. `origins`: sources of the config's
    values, for comments in config.toml. `overwrite`: first remove an older run of that name. Raises ConfigError if a process
    still writes the older run, or the config names one of its files."""
    from agentrl.run.folder import LOCK, RunFolder, lock_folder
    from agentrl.run.provenance import FILE, Provenance

    check_folder(config, overwrite=overwrite)
    target = Path(config.out) / config.name
    # First, because a file that the config names may be missing: then no older run is removed, and no folder made.
    record = Provenance(RunFolder(target), config).record()
    # Remove only a folder that is certainly a run: `out` and `name` may name any folder of the user.
    with ExitStack() as held:
        if over := overwrite and (target / "config.toml").is_file():
            held.enter_context(lock_folder(target))
            # Keep config.toml until the new one replaces it, and the lock, so that other processes find a run even if this one is
            # killed here. Keep the folder too, because it may be a link.
            for path in [path for path in target.iterdir() if path.name not in ("config.toml", LOCK)]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        folder = RunFolder.create(config, origins, {FILE: record})
        if not over:
            held.enter_context(folder.lock())
        folder.held = held.pop_all()
        return folder
