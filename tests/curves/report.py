"""The table, the picture and the verdict of learning curves."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.curves.variants import VARIANTS

GOOD = 0.9
KEPT = 0.8
"""A curve that climbs must reach GOOD and not fall below this again."""
SLACK = 0.15
"""How far above its start a curve that must fall may come on its way."""
FALSE_ALARM = 0.005
"""How often each of the two rules on the random reward may give an alarm while nothing teaches."""


def tokens_to(curve: list[list[float]], success: float) -> float | None:
    """Tokens sampled up to the first evaluation that reached `success`."""
    return next((tokens for _, tokens, found in curve if found >= success), None)


def verdict(row: dict[str, Any]) -> str | None:
    """What is wrong with a curve, or None. One that must stay is judged with the others only (`control`)."""
    expected = VARIANTS[row["variant"]].expected
    first, last, best = row["curve"][0][2], row["curve"][-1][2], max(point[2] for point in row["curve"])
    if expected == "climbs" and (best < GOOD or last < KEPT):
        return f"must reach {GOOD} and end above {KEPT}: {first:.2f} -> {last:.2f} (best {best:.2f})"
    if expected == "rises" and last <= first:
        return f"must rise: {first:.2f} -> {last:.2f}"
    if expected == "falls" and (last > first / 2 or best > first + SLACK):
        return f"must fall: {first:.2f} -> {last:.2f}"
    return None


class Control(NamedTuple):
    """The runs with a random reward, together: in how many success ended above its start, and the chance of so many; and the
    correlation of reward and success within groups in standard errors, with the chance of one as large."""

    runs: int
    up: int
    up_chance: float
    z: float
    z_chance: float

    @property
    def alarm(self) -> bool:
        return min(self.up_chance, self.z_chance) < FALSE_ALARM

    @property
    def enough(self) -> bool:
        return chance(self.runs, self.runs) < FALSE_ALARM


def control(rows: list[dict[str, Any]]) -> Control:
    """Judge the runs that must stay.

    An update by a coin's advantages is as likely as its opposite, so to first order sampled success ends above its start with
    probability 1/2 at most (far from the start what is random only destroys). Given a seed's warm start, runs with coins of
    their own are independent: at most Binomial(runs, 1/2) are up, however far a single run walks. The runs' z (`leak.py`)
    are standard normal, so their sum over sqrt(runs) is.
    """
    found = [row for row in rows if VARIANTS[row["variant"]].expected == "stays"]
    up = sum(row["curve"][-1][2] > row["curve"][0][2] for row in found)
    z = sum(row["z"] for row in found) / math.sqrt(max(len(found), 1))
    return Control(len(found), up, chance(len(found), up), z, math.erfc(abs(z) / math.sqrt(2)))


def chance(runs: int, up: int) -> float:
    """That a fair coin shows heads `up` times or more in `runs`."""
    return sum(math.comb(runs, k) for k in range(up, runs + 1)) / 2**runs


def unexpected(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each curve that does not do what it must, and one if the random reward teaches."""
    found = [(row, verdict(row)) for row in rows]
    lines = [f"{row['variant']} seed {row['seed']}: {problem}" for row, problem in found if problem]
    return [*lines, f"alarm: {about_control(rows)}"] if control(rows).alarm else lines


def about_control(rows: list[dict[str, Any]]) -> str:
    """The random reward in words."""
    found = control(rows)
    few = "" if found.enough else "; too few runs to judge"
    return (
        f"random reward: success ended above its start in {found.up} of {found.runs} runs (chance {found.up_chance:.4f}), "
        f"reward and success correlate by {found.z:+.2f} standard errors (chance {found.z_chance:.4f}){few}"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A markdown row for each variant; numbers of its seeds, in order, apart by slashes."""
    of = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        of[row["variant"]].append(row)
    heads = [
        "variant",
        "seeds",
        "success before",
        "after",
        "thousand tokens to 0.9",
        "updates",
        "rewrites an episode",
        "groups failed",
        "CPU s",
        "as it must",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in (name for name in VARIANTS if name in of):
        runs = of[name]
        reached = [tokens_to(run["curve"], GOOD) for run in runs]
        cells = [
            name,
            _join(run["seed"] for run in runs),
            _join(f"{run['curve'][0][2]:.2f}" for run in runs),
            _join(f"{run['curve'][-1][2]:.2f}" for run in runs),
            _join("-" if tokens is None else f"{tokens / 1000:.0f}" for tokens in reached),
            _join(run["updates"] for run in runs),
            _join(f"{run['ledgers']:.1f}" for run in runs),
            _join(run["failed_groups"] for run in runs),
            _join(f"{run['cpu_s']:.0f}" for run in runs),
            _judged(name, runs, rows),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def picture(rows: list[dict[str, Any]], file: Path) -> None:
    """All curves in a grid: held-out success against thousand tokens sampled, one panel a variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    if not names:
        return
    wide = min(6, len(names))
    figure, panels = pyplot.subplots(
        math.ceil(len(names) / wide),
        wide,
        squeeze=False,
        sharey=True,
        layout="constrained",
        figsize=(2.4 * wide, 1.9 * math.ceil(len(names) / wide)),
    )
    for panel, name in zip(panels.flat, names, strict=False):
        for row in rows:
            if row["variant"] == name:
                panel.plot([point[1] / 1000 for point in row["curve"]], [point[2] for point in row["curve"]], lw=1)
        panel.set_title(f"{name}{'' if VARIANTS[name].expected == 'climbs' else f' ({VARIANTS[name].expected})'}", fontsize=8)
        panel.set_ylim(0, 1.02)
        panel.axhline(GOOD, lw=0.5, color="gray")
        panel.tick_params(labelsize=6)
    for panel in list(panels.flat)[len(names) :]:
        panel.axis("off")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _judged(name: str, runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Whether a variant does what it must; the runs of all coins have one answer."""
    if VARIANTS[name].expected != "stays":
        return "yes" if not unexpected(runs) else "**no**"
    found = control(rows)
    return "**no**" if found.alarm else "yes" if found.enough else "too few runs"


def _join(values: Any) -> str:
    return " / ".join(str(value) for value in values)
