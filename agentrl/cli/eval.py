"""`agentrl eval` and `agentrl rollout`: pass@k and pass^k on held-out tasks, and recorded episodes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli.arguments import COMMANDS, check_read, whole_number, with_parent
from agentrl.run.config_file import find_config_file, is_override, load_whole
from agentrl.utils.errors import ConfigError
from agentrl.utils.event_loop import run_loop
from agentrl.utils.terminal import console as safe_console
from agentrl.utils.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl.run.assembly import Purpose, RunStart
    from agentrl.run.evaluate import RolloutRequest
    from agentrl.run.folder import RunFolder


# agentrl rollout

ROLLOUT_EPILOG = """examples:
  agentrl rollout key_value --model runs/quickstart/final -n 100 -k 8
  agentrl rollout key_value --model api:openai/gpt-4.1-mini --split heldout rollout.max_turns=8
  agentrl rollout key_value --model runs/quickstart/final -n 8 --values 16     which call lost the task?

The folder --out gets trajectories.jsonl, one episode per line. Ctrl-C keeps finished episodes; the same command
then runs only the missing ones.
"""


@COMMANDS.register("rollout")
def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a model's trajectories on an environment."""
    parser.epilog = ROLLOUT_EPILOG
    add_options(parser, tasks=16, split="train", folder="rollouts")
    values = "continuations per turn, to estimate the chance of success before it (default none)"
    parser.add_argument("--values", type=whole_number(2), default=0, metavar="N", help=values)
    parser.set_defaults(run=lambda args: with_parent(args, _roll_out))


def add_options(parser: argparse.ArgumentParser, *, tasks: int, split: str, folder: str, models: bool = False) -> None:
    """Add the options of rollouts; an option that is not given is None. `models`: --model may be repeated, and is a list."""
    parser.add_argument("env", nargs="?", help="an environment's id or short name")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="values of the config's sections")
    several = "; several: one table" if models else ""
    model = f"a model folder or hub name, or api:NAME for an API model (litellm's names){several}"
    players = parser if models else parser.add_mutually_exclusive_group()
    players.add_argument("--model", action="append" if models else "store", help=model)
    scripted = f"a script that plays without a model: gold (the environment's solution), idle, refuse, echo or spam{several}"
    players.add_argument(
        "--policy", dest="model", action="append" if models else "store", type=_policy, metavar="NAME", help=scripted
    )
    given = ", or as in --run or --config" if models else ""
    parser.add_argument("-n", "--tasks", type=whole_number(1), help=f"tasks (default {tasks}{given})")
    parser.add_argument("-k", "--samples", type=whole_number(1), help="episodes per task (default 1)")
    parser.add_argument("--seed", type=whole_number(0), help=f"seed of the sampling; the tasks stay the same (default 0{given})")
    parser.add_argument("--split", help=f"split of the tasks (default {split}{given})")
    parser.add_argument("--max-concurrent", type=whole_number(1), metavar="N", help=f"episodes at once (default 256{given})")
    parser.add_argument("--out", help=f"folder of the results (default {folder}/ENV/MODEL)")
    parser.set_defaults(defaults={"tasks": tasks, "samples": 1, "split": split, "folder": folder})


def _policy(name: str) -> str:
    from agentrl.engines.makers import POLICY

    return POLICY + name


def overrides_of(args: argparse.Namespace, words: Sequence[str], purpose: Purpose) -> list[str]:
    """Return overrides of the config: words of the command line, and options that set a key.
    A word `a=b` that is not a key is a parameter of the environment, as for `agentrl env`."""
    from agentrl.config.identity import check_overrides
    from agentrl.config.keys import section_of
    from agentrl.config.load import UNSET, parse_overrides
    from agentrl.config.schema import TrainConfig

    overrides = []
    for word in words:
        key, _, value = word.partition("=")
        field = TrainConfig.model_fields.get(key)
        if field is not None and value[:1] not in ("", "{", "[") and section_of(field.annotation) is not None:
            raise ConfigError(f"{word}: {key} is a section. Write {key}.KEY=VALUE, or for the environment env.params.{word}")
        known = "." in key or key in TrainConfig.model_fields or key == "base" or word.startswith("~")
        overrides.append(word if known else f"env.params.{word}")
    check_overrides([(one.keys, one.value) for one in parse_overrides(overrides) if one.value is not UNSET], purpose)
    if args.seed is not None:
        overrides.append(f"seed={args.seed}")
    if args.max_concurrent is not None:
        overrides.append(f"rollout.max_episodes={args.max_concurrent}")
    return overrides


def _roll_out(args: argparse.Namespace, _: int) -> int:
    from agentrl.config.load import config_from
    from agentrl.config.origin import typed_origins
    from agentrl.run.assembly import RunStart
    from agentrl.run.checks import check_eval
    from agentrl.run.checks.env_checks import check_named
    from agentrl.run.evaluate import RolloutJob, RolloutRequest, unscored_cause
    from agentrl.run.outcomes import is_scored
    from agentrl.run.provenance import model_label, model_note

    if args.env is None or is_override(args.env):
        raise ConfigError("an environment is needed, for example: agentrl rollout key_value --model runs/quickstart/final")
    if args.model is None:
        raise ConfigError("--model is needed: a model folder or hub name, or api:NAME")
    base: dict[str, Any] = {"name": "rollout", "env": {"id": args.env}, "model": {"path": args.model}}
    overrides = overrides_of(args, args.overrides, "rollout")
    start = RunStart(config_from(base, overrides), purpose="rollout")
    check_named(start, partial(typed_origins, base, overrides))
    name = start.config.the_env.id.replace("/", "_")
    out = Path(args.out or f"{args.defaults['folder']}/{name}/{model_label(args.model)}")
    tasks, split = args.tasks or args.defaults["tasks"], args.split or args.defaults["split"]
    request = RolloutRequest("rollout", args.model, tasks, args.samples or 1, split, out, values=args.values)
    start = check_eval(start.config, request.purpose)
    from agentrl.run.display import Display

    with Display() as display:
        if (note := model_note(start)) is not None:
            display.warn(note)
        job = RolloutJob(start, request, display)
        run_loop(job.run())
        if job.interrupted:
            return say_interrupted(display.say, request, len(job.episodes))
        display.say(f"{len(request.pairs)} episodes: {request.out / 'trajectories.jsonl'}")
        if why := unscored_cause(job.episodes.values()):
            display.say(f"{why}. Fix that; the same command runs them again")
    return int(sum(not is_scored(one) for one in job.episodes.values()) > MAX_UNSCORED * len(job.episodes))


def say_interrupted(say: Any, request: RolloutRequest, done: int) -> int:
    """Report after Ctrl-C the finished episodes and how to continue; returns the exit code."""
    say(f"interrupted: {done} of {len(request.pairs)} episodes are in {request.out}; the same command runs the rest")
    return 130


# agentrl eval

EVAL_EPILOG = """examples:
  agentrl eval --run runs/quickstart                        the trained model, exactly as the run evaluated it
  agentrl eval --run runs/quickstart --checkpoint best -n 500 -k 4 eval.temperature=1     ... except the keys given here
  agentrl eval --run runs/quickstart --checkpoint 0 --checkpoint last     two checkpoints, with their paired difference
  agentrl eval numbers --run runs/two_envs                  one of the run's environments
  agentrl eval --run runs/quickstart --model api:openai/gpt-4.1-mini      another model, as the run evaluated its own
  agentrl eval key_value --model Qwen/Qwen3-0.6B -n 200 -k 4 env.params.calls='[4, 8]'     an environment by name
  agentrl eval key_value --model Qwen/Qwen3-0.6B --model Qwen/Qwen3-1.7B        two models, in one table
  agentrl eval key_value --model api:openai/my-model api.base=http://127.0.0.1:8000/v1      your own server
  agentrl eval key_value sql search --model Qwen/Qwen3-0.6B env.sql.limits.max_turns=4     several, in one table
  agentrl eval service_desk --policy gold --policy idle     without a model: the environment's solution, and doing nothing
  agentrl eval --config my.toml --model Qwen/Qwen3-0.6B     the environments of a config, with its keys
  agentrl eval bfcl --model Qwen/Qwen3-0.6B --split all     a benchmark as a whole, with its own table (docs/benchmarks.md)
  agentrl eval --compare evals/key_value/*                  evaluations that were made before, side by side

--run takes everything from the run's config.toml: environments with their parameters, reward specs, limits, temperature, parser,
context policy, agent. Differences are printed, and listed in the report. --checkpoint is last (the default), best (by the run's
evaluations) or the number of a step; 0 is the model that training started from.

The folder --out (by default evals/NAME/MODEL) holds trajectories.jsonl and report.json; several environments have a folder each,
next to the common report. The same command again runs only the missing episodes. API keys are read from environment variables as
in litellm, for example OPENAI_API_KEY. Exit code 1: more than half of the episodes could not be scored.
"""
MAX_UNSCORED = 0.5
"""Share of unscored episodes above which an evaluation has failed."""


@COMMANDS.register("eval")
def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Evaluate models on environments, or as a run did."""
    parser.epilog = EVAL_EPILOG
    add_options(parser, tasks=100, split="heldout", folder="evals", models=True)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--run", dest="run_folder", metavar="RUN", help="evaluate as the run in this folder did")
    source.add_argument("--config", help="evaluate the environments of this config (those named, or all), with its other keys")
    source.add_argument("--compare", nargs="+", metavar="DIR", help="compare existing evaluations; runs nothing")
    parser.add_argument(
        "--checkpoint", action="append", metavar="best|last|N", help="of --run: which model (several: one table); default last"
    )
    parser.add_argument("--all", action="store_true", help="print every row of the report (default: the first 8)")
    parser.set_defaults(run=run_eval)


@dataclass
class Plan:
    """Evaluation of one model: a request per environment of its config. `notes`: differences from its run."""

    label: str
    start: RunStart
    requests: dict[str, RolloutRequest]
    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run_eval(args: argparse.Namespace) -> int:
    """Evaluate, or compare existing evaluations; returns the exit code."""
    if args.compare is None:
        return with_parent(args, _evaluate)
    from agentrl.run.evaluate import write_comparison

    unread = ("env", "overrides", "model", "checkpoint", "tasks", "samples", "seed", "split", "max_concurrent", "all")
    check_read(args, unread, "--compare reads existing evaluations, and plays nothing. Leave it out")
    # `evals/NAME/*` also matches files that this command and an evaluation of several models wrote next to the folders.
    reports = ("comparison.json", "report.json")
    folders = [folder for folder in map(Path, args.compare) if not (folder.name in reports and folder.is_file())]
    if len(folders) < 2:
        raise ConfigError(f"--compare: two or more folders of evaluations are needed, got {', '.join(args.compare)}")
    found = _side_by_side(folders, safe_console(highlight=False))
    if args.out is not None:
        say(f"comparison: {write_comparison(Path(args.out), found)}")
    return 0


def _evaluate(args: argparse.Namespace, _: int) -> int:
    plans = read_plans(args)
    from agentrl.run.checks import check_eval

    plans = [replace(plan, start=check_eval(plan.start.config)) for plan in plans]
    from agentrl.run.display import Display

    code = 0
    with Display() as display:
        for plan in plans:
            for note in plan.notes:
                display.warn(note)
            if len(plans) > 1:
                display.say(f"[{plan.label}]")
            code = max(code, _play(plan, display, args.all))
            if code == 130:
                return code
        if len(plans) > 1:
            from agentrl.run.evaluate import write_comparison

            found = _side_by_side([plan.folder for plan in plans], display.console)
            display.say(f"comparison: {write_comparison(plans[0].folder.parent, found)}")
    return code


def _play(plan: Plan, display: Any, every: bool) -> int:
    from agentrl.run.compare import print_official
    from agentrl.run.evaluate import RolloutJob, print_report, print_reports, run_evals, unscored_cause

    if len(plan.requests) > 1:
        report, job = run_loop(run_evals(plan.start, plan.requests, display, plan.about))
        reports = {} if report is None else report["envs"]
    else:
        job = RolloutJob(plan.start, next(iter(plan.requests.values())), display)
        report = run_loop(job.evaluate(plan.about))
        reports = {} if report is None else {"": report}
    if report is None:
        return say_interrupted(display.say, job.request, len(job.episodes))
    if len(plan.requests) > 1:
        print_reports(reports, report["success"], display.console)
    else:
        print_report(report, display.console, every)
    print_official(report.get("official", {}), display.console)
    display.say(f"{'reports' if len(reports) > 1 else 'report'} and trajectories: {plan.folder}")
    unscored, episodes = (sum(one[key] for one in reports.values()) for key in ("unscored", "episodes"))
    if unscored <= MAX_UNSCORED * episodes:
        return 0
    why = unscored_cause(job.episodes.values()) or f"{unscored} episodes are unscored"
    display.say(f"agentrl: the evaluation failed: {why}. Fix that; the same command then runs the missing episodes")
    return 1


def _side_by_side(folders: Sequence[Path], console: Console) -> dict[str, Any]:
    """Compare evaluations and print the tables, those of suites included."""
    from agentrl.run.compare import compare_all, print_comparison, print_side_by_side, read_results, side_by_side

    found = compare_all([read_results(folder) for folder in folders])
    print_comparison(found, console)
    official = side_by_side(folders)
    print_side_by_side(official, console)
    return {**found, **({"official": official} if official else {})}


def read_plans(args: argparse.Namespace) -> list[Plan]:
    """Plan an evaluation for each model of the options. Raises ConfigError, CatalogError or CheckpointError."""
    if args.run_folder is None and args.checkpoint:
        raise ConfigError("--checkpoint names a model of a run: give --run RUN")
    from agentrl.run.provenance import model_label, model_of, run_folder

    folder = None if args.run_folder is None else run_folder(args.run_folder)
    models: list[tuple[str, str, dict[str, Any]]] = []  # label, path and further report entries of each
    if folder is not None:
        found = [model_of(folder, which) for which in args.checkpoint or ([] if args.model else ["last"])]
        models = [(model.label, model.path, {"step": model.step}) for model in found]
    models += [(model_label(path), path, {}) for path in args.model or ()]
    if not models:
        raise ConfigError(
            "nothing to evaluate: --run RUN (a run's own model, as the run evaluated it), or --model and an environment (a model "
            "folder or hub name, or api:NAME) or --policy gold, for example: agentrl eval key_value --model Qwen/Qwen3-0.6B"
        )
    if len({label for label, _, _ in models}) < len(models):
        models = [(f"{number}_{label}", path, about) for number, (label, path, about) in enumerate(models, 1)]
    return [_plan(args, folder, label, path, about, single=len(models) == 1) for label, path, about in models]


def _plan(args: argparse.Namespace, folder: RunFolder | None, label: str, path: str, about: dict[str, Any], single: bool) -> Plan:
    from agentrl.env.catalog import EnvRef
    from agentrl.run.compare import choose_tasks
    from agentrl.run.evaluate import RolloutRequest
    from agentrl.run.provenance import Provenance, model_note

    args = argparse.Namespace(**{**vars(args), "model": path})
    start, several = _start(args, folder)
    config = start.config
    name = config.name if args.config is not None else "_".join(env.called for env in config.envs)
    name = name if folder is None else folder.path.name
    out = Path(args.out or f"{args.defaults['folder']}/{name}") / ("" if args.out and single else label)
    # One request per environment; with several in the config each has its own folder, even if only one is chosen.
    requests = {}
    evals = {one.the_env.called: one.eval for one in config.each()}
    for env in config.envs:
        settings, ref = evals[env.called], EnvRef.of(env, config.tools)
        # A benchmark plays all its tasks by default; a run's model plays the first tasks, as the run's evaluations do.
        wanted = args.tasks or (settings.tasks if "tasks" in settings.model_fields_set else None)
        split = args.split or settings.split
        number, chosen = choose_tasks(ref, split, wanted, config.seed, first=folder is not None)
        count, place = number or args.defaults["tasks"], out / env.called if several else out
        requests[env.called] = RolloutRequest("eval", path, count, args.samples or 1, split, place, chosen)
    plan = Plan(label, start, requests, out, about)
    if folder is None:
        plan.notes = [] if (note := model_note(start)) is None else [note]
        return plan
    run, many = Provenance(folder, config), len(config.envs) > 1
    differs = [*run.differences(), *run.changed_files()]
    # Options may choose other tasks than those of the run's evaluations, with which a reader may compare the figures.
    tasks = [(f" of {n}" if many else "", e.tasks) for n, e in evals.items() if args.tasks not in (None, e.tasks)]
    splits = [(f" of {n}" if many else "", e.split) for n, e in evals.items() if args.split not in (None, e.split)]
    differs += [f"tasks{at} were {were}, are {args.tasks}" for at, were in tasks]
    differs += [f"the split{at} was {was}, is {args.split}" for at, was in splits]
    differs += [f"{args.samples} episodes per task, not 1"] if (args.samples or 1) > 1 else []
    # Numbers of another engine differ in their last digits.
    was, now = (folder.read_summary() or {}).get("engine"), start.engine.name
    differs += [f"engine was {was}, is {now}"] if was and was != now else []
    plan.notes = [f"different from the run: {line}" for line in differs]
    if tasks or splits:
        other = {n: e for n, e in evals.items() if args.tasks not in (None, e.tasks) or args.split not in (None, e.split)}
        were = ", ".join(f"{f'{n}: ' if many else ''}{one.tasks} of {one.split}" for n, one in other.items())
        options = [*([f"-n {args.tasks}"] if tasks else []), *([f"--split {args.split}"] if splits else [])]
        plan.notes.append(
            f"its tasks are not those of the run's own evaluations ({were}), so its figures are not paired with theirs; for that "
            f"leave {' and '.join(options)} out"
        )
    plan.about = {"run": {"folder": str(folder.path), **about, "differs": differs}}
    return plan


def _start(args: argparse.Namespace, folder: RunFolder | None) -> tuple[RunStart, bool]:
    """Make the start of an evaluation in the chosen environments; returns it, and True if the config has several.
    Raises ConfigError or CatalogError."""
    from agentrl.config.envs import entry_of
    from agentrl.config.load import config_from
    from agentrl.config.origin import read_origins, typed_origins
    from agentrl.run.assembly import RunStart
    from agentrl.run.checks.env_checks import check_named

    given = [text for text in (args.env, *args.overrides) if text is not None]
    overrides = overrides_of(args, [text for text in given if is_override(text)], "eval")
    names = [text for text in given if not is_override(text)]
    if args.config is None and folder is None:
        if not names:
            raise ConfigError(f"an environment is needed, for example: agentrl eval key_value --model {args.model}")
        env: Any = {"id": names[0]} if len(names) == 1 else [{"id": name} for name in names]
        table = {"name": "eval", "env": env, "model": {"path": args.model}}
        start = RunStart(config_from(table, overrides), purpose="eval")
        check_named(start, partial(typed_origins, table, overrides))
        return start, len(names) > 1
    file = find_config_file(args.config) if folder is None else folder.config
    config = load_whole(file, overrides)
    if not config.envs:
        raise ConfigError(
            f"{file}: it was trained on data and names no environment; name one, for example: agentrl eval key_value --model "
            f"{file.parent / 'final'}"
        )
    known = [{"name": env.called} for env in config.envs]
    chosen = [config.envs[entry_of(known, name)] for name in names] or config.envs
    check_named(
        RunStart(config, purpose="eval"), partial(read_origins, file, overrides, find_config_file), [env.called for env in chosen]
    )
    update: dict[str, Any] = {"model": config.model.model_copy(update={"path": args.model, "init": None, "lora": None})}
    if names:
        update["env"] = chosen
    several, config = len(config.envs) > 1, config.model_copy(update=update)
    config = config if len(config.envs) > 1 else config.alone(config.envs[0])
    return RunStart(config, purpose="eval"), several
