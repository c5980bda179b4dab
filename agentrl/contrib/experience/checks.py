"""Checks of `[algorithm.experience]`, `[algorithm.demonstrations]` and `[algorithm.distillation]` before a run."""

from __future__ import annotations

from agentrl.config.envs import trained_at_all
from agentrl.env.catalog import EnvRef
from agentrl.run.checks import RUN_CHECKS, RunStart
from agentrl.run.checks.env_checks import gold_obstacle
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.losses import POLICY_LOSSES
from agentrl.utils.errors import ConfigError


@RUN_CHECKS.register("algorithm.experience")
def check_experience(start: RunStart) -> list[str]:
    """Raise ConfigError if kept episodes could not be used as the section says.

    Reads: algorithm, env.advantage, rollout.max_staleness.
    """
    one = start.config
    algorithm, staleness = one.algorithm, one.rollout.max_staleness
    experience = algorithm.experience
    assert experience is not None
    if experience.max_age <= staleness:
        raise ConfigError(
            f"algorithm.experience.max_age = {experience.max_age}: an episode may be rollout.max_staleness = "
            f"{staleness} updates old when it is first trained on, so it would be forgotten before it is "
            f"drawn; set max_age to at least {staleness + 1}"
        )
    if experience.term != "policy" or not trained_at_all(one.envs[0].weight):
        return []
    why, loss, advantage = None, POLICY_LOSSES.entry(algorithm.loss.name), algorithm.advantage.name
    if "values" in ADVANTAGES.entry(advantage).needs:
        why = f'algorithm.advantage "{advantage}" is of a critic, and what that says of an old episode has changed since'
    elif algorithm.correction is None and "own_samples" in loss.traits:
        why = (
            f'algorithm.loss "{loss.name}" has no ratio to the policy that sampled; set a loss with one, as "ppo_clip", or '
            'algorithm.proximal = "recompute" with an algorithm.correction'
        )
    elif algorithm.proximal == "recompute" and algorithm.correction is None and "importance_weighted" not in loss.traits:
        why = (
            'algorithm.proximal = "recompute" takes ratios to the weights at the start of the update, so nothing corrects for '
            'those that sampled an old episode; set an algorithm.correction, the loss "decoupled_ppo", or proximal = "behaviour"'
        )
    if why is not None:
        raise ConfigError(f'algorithm.experience.term = "policy": {why}; or set term = "supervised"')
    return []


@RUN_CHECKS.register("algorithm.distillation")
def check_distillation(start: RunStart) -> list[str]:
    """Raise ConfigError if a part of the config would drop or keep what only the teacher tells apart.

    Reads: algorithm, rollout.filter_zero_variance.
    """
    if start.config.rollout.filter_zero_variance:
        raise ConfigError(
            "rollout.filter_zero_variance drops groups whose rewards are equal, from which algorithm.distillation learns as "
            "from any other; unset one of the two"
        )
    kept = start.config.algorithm.experience
    if kept is not None and kept.term == "policy":
        raise ConfigError(
            'algorithm.experience.term = "policy" trains kept episodes with the advantages that they had, and what '
            'algorithm.distillation adds is of the policy as it was; set term = "supervised", or unset one of the two'
        )
    return []


@RUN_CHECKS.register("algorithm.demonstrations")
def check_demonstrations(start: RunStart) -> list[str]:
    """Raise ConfigError, naming the obstacle, if there is no gold solution that an update could show.

    Reads: algorithm.demonstrations, rollout.context, rollout.sampler, env, tools.sets, tools.mcp, agent, seed.
    """
    one = start.config
    if not trained_at_all(one.envs[0].weight):
        return []
    why = gold_obstacle(
        one,
        EnvRef.of(one),
        "writes prompts of its own, which a gold solution does not have",
        "a gold solution has no summaries, which the policy would write",
        played=False,
    )
    if why is not None:
        raise ConfigError(f"algorithm.demonstrations ({one.envs[0].called}): {why}; leave algorithm.demonstrations out")
    return []
