"""Lint of a run's reward specs before it starts: the spec alone, and what it pays gold, idle and spam episodes.

Only what makes a run pointless is refused: a spec that cannot do what it says, gold that cannot be scored, and doing nothing paid
like gold. All else is a warning (docs/debugging.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from agentrl.catalog import EnvRef
from agentrl.catalog.scoring import spec_word
from agentrl.config import TrainConfig
from agentrl.config.envs import the_env
from agentrl.env.wrapper import WRAPPERS
from agentrl.errors import ConfigError
from agentrl.reward import Scorer
from agentrl.reward.lint import LintFinding, lint_idle, lint_probes, lint_spec, reads_samples, whatever_judged
from agentrl.reward.probes import probe_episodes
from agentrl.run.checks.reward import in_daemon_thread

TASKS = 3
SECONDS = 2.0
"""No probe is begun after so many seconds, so that an environment that starts slowly costs a run little more than its gold."""

UNSAID = frozenset({"never-varies", "escapes-scoring"})
"""Codes that say little before a run: a part is at its best in every probe, as a format that no script violates; an episode
without a single turn is unscored, which no policy can play."""
AMOUNTS = frozenset({"gold-below-maximum", "spam-passes", "do-nothing-floor"})
"""Codes that compare what episodes earn."""
REFUSED = frozenset({"gold-unscored", "gold-no-success", "idle-paid"})
"""Codes of findings in probes that end a run before it starts."""


def check_lint(config: TrainConfig, env: EnvRef, scorer: Scorer) -> list[str]:
    """What is suspicious about the reward spec, a line each. Raises ConfigError, with the places in the spec, for faults.

    Environments elsewhere and agents with tools of their own are linted without episodes, and that is said. Judges are not asked:
    what is found holds whatever they say, and their leaves are named.

    Reads: health.lint, env, tools, agent, rollout.env_timeout, rollout.episode_timeout.
    """
    if not config.health.lint:
        return []
    findings = lint_spec(scorer)
    word = spec_word(env, the_env(config).reward, scorer)
    _refuse(scorer, f"{word} --env {env.id}", [item for item in findings if item.level == "error"])
    why = _not_probed(config, env, scorer)
    if why is not None:
        return [*_lines(scorer, findings), f"reward spec {scorer.name!r} is not tried on episodes before the start: {why}"]
    try:
        probed = _probed(config, env, scorer)
    except Exception as error:  # the environment's own code; where gold is played, `check_success` has named its fault
        return [*_lines(scorer, findings), f"reward spec {scorer.name!r}: probe episodes of {env.id} failed: {error}"]
    _refuse(scorer, f"{word} --env {env.id}", [item for item in probed if item.code in REFUSED])
    return _lines(scorer, [*findings, *probed])


def _not_probed(config: TrainConfig, env: EnvRef, scorer: Scorer) -> str | None:
    if env.at is not None:
        return f"the environment is at {env.at.url}"
    if config.agent is not None and config.agent.tools == "own":
        return "the agent has tools of its own, which no script plays"
    return None


def _probed(config: TrainConfig, env: EnvRef, scorer: Scorer) -> list[LintFinding]:
    # A script cannot try again if a tool fails at random, as a policy can.
    kept = [choice for choice in env.wrappers if "chance_faults" not in WRAPPERS.entry(choice.name).traits]
    sound, until = replace(env, wrappers=kept).scripted(), time.monotonic() + SECONDS

    def probe() -> list[LintFinding]:
        built = sound.build()
        order_free, idle_share = built.order_free, built.idle_share
        built.close()
        probes = probe_episodes(sound.build, TASKS, enough=lambda: time.monotonic() > until, gold_needed=False)
        unsaid = UNSAID | (AMOUNTS if reads_samples(scorer) else frozenset())

        def lint(one: Scorer) -> list[LintFinding]:
            found = lint_probes(one, probes, order_free, idle_share)
            return [*lint_idle(one, probes, idle_share), *(item for item in found if item.code not in unsaid)]

        return whatever_judged(scorer, probes, lint)

    limit = config.rollout.env_timeout + config.rollout.episode_timeout
    return in_daemon_thread(probe, limit)


def _refuse(scorer: Scorer, words: str, faults: Iterable[LintFinding]) -> None:
    if told := [f"{item.at}: {item.message}" for item in faults]:
        raise ConfigError(
            f"env.reward: reward spec {scorer.name!r}: {'; '.join(told)}. `agentrl reward lint {words}` "
            "shows more; health.lint = false starts the run all the same"
        )


def _lines(scorer: Scorer, findings: Iterable[LintFinding]) -> list[str]:
    return [f"reward spec {scorer.name!r} at {item.at}: {item.message}" for item in findings]
