"""Shared by the commands that take a config: its arguments, finding its file, and creating its run folder."""

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
    """`CONFIG a.b=c ...`; CONFIG may be left out."""
    parser.add_argument("config", nargs="?", help=help)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace those of the file; ~a.b unsets one")


def is_override(text: str) -> bool:
    """Return True if a word of the command line is meant as an override, not as a name: of a shelf, a file or a run's folder,
    which may have a "=" in it (a sweep's `runs/lr=1e-3`)."""
    if text.startswith(("~/", "~\\")) or Path(text).is_file() or (Path(text) / "config.toml").is_file():
        return False
    key = re.sub(r"""\"[^"]*"|'[^']*'""", "", text.partition("=")[0])
    return text.startswith("~") or ("=" in text and "/" not in key)


def load_whole(file: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a file with overrides, with whole paths; a base may be on a shelf. Raises ConfigError or CatalogError."""
    from agentrl.config import load_config
    from agentrl.config.load import with_absolute_paths

    return with_absolute_paths(load_config(file, overrides, find_config_file))


def read_resumed(run: str, texts: list[str]) -> tuple[TrainConfig, TrainConfig]:
    """The config with which the run in the folder `run` began, and that with the overrides `texts`. Raises ConfigError."""
    from agentrl.run.provenance import run_folder

    file = run_folder(run).config
    return load_whole(file), load_whole(file, texts)


def resume_overrides(args: argparse.Namespace) -> list[str]:
    """Those of a resume, as argparse takes the first for the config. Raises ConfigError if it is to start over as well."""
    if args.overwrite:
        raise ConfigError(f"--resume goes on with {args.resume}, and --overwrite starts over; leave one of the two out")
    if args.config is not None and not is_override(args.config):
        raise ConfigError(f"--resume {args.resume} has its own config: leave {args.config!r} out (a.b=c after it changes a key)")
    return [text for text in (args.config, *args.overrides) if text is not None]


def find_config_file(name: str) -> Path:
    """The TOML file at the path `name`, or the config of that name on a shelf. Raises UserError without one."""
    path = Path(name)
    if path.is_file():
        return path
    from agentrl.env.catalog import find_config

    try:
        return Path(find_config(name))
    except CatalogError as error:
        if name and path.is_dir():
            inside, hint = path / "config.toml", "; name a TOML file"
            if inside.is_file():  # of a run, which is what it was to be and what it has learned
                hint = f"; its config: {shlex.quote(str(inside))}; to go on with it: --resume"
            raise CatalogError(f"{name}: a folder{hint}") from None
        if path.suffix == ".toml":
            return path  # load_config says which file is missing and what is near it
        if (file := Path(f"{name}.toml")).is_file():
            raise CatalogError(f"no config {name!r} in a folder configs/; did you mean the file {str(file)!r}?") from None
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.toml")]) if name else ""
        if near:
            raise CatalogError(f"{error}; a file here: {near}") from None
        raise


def check_folder(name: str, out: str, *, overwrite: bool) -> None:
    """Raise what `open_folder` would raise of the place of the run's folder. Makes and removes nothing."""
    from agentrl.run.folder import check_free, check_unlocked

    target = Path(out) / name
    if overwrite and (target / "config.toml").is_file():
        check_unlocked(target)
    else:
        check_free(name, out)


def open_folder(config: TrainConfig, *, overwrite: bool, origins: Origins | None = None) -> RunFolder:
    """Create the run's folder, with digests of the files that the config names, and in its config `origins`; with `overwrite` an
    older run of that name is removed first. The folder holds its lock. Raises ConfigError if the older one is still written."""
    from agentrl.run.folder import LOCK, RunFolder, lock_folder
    from agentrl.run.provenance import Provenance

    target = Path(config.out) / config.name
    # Only what is certainly a run is removed: `out` and `name` may point at any folder of the user.
    with ExitStack() as held:
        if over := overwrite and (target / "config.toml").is_file():
            held.enter_context(lock_folder(target))
            # What makes it a run stays until the new one's replaces it, and its lock: whoever comes meanwhile, or after this was
            # cut short, finds a run. The folder may be a link, and stays too.
            for path in [path for path in target.iterdir() if path.name not in ("config.toml", LOCK)]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        folder = RunFolder.create(config, origins, over=over)
        if not over:
            held.enter_context(folder.lock())
        try:
            Provenance(folder, config).write()
        except OSError:
            shutil.rmtree(folder.path, ignore_errors=True)  # else the name were taken by a run that has not begun
            raise
        folder.held = held.pop_all()
        return folder
