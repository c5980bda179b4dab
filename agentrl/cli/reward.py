"""`agentrl reward`: lint, explain, score and compare reward specs, list the leaves, write the schema."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli.arguments import COMMANDS, check_read, whole_number
from agentrl.cli.env import PARAMS, reference
from agentrl.utils.errors import CatalogError, UserError
from agentrl.utils.parsing import json_text
from agentrl.utils.terminal import console as safe_console
from agentrl.utils.terminal import say

if TYPE_CHECKING:
    from agentrl.config.schema import RewardConfig
    from agentrl.data.trajectory import Task, Trajectory
    from agentrl.env.catalog import EnvRef
    from agentrl.reward import Scorer
    from agentrl.run.services import RunServices


SHOWN = 20
"""Maximum number of episodes that `diff` lists because only their value changes."""
EPILOG = """examples:
  agentrl reward lint key_value                                  mistakes in the spec
  agentrl reward lint my_spec.json --env agentrl/KeyValue-v0     ... on gold, empty and spam episodes
  agentrl reward lint my_spec.json --env key_value calls=4       ... of an environment with these parameters
  agentrl reward explain key_value runs/quickstart/trajectories/after_000010.jsonl --row 3
  agentrl reward score my_spec.json episodes.jsonl --workers 4 > scores.jsonl
  agentrl reward diff key_value my_spec.json episodes.jsonl      which episodes change rank or value
  agentrl reward leaves                                          every leaf with its formula and an example
  agentrl reward schema --out rewards/schema.json                the grammar as JSON Schema, for an editor

SPEC is the name of a spec on the shelf (rewards/) or of an environment, or a path to a JSON file. A spec that replays gold calls
needs --env. A spec with a judge asks the model that it names, at --judge-url if given (lint asks only with --judge-url,
--judge-model or --ask-judge).
"""


@COMMANDS.register("reward")
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Check, explain and apply reward specs."""
    parser.epilog = EPILOG
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    lint = parts.add_parser("lint", help="find mistakes in a spec", epilog=EPILOG)
    lint.add_argument("spec")
    lint.add_argument("-n", "--tasks", type=whole_number(1), help="tasks to probe (default 59, or as many as 30 s allow)")
    lint.add_argument("--seed", type=whole_number(0), default=0, help="seed of the first task (default 0)")
    lint.add_argument(
        "--ask-judge", action="store_true", help="with --env: ask the spec's judge, as with --judge-url; by default not asked"
    )
    lint.set_defaults(run=run_lint)
    explain = parts.add_parser("explain", help="why an episode got its score", epilog=EPILOG)
    explain.add_argument("spec")
    explain.add_argument("trajectory", type=Path, help="a JSON or JSONL file")
    explain.add_argument("--row", type=whole_number(1), default=1, help="which row of a JSONL file (from 1)")
    explain.set_defaults(run=run_explain)
    score = parts.add_parser("score", help="rescore recorded episodes", epilog=EPILOG)
    score.add_argument("spec")
    score.add_argument("trajectories", type=Path, help="a JSONL file")
    score.add_argument("--out", type=Path, help="write the scores to this file instead of standard output")
    score.set_defaults(run=run_score)
    diff = parts.add_parser("diff", help="which episodes change rank, value or success", epilog=EPILOG)
    diff.add_argument("spec_a")
    diff.add_argument("spec_b")
    diff.add_argument("trajectories", type=Path, help="a JSONL file")
    diff.set_defaults(run=run_diff)
    leaves = parts.add_parser("leaves", help="the leaf kinds, each with formula and example")
    leaves.set_defaults(run=run_leaves)
    schema = parts.add_parser("schema", help="the grammar as JSON Schema, for an editor", epilog=EPILOG)
    schema.add_argument("--out", type=Path, help="write it to this file instead of standard output")
    schema.set_defaults(run=run_schema)
    env_help = "id of the environment on which gold calls are replayed, and which lint probes (default: SPEC, if it names one)"
    pair, judge = "NAME=MODEL", 'the model of "engine:NAME", sampled in this process'
    for part in (lint, explain, score, diff):
        part.add_argument("--env", help=env_help)
        part.add_argument("params", nargs="*", metavar="a=b", help=PARAMS)
        part.add_argument("--python", action="append", default=[], metavar="NAME=MODULE:FUNCTION", help="allow a python leaf")
        part.add_argument("--judge-url", help="base URL of an OpenAI-compatible server for judge leaves")
        part.add_argument("--judge-model", action="append", default=[], metavar=pair, help=judge)
        part.add_argument("--judge-cache", help="folder in which verdicts are cached")
        part.add_argument("--judge-calls", type=whole_number(1), default=1000, help="limit on calls to the judge (default 1000)")
        part.add_argument("--judge-usd", type=float, help="limit on the judge's cost in US dollars")
    for part in (lint, explain, diff):
        part.add_argument("--json", action="store_true", help="print JSON")
    for part in (score, diff):
        part.add_argument("--workers", type=whole_number(1), default=1, help="processes (default 1)")


_LINT_S = 30.0


def run_lint(args: argparse.Namespace) -> int:
    """Print the findings; returns exit code 1 if one of them is an error."""
    from agentrl.reward.lint import (
        ENOUGH,
        LintFinding,
        bound_text,
        lint_any_verdict,
        lint_probes,
        lint_spec,
        probe_episodes,
        tasks_tried,
    )
    from agentrl.reward.nodes import LeafNode, walk

    options = _options(args)
    if args.env is None:
        check_read(args, ("tasks", "seed", "ask_judge"), "nothing is probed without an environment. Add --env ID")
    if not (args.env is not None and (args.ask_judge or args.judge_url or args.judge_model)):
        check_read(args, ("judge_cache", "judge_calls", "judge_usd"), "no judge is asked. Add --ask-judge and --env ID")
    scorer = options.scorer(_spec(args.spec), inspect_only=args.env is None)
    findings = lint_spec(scorer)
    probes: dict[str, list[Trajectory]] = {}
    if options.env is not None:
        ref = options.env.with_gold_user()
        try:
            until = math.inf if args.tasks else time.monotonic() + _LINT_S
            probes = probe_episodes(ref.build, args.tasks or ENOUGH, args.seed, enough=lambda: time.monotonic() > until)
        except NotImplementedError as error:
            raise UserError(f"{args.env}: cannot be probed: {error}") from error
        built = ref.build()

        def lint(one: Scorer) -> list[LintFinding]:
            return lint_probes(one, probes, built.order_free, built.idle_share)

        if args.ask_judge or args.judge_url or args.judge_model:
            with options.asking(dict(scorer.spec)) as asking:
                findings += lint(asking)
        else:
            findings += lint_any_verdict(scorer, probes, lint)
    if args.json:
        decides = None if scorer.rule is None else {"by": str(scorer.rule), "node": scorer.rule.node}
        rows = [asdict(item) for item in findings]
        say(json.dumps({"spec": scorer.name, "success": decides, "findings": rows}, indent=2))
    else:
        for item in findings:
            say(f"{item.level}: {item.code} at {item.at}: {item.message}")
        if scorer.rule is not None:
            node = f": {json.dumps(scorer.rule.node)}" if scorer.rule.derived else ""
            say(f"success is decided by {scorer.rule}{node}")
        low, high = scorer.range
        replays = any(isinstance(node, LeafNode) and "replay" in node.leaf.args for node in walk(scorer.root))
        unseen = "what it replays, gold and spam: not tried" if replays else "gold and spam: not tried"
        count = tasks_tried(probes)
        seen = f", probed on {count} tasks of {args.env}: {bound_text(count)}"
        probed = seen if args.env else f" ({unseen}; --env ID does)"
        faults = sum(item.level != "note" for item in findings)
        say(f"{scorer.name}: {_count(faults, 'finding')}; reward within [{low:g}, {high:g}]{probed}")
    return 1 if any(item.level == "error" for item in findings) else 0


def run_explain(args: argparse.Namespace) -> int:
    """Print the evidence of one episode."""
    from agentrl.reward.explain import explain_text, parse_row, read_lines, show_value

    with _options(args).asking(_spec(args.spec)) as scorer:
        path, row, lines = args.trajectory, args.row, read_lines(args.trajectory)
        rows: list[Trajectory] = []
        if path.suffix == ".json":
            check_read(args, ("row",), f"{path} is one episode. Leave it out")
            trajectory = parse_row(str(path), 1, "\n".join(line for _, line in lines))
        elif row > len(lines):
            raise UserError(f"{path}: --row {row}, but it has {len(lines)} rows")
        else:
            trajectory = parse_row(str(path), *lines[row - 1])
            if scorer.compares:  # with the other episodes of its task in the file
                rows = [parse_row(str(path), *line) for number, line in enumerate(lines, 1) if number != row]
        others = [one for one in rows if one.task_key == trajectory.task_key]
        score = scorer.score_group([trajectory, *others])[0] if others else scorer.score(trajectory)
    if args.json:
        names = ("value", "success", "turns", "terminal", "metrics", "evidence")
        say(json_text({name: getattr(score, name) for name in names}, indent=2))
    else:
        recorded = f"recorded reward {show_value(trajectory.reward)}"
        episode = f"{trajectory.task.id}, member {trajectory.member}, {_count(len(trajectory.turns), 'turn')}"
        say(f"{episode}, stopped: {trajectory.stop.value}, {recorded}")
        say(explain_text(score))
    return 0


def run_score(args: argparse.Namespace) -> int:
    """Score a file, one JSON object per row; counts the reasons for unscored rows on standard error."""
    from agentrl.reward.explain import reasons

    if args.out is not None and not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}")
    if args.out is not None and args.out.resolve() in (args.trajectories.resolve(), Path(args.spec).resolve()):
        raise UserError(f"--out {args.out}: it is also an input. Choose another file")
    rows = _score_rows(args, args.spec)
    text = "".join(json_text(row) + "\n" for row in rows)
    if args.out is None:
        say(text, end="")
    else:
        args.out.write_text(text, encoding="utf-8")
    known = [row["success"] for row in rows if row["success"] is not None]
    success = f", success {sum(known)} of {len(known)}" if known else ""
    scored = sum(row["value"] is not None for row in rows)
    say(f"{scored} of {len(rows)} episodes scored, {_mean(rows)}{success}", file=sys.stderr)
    unscored = Counter(next(reasons(row["evidence"]), "no reason given") for row in rows if row["value"] is None)
    for reason, count in unscored.most_common(5):
        say(f"unscored: {count} x {reason}", file=sys.stderr)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Compare two specs on the same episodes."""
    from agentrl.reward.explain import changed_ranks, changed_values, count_single, parse_row, read_lines, show_value

    a, b = _score_rows(args, args.spec_a, args.spec_b), _score_rows(args, args.spec_b, args.spec_a)
    lines = read_lines(args.trajectories)
    trajectories = [parse_row(str(args.trajectories), number, line) for number, line in lines]
    before, after = ([row["value"] for row in rows] for rows in (a, b))
    changes, values = changed_ranks(trajectories, before, after), changed_values(before, after)
    verdicts = [row for row, (one, other) in enumerate(zip(a, b, strict=True)) if one["success"] != other["success"]]
    single, tasks = count_single(trajectories)
    if args.json:
        numbered = [{**asdict(change), "row": lines[change.row][0]} for change in changes]
        worth = [{"row": lines[row][0], "value_a": x, "value_b": y} for row, x, y in values]
        found = {"episodes": len(lines), "changed": numbered, "values": worth, "success": [lines[row][0] for row in verdicts]}
        say(json_text({**found, "tasks": tasks, "tasks_of_one_episode": single}, indent=2))
        return 0
    for change in changes:
        say(
            f"row {lines[change.row][0]} (task {change.task}, member {change.member}): "
            f"{show_value(change.value_a)} -> {show_value(change.value_b)}, "
            f"rank {change.rank_a or 'none'} -> {change.rank_b or 'none'}"
        )
    ranked = {change.row for change in changes}
    for row, x, y in [item for item in values if item[0] not in ranked][:SHOWN]:
        say(f"row {lines[row][0]} (task {trajectories[row].task.id}): {show_value(x)} -> {show_value(y)}")
    say(f"{len(changes)} of {len(lines)} episodes change rank within their task")
    say(f"{len(values)} of {len(lines)} episodes change value ({_mean(a)} -> {_mean(b)}), {len(verdicts)} change success")
    if single:
        say(f"{single} of {_count(tasks, 'task')} have one episode, so no rank: record more per task (agentrl rollout -k 4)")
    return 0


def _mean(rows: list[dict[str, Any]]) -> str:
    values = [row["value"] for row in rows if row["value"] is not None]
    return f"mean {sum(values) / len(values):.4g}" if values else "no value"


def run_schema(args: argparse.Namespace) -> int:
    """Write the reward grammar of this version as JSON Schema."""
    from agentrl.reward.spec import published_schema

    text = json.dumps(published_schema(), indent=2) + "\n"
    if args.out is None:
        say(text, end="")
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    return 0


def run_leaves(args: argparse.Namespace) -> int:
    """Print the documentation of every leaf."""
    from agentrl.reward.leaf import LEAVES
    from agentrl.reward.nodes import GROUP_LEAVES

    leaves: list[tuple[str, Any]] = [*LEAVES.items(), *GROUP_LEAVES.items()]
    for kind, leaf in leaves:
        example, doc = json.dumps({"use": kind, "args": leaf.example}), " ".join((leaf.__doc__ or "").split())
        say(f"{kind}\n  {doc}\n  value    {leaf.formula}\n  example  {example}\n")
    return 0


@dataclass(frozen=True)
class _Options:
    """Functions and services for a spec, from the command line. Picklable, because worker processes build scorers from it."""

    env: EnvRef | None
    reward: RewardConfig

    def scorer(self, spec: dict[str, Any], *, inspect_only: bool = False, services: RunServices | None = None) -> Scorer:
        """Make the scorer of a spec as for a run. `inspect_only`: score nothing, so no environment for replays is needed."""
        from agentrl.env.catalog import make_scorer
        from agentrl.reward import compile_spec, make_context

        def refuse_replay(task: Task) -> Any:
            raise UserError("a spec that is only inspected replays nothing")

        if inspect_only:
            return compile_spec(spec, context=make_context(self.reward, replay_env=refuse_replay))
        return make_scorer(spec, self.reward, self.env, services=services)

    @contextmanager
    def asking(self, spec: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> Iterator[Scorer]:
        """Yield the scorer of a spec whose services can be asked inside the block. Raises UserError for a service that
        cannot be asked, or that neither the spec nor one of `others` asks."""
        from agentrl.config import TrainConfig
        from agentrl.config.schema import HealthConfig
        from agentrl.run.checks import RUN_CHECKS, RunStart
        from agentrl.run.services import RunServices
        from agentrl.utils.threads import background

        config = TrainConfig(reward=self.reward, health=HealthConfig(preflight=False))
        scorers = {str(number): self.scorer(one) for number, one in enumerate((spec, *others))}
        services, loop = RunServices(config), background().loop
        asked = config.reward.model_fields_set.union(*(scorer.asks for scorer in scorers.values()))
        for name in sorted(asked & set(RUN_CHECKS)):
            for note in RUN_CHECKS.entry(name).make(RunStart(config, scorers)):
                say(note, file=sys.stderr)
        scorer = self.scorer(spec, services=services)
        try:
            asyncio.run_coroutine_threadsafe(services.start([scorer]), loop).result()
            yield scorer
        finally:
            asyncio.run_coroutine_threadsafe(services.close(), loop).result()


def _options(args: argparse.Namespace) -> _Options:
    from agentrl.config.schema import JudgeConfig, JudgeEngineConfig, RewardConfig
    from agentrl.env.catalog import check_ref, find_env

    words = args.params
    specs = [getattr(args, name) for name in ("spec", "spec_a", "spec_b") if hasattr(args, name)]
    for spec in specs:
        with suppress(UserError):  # SPEC names an environment: use its spec, on that environment
            if args.env is None and find_env(spec).reward is not None:
                args.env = spec
    if words and args.env is None:
        raise UserError(f"{words[0]}: a parameter of an environment, but --env is missing. Add --env ID")
    if words and args.part != "lint" and not any('"replay": ' in json.dumps(_spec(spec)) for spec in specs):
        raise UserError(f"{words[0]}: {' or '.join(specs)} replays no gold calls, so nothing is played. Leave it out")
    models = tuple(_pairs(args.judge_model, "--judge-model", "strict=Qwen/Qwen3-0.6B"))
    if twice := [name for number, (name, _) in enumerate(models) if name in dict(models[:number])]:
        raise UserError(f"--judge-model {twice[0]}=...: given twice; a judge has one model")
    judge = {"api_base": args.judge_url, "cache": args.judge_cache, "calls": args.judge_calls, "usd": args.judge_usd}
    engines = {name: JudgeEngineConfig(path=model) for name, model in models}
    python = dict(_pairs(args.python, "--python", "polite=my_rewards:polite"))
    if args.env is not None:
        find_env(args.env)  # raises for an unknown environment
    env = None if args.env is None else reference(args.env, words)
    if env is not None and words:
        check_ref(env)
    return _Options(env, RewardConfig(python=python, judge=JudgeConfig(engines=engines, **judge)))


def _pairs(texts: list[str], option: str, example: str) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{option} {text!r}: expected NAME=VALUE, for example {example}")
        yield name, value


def _spec(name: str) -> dict[str, Any]:
    from agentrl.env.catalog import EnvRef, find_env, find_reward, find_spec
    from agentrl.reward import load_spec
    from agentrl.reward.compile import given_spec
    from agentrl.utils.search_path import is_given

    if is_given(name):
        return given_spec(name)
    path = Path(name)
    if path.is_file() or (path.suffix == ".json" and not name.startswith("rewards/")):  # rewards/ is also on a shelf
        return load_spec(path)
    try:
        return load_spec(find_reward(name))
    except CatalogError as error:
        with suppress(CatalogError):  # an environment's name: its own spec
            find_env(name)
            return find_spec(EnvRef(name), None)
        raise UserError(f"{name!r} is neither a file nor an environment nor a spec on the shelf: {error}") from error


def _score_rows(args: argparse.Namespace, name: str, *others: str) -> list[dict[str, Any]]:
    from rich.progress import Progress

    from agentrl.reward.explain import read_lines, score_file

    spec, options, console = _spec(name), _options(args), safe_console(stderr=True)
    total = len(read_lines(args.trajectories))
    with Progress(console=console, disable=not console.is_terminal) as progress:  # only if standard error is a terminal
        done = partial(progress.advance, progress.add_task(str(spec["name"]), total=total))
        if not options.scorer(spec).asks:  # picklable, so worker processes make their own scorers
            return score_file(partial(options.scorer, spec), args.trajectories, args.workers, done)
        with options.asking(spec, [_spec(other) for other in others]) as scorer:
            return score_file(lambda: scorer, args.trajectories, args.workers, done)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
