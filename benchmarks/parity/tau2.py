"""tau2-bench: agentrl's verdicts against tau2's own, on gold, do-nothing and corrupted episodes of every task.

    python benchmarks/parity/tau2.py --source ~/tau2-bench --python ~/tau2-bench/.venv/bin/python

Each episode is a script: what the agent says and calls, and what the customer does. It is played twice: here, by the suite and
the spec `tau2`; and by tau2's own orchestrator and evaluator, in tau2's own Python (`tau2_checker.py`). Compared are the reward,
why the episode ended, and the text of every tool result. It prints counts by domain and variant. Exit code 1 if anything differs
that `DOCUMENTED` does not explain, or if a domain has no tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.schema import JudgeConfig
from agentrl.contrib.judges.client import Judge
from agentrl.contrib.judges.leaf import Verdict, VerdictRequest
from agentrl.data.trajectory import Message, Task, ToolCall, Trajectory
from agentrl.env.catalog import EnvRef, find_spec
from agentrl.env.users import ScriptedUser
from agentrl.reward import Context, compile_spec

DOMAINS = ("mock", "airline", "retail", "telecom")
CHECKER = Path(__file__).with_name("tau2_checker.py")
DOCUMENTED = {
    "raises": "an assertion about something absent raises in tau2's evaluator: the episode has no verdict there, and 0 here",
    "goes on": "a customer who is at its own calls when the steps are used up makes them all; 0 in both",
}


@dataclass
class Script:
    """One episode: the agent's messages and the customer's, each {"text"} or {"calls"}; what the judge says; whether it is cut
    before the customer leaves, after so many steps."""

    variant: str
    agent: list[dict[str, Any]]
    user: list[dict[str, Any]]
    judge: bool = True
    max_steps: int = 200


@dataclass
class Tally:
    """Of one domain and variant: episodes, how many of them tau2 pays, differences with a documented cause, and others."""

    episodes: int = 0
    paid: int = 0
    documented: Counter[str] = field(default_factory=Counter)
    differ: list[str] = field(default_factory=list)


def conversation(task: Task, actions: list[dict[str, Any]], texts: list[str], variant: str, **more: Any) -> Script:
    """The actions, each by whom the task says, and then what the agent has to say."""
    agent: list[dict[str, Any]] = []
    user: list[dict[str, Any]] = [{"text": task.data["scenario"]}]
    for number, action in enumerate(actions):
        call = {"name": action["name"], "arguments": action["arguments"]}
        if action["by"] == "assistant":
            agent.append({"calls": [call]})
            continue
        if number and actions[number - 1]["by"] == "user":
            user.insert(-1, {"calls": [call]})
        else:
            agent.append({"text": "Please do the next thing on your side."})
            user += [{"calls": [call]}, {"text": "I have done that."}]
    history = (task.data["start"] or {}).get("message_history") or [{"role": "assistant"}]
    return Script(variant, [*agent, {"text": "\n".join([*texts, "That is all."])}], user[history[-1]["role"] == "user" :], **more)


def scripts(task: Task, writes: list[dict[str, Any]]) -> Iterator[Script]:
    """The variants of a task. `writes`: calls that change something, from other tasks of the domain."""
    rng = random.Random(task.id)
    actions, say = list(task.gold["calls"]), list(task.gold["say"])
    yield conversation(task, actions, say, "gold")
    yield conversation(task, [], [], "nothing")
    yield conversation(
        task, [{"name": "transfer_to_human_agents", "arguments": {"summary": "-"}, "by": "assistant"}], say, "transfer"
    )
    yield conversation(task, [*actions, dict(rng.choice(writes))], say, "extra write")
    yield conversation(task, [unknown(), *actions], say, "unknown tool")
    yield conversation(task, [unknown()] * 10 + actions, say, "ten errors")
    script = conversation(task, actions, say, "cut")
    yield Script("cut", script.agent, script.user, max_steps=len(script.agent))
    if say:
        yield conversation(task, actions, [], "silent")
        yield conversation(task, actions, say[1:], "one thing not said")
        yield conversation(task, actions, [f"{text[:1]},{text[1:]}".upper() for text in say], "said with commas, in capitals")
    if task.gold["outcomes"]:
        yield conversation(task, actions, say, "judge says no", judge=False)
    if actions:
        place = rng.randrange(len(actions))
        yield conversation(task, actions[:place] + actions[place + 1 :], say, "dropped call")
        yield conversation(task, actions[: len(actions) // 2], say, "ended early")
        yield conversation(task, [call for call in actions for _ in range(2)], say, "every call twice")
        yield conversation(task, actions[::-1], say, "other order")
        for name, change in CHANGES.items():
            changed = [change(rng, call) if number == place else call for number, call in enumerate(actions)]
            if changed != actions:
                yield conversation(task, changed, say, name)


def unknown() -> dict[str, Any]:
    return {"name": "no_such_tool", "arguments": {"x": 1}, "by": "assistant"}


def other_value(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    """One argument with another value of its type."""
    if not call["arguments"]:
        return call
    name = rng.choice(sorted(call["arguments"]))
    value = call["arguments"][name]
    if isinstance(value, bool):
        value = not value
    elif isinstance(value, int | float):
        value = value + 1
    else:
        value = value[:-1] if isinstance(value, list) and value else f"{value}x" if isinstance(value, str) else None
    return {**call, "arguments": {**call["arguments"], name: value}}


def as_text(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    """One argument as the text of itself."""
    if not call["arguments"]:
        return call
    name = rng.choice(sorted(call["arguments"]))
    return {**call, "arguments": {**call["arguments"], name: json.dumps(call["arguments"][name])}}


def undeclared(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "arguments": {**call["arguments"], "no_such_argument": 1}}


def missing(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    names = sorted(call["arguments"])
    gone = rng.choice(names) if names else None
    return {**call, "arguments": {name: value for name, value in call["arguments"].items() if name != gone}}


CHANGES = {"changed value": other_value, "value as text": as_text, "undeclared argument": undeclared, "missing argument": missing}


class FixedJudge(Judge):
    """Says the same of everything, as the checker's does."""

    yes = True

    def ask(self, key: str, request: VerdictRequest) -> Verdict:
        return Verdict({"score": float(self.yes), "reason": "fixed"})


class Here:
    """The suite and its spec."""

    def __init__(self, source: str, domain: str, full: bool) -> None:
        ref = EnvRef("tau2", {"source": source, "domain": domain, "full": full})
        self.env: Any = ref.build(scorer=None)
        self.judge = FixedJudge(JudgeConfig())
        context = Context(replay_env=lambda task: ref.build(scorer=None), services={"judge": self.judge})
        self.scorer = compile_spec(find_spec(ref, "tau2"), context=context)

    def tasks(self) -> list[Task]:
        return [self.env.make_task(seed, "all") for seed in range(self.env.task_count("all"))]

    def writes(self, tasks: list[Task]) -> list[dict[str, Any]]:
        """The agent's gold calls that change something: those that decide databases, or where no task compares these (telecom),
        those of tools that do more than read."""
        known = [call for task in tasks for call in task.gold["writes"] if call["by"] == "assistant"]
        if known:
            return known
        self.env.reset(seed=tasks[0].seed, options={"task": tasks[0]})
        reads = {tool.name for tool in self.env.toolbox if tool.options.read_only}
        made = [call for task in tasks for call in task.gold["calls"] if call["by"] == "assistant"]
        return [{key: call[key] for key in ("name", "arguments", "by")} for call in made if call["name"] not in reads]

    def answer(self, task: Task, script: Script) -> dict[str, Any]:
        """What the checker answers, by the suite."""
        lines: list[Any] = [one.get("text") or [ToolCall(**call) for call in one["calls"]] for one in script.user]
        self.env.max_steps, self.judge.yes = script.max_steps, script.judge
        self.env.reset(seed=task.seed, options={"task": task, "user": ScriptedUser(lines)})
        for said in script.agent:
            calls = tuple(ToolCall(**call) for call in said.get("calls", ()))
            if self.env.step(Message("assistant", said.get("text", ""), calls))[2]:
                break
        record: Trajectory = self.env.trajectory
        score = self.scorer.score(record)
        return {"ended": record.state["ended"] if record.state else None, "texts": texts(record), "reward": score.value}


def texts(record: Trajectory) -> list[str]:
    """The texts of all tool results, in the order in which the calls were made."""
    found = [made.result.content for made in record.user_calls if made.turn == -1 and made.result]
    for turn in record.turns:
        found += [result.content for result in turn.results]
        found += [made.result.content for made in record.user_calls if made.turn == turn.index and made.result]
    return found


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """What differs; a name in DOCUMENTED, or what it is; None for nothing."""
    if ours["ended"] == theirs["ended"] == "max_steps" and len(ours["texts"]) > len(theirs["texts"]):
        return "goes on" if ours["texts"][: len(theirs["texts"])] == theirs["texts"] and ours["reward"] == 0.0 else "tool results"
    before = len(theirs["texts"]) - len(ours["texts"])  # those of the task's opening history come first
    if before < 0 or theirs["texts"][before:] != ours["texts"]:
        wrong = next(
            (pair for pair in zip(theirs["texts"][max(before, 0) :], ours["texts"], strict=False) if pair[0] != pair[1]), None
        )
        return f"tool results: {wrong or (len(theirs['texts']), len(ours['texts']))}"
    if ours["ended"] != theirs["ended"]:
        return f"ended: theirs {theirs['ended']}, ours {ours['ended']}"
    if "error" in theirs:
        return "raises" if ours["reward"] == 0.0 else f"theirs raises ({theirs['error']}), ours {ours['reward']}"
    return None if ours["reward"] == theirs["reward"] else f"reward: theirs {theirs['reward']}, ours {ours['reward']}"


def run_domain(args: argparse.Namespace, domain: str) -> dict[str, Tally]:
    """Play and compare every variant of every task of a domain."""
    here = Here(args.source, domain, args.full)
    tasks = here.tasks()
    writes = here.writes(tasks)
    tasks = random.Random(0).sample(tasks, min(args.tasks or len(tasks), len(tasks)))
    asked = [(task, script) for task in tasks for script in scripts(task, writes)]
    requests = [{"domain": domain, "task": task.id.partition("/")[2], **asdict(script)} for task, script in asked]
    with tempfile.TemporaryFile("w+") as questions, tempfile.TemporaryFile("w+") as answers:
        questions.write("".join(json.dumps(one) + "\n" for one in requests))
        questions.seek(0)
        where = {**os.environ, "PYTHONPATH": str(Path(args.source) / "src")}
        theirs = subprocess.Popen(
            [args.python, "-P", CHECKER], stdin=questions, stdout=answers, stderr=subprocess.DEVNULL, env=where
        )
        ours = [here.answer(task, script) for task, script in asked]
        if theirs.wait():
            raise SystemExit(f"tau2's own checker failed: {args.python} {CHECKER}")
        answers.seek(0)
        said = [json.loads(line) for line in answers]
    found: dict[str, Tally] = {}
    for (task, script), mine, other in zip(asked, ours, said, strict=True):
        tally = found.setdefault(script.variant, Tally())
        tally.episodes += 1
        tally.paid += other.get("reward") == 1.0
        if (what := difference(mine, other)) in DOCUMENTED:
            tally.documented[what] += 1
        elif what is not None:
            tally.differ.append(f"{task.id}: {what}")
    return found


def main() -> int:
    """Returns 1 if anything differs without a documented cause."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="the checkout of tau2-bench")
    parser.add_argument("--python", default=sys.executable, help="a Python (3.12 or newer) with tau2's requirements")
    parser.add_argument("--domains", nargs="+", default=DOMAINS, choices=DOMAINS)
    parser.add_argument("--tasks", type=int, help="so many tasks of each domain, drawn by a fixed seed (default: all)")
    parser.add_argument("--full", action="store_true", help="telecom's full set, 2,285 tasks, and not its base set")
    parser.add_argument("--show", type=int, default=5, help="differences to print of each variant")
    args = parser.parse_args()
    wrong = 0
    print(f"{'domain':8} {'variant':28} {'episodes':>8} {'paid':>5} {'equal':>6} {'documented':>10} {'differ':>6}")
    for domain in args.domains:
        total = Tally()
        for variant, tally in run_domain(args, domain).items():
            show(domain, variant, tally)
            print("".join(f"    {line[:400]}\n" for line in tally.differ[: args.show]), end="")
            total = Tally(
                total.episodes + tally.episodes,
                total.paid + tally.paid,
                total.documented + tally.documented,
                total.differ + tally.differ,
            )
        show(domain, "all", total)
        wrong += len(total.differ) + (total.episodes == 0)
    for name, why in DOCUMENTED.items():
        print(f"documented: {name}: {why}")
    return 1 if wrong else 0


def show(domain: str, variant: str, tally: Tally) -> None:
    known = tally.documented.total()
    equal = tally.episodes - known - len(tally.differ)
    print(f"{domain:8} {variant:28} {tally.episodes:8} {tally.paid:5} {equal:6} {known:10} {len(tally.differ):6}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
