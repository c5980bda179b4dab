"""Preflight: what a run only calls later is called once before it, so that a dead server or a missing key is an error now.

Every MCP server is started and lists its tools; every model behind an API is asked for a word, without retries, with the very
parameters that the run's calls have: the policy,
the writer of summaries, judges (of a benchmark, if one of its tasks asks them), and those that play users, as far as the
environment names them (`ToolEnv.user_models`)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.cluster.placement import is_planned
from agentrl.config import TrainConfig
from agentrl.config.envs import each, entry_name, one_temperature
from agentrl.config.schema import AgentConfig, Choice, McpServerConfig
from agentrl.data.trajectory import Json, Task
from agentrl.engines.makers import api_name, is_script
from agentrl.env.catalog import EnvRef
from agentrl.env.official import WHOLE
from agentrl.env.spaces import run_sync
from agentrl.render.litellm_calls import ONCE, causes, load_litellm, said_of
from agentrl.reward import Scorer
from agentrl.reward.judge import JudgeLeaf, VerdictRequest, judge_call, own_name
from agentrl.reward.nodes import LeafNode, Node
from agentrl.reward.values import decider, follow, parse_pointer, references
from agentrl.rollout.engine import Sampling
from agentrl.rollout.samplers import make_sampler
from agentrl.run.checks import RUN_CHECKS, Purpose, RunStart
from agentrl.run.digests import suite_env
from agentrl.utils.errors import ConfigError, EnvError, ResourceError
from agentrl.utils.parsing import json_text

if TYPE_CHECKING:
    import openai


ANSWER_S = 20.0
"""Seconds in which each server and model must answer."""
QUESTION = {"role": "user", "content": "Answer with the word: ready"}


@dataclass(frozen=True, slots=True)
class ApiModel:
    """A model behind an API: the config key that names it, that of its address, `base`, and the request that the run will make,
    but for what it asks. `args`: the key of the arguments that are `given`; `set_by`: that of other parameters of the request."""

    key: str
    base_key: str
    base: str | None
    request: Mapping[str, Any]
    args: str = "api.args"
    given: Collection[str] = ()
    set_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Its name in litellm's form."""
        return str(self.request["model"])


@RUN_CHECKS.register("services")
def check_services(start: RunStart) -> list[str]:
    """Raise ConfigError for an MCP server that does not start or list its tools (with what it wrote), a missing or refused key
    (with its variable), a model that is not there and a request that it refuses (with the parameter); ResourceError for an
    address that does not answer. In a plan nothing is asked that costs money, so of an API only its key.

    Reads: health, env, tools, agent, rollout.summary_model, rollout.max_turn_tokens, rollout.temperature, rollout.top_p,
    eval.temperature, reward.judge, api, model.path.
    """
    config = start.config
    if not config.health.preflight:
        return []
    for number, one in enumerate(each(config)):
        at = f"{entry_name(number, one.envs[0].called)}.tools" if config.envs[number].tools is not None else "tools"
        owners: dict[str, str] = {}
        for name, server in {} if is_planned() else one.tools.mcp.items():
            for tool in _start(f"{at}.mcp.{name}", name, server, ANSWER_S):
                if (other := owners.setdefault(tool, name)) != name:
                    raise ConfigError(
                        f"{at}.mcp.{name}: its tool {tool!r} has the name of one of {at}.mcp.{other}. Set {at}.mcp.{name}.prefix"
                    )
    asked: set[str] = set()
    for model in api_models(start):
        if (request := json_text([model.base, dict(model.request)])) not in asked:
            asked.add(request)
            _check_key(model)
            if not start.planned:
                _ask(model, ANSWER_S)
    return []


def api_models(start: RunStart) -> Iterator[ApiModel]:
    """The models behind an API that a run asks: its judges, the writer of its summaries, those that play users, and the policy if
    it is one."""
    config = start.config
    for one in each(config):
        yield from _policies(one, start.purpose)
    if not is_script(config.model.path):  # its user is scripted too
        for one in each(config):
            yield from _users(one.envs[0].called, EnvRef.of(one))
    judge = config.reward.judge
    for one in each(config):
        scorer = start.scorers[one.envs[0].called]
        tasks = _all_tasks(EnvRef.of(one), one.rollout.sampler) if scorer.asks else None
        for leaf in _judges(scorer, tasks):
            verdict = VerdictRequest(str(leaf.args["model"]), (QUESTION,), leaf.verdict_schema, leaf.max_tokens)
            yield ApiModel(
                f"the judge of reward spec {scorer.name!r}",
                "reward.judge.api_base",
                judge.api_base,
                judge_call(judge, verdict),
                "reward.judge.args",
                judge.args,
                {"temperature": "reward.judge.args.temperature"},
            )


def _policies(one: TrainConfig, purpose: Purpose) -> Iterator[ApiModel]:
    """The policy, and the writer of summaries, as an environment's episodes ask them."""
    from agentrl.engines.api_models import LiteLlmEngine

    rollout, tools = one.rollout, partial(_tools, EnvRef.of(one), one.agent)
    if (name := api_name(one.model.path)) is not None:
        keys = {"temperature": f"{'rollout' if purpose == 'rollout' else 'eval'}.temperature", "top_p": "rollout.top_p"}
        keys["max_tokens"] = "rollout.max_turn_tokens"
        temperature = one_temperature(rollout, "a rollout") if purpose == "rollout" else one.eval.temperature
        sampling = Sampling(max_tokens=rollout.max_turn_tokens, temperature=temperature, top_p=rollout.top_p)
        request = LiteLlmEngine(name, one.api).request([QUESTION], tools(), sampling)
        yield ApiModel("--model", "api.base", one.api.base, request, given=one.api.args, set_by=keys)
    if rollout.summary_model is not None:
        sampling = Sampling(max_tokens=rollout.max_turn_tokens, temperature=0.0)
        request = LiteLlmEngine(rollout.summary_model, one.api).request([QUESTION], tools(), sampling)
        yield ApiModel("rollout.summary_model", "api.base", one.api.base, request, given=one.api.args)


def _tools(ref: EnvRef, agent: AgentConfig | None) -> list[dict[str, Json]]:
    """The tools of an environment, but for those of servers and of a task."""
    if ref.at is not None or agent is not None:
        return []
    with closing(ref.build()) as built:
        return built.toolbox.schemas()


def _users(called: str, ref: EnvRef) -> Iterator[ApiModel]:
    if ref.at is not None:  # they are asked by its server
        return
    key, own = f"the user of environment {called!r}", {"temperature": "the option `temperature` of its model"}
    with closing(ref.build()) as built:
        for user in built.user_models():
            base, request = user.options.get("api_base"), {**user.request([QUESTION]), **ONCE}
            yield ApiModel(key, "its api_base", base, request, "the options of its model", user.options, own)


def _judges(scorer: Scorer, tasks: Sequence[Task] | None = None) -> list[JudgeLeaf]:
    """The spec's judges behind an API; if `tasks` are all that there are, those that one of them asks by its `when`."""

    def visit(node: Node, whens: Sequence[Mapping[str, Json]]) -> Iterator[JudgeLeaf]:
        whens = whens if node.mods.when is None else [*whens, node.mods.when]
        if (
            isinstance(node, LeafNode)
            and isinstance(node.leaf, JudgeLeaf)
            and (tasks is None or any(all(_may_hold(when, task) for when in whens) for task in tasks))
        ):
            yield node.leaf
        for child in node.children:
            yield from visit(child, whens)

    found = (leaf for top in scorer.tops for leaf in visit(top, []))
    return [leaf for leaf in found if own_name(str(leaf.args["model"])) is None]


def _may_hold(when: Mapping[str, Json], task: Task) -> bool:
    """Return True if a `when` can be true in an episode of a task: also if it reads more than the task."""
    places = [parse_pointer(str(ref["$"])) for _, ref in references(when)]
    if any(place[:2] not in (("task", "data"), ("task", "gold")) for place in places):
        return True
    document = {"task": {"data": task.data, "gold": task.gold}}
    return decider(when)(lambda ref: follow(document, parse_pointer(str(ref["$"])))) is not False


def _all_tasks(ref: EnvRef, sampler: Choice) -> Sequence[Task] | None:
    """Every task of an environment that is a suite; None of another, or if its parameters change in the run."""
    suite = suite_env(ref)
    if suite is None or any(make_sampler(sampler).variants()):
        return None
    return [suite.make_task(seed, WHOLE) for seed in range(suite.task_count(WHOLE))]


# -- MCP servers -------------------------------------------------------------------------------------


def _start(key: str, name: str, server: McpServerConfig, seconds: float) -> list[str]:
    """The names of its tools."""
    from agentrl.env.mcp import McpSource

    session = McpSource(name, server.model_copy(update={"timeout": min(server.timeout, seconds)})).session()

    async def once() -> list[str]:
        try:
            return [tool.name for tool in await session.open()]
        finally:
            await session.close()

    try:
        return run_sync(once())
    except EnvError as problem:
        raise ConfigError(f"{key}: {problem}") from problem


# -- APIs --------------------------------------------------------------------------------------------


def _check_key(asked: ApiModel) -> None:
    """Only where litellm wants a single key: other providers find theirs in files, or from the machine that they run on."""
    if "api_key" in asked.request:
        return
    missing = load_litellm().validate_environment(asked.model)["missing_keys"]
    if len(missing) == 1 and missing[0].endswith("_API_KEY"):
        raise ConfigError(
            f"{asked.key} ({asked.model}): its key is missing; set the environment variable {missing[0]}, "
            "or health.preflight=false to leave unscored what needs it"
        )


def _ask(asked: ApiModel, seconds: float) -> None:
    import openai  # a dependency of litellm, whose errors are subclasses of openai's

    where, said = asked.base or "its provider", partial(said_of, base=asked.request.get("api_base"))
    try:
        load_litellm().completion(**{**asked.request, "timeout": seconds})
    except (openai.AuthenticationError, openai.PermissionDeniedError) as problem:
        keys = _keys(asked.model)
        raise ConfigError(f"{asked.key} ({asked.model}): {where} refuses the key{keys}: {said(problem)}") from problem
    except openai.NotFoundError as problem:
        raise ConfigError(f"{asked.key} ({asked.model}): {where} has no such model: {said(problem)}") from problem
    except openai.BadRequestError as problem:
        if "Provider NOT provided" in str(problem):
            raise ConfigError(f"{asked.key}: {asked.model!r} names no provider; litellm's form is PROVIDER/MODEL") from problem
        raise ConfigError(
            f"{asked.key} ({asked.model}): {where} refuses the request that the run would make: "
            f"{said(problem)}{_fix(asked, problem)}"
        ) from problem
    except openai.APIError as problem:
        # Others come from a server that is there and busy, or has an outage of the moment: runs have retries for that.
        # No answer at all, or one too late; litellm says so only in what its error was raised from.
        if any(isinstance(link, openai.APIConnectionError) for link in causes(problem)):
            raise ResourceError(
                f"{asked.key} ({asked.model}): {where} ({asked.base_key}) does not answer within {seconds:g} s "
                f"(health.preflight = false does not ask): {said(problem)}"
            ) from problem


def _fix(asked: ApiModel, problem: openai.BadRequestError) -> str:
    """The parameter that is refused, if the error names one that was sent, and the keys that change it."""
    import litellm

    said, sent = str(problem), sorted(asked.request.keys() - {"model", "messages", "timeout", *ONCE}, key=len, reverse=True)
    name = next((name for name in sent if re.search(rf"\b{name}\b", said)), None)
    if name is None:
        return ""
    if name == "tools":  # what an episode cannot do without
        return ". It refuses tools; take a model, or options of its server, with tool calls"
    # What litellm itself refuses it can leave out by its own knowledge of the model; of a server's refusal it knows nothing.
    known = isinstance(problem, litellm.UnsupportedParamsError)
    ways = [f"{asked.args}.drop_params = true" if known else f'{asked.args}.additional_drop_params = ["{name}"]']
    if name in asked.set_by:
        ways.append(f"{asked.set_by[name]} = {'1' if name == 'temperature' else 'another value'}")
    elif name in asked.given:
        ways = [f"{asked.args} without {name}"]
    return f". The parameter {name} = {asked.request[name]!r} is refused; set {' or '.join(ways)}"


def _keys(model: str) -> str:
    """The environment variables that may hold the key, as far as they are set or litellm names them."""
    found: Any = load_litellm().validate_environment(model)
    provider = model.partition("/")[0].upper().replace("-", "_")
    named = found["missing_keys"] or [name for name in (f"{provider}_API_KEY",) if name in os.environ]
    return f" (environment variable {', '.join(named)})" if named else ""
