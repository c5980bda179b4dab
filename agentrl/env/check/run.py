"""All checks in order; a failure of one does not affect the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

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


def check_all(subject: Subject, only: Iterable[str] | None = None) -> list[CheckFinding]:
    """Run the checks (those named in `only`) and report every outcome; errors of the environment become findings.

    Raises KeyError for an unknown name in `only`.
    """
    names = list(CHECKS) if only is None else list(only)
    return [_run(name, CHECKS[name], subject) for name in names]


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
