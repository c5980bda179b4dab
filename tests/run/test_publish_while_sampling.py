"""Updates while episodes go on: a request that comes while weights arrive waits for them, and no group fails for it."""

from pathlib import Path

import pytest

from tests.conftest import proof
from tests.e2e.inside import config_of, execute, updates
from tests.run.broken_off import TINY

STEPS, STALE = 300, 2


@proof
@pytest.mark.timeout(1800)
def test_no_group_fails_over_300_updates_with_episodes_under_way(tmp_path: Path) -> None:
    more = [f"steps={STEPS}", f"rollout.max_staleness={STALE}", "checkpoint.every=1000", "trajectories_every=1000"]
    run = execute(config_of(tmp_path, "run", *TINY, *more))
    rows = updates(run)
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert {row["groups/failed"] for row in rows} == {0} and {row["unscored"] for row in rows} == {0}
    assert not any(value for row in rows for key, value in row.items() if key.startswith("faults/"))
    ages = [row["staleness_max"] for row in rows]
    assert max(ages) == STALE and sum(age > 0 for age in ages) > STEPS / 2, "nothing was under way when weights came"
