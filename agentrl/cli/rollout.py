"""`agentrl rollout`: episodes of a model, as trajectories. `agentrl eval` shares its options."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.cli.configs import is_override
from agentrl.cli.parented import with_parent
from agentrl.cli.parser import seed
from agentrl.deadline import run_loop
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config import TrainConfig
    from agentrl.run.rollout import RolloutRequest

HELP = "write a model's trajectories on an environment"
EPILOG = """examples:
  agentrl rollout key_value --model runs/quickstart/final -n 100 -k 8
  agentrl rollout key_value --model api:openai/gpt-4.1-mini --split heldout rollout.max_turns=8
  agentrl rollout key_value --model runs/quickstart/final --record records/one      record every answer
  agentrl rollout --replay records/one --out again       replay it: no model, no tools, no judge

The folder --out gets trajectories.jsonl, one episode per line. Ctrl-C keeps finished episodes; the same command
then runs only the missing ones.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_options(parser, tasks=16, split="train", folder="rollouts")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser, *, tasks: int, split: str, folder: str, models: bool = False) -> None:
    """Add the options of rollouts. One that the user does not give is None, so that a replay can take it from its record.
    `models`: --model may be given several times, and is a list."""
    parser.add_argument("env", nargs="?", help="an environment's id or short name")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="values of the config's sections")
    again = "; several: one table" if models else ""
    model = f"a model folder or hub name, or api:NAME for an API model (litellm's names){again}"
    who = parser if models else parser.add_mutually_exclusive_group()
    who.add_argument("--model", action="append" if models else "store", help=model)
    scripted = f"a script that plays without a model: gold (the environment's solution), idle, refuse, echo or spam{again}"
    who.add_argument(
        "--policy", dest="model", action="append" if models else "store", type=_policy, metavar="NAME", help=scripted
    )
    parser.add_argument("-n", "--tasks", type=int, help=f"tasks (default {tasks})")
    parser.add_argument("-k", "--samples", type=int, help="episodes per task (default 1)")
    parser.add_argument("--seed", type=seed, help="seed of the sampling; the tasks stay the same (default 0)")
    parser.add_argument("--split", help=f"split of the tasks (default {split})")
    parser.add_argument("--max-concurrent", type=int, metavar="N", help="episodes at the same time (default 256)")
    parser.add_argument("--out", help=f"folder of the results (default {folder}/ENV/MODEL)")
    parser.add_argument("--record", metavar="DIR", help="also record every answer of model, environment and judge")
    parser.add_argument("--replay", metavar="DIR", help="replay such a record; options that are not given are taken from it")
    parser.set_defaults(defaults={"tasks": tasks, "samples": 1, "split": split, "folder": folder})


def _policy(name: str) -> str:
    """A scripted policy as a model's name."""
    from agentrl.backends.scripted.make import POLICY

    return POLICY + name


def read_request(args: argparse.Namespace, purpose: Literal["eval", "rollout"]) -> tuple[TrainConfig, RolloutRequest]:
    """The config and the request that the options ask for. Raises ConfigError, or ReplayError for a bad --replay."""
    from agentrl.config.envs import the_env
    from agentrl.run.rollout import RolloutRequest

    config, values, record, replay = read_config_of(args, purpose)
    name = the_env(config).id.replace("/", "_")
    from agentrl.run.of_run import model_label

    default = f"{args.defaults['folder']}/{name}/{model_label(values['model'])}" if replay is None else replay / "replayed"
    out = Path(args.out or default)
    chosen = tuple(values.get("chosen", ()))[: values["tasks"]]
    return config, RolloutRequest(
        purpose, values["model"], values["tasks"], values["samples"], values["split"], out, record, replay, chosen
    )


def read_config_of(args: argparse.Namespace, purpose: str) -> tuple[TrainConfig, dict[str, Any], Path | None, Path | None]:
    """The config, the values of the request's options, and the folders of --record and --replay. Raises as `read_request`."""
    from agentrl.config.load import config_from

    if args.env is not None and is_override(args.env):  # with --replay the environment may be left out
        args.env, args.overrides = None, [args.env, *args.overrides]
    base, known = _base(args, purpose)
    overrides = list(args.overrides)
    if args.seed is not None:
        overrides.append(f"seed={args.seed}")
    if args.max_concurrent is not None:
        overrides.append(f"rollout.max_episodes={args.max_concurrent}")
    config = config_from(base, overrides)
    if args.replay is None:
        from agentrl.config.origin import typed_origins
        from agentrl.run.checks.named import check_played

        check_played(config, partial(typed_origins, base, overrides))
    given = {name: value for name in ("tasks", "samples", "split") if (value := vars(args)[name]) is not None}
    values = {**known, **given}  # options that are given win over those of a replayed record, or over the defaults
    check_counts(args)
    record, replay = (None if path is None else Path(path) for path in (args.record, args.replay))
    return config, values, record, replay


def check_counts(args: argparse.Namespace) -> None:
    """Raise ConfigError for fewer than one task, or episode a task."""
    if any(vars(args)[option] is not None and vars(args)[option] < 1 for option in ("tasks", "samples")):
        raise ConfigError("-n and -k must be at least 1")


def _base(args: argparse.Namespace, purpose: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config table to start from, and the request's values for options that are not given."""
    if args.replay is None:
        if args.env is None:
            raise ConfigError(f"an environment is needed, for example: agentrl {purpose} key_value --model runs/quickstart/final")
        if args.model is None:
            raise ConfigError("--model is needed: a model folder or hub name, or api:NAME")
        return ({"name": purpose, "env": {"id": args.env}, "model": {"path": args.model}}, {**args.defaults, "model": args.model})
    if args.record is not None:
        raise ConfigError("--record and --replay: a replay is a record already; give one of them")
    from agentrl.run.record_folder import RecordFolder

    manifest = RecordFolder(Path(args.replay)).manifest()
    table = manifest["config"]
    if manifest["purpose"] != purpose:  # the two commands take their temperature from different keys
        temperature = table["eval" if manifest["purpose"] == "eval" else "rollout"]["temperature"]
        table["eval" if purpose == "eval" else "rollout"]["temperature"] = temperature
    if args.env is not None:
        table["env"]["id"] = args.env
    return table, manifest if args.model is None else {**manifest, "model": args.model}


def check_request(config: TrainConfig, request: RolloutRequest) -> TrainConfig:
    """The config with its engine settled. Raises a UserError for a request that cannot work, before a folder is created. A
    replay is checked call by call instead."""
    if config.agent is not None and (request.replay is not None or request.record is not None):
        raise ConfigError("[agent]: what an agent does is not recorded, so neither --record nor --replay goes with one")
    if request.replay is not None:
        for key, given in (("tools.sets", config.tools.sets), ("tools.mcp", config.tools.mcp)):
            if given:
                raise ConfigError(
                    f"{key}: a replay has the answers of the recorded run's tools and calls no others; leave it out"
                )
    else:
        from agentrl.run.checks import check_eval
        from agentrl.run.engines import without_trainer

        config = without_trainer(config)
        check_eval(config, request.purpose)
    return config


def run(args: argparse.Namespace) -> int:
    """Roll out; returns the exit code."""
    return with_parent(args, partial(_roll_out, args))


def _roll_out(args: argparse.Namespace, _: int) -> int:
    config, request = read_request(args, "rollout")
    config = check_request(config, request)
    from agentrl.run.display import Display
    from agentrl.run.of_run import model_note
    from agentrl.run.rollout import run_rollout

    with Display() as display:
        if request.replay is None and (note := model_note(request.model, config)) is not None:
            display.warn(note)
        outcome = run_loop(run_rollout(config, request, display))
        if outcome.interrupted:
            return say_interrupted(display.say, request, len(outcome.episodes))
        unscored = sum(trajectory.reward is None for trajectory in outcome.episodes.values())
        note = f" ({unscored} of them unscored: the same command runs them again)" if unscored else ""
        display.say(f"{len(request.pairs)} episodes{note}: {request.out / 'trajectories.jsonl'}")
        if request.record is not None:
            display.say(f"record: {request.record} (agentrl {request.purpose} --replay {request.record})")
    return 0


def say_interrupted(say: Any, request: RolloutRequest, done: int) -> int:
    """Say after Ctrl-C what is done and how to continue; returns the exit code."""
    say(f"interrupted: {done} of {len(request.pairs)} episodes are in {request.out}; the same command runs the rest")
    return 130
