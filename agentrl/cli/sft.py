"""`agentrl sft`: training that is not reinforcement: the supervised warm start alone, or on data that is there already."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.configs import (
    add_config,
    check_folder,
    find_config_file,
    is_override,
    open_folder,
    read_config_origins,
    read_resumed,
    resume_overrides,
)
from agentrl.cli.parented import Drive, with_parent
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config import TrainConfig

HELP = "train on a teacher's transcripts, or on data: episodes, conversations, preferences"
EPILOG = """examples:
  agentrl sft configs/quickstart.toml name=warm                  the warm start of [sft]: writes runs/warm/warm_start
  agentrl sft configs/quickstart.toml name=warm sft.gate=0.9 sft.teacher.wrong=0.1
  agentrl train configs/quickstart.toml sft=false model.path=runs/warm/warm_start    train from there

  agentrl sft --data chats.jsonl model.path=Qwen/Qwen3-0.6B name=chats
                                                     conversations of OpenAI's layout, Hermes or ToolACE; Parquet too
  agentrl sft configs/quickstart.toml --data runs/quickstart --success --per-task 2 name=better
                                                     rejection sampling: the best two successes of each task
  agentrl sft --data runs/quickstart --loss dpo model.path=runs/quickstart/final name=dpo
                                                     pairs of one task, the better preferred (also chosen/rejected files)
  agentrl sft --data pairs.jsonl --loss reward model.path=Qwen/Qwen3-0.6B name=judge
                                                     a reward model, for [reward_model]
  agentrl sft --resume runs/chats                    continue from the newest checkpoint

The result is a Hugging Face model folder, which transformers and vLLM can load: RUN/final, of a warm start RUN/warm_start.
Ctrl-C once finishes the step, writes a checkpoint and exits with 130; twice stops at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config(
        parser, "a TOML file or the name of a packaged config, with an [sft] or a [data] section; with --data it may be left out"
    )
    parser.add_argument(
        "--data", action="append", metavar="PATH", help="a file, a folder of files, or a run (data.path); may be repeated"
    )
    parser.add_argument("--loss", choices=("sft", "dpo", "reward"), help="what is learned from it (data.loss)")
    parser.add_argument("--min-reward", type=float, metavar="R", help="of episodes: only those with at least this reward")
    parser.add_argument("--success", action="store_true", help="of episodes: only those that solved their task")
    parser.add_argument("--per-task", type=int, metavar="K", help="of episodes: so many of each task at most, the best first")
    parser.add_argument("--resume", metavar="RUN", help="continue the run on data in this folder")
    parser.add_argument("--overwrite", action="store_true", help="start over if a run of that name exists")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    return with_parent(args, partial(_run, args), partial(_again, args))


def _run(args: argparse.Namespace, restarts: int) -> int:
    if args.resume is not None:
        return _resume(args, restarts)
    config, overrides = _config(args)
    if config.data is not None:
        return _on_data(args, config, overrides, restarts)
    if config.sft is None:
        raise ConfigError(f"{args.config}: it has no [sft] section; add one, or set sft.batch=8, or name data: --data PATH")
    from agentrl.run.checks import check_train
    from agentrl.run.checks.named import check_named
    from agentrl.run.main import execute

    check_folder(config, overwrite=args.overwrite)  # as in `agentrl train`
    check_named(config, partial(read_config_origins, args))
    notes = check_train(config)
    folder = open_folder(config, overwrite=args.overwrite, origins=read_config_origins(args))
    return execute(config, folder, resumed=False, only_warm_start=True, notes=notes, restarts=restarts)


def _again(args: argparse.Namespace, run: str) -> Drive:
    """What goes on with a run that Ray has ended: on data, or with the warm start alone."""
    args.resume, args.config, args.overrides, args.overwrite = run, None, [], False
    args.data = args.loss = args.min_reward = args.success = args.per_task = None  # they are in the run's config
    return partial(_resume, args, warm_start=True)


def _given(args: argparse.Namespace) -> list[str]:
    """The options as overrides, which are before those that were written as such."""
    named = [("min_reward", args.min_reward), ("per_task", args.per_task), ("loss", args.loss), ("success", args.success or None)]
    found = [f"data.{key}={json.dumps(value)}" for key, value in named if value is not None]
    return [*([f"data.path={json.dumps(args.data)}"] if args.data else []), *found]


def _config(args: argparse.Namespace) -> tuple[TrainConfig, list[str]]:
    from agentrl.config import load_config
    from agentrl.config.load import config_from
    from agentrl.config.paths import with_absolute_paths

    if args.config is not None and is_override(args.config):
        args.overrides, args.config = [args.config, *args.overrides], None
    options = _given(args)
    given = [*options, *args.overrides]
    if args.config is None:
        if not args.data:
            raise ConfigError("a config or data is needed: agentrl sft CONFIG, or agentrl sft --data PATH model.path=MODEL")
        return with_absolute_paths(config_from({}, given)), given
    file = find_config_file(args.config)
    if options and not args.data and load_config(file, args.overrides, find_config_file).data is None:
        raise ConfigError(
            f"{options[0].partition('=')[0]}: it is of data, and {args.config} names none; name it too: --data PATH"
        )
    return with_absolute_paths(load_config(file, given, find_config_file)), given


def _on_data(args: argparse.Namespace, config: TrainConfig, overrides: list[str], restarts: int) -> int:
    """The data is read before the run has a folder: what cannot be used leaves nothing behind."""
    from agentrl.config.origin import Origins, read_origins
    from agentrl.run.checks.data import check_data
    from agentrl.run.display import Display
    from agentrl.run.folder import check_free
    from agentrl.run.interrupt import ended_as_interrupted
    from agentrl.run.main import execute
    from agentrl.run.offline import write_data

    notes = check_data(config)
    if not args.overwrite:
        check_free(config)  # before the data is read, which may take long
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    read = Path(tempfile.mkdtemp(prefix=f".{config.name}.data-", dir=out))
    try:
        with ended_as_interrupted(), Display() as display:
            write_data(config, read, display)
        file = None if args.config is None else find_config_file(args.config)
        origins = Origins() if file is None else read_origins(file, overrides, find_config_file)
        folder = open_folder(config, overwrite=args.overwrite, origins=origins)
        read.rename(folder.data)
    finally:
        shutil.rmtree(read, ignore_errors=True)
    return execute(config, folder, resumed=False, notes=notes, restarts=restarts)


def _resume(args: argparse.Namespace, restarts: int, warm_start: bool = False) -> int:
    """Go on with a run on data; with one of a warm start alone too, if `warm_start`."""
    from agentrl.config.identity import check_resumed
    from agentrl.config.origin import read_origins
    from agentrl.run.checks.data import check_data
    from agentrl.run.folder import RunFolder
    from agentrl.run.main import execute
    from agentrl.run.provenance import check_resumable

    texts = [*resume_overrides(args), *_given(args)]
    before, config = read_resumed(args.resume, texts)
    folder = RunFolder(Path(args.resume))
    if before.data is None:
        if warm_start:
            return execute(config, folder, resumed=True, only_warm_start=True, restarts=restarts)
        run = shlex.quote(args.resume)
        raise ConfigError(
            f"{args.resume}: it is no run on data; continue it, its warm start too, by agentrl train --resume {run}"
        )
    check_resumed(before, config, Path(args.resume))
    notes = check_resumable(before, config, folder, partial(check_data, prepared=True))
    origins = read_origins(folder.config, texts)
    return execute(config, folder, resumed=True, notes=notes, origins=origins, restarts=restarts)
