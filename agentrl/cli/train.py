"""`agentrl train`: validate, set up the run folder, train, and leave a summary whatever happens."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from agentrl.config import TrainConfig, load_config
from agentrl.errors import CatalogError, ConfigError

EPILOG = """examples:
  agentrl train configs/quickstart.toml
  agentrl train configs/quickstart.toml seed=3 name=seed3 rollout.group_size=16
  agentrl train configs/quickstart.toml engine=vllm cluster.actors=2
  agentrl train quickstart cluster.backend=inline      a packaged config; every role in this process
  agentrl train --resume runs/quickstart               go on after the newest checkpoint

Ctrl-C once finishes the step, writes a checkpoint and exits with 130; twice stops at once.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "train", help="train a policy on an environment", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="a TOML file or the name of a packaged config")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace those of the file")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run folder")
    parser.add_argument("--overwrite", action="store_true", help="start over where a run of that name exists")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    config, resume = _config(args)
    from agentrl.run.preflight import preflight

    preflight(config)
    from agentrl.run.folder import RunFolder
    from agentrl.run.main import train

    if resume is not None:
        return train(config, RunFolder(resume), resumed=True)
    target = Path(config.out) / config.name
    if args.overwrite and (target / "config.toml").is_file():
        shutil.rmtree(target)
    return train(config, RunFolder.create(config), resumed=False)


def _config(args: argparse.Namespace) -> tuple[TrainConfig, Path | None]:
    if args.resume is None:
        if args.config is None:
            raise ConfigError("a config is needed, for example: agentrl train configs/quickstart.toml")
        return load_config(_find(args.config), args.overrides), None
    folder = Path(args.resume)
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder}: not a run folder (it has no config.toml)")
    overrides = [text for text in (args.config, *args.overrides) if text is not None]
    return load_config(folder / "config.toml", overrides), folder


def _find(name: str) -> Path:
    path = Path(name)
    if path.suffix == ".toml" and path.exists():
        return path
    from agentrl.catalog import find_config

    try:
        return Path(find_config(name))
    except CatalogError:
        if path.suffix == ".toml":
            return path  # load_config says which file is missing and what is near it
        raise
