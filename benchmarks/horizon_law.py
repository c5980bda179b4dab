"""Measure success by the number of calls, and predict long tasks from the faults of short ones.

    python benchmarks/horizon_law.py play CONFIG MODEL --calls 1,2,3,5,8 -n 100 --out evals/NAME
    python benchmarks/horizon_law.py predict evals/NAME --calls 12,20,32      writes benchmarks/learning/horizon/NAME.json
    python benchmarks/horizon_law.py play CONFIG MODEL --calls 12,20,32 -n 100 --out evals/NAME
    python benchmarks/horizon_law.py table evals/NAME ...                      measured against predicted

CONFIG has one [env] with a parameter `calls`; its held-out tasks are played at temperature 0. Tasks of up to 8 calls are fitted.

The law: a call with a context of c tokens fails by kind k at the rate r_k(c) = exp(a_k + b_k log(c / 1000)), as does the end of
the episode. A task of n calls succeeds with probability exp(-sum of the rates of n calls and the end). a and b maximize the
likelihood of a Poisson regression (McCullagh and Nelder, 1989, chapter 6), b with the prior N(0, 1). `constant` has b = 0.
Intervals: 95 %, bootstrap of the episodes for predictions, Wilson's (1927) for measured success.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.config import load_config
from agentrl.env.check import share_interval
from agentrl.run.config_file import find_config_file

HERE = Path(__file__).resolve().parent
FITTED = 8
RESAMPLES = 500
Array = npt.NDArray[np.float64]
Json = dict[str, Any]


class Episode(NamedTuple):
    """`contexts`: tokens before each correct call, then before the turn that failed or ended; `fault`: None after a success."""

    calls: int
    contexts: list[int]
    fault: str | None

    @property
    def good(self) -> int:
        """Return the number of correct calls."""
        return len(self.contexts) - 1


# -- play -----------------------------------------------------------------------------------------------


ENTRY = """[[env]]
name = "calls{calls}"
id = "{id}"
reward = "{reward}"
params = {params}
eval = {{ tasks = {tasks} }}
"""


def play(args: argparse.Namespace) -> int:
    """Run one evaluation with an environment per number of calls; finished episodes are skipped."""
    env, most = load_config(args.config, [], find_config_file).envs[0], max(args.calls)
    text = f'base = "{args.config.resolve()}"\n[rollout]\nmax_turns = {most + 6}\nmax_episode_tokens = {600 + 80 * most}\n'
    text += f"[vllm]\nmax_model_len = {1024 + 128 * most}\n[eval]\ntemperature = 0.0\n"
    for calls in args.calls:
        params = ", ".join(f"{key} = {json.dumps(value)}" for key, value in {**env.params, "calls": calls}.items())
        text += ENTRY.format(calls=calls, id=env.id, reward=env.reward, params=f"{{ {params} }}", tasks=args.tasks)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        out = f"{args.out}/calls_{args.calls[0]}_{most}"
        words = ["eval", "--config", file.name, "--model", str(args.model), "-n", str(args.tasks), "--out", out]
        return subprocess.run([sys.executable, "-m", "agentrl", *words, "~rollout.sampler", "~sft"]).returncode


# -- results of episodes ---------------------------------------------------------------------------------


def episodes(folder: Path) -> list[Episode]:
    """Read the scored episodes of an evaluation."""
    rows = [json.loads(line) for file in sorted(folder.rglob("trajectories.jsonl")) for line in file.read_text().splitlines()]
    return [episode(row) for row in rows if row["success"] is not None]


def episode(row: Json) -> Episode:
    """Find the correct calls of an episode, and its first fault if it failed."""
    left = [(call["name"], call["arguments"]) for call in row["task"]["gold"]["calls"]]
    calls, contexts = len(left), []
    prompt = " ".join(message["content"] for message in row["messages"][:2])
    fault = None
    for turn in row["turns"]:
        contexts.append(turn["prompt_tokens"])
        kind = _fault(turn, left, prompt)
        if kind == "end" or (kind and not row["success"]):
            fault = ("stop" if left else None) if kind == "end" else kind
            break
        elif kind:
            contexts.pop()
    else:
        fault = "stop" if left else "end"  # cut by a limit
    if not row["success"] and fault is None:
        fault = "end"
    return Episode(calls, contexts, None if row["success"] else fault)


def _fault(turn: Json, left: list[tuple[str, Json]], prompt: str) -> str | None:
    """Return the kind of a turn's fault, or None if its calls are correct; those are removed from `left`."""
    made = turn["message"]["tool_calls"]
    if not made:
        return "malformed" if "<tool_call>" in turn["message"]["content"] else "end"
    for call in made:
        wanted = (call["name"], call["arguments"])
        if call["error"]:
            return "malformed"
        if wanted in left:
            left.remove(wanted)
            continue
        same = [arguments for name, arguments in left if name == call["name"]]
        if not left:
            return "end"
        if not same:
            return "choice"
        nearest = max(same, key=lambda gold: sum(gold[key] == value for key, value in call["arguments"].items() if key in gold))
        off = [str(value) for key, value in nearest.items() if call["arguments"].get(key) != value]
        return "copy" if all(value in prompt for value in off) else "memory"
    return None


# -- the law ---------------------------------------------------------------------------------------------


def fit(played: Sequence[Episode], growth: bool) -> dict[str, tuple[float, float]]:
    """Fit (a, b) of each kind that occurred. `growth`: b may differ from 0."""
    calls = np.array([c for one in played for c in one.contexts[: one.good + (one.fault not in (None, "end"))]], float)
    ends = np.array([one.contexts[-1] for one in played if one.fault in (None, "end")], float)
    found = {}
    for kind in sorted({one.fault for one in played if one.fault}):
        exposed = ends if kind == "end" else calls
        failed = np.array([one.contexts[-1] for one in played if one.fault == kind], float)
        found[kind] = _poisson(np.log(exposed / 1000), np.log(failed / 1000), growth)
    return found


def _poisson(exposed: Array, failed: Array, growth: bool) -> tuple[float, float]:
    """Maximize sum over failed of (a + b x) - sum over exposed of exp(a + b x) - b^2 / 2, by Newton's method."""
    center = float(exposed.mean())
    x, y = exposed - center, failed - center
    b = 0.0
    for _ in range(50 if growth else 0):
        weights = np.exp(b * x)
        mean = float((weights * x).sum() / weights.sum())
        spread = float((weights * x**2).sum() / weights.sum()) - mean**2
        step = (float(y.sum()) - len(y) * mean - b) / (len(y) * spread + 1)
        b += max(-1.0, min(1.0, step))
    a = math.log(len(y) / float(np.exp(b * x).sum()))
    return a - b * center, b


def contexts(played: Sequence[Episode]) -> Array:
    """Fit (constant, per call of the task, per call made) by least squares to the tokens before call i of n calls."""
    rows = [(1.0, one.calls, i, c) for one in played for i, c in enumerate(one.contexts)]
    table = np.array(rows)
    found: Array = np.linalg.lstsq(table[:, :3], table[:, 3], rcond=None)[0]
    return found


def predicted(law: dict[str, tuple[float, float]], line: Array, calls: int) -> float:
    """Return the probability of success at `calls` calls."""
    sizes = np.log(np.maximum(line[0] + line[1] * calls + line[2] * np.arange(calls + 1), 1) / 1000)
    total = 0.0
    for kind, (a, b) in law.items():
        rates = np.exp(a + b * sizes)
        total += float(rates[-1] if kind == "end" else rates[:-1].sum())
    return math.exp(-total)


def predict(args: argparse.Namespace) -> int:
    played = [one for one in episodes(args.folder) if one.calls <= FITTED]
    if not played:
        raise SystemExit(f"{args.folder}: no episodes of up to {FITTED} calls. Play them first.")
    line, rng = contexts(played), np.random.default_rng(0)
    laws = {"law": fit(played, True), "constant": fit(played, False)}
    resampled = []
    for _ in range(RESAMPLES):
        drawn = [played[i] for i in rng.integers(len(played), size=len(played))]
        resampled.append({name: fit(drawn, name == "law") for name in laws})
    rows = []
    for n in args.calls:
        row: Json = {"calls": n}
        for name, law in laws.items():
            low, high = np.percentile([predicted(one[name], line, n) for one in resampled], [2.5, 97.5])
            row[name] = [round(float(value), 3) for value in (predicted(law, line, n), low, high)]
        rows.append(row)
    result = {
        "episodes": len(played),
        "success": {n: [sum(one.fault is None for one in group), len(group)] for n, group in _by_calls(played)},
        "faults": Counter(one.fault for one in played if one.fault),
        "calls_made": sum(one.good for one in played),
        "rates": {
            kind: {"at 1,000 tokens": float(f"{math.exp(a):.3g}"), "exponent": round(b, 2)}
            for kind, (a, b) in laws["law"].items()
        },
        "context": [round(float(value), 1) for value in line],
        "predicted": rows,
    }
    file = HERE / "learning" / "horizon" / f"{args.folder.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(file.read_text())
    return 0


def _by_calls(played: Sequence[Episode]) -> Iterator[tuple[int, list[Episode]]]:
    for n in sorted({one.calls for one in played}):
        yield n, [one for one in played if one.calls == n]


# -- measured against predicted --------------------------------------------------------------------------


def table(args: argparse.Namespace) -> int:
    """Print a row per number of calls, and add measured success and faults to the files of the predictions."""
    for folder in args.folders:
        file = HERE / "learning" / "horizon" / f"{folder.name}.json"
        result = json.loads(file.read_text())
        measured = dict(_by_calls(episodes(folder)))
        faults = {n: Counter(one.fault for one in group if one.fault) for n, group in measured.items()}
        for n, group in measured.items():  # other numbers of calls stay as an earlier play measured them
            result.setdefault("measured", {})[str(n)] = [sum(one.fault is None for one in group), len(group)]
            result.setdefault("measured_faults", {})[str(n)] = faults[n]
        file.write_text(json.dumps(result, indent=1) + "\n")
        guesses = {row["calls"]: row for row in result["predicted"]}
        print(f"\n{folder.name}\n\n| calls | n | success, 95 % | law | constant rates | faults |\n|--:|--:|---|---|---|---|")
        for n, group in measured.items():
            hits, guess = sum(one.fault is None for one in group), guesses.get(n)
            laws = (
                [f"{p:.2f} ({low:.2f} to {high:.2f})" for p, low, high in (guess["law"], guess["constant"])]
                if guess
                else ["", ""]
            )
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(faults[n].items()))
            low, high = share_interval(hits, len(group))
            print(f"| {n} | {len(group)} | {hits / len(group):.2f} ({low:.2f} to {high:.2f}) | {laws[0]} | {laws[1]} | {kinds} |")
    return 0


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("play")
    one.add_argument("config", type=Path)
    one.add_argument("model", type=Path)
    one.add_argument("--calls", type=numbers, default=[1, 2, 3, 5, 8])
    one.add_argument("-n", "--tasks", type=int, default=100)
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(work=play)
    two = commands.add_parser("predict")
    two.add_argument("folder", type=Path)
    two.add_argument("--calls", type=numbers, default=[12, 20, 32])
    two.set_defaults(work=predict)
    three = commands.add_parser("table")
    three.add_argument("folders", type=Path, nargs="+")
    three.set_defaults(work=table)
    args = parser.parse_args()
    code: int = args.work(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
