"""All checks in order; a failure of one does not affect the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from agentrl.env.check.contract import check_contract, check_process, check_seeds, check_splits
from agentrl.env.check.faults import check_crash, check_hang, check_teardown
from agentrl.env.check.fuzz import check_fuzz
from agentrl.env.check.isolation import check_fork, check_instances
from agentrl.env.check.leaks import check_leaks
from agentrl.env.check.report import CheckFailed, CheckFinding, Skipped, Subject
from agentrl.env.check.scores import check_exploits, check_gold, check_order

Check = Callable[[Subject], str]

CHECKS: dict[str, Check] = {
    "contract": check_contract,
    "same seed": check_seeds,
    "same seed elsewhere": check_process,
    "splits apart": check_splits,
    "gold scores most": check_gold,
    "idling scores nothing": check_exploits,
    "free order": check_order,
    "fuzzed calls": check_fuzz,
    "instances apart": check_instances,
    "fork": check_fork,
    "hang": check_hang,
    "crash": check_crash,
    "teardown": check_teardown,
    "no gold shown": check_leaks,
}


AT_ONCE = 4
"""Checks that run at the same time, of an environment whose episodes start programs: most of the time they wait for these."""


def check_all(
    subject: Subject, only: Iterable[str] | None = None, report: Callable[[CheckFinding], None] = lambda finding: None
) -> list[CheckFinding]:
    """Run the checks (those named in `only`) and report every outcome; errors of the environment become findings. `report` is
    called with each as it is found.

    Raises KeyError for an unknown name in `only`.
    """
    checks = {name: CHECKS[name] for name in (CHECKS if only is None else only)}
    found: dict[str, CheckFinding] = {}
    waiting = iter(list(checks.items()))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                name, check = next(waiting, ("", None))
            if check is None:
                return
            finding = _run(name, check, subject)
            with lock:
                found[name] = finding
                report(finding)

    if not subject.light:
        work()
    else:
        threads = [threading.Thread(target=work, daemon=True, name="agentrl-check") for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [found[name] for name in checks]


def limit_to(subject: Subject, seconds: float = 30.0) -> Subject:
    """With fewer tasks and inputs if each episode starts a program, so that all checks take about `seconds`. Raises EnvError if
    an episode does not start."""
    env = subject.build()
    if not env.has_sources:
        return subject
    began = time.perf_counter()
    env.reset(seed=0)
    tools = max(1, len(env.toolbox))
    env.close()
    # Episodes of a server of 0.6 s take two cores 0.3 s each; about 30 are played whatever the number of tasks, and 20 for each.
    episodes = seconds / (time.perf_counter() - began)
    tasks = max(1, min(subject.tasks, int((episodes - 30) / 20)))
    fuzz = subject.fuzz if tasks == subject.tasks else min(subject.fuzz, max(9, 100 // tools))
    return replace(subject, tasks=tasks, fuzz=fuzz, light=True)


def _run(name: str, check: Check, subject: Subject) -> CheckFinding:
    began = time.perf_counter()
    ok: bool | None
    try:
        ok, evidence = True, check(subject)
    except CheckFailed as failure:
        ok, evidence = False, str(failure)
    except Skipped as reason:
        ok, evidence = None, str(reason)
    except Exception as fault:
        # The environment is the code under test, so anything that it raises is a finding.
        ok, evidence = False, f"raised {type(fault).__name__}: {fault}"
    return CheckFinding(name, ok, evidence, time.perf_counter() - began)
