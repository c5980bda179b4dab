"""Checks of a run's remote environments, and their description in a plan."""

from __future__ import annotations

from agentrl.env.address import PROTOCOLS, EnvAddress
from agentrl.env.catalog import EnvRef
from agentrl.run.checks import RUN_CHECKS, RunStart
from agentrl.utils.errors import ConfigError


@RUN_CHECKS.register("remote_envs", traits={"first"})
def check_servers(start: RunStart) -> list[str]:
    """Raise a UserError if an environment's server is unreachable, speaks another protocol, has another environment, refuses its
    parameters, wrappers or tool sets, or allows fewer concurrent episodes than the run needs; or if an agent of the user would
    play there."""
    for env in start.config.envs:
        with start.alone(env) as one:
            if one.env.at is not None and one.env.at.is_agentrl:
                _check_server(one, one.env.at)
            elif one.env.at is not None:
                PROTOCOLS[one.env.at.protocol].describe(one.env.at)
    return []


def _check_server(start: RunStart, at: EnvAddress) -> None:
    config = start.config
    if config.tools.mcp:
        raise ConfigError(
            f"tools.mcp: the tools of an environment elsewhere run on its server, {at.url}, which starts no programs for its "
            "clients; put the tools into its tool sets (tools.sets)"
        )
    if config.tools.args:
        raise ConfigError(
            f"tools.args: the tools of an environment elsewhere run on its server, {at.url}, which reads no files that its "
            "clients name; leave it out, and give the set to the environment there"
        )
    if config.agent is not None:
        raise ConfigError(
            f"[agent]: its calls go to the tools one by one, and an environment elsewhere ({at.url}) answers whole turns; "
            "run where the environment is (without env.url)"
        )
    card = start.env.card(fresh=True)
    assert card is not None
    most = card["limits"]["episodes"]
    if config.rollout.max_episodes > most:
        raise ConfigError(
            f"rollout.max_episodes = {config.rollout.max_episodes}: {at.url} takes {most} episodes at once; lower it, or "
            f"start the server with --max-episodes {config.rollout.max_episodes} or more"
        )


@RUN_CHECKS.register("remote_env_lines", traits={"plan"})
def remote_lines(start: RunStart) -> list[str]:
    """Describe the environments' servers; [] for local environments."""
    lines = []
    for ref in (EnvRef.of(env, start.config.tools) for env in start.config.envs):
        if ref.at is not None and not ref.at.is_agentrl:
            lines.append(PROTOCOLS[ref.at.protocol].describe(ref.at))
        elif ref.at is not None:
            card = ref.card()
            assert card is not None
            limits, tools = card["limits"], ", ".join(row["function"]["name"] for row in card["toolbox"]["rows"]) or "none"
            there = {"gold solutions": card["gold"], "a teacher": card["teacher"]}
            has = " and ".join(what for what in there if there[what])
            lines += [
                f"environment: {ref.at.url} (agentrl {card['agentrl']}) has {card['env']['id']}, with "
                f"{has or 'no gold solutions'}",
                f"  tools: {tools}",
                f"  at most {limits['episodes']} episodes at once, each closed after {limits['idle']:g} s without a request",
            ]
    return lines
