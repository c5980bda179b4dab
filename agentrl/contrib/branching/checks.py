"""Checks of `[rollout.branch]` before a run."""

from __future__ import annotations

from agentrl.config.schema import AlgorithmConfig, RolloutConfig
from agentrl.contrib.branching.trees import count_places, plant_trees
from agentrl.env import ToolEnv
from agentrl.env.spaces import run_sync
from agentrl.rollout.context import CONTEXTS
from agentrl.rollout.samplers import fresh_seed
from agentrl.run.checks import RUN_CHECKS, RunStart
from agentrl.run.checks.env_checks import each_env
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.utils.errors import AgentrlError, ConfigError

BRANCHES = "branches"


@RUN_CHECKS.register("rollout.branch")
def check_branch(start: RunStart) -> list[str]:
    """Raise ConfigError, naming the obstacle, if branches of episodes are impossible."""
    one = start.config
    if (why := _obstacle(one.rollout, one.algorithm) or fork_obstacle(start)) is not None:
        raise ConfigError(f"rollout.branch ({one.envs[0].called}): {why}")
    return []


def _obstacle(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> str | None:
    branch = rollout.branch
    assert branch is not None
    size, advantage, turns = rollout.group_size, algorithm.advantage.name, f"turns = {branch.turns}"
    if branch.roots >= size:
        begins = f"roots = {branch.roots} of rollout.group_size = {size} members begin at the beginning"
        return f"{begins}, so none would branch; set roots below {size}"
    most = max(map(len, plant_trees(range(size), branch.roots).values()))
    if 1 + most > rollout.max_episodes:
        many = f"a root and its branches are {1 + most} episodes at once, and rollout.max_episodes = {rollout.max_episodes}"
        return f"{many}; raise it, or roots"
    if branch.turns and branch.at != "depth":
        return f'turns are read with at = "depth" alone, and at = "{branch.at}"; leave turns out, or set at = "depth"'
    if branch.turns and max(branch.turns) >= (end := rollout.max_turns):
        return f"{turns} are counted from 0, and rollout.max_turns = {end}: none is above {end - 1}"
    if len(set(branch.turns)) < len(branch.turns):
        return f"{turns} names one twice; several branches of one turn are `width`"
    if len(branch.turns) > (used := count_places(branch, most)):
        only = f"a root has {most} branches, {branch.width} a turn, so only the first {used} are used"
        return f"{turns}, and {only}; take the others out, or raise rollout.group_size"
    if BRANCHES not in ADVANTAGES.entry(advantage).traits:
        wrong = f'algorithm.advantage "{advantage}" compares members as if none shared its beginning with another'
        return f"{wrong}; use one of {ADVANTAGES.that_are(BRANCHES)}"
    if algorithm.kl.coef > 0 and algorithm.kl.where == "reward":
        wrong = 'algorithm.kl.where = "reward" would charge an episode for the turns that its branches are given for nothing'
        return f'{wrong}; use where = "loss"'
    if algorithm.experience is not None:
        return "algorithm.experience keeps whole episodes, and of a branch there is only the end; leave one of the two out"
    if rollout.oversample_members > 1:
        wrong = "rollout.oversample_members drops the members that end last, which branches do by their nature"
        return f"{wrong}; set it to 1, or leave rollout.branch out"
    return None


def fork_obstacle(start: RunStart) -> str | None:
    """Return the reason why no episode can be forked, or None. Forks one of the first task inside an event loop, as a run
    does."""
    rollout, ref = start.config.rollout, start.env
    if start.config.agent is not None:
        return "[agent]: an agent that plays by itself cannot be forked; leave one of the two out"
    if "summarizes" in CONTEXTS.entry(rollout.context.name).traits:
        wrong = f"rollout.context = {rollout.context.name!r}: a summary is sampled before the turn that it makes room for"
        return f"{wrong}, so a branch of that turn would share it; use another, or leave one of the two out"
    if ref.at is not None:
        return f"env.url = {ref.at.url!r}: an environment elsewhere is not forked in a run; leave one of the two out"
    for env in each_env(rollout, ref):
        if env.has_sources:
            return "its tools are of an MCP server, whose state cannot be forked; leave one of the two out"
        if env.user_models():
            return "its user is a model, of whose forks nothing is known before they are paid for; leave one of the two out"
        try:
            run_sync(_fork_once(env, start.config.seed))
        except (AgentrlError, TypeError, ValueError, RuntimeError) as fault:
            return f"environment {env.id} cannot be forked: {type(fault).__name__}: {fault}; leave one of the two out"
    return None


async def _fork_once(env: ToolEnv, seed: int) -> None:
    await env.areset(seed=fresh_seed(seed, 0), options={"split": "train"})
    try:
        await env.fork().aclose()
    finally:
        await env.aclose()
