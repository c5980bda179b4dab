"""Preflight: what a run only calls later is called once before it, so that a dead server or a missing key is an error now.

Every MCP server is started and lists its tools; every model behind an API is asked for a word, without retries, with the very
parameters that the run's calls have: the policy, the writer of summaries, those of services of rewards (run/services.py), and
those that play users, as far as the environment names them (`ToolEnv.user_models`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from agentrl.cluster.placement import is_planned
from agentrl.config.envs import one_temperature
from agentrl.config.schema import AgentConfig, McpServerConfig
from agentrl.config.schema.episodes import entry_name
from agentrl.data.trajectory import Json
from agentrl.engines.makers import POLICY, api_name
from agentrl.env.catalog import EnvRef
from agentrl.env.spaces import run_sync
from agentrl.env.tools import TOOL_SOURCES
from agentrl.render.litellm_calls import NO_RETRIES, causes, error_line, load_litellm, refusal
from agentrl.rollout.engine import Sampling
from agentrl.run.checks import RUN_CHECKS, RunStart
from agentrl.run.services import QUESTION, ApiModel, RunServices
from agentrl.utils.errors import ConfigError, EnvError, ResourceError
from agentrl.utils.parsing import json_text

if TYPE_CHECKING:
    import openai


ANSWER_S = 20.0
"""Seconds in which each server and model must answer."""


@RUN_CHECKS.register("preflight")
def check_preflight(start: RunStart) -> list[str]:
    """Raise ConfigError for an MCP server that does not start or list its tools (with what it wrote), a missing or refused key
    (with its variable), a model that is not there and a request that it refuses (with the parameter); ResourceError for an
    address that does not answer. In a plan nothing is asked that costs money, so of an API only its key.
    """
    config = start.config
    if not config.health.preflight:
        return []
    for number, one in enumerate(config.each()):
        at = f"{entry_name(number, one.envs[0].called)}.tools" if config.envs[number].tools is not None else "tools"
        owners: dict[str, str] = {}
        for name, server in {} if is_planned() else one.tools.mcp.items():
            for tool in _start(f"{at}.mcp.{name}", name, server):
                if (other := owners.setdefault(tool, name)) != name:
                    raise ConfigError(
                        f"{at}.mcp.{name}: its tool {tool!r} has the name of one of {at}.mcp.{other}. Set {at}.mcp.{name}.prefix"
                    )
    asked: set[str] = set()
    for model in api_models(start):
        if (request := json_text([model.base, dict(model.request)])) not in asked:
            asked.add(request)
            # Only where litellm wants a single key: other providers find theirs in files, or from the machine that they run on.
            lacks = [] if "api_key" in model.request else load_litellm().validate_environment(model.model)["missing_keys"]
            if len(lacks) == 1 and lacks[0].endswith("_API_KEY"):
                raise ConfigError(
                    f"{model.key} ({model.model}): its key is missing; set the environment variable {lacks[0]}, "
                    "or health.preflight=false to leave unscored what needs it"
                )
            if not start.planned:
                _ask(model)
    return []


def api_models(start: RunStart) -> Iterator[ApiModel]:
    """The models behind an API that a run asks: those of services, the writer of its summaries, those that play users, and the
    policy if it is one."""
    config = start.config
    for one in config.each():
        from agentrl.engines.api_models import LiteLlmEngine

        rollout, tools = one.rollout, partial(_tools, EnvRef.of(one.the_env, one.tools), one.agent)
        if (name := api_name(one.model.path)) is not None:
            keys = {"temperature": f"{'rollout' if start.purpose == 'rollout' else 'eval'}.temperature", "top_p": "rollout.top_p"}
            keys["max_tokens"] = "rollout.max_turn_tokens"
            temperature = one_temperature(rollout, "a rollout") if start.purpose == "rollout" else one.eval.temperature
            sampling = Sampling(max_tokens=rollout.max_turn_tokens, temperature=temperature, top_p=rollout.top_p)
            request = LiteLlmEngine(name, one.api).request([QUESTION], tools(), sampling)
            yield ApiModel("--model", "api.base", one.api.base, request, given=one.api.args, set_by=keys)
        if rollout.summary_model is not None:
            sampling = Sampling(max_tokens=rollout.max_turn_tokens, temperature=0.0)
            request = LiteLlmEngine(rollout.summary_model, one.api).request([QUESTION], tools(), sampling)
            yield ApiModel("rollout.summary_model", "api.base", one.api.base, request, given=one.api.args)
    for env in () if str(config.model.path).startswith(POLICY) else config.envs:  # a script's user is scripted too
        called, ref, own = env.called, EnvRef.of(env, config.tools), {"temperature": "the option `temperature` of its model"}
        if ref.at is not None:  # they are asked by its server
            continue
        with closing(ref.build()) as built:
            for user in built.user_models():
                base, asked = user.options.get("api_base"), {**user.request([QUESTION]), **NO_RETRIES}
                key = f"the user of environment {called!r}"
                yield ApiModel(key, "its api_base", base, asked, "the options of its model", user.options, own)
    run = RunServices(config)
    for service in run.kinds(start.scorers.values()):
        yield from service.api_models(run, start.scorers)


def _tools(ref: EnvRef, agent: AgentConfig | None) -> list[dict[str, Json]]:
    """The tools of an environment, but for those of servers and of a task."""
    if ref.at is not None or agent is not None:
        return []
    with closing(ref.build()) as built:
        return built.toolbox.schemas()


# -- MCP servers -------------------------------------------------------------------------------------


def _start(key: str, name: str, server: McpServerConfig) -> list[str]:
    """The names of its tools."""
    hurried = server.model_copy(update={"timeout": min(server.timeout, ANSWER_S)})
    session = TOOL_SOURCES.entry("mcp").make(name, hurried).session()

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


def _ask(asked: ApiModel) -> None:
    import openai  # a dependency of litellm, whose errors are subclasses of openai's

    where, said = asked.base or "its provider", partial(error_line, base=asked.request.get("api_base"))
    try:
        load_litellm().completion(**{**asked.request, "timeout": ANSWER_S})
    except openai.APIError as problem:
        if (refused := refusal(problem, asked.request, asked.base)) is not None:
            raise ConfigError(f"{asked.key} {refused}") from problem
        if "Provider NOT provided" in str(problem):
            raise ConfigError(f"{asked.key}: {asked.model!r} names no provider; litellm's form is PROVIDER/MODEL") from problem
        if isinstance(problem, openai.BadRequestError):
            raise ConfigError(
                f"{asked.key} ({asked.model}): {where} refuses the request that the run would make: "
                f"{said(problem)}{_fix(asked, problem)}"
            ) from problem
        # Others come from a server that is there and busy, or has an outage of the moment: runs have retries for that.
        # No answer at all, or one too late; litellm says so only in what its error was raised from.
        if any(isinstance(link, openai.APIConnectionError) for link in causes(problem)):
            raise ResourceError(
                f"{asked.key} ({asked.model}): {where} ({asked.base_key}) does not answer within {ANSWER_S:g} s "
                f"(health.preflight = false does not ask): {said(problem)}"
            ) from problem


def _fix(asked: ApiModel, problem: openai.BadRequestError) -> str:
    """The parameter that is refused, if the error names one that was sent, and the keys that change it."""
    import litellm

    said, sent = str(problem), sorted(asked.request.keys() - {"model", "messages", "timeout", *NO_RETRIES}, key=len, reverse=True)
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
