"""Draw the curves of runs: held-out success, and what the updates report, in a light and a dark picture.

    python benchmarks/run_curves.py OUT benchmarks/learning/bfcl_mixed_seed1 [RUN...]    writes OUT_light.png and OUT_dark.png

A curve of updates is the mean of the last five; points of held-out success are joined by lines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MEAN_OF = 5
PANELS = {
    "success": "success of trained episodes",
    "response_length/mean": "tokens per answer",
    "entropy": "entropy per token",
    "mismatch_kl": "KL of sampler and trainer",
    "staleness_mean": "mean staleness, updates",
}
THEMES = {
    "light": {"ground": "#ffffff", "ink": "#1f2328", "lines": ("#0969da", "#bc4c00", "#1a7f37", "#8250df")},
    "dark": {"ground": "#0d1117", "ink": "#e6edf3", "lines": ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff")},
}


def rows_of(run: Path, *phases: str) -> dict[int, dict[str, Any]]:
    """Read a run's metrics of these phases, by update; of an update that was repeated, the last."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["step"]: row for row in rows if row["phase"] in phases}


def smooth(values: list[float]) -> list[float]:
    """Return the mean of each value and up to MEAN_OF - 1 before it."""
    return [float(np.mean(values[max(0, end - MEAN_OF) : end])) for end in range(1, len(values) + 1)]


def draw(runs: list[Path], env: str, theme: dict[str, Any]) -> Figure:
    """Draw one panel per measure, and one line per run."""
    figure = Figure(figsize=(10, 5), layout="constrained", facecolor=theme["ground"])
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flat
    for axis, title in zip(axes, ["held-out success", *PANELS.values()], strict=True):
        axis.set_title(title, fontsize=10, color=theme["ink"])
        axis.set_facecolor(theme["ground"])
        axis.tick_params(colors=theme["ink"], labelsize=8)
        axis.spines[:].set_color(theme["ink"])
        axis.grid(alpha=0.2, color=theme["ink"])
    for run, color in zip(runs, theme["lines"], strict=False):
        held = {step: row[f"env/{env}/success"] for step, row in rows_of(run, "before", "eval", "after").items()}
        axes[0].plot([*held], [*held.values()], "o-", color=color, markersize=4, linewidth=1.2, label=run.name)
        trained = rows_of(run, "train")
        for axis, key in zip(axes[1:], PANELS, strict=True):
            points = {step: row[key] for step, row in sorted(trained.items()) if row.get(key) is not None}
            axis.plot([*points], smooth([*points.values()]), color=color, linewidth=1.2)
    axes[0].legend(fontsize=8, labelcolor=theme["ink"], facecolor=theme["ground"], edgecolor=theme["ink"])
    figure.supxlabel("updates", fontsize=9, color=theme["ink"])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--env", default="test", help="environment of the held-out tasks (default: test)")
    args = parser.parse_args()
    if len(args.runs) > len(THEMES["light"]["lines"]):
        parser.error(f"runs: {len(args.runs)} given. Draw at most {len(THEMES['light']['lines'])}.")
    for name, theme in THEMES.items():
        draw(args.runs, args.env, theme).savefig(args.out.with_name(f"{args.out.name}_{name}.png"), dpi=110)


if __name__ == "__main__":
    main()
