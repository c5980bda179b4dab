"""Pages of the manual with tables of measurements, from docs/ and benchmarks/results. `make docs` writes them."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ENGINES = ("embedded", "vllm")
COLUMNS = (
    "model_type", "architecture", "packed", "shared prefix", "2 ranks", "a run", "template", "parser", "embedded", "vLLM",
)  # fmt: skip
Entry = dict[str, Any]


def families_page() -> str:
    """Every causal language model of transformers: results of the probe and of three updates."""
    probes, runs = (json.loads((DOCS / name).read_text()) for name in ("families.json", "family_runs.json"))
    return FAMILIES.format(probes=probe_table(probes), runs=run_table(runs))


def templates_page() -> str:
    """Every chat template that was tried, and the speed of the parsers."""
    lines = (DOCS / "parsers.json").read_text(encoding="utf-8").splitlines()
    parsers = sorted((json.loads(line) for line in lines), key=lambda row: row["syntax"])
    templates = json.loads((DOCS / "templates.json").read_text(encoding="utf-8"))
    return TEMPLATES.format(templates=template_table(templates), parsers=parser_table(parsers))


def floors_page() -> str:
    """Rewards of agents that solve nothing, per environment."""
    from floors import page

    return FLOORS.format(table=page(json.loads((DOCS / "floors.json").read_text(encoding="utf-8"))))


def gpu_page() -> str:
    """Results on GPUs, from benchmarks/results/gpu-*.json."""
    sys.path[:0] = [str(ROOT / "benchmarks" / "parts")]
    from gpu_page import page

    return str(page(ROOT / "benchmarks" / "results"))


def benchmark_book() -> str:
    """Results of `make bench`, a table per claim."""
    return str(runpy.run_path(str(ROOT / "benchmarks" / "book.py"))["page"]())


def probe_table(record: dict[str, Entry]) -> str:
    """Table of the probe's errors per family, then the reasons of families that are not packed."""
    counts = {mode: sum(entry["mode"] == mode for entry in record.values()) for mode in ("packed", "packed, no sharing")}
    single = sum(entry["mode"].startswith("one row") for entry in record.values())
    lines = [
        f"Of {len(record)} families {sum(counts.values())} are packed, {single} computed one row a pass, and "
        f"{sum(entry['mode'] == 'refused' for entry in record.values())} refused.\n",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for name, entry in record.items():
        if entry["mode"] == "refused":
            continue
        cells = [_error(entry.get(key, "")) for key in ("packed", "shared", "ulysses")]
        rest = [str(entry.get(key, "")) for key in ("template", "parser")]
        engine = "yes" if entry.get("embedded") == "yes" else "no"
        lines.append(
            "| "
            + " | ".join([f"`{name}`", entry["architecture"], *cells, entry["mode"], *rest, engine, entry.get("vllm", "")])
            + " |"
        )
    lines += ["", "One row a pass, and why:", ""]
    lines += [f"- `{name}`: {_reason(entry)}" for name, entry in record.items() if entry["mode"] not in ("packed", "refused")]
    lines += ["", "Refused, and why:", ""]
    lines += [f"- `{name}`: {_reason(entry)}" for name, entry in record.items() if entry["mode"] == "refused"]
    return "\n".join(lines) + "\n"


def _reason(entry: Entry) -> str:
    """Return why a family is not packed, without characters that are markup in a page."""
    return str(entry["why"]).replace("`", "'").replace("*", "")


def _error(text: str) -> str:
    """Format an error for a cell; a text is a dash, and listed below the table."""
    try:
        return f"{float(text):.0e}"
    except ValueError:
        return "-" if text else ""


def run_table(record: dict[str, Entry]) -> str:
    """Table of three updates per family and engine, then the reasons of families that were not run."""
    lines = ["| family | rows | embedded | vLLM | alone | stale |", "|---|---|---|---|---|---|"]
    notes = []
    for family, entry in record.items():
        embedded, vllm = (entry.get(engine, {}) for engine in ENGINES)
        ran = [found for found in (embedded, vllm) if "stale" in found]
        cells = [
            ran[0]["packing"] if ran else "",
            _steps(embedded) + ("" if embedded.get("cache", True) else " (no cache)"),
            _steps(vllm),
            f"{max(found['alone'] for found in ran):.0e}" if ran else "",
            f"{min(found['stale'] for found in ran):.2g}" if ran else "",
        ]
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
        notes += [f"- `{family}`, {name}: {found['why']}" for name, found in entry.items() if "why" in found]
    return "\n".join([*lines, "", "No run, and why:", "", *notes]) + "\n"


def _steps(entry: Entry) -> str:
    if "why" in entry:
        return "-"
    return ", ".join(f"{value:.0e}" for value in entry["mismatch_max"]) if entry else ""


def template_table(rows: list[Entry]) -> str:
    """Table of the templates' syntaxes, stop tokens and forks."""
    words = {True: "kept", False: "forks", None: ""}
    lines = [
        "| family | template | parser | tools | a turn ends with | reasoning between | while tools answer | when a user speaks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tools = "yes" if row["tools"] else f"no: {row['why_no_tools']}".replace("|", "\\|")
        plain = (
            "" if row["plain_turn_kept_when_user_speaks"] == row["turn_kept_when_user_speaks"] else " (kept without reasoning)"
        )
        lines.append(
            f"| {row['family']} | {row['package']}, {row['template']} | {row['parser'] or ''} | {tools} | "
            f"{_code(row['stop_tokens'])} | {_code(row['reasoning_marks'])} | {words[row['turn_kept_while_tools_answer']]} | "
            f"{words[row['turn_kept_when_user_speaks']]}{plain} |"
        )
    return "\n".join(lines)


def _code(items: list[str]) -> str:
    return " ".join(f"`{item}`" for item in items).replace("\n", "").replace("|", "\\|")


def parser_table(rows: list[Entry]) -> str:
    """Table of the parsers' core seconds and megabytes."""
    table = ["| syntax | shapes | 1 MB, s | 10 MB, s | growth | memory beyond the text, MB |", "|---|---|---|---|---|---|"]
    for row in rows:
        assert row["megabytes"] == 10
        seconds = f"{row['seconds_1MB']:.3f} | {row['seconds']:.2f} | {row['growth']:.1f}"
        table.append(f"| `{row['syntax']}` | {row['shapes']} | {seconds} | {row['memory_mb']} |")
    return "\n".join(table) + "\n"


FAMILIES = """# Measurements of model families

<!-- written by `make docs` from docs/families.json and docs/family_runs.json -->

[Families of models](families.md) explains the probe. `python .ci/families.py` and `python .ci/family_runs.py` measure.

## The probe

The default config of each class is tried, without dropout (`.ci/specimens.py`). *packed* and *shared prefix*: the largest error
of a log probability over four rows of 11 to 31 tokens. *2 ranks*: the error of log probabilities and gradients when two ranks
share the tokens. *a run*: the mode that `model.packing = "auto"` chooses. *embedded*: the embedded engine serves the family with
its cache. *vLLM*: the largest mismatch in the runs below. An empty cell was not measured.

{probes}
## Three updates

Each family is a tiny random model in float32 on a CPU, trained for three GRPO steps at temperature 0.8. *embedded* and *vLLM*:
the largest difference between the engine's and the trainer's log probability of a sampled token, per step. *alone*: the same
between the engine and transformers in the first step. *stale*: the mismatch if no weights had been published.

{runs}"""
TEMPLATES = """# Measurements of chat templates

<!-- written by `make docs` from docs/templates.json and docs/parsers.json -->

[Chat templates](templates.md) explains the columns. `python tests/render/report_templates.py` and
`python benchmarks/parsers.py > docs/parsers.json` measure.

## Templates

{templates}

## Parsers on hostile turns

The longest time over several hundred texts per syntax that are made to be slow. `growth` is the ratio of ten times the text.
Memory is the most that 10 MB of text took beyond itself.

{parsers}"""
FLOORS = """# Measurements of agents that solve nothing

<!-- written by `make docs` from docs/floors.json -->

[Benchmarks](benchmarks.md#agents-that-solve-nothing) explains the scripts. `python .ci/floors.py` measures.

{table}"""
