"""Preflight: what a run only calls later is called once before it, so that a dead server or a missing key is an error now.

Every MCP server is started and lists its tools; every model behind an API is asked for a few tokens, without retries: the policy,
the writer of summaries, judges (of a benchmark, if one of its tasks asks them), and those that play users, as far as the
environment names them (`ToolEnv.user_models`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

from agentrl.backends.api.make import api_name
from agentrl.backends.scripted.make import is_script
from agentrl.catalog import EnvRef
from agentrl.cluster.devices import is_planned
from agentrl.config import TrainConfig
from agentrl.config.envs import alone, each, entry_name
from agentrl.config.schema import McpServerConfig
from agentrl.env.suite import WHOLE
from agentrl.env.sync import run_sync
from agentrl.errors import ConfigError, EnvError, ResourceError
from agentrl.reward import Scorer
from agentrl.reward.judge.load import addressed, load_litellm
from agentrl.reward.judge.own import own_name
from agentrl.reward.node import LeafNode, Node
from agentrl.reward.pointer import follow, parse_pointer
from agentrl.reward.predicate import decide, references
from agentrl.rollout.sampler.base import make_sampler
from agentrl.run.contents import suite_env
from agentrl.trajectory import Json, Task

QUESTION, ANSWER_TOKENS = "Answer with the word: ready", 16
"""As few tokens as every provider grants."""
_WRITTEN = 2000


@dataclass(frozen=True, slots=True)
class ApiModel:
    """A model behind an API, in litellm's form: the config key that names it, and that of its address, `base`. `options`: what
    else its calls get."""

    key: str
    model: str
    base_key: str
    base: str | None
    options: Mapping[str, Any] = field(default_factory=dict)


def check_preflight(config: TrainConfig, scorers: Mapping[str, Scorer], free: bool = False) -> None:
    """Raise ConfigError for an MCP server that does not start or list its tools (with what it wrote), a missing or refused key
    (with its variable) and a model that is not there; ResourceError for an address that does not answer. `free`: nothing that
    costs money, so of an API only its key.

    Reads: health, env, tools, rollout.summary_model, reward.judge, api, model.path.
    """
    if not config.health.preflight:
        return
    seconds = config.health.preflight_timeout
    for number, one in enumerate(each(config)):
        at = f"{entry_name(number, one.envs[0].called)}.tools" if config.envs[number].tools is not None else "tools"
        for name, server in {} if is_planned() else one.tools.mcp.items():
            _start(f"{at}.mcp.{name}", name, server, seconds)
    asked: set[tuple[str, str | None]] = set()
    for model in api_models(config, scorers):
        if (model.model, model.base) not in asked:
            asked.add((model.model, model.base))
            _check_key(model)
            if not free:
                _ask(model, seconds)


def api_models(config: TrainConfig, scorers: Mapping[str, Scorer]) -> Iterator[ApiModel]:
    """The models behind an API that a run asks: its judges, the writer of its summaries, those that play users, and the policy if
    it is one."""
    if (name := api_name(config.model.path)) is not None:
        yield ApiModel("--model", name, "api.base", config.api.base)
    if config.rollout.summary_model is not None:
        yield ApiModel("rollout.summary_model", config.rollout.summary_model, "api.base", config.api.base)
    if not is_script(config.model.path):  # its user is scripted too
        for one in each(config):
            yield from _users(one)
    judge = config.reward.judge
    for called, scorer in scorers.items():
        tasks = _all_tasks(config, called) if scorer.asks else None
        for model in sorted(_judges(scorer, tasks)):
            yield ApiModel(f"the judge of reward spec {scorer.name!r}", model, "reward.judge.api_base", judge.api_base)


def _users(config: TrainConfig) -> Iterator[ApiModel]:
    ref = EnvRef.of(config)
    if ref.at is not None:  # they are asked by its server
        return
    built = ref.build()
    try:
        for user in built.user_models():
            key = f"the user of environment {config.envs[0].called!r}"
            yield ApiModel(key, user.model, "its api_base", user.options.get("api_base"), user.options)
    finally:
        built.close()


def _judges(scorer: Scorer, tasks: Sequence[Task] | None = None) -> set[str]:
    """The models of the spec's judges; if `tasks` are all that there are, of those that one of them asks by its `when`."""
    tops = (scorer.root, *scorer.metrics, *([scorer.success] if scorer.success is not None else []))
    found: set[str] = set()

    def visit(node: Node, whens: Sequence[Mapping[str, Json]]) -> None:
        whens = whens if node.mods.when is None else [*whens, node.mods.when]
        if isinstance(node, LeafNode) and node.leaf.kind == "judge" and _asked(whens, tasks):
            found.add(str(node.leaf.args["model"]))
        for child in node.children():
            visit(child, whens)

    for top in tops:
        visit(top, [])
    return {model for model in found if own_name(model) is None}  # none of the run's own engines is behind an API


def _asked(whens: Sequence[Mapping[str, Json]], tasks: Sequence[Task] | None) -> bool:
    return tasks is None or any(all(_may_hold(when, task) for when in whens) for task in tasks)


def _may_hold(when: Mapping[str, Json], task: Task) -> bool:
    """Whether a `when` can be true in an episode of a task: also if it reads more than the task."""
    places = [parse_pointer(str(ref["$"])) for ref in references(when)]
    if any(place[:2] not in (("task", "data"), ("task", "gold")) for place in places):
        return True
    document = {"task": {"data": task.data, "gold": task.gold}}
    return decide(when, lambda ref: follow(document, parse_pointer(str(ref["$"])))) is not False


def _all_tasks(config: TrainConfig, called: str) -> Sequence[Task] | None:
    """Every task of an environment that is a suite; None of another, or if its parameters change in the run."""
    one = next(alone(config, env) for env in config.envs if env.called == called)
    suite = suite_env(EnvRef.of(one))
    if suite is None or any(make_sampler(one.rollout.sampler).variants()):
        return None
    return [suite.make_task(seed, WHOLE) for seed in range(suite.task_count(WHOLE))]


# -- MCP servers -------------------------------------------------------------------------------------


def _start(key: str, name: str, server: McpServerConfig, seconds: float) -> None:
    from agentrl.tool.mcp import McpSource

    short = server.model_copy(update={"timeout": min(server.timeout, seconds)})
    with tempfile.TemporaryFile("w+") as written:
        session = McpSource(name, short).session(cast(TextIO, written))

        async def once() -> None:
            try:
                await session.open()
            finally:
                await session.close()

        try:
            run_sync(once())
        except EnvError as problem:
            written.seek(0)
            text = " ".join(written.read()[-_WRITTEN:].split())
            said = f"; it wrote: {text}" if text else ""
            raise ConfigError(f"{key}: {problem}{said}") from problem


# -- APIs --------------------------------------------------------------------------------------------


def _check_key(asked: ApiModel) -> None:
    """Only where litellm wants a single key: other providers find theirs in files, or from the machine that they run on."""
    if "api_key" in asked.options:
        return
    missing = load_litellm().validate_environment(asked.model)["missing_keys"]
    if len(missing) == 1 and missing[0].endswith("_API_KEY"):
        raise ConfigError(
            f"{asked.key} ({asked.model}): its key is missing; set the environment variable {missing[0]}, "
            "or health.preflight=false to leave unscored what needs it"
        )


def _ask(asked: ApiModel, seconds: float) -> None:
    import openai  # a dependency of litellm, whose errors are subclasses of openai's

    where = asked.base or "its provider"
    try:
        load_litellm().completion(
            **{
                **asked.options,
                "model": asked.model,
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": ANSWER_TOKENS,
                "timeout": seconds,
                "num_retries": 0,
                "max_retries": 0,
                "drop_params": True,
                **addressed(asked.base, asked.base_key),
            }
        )
    except (openai.AuthenticationError, openai.PermissionDeniedError) as problem:
        keys = _keys(asked.model)
        raise ConfigError(f"{asked.key} ({asked.model}): {where} refuses the key{keys}: {_line(problem)}") from problem
    except openai.NotFoundError as problem:
        raise ConfigError(f"{asked.key} ({asked.model}): {where} has no such model: {_line(problem)}") from problem
    except openai.BadRequestError as problem:
        if "Provider NOT provided" in str(problem):
            raise ConfigError(f"{asked.key}: {asked.model!r} names no provider; litellm's form is PROVIDER/MODEL") from problem
    except openai.APIError as problem:
        # Others come from a server that is there and busy, or has an outage of the moment: runs have retries for that.
        if _unreached(problem):
            raise ResourceError(
                f"{asked.key} ({asked.model}): {where} ({asked.base_key}) does not answer within {seconds:g} s "
                f"(health.preflight_timeout): {_line(problem)}"
            ) from problem


def _unreached(problem: BaseException) -> bool:
    """Whether no answer came at all; litellm says so only in what its error was raised from."""
    import openai

    link: BaseException | None = problem
    while link is not None:
        if isinstance(link, openai.APIConnectionError):  # also too late an answer
            return True
        link = link.__cause__ or link.__context__
    return False


def _keys(model: str) -> str:
    """The environment variables that may hold the key, as far as they are set or litellm names them."""
    found: Any = load_litellm().validate_environment(model)
    provider = model.partition("/")[0].upper().replace("-", "_")
    named = found["missing_keys"] or [name for name in (f"{provider}_API_KEY",) if name in os.environ]
    return f" (environment variable {', '.join(named)})" if named else ""


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:300]
