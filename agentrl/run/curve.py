"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.run.by_env import env_names
from agentrl.run.horizon import key_of, labels_of, order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAIN, EVALUATED = ("train",), ("before", "eval", "after")


def draw_curve(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw success per step (on sampled training tasks, and on held-out tasks at evaluations) into a PNG; of several environments
    a pair of lines each, and the mean of the evaluations. Where tasks differ in their number of calls, a panel below has a pair
    of lines for each number."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = env_names(rows)
    envs: list[str | None] = [*names] if names else [None]
    panels = {env: labels for env in envs if len(labels := _labels(rows, env)) > 1}
    figure = Figure(figsize=(8, 4.5 * (1 + len(panels))), layout="constrained")
    FigureCanvasAgg(figure)
    axes, *below = figure.subplots(1 + len(panels), 1, squeeze=False)[:, 0]
    _draw_all(axes, rows, names, title)
    for part, (env, labels) in zip(below, panels.items(), strict=True):
        _draw_horizons(part, rows, env, labels)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)  # a viewer never reads half an image


def _draw_all(axes: Axes, rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str) -> None:
    train, held = points(rows, TRAIN, "success"), points(rows, EVALUATED, "success")
    if train and not names:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, label="training tasks, sampled")
    for number, name in enumerate(names):
        color, key = f"C{number % 10}", f"env/{name}/success"
        if sampled := points(rows, TRAIN, key):
            axes.plot(*zip(*sampled, strict=True), color=color, linewidth=0.8, alpha=0.6)
        if found := points(rows, EVALUATED, key):
            axes.plot(*zip(*found, strict=True), "o--", color=color, label=f"{name}, held-out tasks")
    if held:
        color, label = ("black", "mean, held-out tasks") if names else ("tab:orange", "held-out tasks")
        axes.plot(*zip(*held, strict=True), "o--", color=color, label=label)
    axes.set(title=title, xlabel="update", ylabel="success rate", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if train or held:
        axes.legend(loc="lower right")


def _draw_horizons(axes: Axes, rows: Sequence[Mapping[str, Any]], env: str | None, labels: Sequence[str]) -> None:
    """Success by the number of calls: held-out tasks with dots, training tasks thin; from dark (short) to light (long)."""
    from matplotlib import colormaps

    for number, label in enumerate(labels):
        color = colormaps["viridis"](0.9 * number / (len(labels) - 1))
        if sampled := points(rows, TRAIN, key_of(label, "success", env)):
            axes.plot(*zip(*sampled, strict=True), color=color, linewidth=0.7, alpha=0.5)
        found = points(rows, EVALUATED, key_of(label, "success", env))
        axes.plot(*zip(*found, strict=True), "o--", color=color, label=label) if found else axes.plot(
            [], color=color, label=label
        )
    of = "" if env is None else f"{env}: "
    axes.set(title=f"{of}by calls of the solution; dots: held-out tasks, thin: training tasks, sampled", xlabel="update")
    axes.set(ylabel="success rate", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(title="calls", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _labels(rows: Sequence[Mapping[str, Any]], env: str | None) -> list[str]:
    drawn = (*TRAIN, *EVALUATED)
    return sorted({label for row in rows if row["phase"] in drawn for label in labels_of(row, env)}, key=order)


def points(rows: Sequence[Mapping[str, Any]], phases: Sequence[str], key: str) -> list[tuple[int, float]]:
    """(step, value) of the rows of these phases in which the key is known."""
    return [(row["step"], row[key]) for row in rows if row["phase"] in phases and row.get(key) is not None]
