"""`agentrl train` and `agentrl sft`: check the config, create the run folder and train, or plan a run."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.cli.arguments import COMMANDS, check_read, with_parent
from agentrl.config import TrainConfig
from agentrl.config.origin import Origins, read_origins
from agentrl.run.config_file import (
    add_config,
    check_folder,
    find_config_file,
    is_override,
    load_whole,
    open_folder,
    read_resumed,
    resume_overrides,
)
from agentrl.utils.errors import ConfigError
from agentrl.utils.terminal import say

# agentrl train

TRAIN_EPILOG = """examples:
  agentrl train configs/quickstart.toml
  agentrl train configs/quickstart.toml seed=3 name=seed3 rollout.group_size=16
  agentrl train configs/quickstart.toml engine=vllm cluster.actors=2
  agentrl train quickstart cluster.backend=inline      a packaged config; every role in this process
  agentrl train configs/quickstart.toml --dry-run      the plan: batches, memory, trained parameters; runs nothing
  agentrl train my.toml --dry-run --gpu-memory 80      ... planned for cards of 80 GiB on another machine
  agentrl train my.toml --dry-run --gpu-memory 80 --nodes 4x8    ... on 4 nodes of 8 cards: which process is on which card
  agentrl train --resume runs/quickstart               continue from the newest checkpoint
  agentrl train --resume runs/NAME steps=400           ... for more steps (a decaying optim.schedule is stretched)

Ctrl-C once finishes the step, writes a checkpoint, exits with 130; twice stops at once (a checkpoint being written is kept).
"""


@COMMANDS.register("train")
def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Train a policy on an environment."""
    parser.epilog = TRAIN_EPILOG
    add_config(parser, "a TOML file or the name of a packaged config")
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this folder")
    parser.add_argument("--overwrite", action="store_true", help="start over if a run of that name exists")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the config, print the run's plan (batches, memory, trained parameters), and end",
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: one JSON object")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="GiB per card, to plan a run for another machine")
    parser.add_argument(
        "--nodes",
        metavar="NODESxCARDS",
        help="with --gpu-memory: plan for this many nodes of this many cards each (default: one, with as many as needed)",
    )
    parser.set_defaults(run=lambda args: _run(args, 0) if args.dry_run else with_parent(args, _run, _run))


def _run(args: argparse.Namespace, restarts: int) -> int:
    if args.resume is None:
        if args.config is None:
            raise ConfigError("a config is needed, for example: agentrl train configs/quickstart.toml")
        command = TrainCommand(args, restarts, load_whole(find_config_file(args.config), args.overrides))
    else:
        texts = resume_overrides(args)
        before, config = read_resumed(args.resume, texts)
        if before.data is not None:
            raise ConfigError(f"{args.resume}: a run on data; continue it by agentrl sft --resume {shlex.quote(args.resume)}")
        command = TrainCommand(args, restarts, config, before, texts)
    if args.gpu_memory is not None and not 0 < args.gpu_memory < math.inf:
        raise ConfigError(f"--gpu-memory = {args.gpu_memory:g}: expected the GiB of a card, for example 80")
    if args.dry_run:
        return command.plan()
    check_read(args, ("json", "gpu_memory", "nodes"), "it is for planning: use it together with --dry-run")
    return command.begin() if args.resume is None else command.resume(command.check)


@dataclass(frozen=True, slots=True)
class TrainCommand:
    """Command that trains. `before`: earlier config of a resumed run; `texts`: overrides of the resume."""

    args: argparse.Namespace
    restarts: int
    config: TrainConfig
    before: TrainConfig | None = None
    texts: Sequence[str] = ()

    def origins(self) -> Origins:
        """Return the sources of the config's values, also for a resumed run."""
        if self.before is None:
            return read_origins(find_config_file(self.args.config), self.args.overrides, find_config_file)
        return read_origins(Path(self.args.resume) / "config.toml", self.texts)

    def check(self) -> list[str]:
        """Run all checks of a run that plays episodes; returns the warnings."""
        from agentrl.run.assembly import RunStart
        from agentrl.run.checks import check_config
        from agentrl.run.checks.env_checks import check_named

        check_named(RunStart(self.config), self.origins)
        return check_config(self.config, capacity=True)

    def plan(self) -> int:
        """Print the plan, after the checks of a start; changes nothing. Returns the exit code."""
        from agentrl.run.assembly import RunStart
        from agentrl.run.checks.env_checks import check_named
        from agentrl.run.display import shown_working
        from agentrl.run.folder import NameTakenError, check_unlocked
        from agentrl.run.plan import Planner
        from agentrl.run.provenance import Provenance, run_folder

        args, config = self.args, self.config
        try:
            if self.before is None:
                check_folder(config, overwrite=args.overwrite)
            else:
                folder = run_folder(args.resume)
                Provenance(folder, config).check_unchanged(self.before)
                check_unlocked(folder.path)
        except NameTakenError as taken:  # only a warning, because the config may be a plan for the next run
            say(f"warning: a run would refuse this: {taken}", file=sys.stderr)
        check_named(RunStart(config), self.origins)
        nodes: tuple[int, int] | None = None
        if args.nodes is not None:
            sizes = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", args.nodes)
            if sizes is None:
                raise ConfigError(f"--nodes = {args.nodes}: expected nodes x cards of each. Write 4x8 for 4 nodes of 8 cards")
            if args.gpu_memory is None:
                raise ConfigError(f"--nodes = {args.nodes}: the memory of their cards is not known. Add --gpu-memory GIB")
            nodes = int(sizes[1]), int(sizes[2])
        with shown_working("dry run", "checking the config and what it names"):
            found = Planner(config).dry_run(args.gpu_memory, nodes)
        say(json.dumps(found.json(), indent=2) if args.json else found.text())
        return 0

    def begin(self, *, only_warm_start: bool = False) -> int:
        """Start a new run; returns the exit code."""
        from agentrl.run.driver import execute

        config, overwrite = self.config, self.args.overwrite
        check_folder(config, overwrite=overwrite)  # first, because checks may start servers or cost money
        notes = self.check()
        folder = open_folder(config, overwrite=overwrite, origins=self.origins())
        folder.only_warm_start = only_warm_start
        return execute(config, folder, resumed=False, notes=notes, restarts=self.restarts)

    def resume(self, check: Callable[[], list[str]], *, only_warm_start: bool = False) -> int:
        """Continue the run after `check`; returns the exit code."""
        from agentrl.run.driver import execute
        from agentrl.run.folder import RunFolder
        from agentrl.run.provenance import Provenance

        assert self.before is not None
        folder, origins = RunFolder(Path(self.args.resume)), self.origins()
        notes = Provenance(folder, self.config).check_resumable(self.before, check)
        folder.only_warm_start = only_warm_start
        return execute(self.config, folder, resumed=True, notes=notes, origins=origins, restarts=self.restarts)


# agentrl sft

SFT_EPILOG = """examples:
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


@COMMANDS.register("sft")
def add_sft_arguments(parser: argparse.ArgumentParser) -> None:
    """Train on a teacher's transcripts, or on data: episodes, conversations, preferences."""
    parser.epilog = SFT_EPILOG
    add_config(
        parser, "a TOML file or the name of a packaged config, with an [sft] or a [data] section; with --data it may be left out"
    )
    parser.add_argument(
        "--data", action="append", metavar="PATH", help="a file, a folder of files, or a run (data.path); may be repeated"
    )
    parser.add_argument("--loss", choices=("sft", "dpo", "reward"), help="what to learn from it (data.loss)")
    parser.add_argument("--min-reward", type=float, metavar="R", help="of episodes: only those with at least this reward")
    parser.add_argument("--success", action="store_true", help="of episodes: only those that solved their task")
    parser.add_argument("--per-task", type=int, metavar="K", help="of episodes: at most this many per task, the best first")
    parser.add_argument("--resume", metavar="RUN", help="continue the run on data, or warm start, in this folder")
    parser.add_argument("--overwrite", action="store_true", help="start over if a run of that name exists")
    parser.set_defaults(run=lambda args: with_parent(args, _run_sft, _resume))


def _run_sft(args: argparse.Namespace, restarts: int) -> int:
    from agentrl.config.load import config_from, with_absolute_paths

    if args.resume is not None:
        return _resume(args, restarts)
    if args.config is not None and is_override(args.config):
        args.overrides, args.config = [args.config, *args.overrides], None
    file = None if args.config is None else find_config_file(args.config)
    options = _options_as_overrides(args)
    given = [*options, *args.overrides]
    if file is not None:
        if options and not args.data and load_whole(file, args.overrides).data is None:
            raise ConfigError(
                f"{options[0].partition('=')[0]}: it needs data, but {args.config} names none; name it too: --data PATH"
            )
        config = load_whole(file, given)
    elif args.data:
        config = with_absolute_paths(config_from({}, given))
    else:
        raise ConfigError("a config or data is needed: agentrl sft CONFIG, or agentrl sft --data PATH model.path=MODEL")
    if config.data is None and config.sft is None:
        raise ConfigError(f"{args.config}: it has no [sft] section; add one, or set sft.batch=8, or name data: --data PATH")
    if config.data is None:
        return TrainCommand(args, restarts, config).begin(only_warm_start=True)
    from agentrl.run.display import Display
    from agentrl.run.driver import DATA, RUN_KINDS, execute
    from agentrl.run.interrupt import handle_stop_signals

    # Read the data before the run has a folder, so that unusable data leaves nothing behind.
    kind = RUN_KINDS[DATA](config)
    notes = kind.check()
    check_folder(config, overwrite=args.overwrite)  # before reading the data, which may take long
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    read = Path(tempfile.mkdtemp(prefix=f".{config.name}.data-", dir=out))
    try:
        with handle_stop_signals(), Display() as display:
            kind.prepare(read, display)
        origins = Origins() if file is None else read_origins(file, given, find_config_file)
        folder = open_folder(config, overwrite=args.overwrite, origins=origins)
        read.rename(folder.data)
    finally:
        shutil.rmtree(read, ignore_errors=True)
    return execute(config, folder, resumed=False, notes=notes, restarts=restarts)


def _options_as_overrides(args: argparse.Namespace) -> list[str]:
    """Return the options as overrides; overrides on the command line come after them."""
    named = [("min_reward", args.min_reward), ("per_task", args.per_task), ("loss", args.loss), ("success", args.success or None)]
    found = [f"data.{key}={json.dumps(value)}" for key, value in named if value is not None]
    return [*([f"data.path={json.dumps(args.data)}"] if args.data else []), *found]


def _resume(args: argparse.Namespace, restarts: int) -> int:
    from agentrl.run.driver import DATA, RUN_KINDS
    from agentrl.run.folder import RunFolder
    from agentrl.run.session import needs_warm_start

    texts = [*resume_overrides(args), *_options_as_overrides(args)]
    before, config = read_resumed(args.resume, texts)
    command = TrainCommand(args, restarts, config, before, texts)
    if before.data is None:
        if not restarts and not needs_warm_start(config, RunFolder(Path(args.resume))):
            raise ConfigError(f"{args.resume}: no warm start to continue. Use agentrl train --resume {shlex.quote(args.resume)}")
        return command.resume(command.check, only_warm_start=True)
    return command.resume(partial(RUN_KINDS[DATA](config).check, prepared=True))
