"""Checks of an environment elsewhere: its server is there, has that environment, and takes as many episodes as the run plays."""

from __future__ import annotations

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.config.envs import each
from agentrl.errors import ConfigError


def check_remote(config: TrainConfig) -> None:
    """Raise a UserError if the environment's server cannot be reached, speaks another protocol, has another environment, refuses
    its parameters, wrappers or tool sets, or takes fewer episodes at once than the run plays; or if an
    agent of the user's would play there.

    Reads: env, tools, agent, rollout.max_episodes, sft.
    """
    ref = EnvRef.of(config)
    if ref.at is None:
        return
    if not ref.at.ours:
        from agentrl.env.integrations.openenv import action_schema

        action_schema(ref.at.url, ref.at.token())
        return
    if config.tools.mcp:
        raise ConfigError(
            f"tools.mcp: the tools of an environment elsewhere run on its server, {ref.at.url}, which starts no programs for its "
            "clients; put the tools into its tool sets (tools.sets)"
        )
    if config.tools.args:
        raise ConfigError(
            f"tools.args: the tools of an environment elsewhere run on its server, {ref.at.url}, which reads no files that its "
            "clients name; leave it out, and give the set to the environment there"
        )
    if config.agent is not None:
        raise ConfigError(
            f"[agent]: its calls go to the tools one by one, and an environment elsewhere ({ref.at.url}) answers whole turns; "
            "run where the environment is (without env.url)"
        )
    card = ref.card(fresh=True)
    assert card is not None
    most = card["limits"]["episodes"]
    if config.rollout.max_episodes > most:
        raise ConfigError(
            f"rollout.max_episodes = {config.rollout.max_episodes}: {ref.at.url} takes {most} episodes at once; lower it, or "
            f"start the server with --max-episodes {config.rollout.max_episodes} or more"
        )
    if config.sft is not None and not card["teacher"]:
        raise ConfigError(f"env.id: {card['env']['id']} at {ref.at.url} has no teacher, so [sft] cannot warm a model up on it")


def remote_lines(config: TrainConfig) -> list[str]:
    """What the environment's server says of itself, for `--dry-run`; nothing for environments that are here."""
    return [line for one in each(config) for line in _lines(EnvRef.of(one))]


def _lines(ref: EnvRef) -> list[str]:
    if ref.at is None:
        return []
    if not ref.at.ours:
        from agentrl.env.integrations.openenv import action_schema

        fields = ", ".join(action_schema(ref.at.url, ref.at.token()).get("properties", {})) or "none"
        return [f"environment: {ref.at.url} (OpenEnv); fields of an action: {fields}"]
    card = ref.card()
    assert card is not None
    limits, tools = card["limits"], ", ".join(row["function"]["name"] for row in card["toolbox"]["rows"]) or "none"
    has = " and ".join(name for name, there in (("gold solutions", card["gold"]), ("a teacher", card["teacher"])) if there)
    return [
        f"environment: {ref.at.url} (agentrl {card['agentrl']}) has {card['env']['id']}, with {has or 'no gold solutions'}",
        f"  tools: {tools}",
        f"  at most {limits['episodes']} episodes at once, each closed after {limits['idle']:g} s without a request",
    ]
