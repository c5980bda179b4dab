"""`agentrl train`: validate the config, create the run folder, train, and always write a summary."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
from functools import partial
from pathlib import Path

from agentrl.cli.configs import (
    add_config,
    check_folder,
    open_folder,
    read_config,
    read_config_origins,
    read_resumed,
    resume_overrides,
)
from agentrl.cli.parented import Drive, with_parent
from agentrl.config import TrainConfig
from agentrl.config.identity import check_resumed
from agentrl.config.origin import Origins, read_origins
from agentrl.errors import ConfigError
from agentrl.shown import say

HELP = "train a policy on an environment"
EPILOG = """examples:
  agentrl train configs/quickstart.toml
  agentrl train configs/quickstart.toml seed=3 name=seed3 rollout.group_size=16
  agentrl train configs/quickstart.toml engine=vllm cluster.actors=2
  agentrl train quickstart cluster.backend=inline      a packaged config; every role in this process
  agentrl train configs/quickstart.toml --dry-run      what it would be: batches, memory, what is trained; runs nothing
  agentrl train my.toml --dry-run --gpu-memory 80      ... planned for cards of 80 GiB on another machine
  agentrl train my.toml --dry-run --gpu-memory 80 --nodes 4x8    ... on 4 nodes of 8 cards: which process is on which card
  agentrl train --resume runs/quickstart               continue from the newest checkpoint
  agentrl train --resume runs/NAME steps=400           ... for more steps (a decaying optim.schedule is stretched)

Ctrl-C once finishes the step, writes a checkpoint and exits with 130; twice stops at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config(parser, "a TOML file or the name of a packaged config")
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this folder")
    parser.add_argument("--overwrite", action="store_true", help="start over if a run of that name exists")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the config, print what the run would be (batches, memory, what is trained), and end",
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: one JSON object")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="of each card, to plan a run for another machine")
    parser.add_argument(
        "--nodes",
        metavar="NODESxCARDS",
        help="with --gpu-memory: plan for so many nodes of so many cards each (by default one, with as many as the run takes)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    if args.dry_run:
        return _run(args, 0)
    return with_parent(args, partial(_run, args), partial(_resumed, args))


def _resumed(args: argparse.Namespace, run: str) -> Drive:
    args.resume, args.config, args.overrides, args.overwrite = run, None, [], False
    return partial(_run, args)


def _run(args: argparse.Namespace, restarts: int) -> int:
    config, before = _configs(args)
    if args.gpu_memory is not None and not 0 < args.gpu_memory < math.inf:
        raise ConfigError(f"--gpu-memory = {args.gpu_memory:g}: GiB of a card are needed, for example 80")
    if args.dry_run:
        from agentrl.run.checks.named import check_named
        from agentrl.run.dry_run import dry_run
        from agentrl.run.folder import NameTakenError

        try:
            _check_place(args, config, before)
        except NameTakenError as taken:  # no mistake of the config: who has a run may plan the next one
            say(f"warning: the start refuses this: {taken}", file=sys.stderr)
        check_named(config, partial(_origins, args))
        found = dry_run(config, args.gpu_memory, _nodes(args))
        say(json.dumps(found.json(), indent=2) if args.json else found.text())
        return 0
    options = {"--json": args.json, "--gpu-memory": args.gpu_memory is not None, "--nodes": args.nodes is not None}
    if given := [option for option, used in options.items() if used]:
        raise ConfigError(f"{given[0]} is for planning: use it together with --dry-run")
    return _train(args, config, before, restarts)


def _nodes(args: argparse.Namespace) -> tuple[int, int] | None:
    """The nodes of a plan, and the cards of each."""
    if args.nodes is None:
        return None
    sizes = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", args.nodes)
    if sizes is None:
        raise ConfigError(f"--nodes = {args.nodes}: expected nodes x cards of each. Write 4x8 for 4 nodes of 8 cards")
    if args.gpu_memory is None:
        raise ConfigError(f"--nodes = {args.nodes}: the memory of their cards is not known. Add --gpu-memory GIB")
    return int(sizes[1]), int(sizes[2])


def _origins(args: argparse.Namespace) -> Origins:
    """Where the values of the config are from, of a resumed run too."""
    if args.resume is None:
        return read_config_origins(args)
    return read_origins(Path(args.resume) / "config.toml", resume_overrides(args))


def _check_place(args: argparse.Namespace, config: TrainConfig, before: TrainConfig | None) -> None:
    """Raise, in its words, what the start would raise of the run's folder, and of a resumed run's files. Changes nothing."""
    from agentrl.run.lock import check_unlocked
    from agentrl.run.of_run import run_folder
    from agentrl.run.provenance import check_unchanged

    if before is None:
        check_folder(config, overwrite=args.overwrite)
        return
    folder = run_folder(args.resume)
    check_unchanged(before, config, folder)
    check_unlocked(folder.path)


def _train(args: argparse.Namespace, config: TrainConfig, before: TrainConfig | None, restarts: int) -> int:
    from agentrl.run.checks import check_train
    from agentrl.run.checks.named import check_named
    from agentrl.run.folder import RunFolder
    from agentrl.run.main import execute
    from agentrl.run.provenance import check_resumable

    def check(made: TrainConfig) -> list[str]:
        check_named(made, partial(_origins, args))
        return check_train(made)

    if before is None:
        check_folder(config, overwrite=args.overwrite)  # before the checks, which may start servers and ask judges that cost
        notes = check(config)
        folder = open_folder(config, overwrite=args.overwrite, origins=_origins(args))
        return execute(config, folder, resumed=False, notes=notes, restarts=restarts)
    folder = RunFolder(Path(args.resume))
    origins = _origins(args)
    news = check_resumable(before, config, folder, check)
    return execute(config, folder, resumed=True, notes=news, origins=origins, restarts=restarts)


def _configs(args: argparse.Namespace) -> tuple[TrainConfig, TrainConfig | None]:
    """The config, and the one with which the run began if it is resumed."""
    if args.resume is None:
        if args.config is None:
            raise ConfigError("a config is needed, for example: agentrl train configs/quickstart.toml")
        return read_config(args), None
    before, config = read_resumed(args.resume, resume_overrides(args))
    if before.data is not None:
        raise ConfigError(f"{args.resume}: a run on data; continue it by agentrl sft --resume {shlex.quote(args.resume)}")
    check_resumed(before, config, Path(args.resume))
    return config, before
