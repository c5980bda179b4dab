"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curve(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw success per step (on sampled training tasks, and on held-out tasks at evaluations) into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(row["step"], row["success"]) for row in rows if row["phase"] == "train"]
    held = [(row["step"], row["success"]) for row in rows if row["phase"] in ("before", "eval", "after")]
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, label="training tasks, sampled")
    if held:
        axes.plot(*zip(*held, strict=True), "o--", color="tab:orange", label="held-out tasks")
    axes.set(title=title, xlabel="update", ylabel="success rate", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if train or held:
        axes.legend(loc="lower right")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)  # a viewer never reads half an image
