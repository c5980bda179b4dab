"""ToolSandbox's own runner against the suite, on the same scripted turns.

    python benchmarks/parity/toolsandbox.py --source FOLDER [--python PYTHON] [--every 8]

Each scenario that needs no network, every N-th of the augmented ones, is played in these variants: gold turns, nothing said, a
refusal, a call left out, an argument changed, two calls exchanged, all calls in one turn, a tool that is not there. Official: its
`Scenario.play_and_evaluate` with its OpenAI agent and user, whose model is the script. Compared are similarity, turn count and
every tool's answer. Prints counts by category and variant; exit status 1 if anything differs that DOCUMENTED does not have.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.contrib.suites.foreign import foreign
from agentrl.env import Message, ToolCall
from agentrl.env.catalog import find_env

REFUSAL = "I am sorry, but I cannot assist with that."
DOCUMENTED: dict[str, str] = {
    "unknown": "turn count, answers: theirs ends a scenario with an exception, and reports its most messages as turns; ours "
    "plays on without the call and scores it the same, 0",
    "one turn": "the order of answers: of calls that fail in some order, theirs writes the answers in that order, each with the "
    "id of its call; ours gives each call its own",
}
"""By variant: what differs, and why. Similarities never do."""
ADDRESS = re.compile(r" at 0x[0-9A-F]+")  # of an object in memory, which the text of one of its errors shows
HERE = Path(__file__).resolve().parent


def variants(turns: list[Any], rng: random.Random) -> Iterator[tuple[str, list[Any]]]:
    """Gold and what is made of it; a turn is a text or a list of calls [name, arguments]."""
    gold: list[Any] = [turn if isinstance(turn, str) else [turn] for turn in turns]
    calls = [number for number, turn in enumerate(gold) if not isinstance(turn, str)]
    yield "gold", gold
    yield "nothing", []
    yield "refusal", [REFUSAL]
    if calls:
        left = rng.choice(calls)
        yield "left out", gold[:left] + gold[left + 1 :]
        yield "unknown", [*gold[:left], [["no_such_tool", {}]], *gold[left:]]
        yield "argument", [*gold[:left], [changed(gold[left][0], rng)], *gold[left + 1 :]]
    if len(calls) > 1:
        one, two = rng.sample(calls, 2)
        order = list(range(len(gold)))
        order[one], order[two] = two, one
        yield "exchanged", [gold[number] for number in order]
        if len(calls) <= 3:
            yield "one turn", [[gold[number][0] for number in calls], *[turn for turn in gold if isinstance(turn, str)]]


def changed(call: list[Any], rng: random.Random) -> list[Any]:
    name, arguments = call
    if not arguments:
        return [name, {"unheard_of": 1}]
    key = rng.choice(sorted(arguments))
    value = arguments[key]
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else f"{value}x"
    return [name, {**arguments, key: other}]


def ours(env: Any, number: int, turns: list[Any]) -> dict[str, Any]:
    """The same turns through the suite, and silence after them."""
    env.reset(seed=number, options={"split": "all"})
    rest = [turn if isinstance(turn, str) else tuple(ToolCall(*call) for call in turn) for turn in turns]
    while True:
        turn = rest.pop(0) if rest else ""
        message = Message("assistant", turn) if isinstance(turn, str) else Message("assistant", "", turn)
        _, reward, terminated, truncated, _ = env.step(message)
        if terminated or truncated:
            break
    verdict = env.trajectory.state["verdict"]
    told = [result.content for turn in env.trajectory.turns for result in turn.results if result.error is None]
    return {"similarity": reward, "turn_count": verdict["turn_count"], "raised": verdict.get("stopped"), "told": told}


def differences(variant: str, theirs: dict[str, Any], found: dict[str, Any]) -> list[str]:
    wrong = [] if abs(theirs["similarity"] - found["similarity"]) < 1e-9 else ["similarity"]
    documented = DOCUMENTED.get(variant, "")
    if theirs["turn_count"] != found["turn_count"] and "turn count" not in documented:
        wrong.append("turn count")
    shown, told = ([ADDRESS.sub("", text) for text in one["told"]] for one in (theirs, found))
    if "order" in documented:
        shown, told = sorted(shown), sorted(told)
    if "answers: theirs" not in documented and shown != told[: len(shown)]:
        wrong.append("answers")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", required=True)
    parser.add_argument("--python")
    parser.add_argument("--every", type=int, default=8, help="take each N-th of the augmented scenarios (1: all)")
    parser.add_argument("--only", nargs="*", help="variants to play; all by default")
    parser.add_argument("--most", type=int, help="stop after so many scenarios")
    args = parser.parse_args()
    env: Any = find_env("toolsandbox").load()(source=args.source, python=args.python)
    script = HERE / "toolsandbox_official.py"
    official = foreign(env.python, script, (*env.inside.command[3:], str(env.script)))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    idle: dict[str, list[float]] = defaultdict(list)
    golden, wrong, began, taken = Counter[str](), [], time.time(), 0
    for number in range(env.task_count("all")):
        task = env.make_task(number, "all")
        name, base = task.data["name"], task.data["base"]
        if name != base and number % args.every:
            continue
        if args.most is not None and taken >= args.most:
            break
        taken += 1
        turns = env.inside.ask("gold", name=name)
        golden["determined" if turns is not None else "not determined"] += 1
        for variant, played in variants(turns or [], random.Random(name)):
            if args.only and variant not in args.only:
                continue
            theirs = official.ask("official", name=name, turns=played, lines=task.data["says"] - 1)
            found = ours(env, number, played)
            bad = differences(variant, theirs, found)
            counts[variant]["different" if bad else "equal"] += 1
            counts[variant]["full"] += found["similarity"] >= 0.999
            wrong += [f"{name}, {variant}: {', '.join(bad)}: {theirs} against {found}"] if bad else []
            if variant in ("nothing", "refusal"):
                for category in [*task.data["categories"], "ALL"]:
                    idle[f"{category} {variant}"].append(found["similarity"])
    for variant, count in counts.items():
        print(f"{variant:10} {count['equal']:5} equal {count['different']:4} different; {count['full']} with full similarity")
    print(f"gold: {dict(golden)}; {time.time() - began:.0f} s")
    for key, values in sorted(idle.items()):
        full = sum(value >= 0.999 for value in values)
        print(f"{key:45} mean {sum(values) / len(values):.3f}, in full {full} of {len(values)}")
    print("\n".join(wrong[:20]))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
