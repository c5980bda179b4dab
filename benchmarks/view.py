"""Measure the viewer on a run of many episodes: time to index them, and to answer each request of the page.

    python benchmarks/view.py                       100,000 episodes in 200 files
    python benchmarks/view.py --episodes 10000      a tenth

Episodes have six turns with a call each (about 8 kB per row, as in the quickstart), written as by a run. `index` builds the
whole index in one process; `again` checks unchanged files; `one more` adds one file. Requests go through the API without HTTP,
seven times each: median and maximum, in milliseconds of wall-clock time. Memory is that of this process (RssAnon).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.contrib.view.api import Api
from agentrl.contrib.view.library import Library
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.run.folder import RunFolder

WORDS = [f"word{n}" for n in range(500)]
STOPS = ["done"] * 8 + ["max_turns", "context_full"]


def memory() -> float:
    """Return this process's memory in MiB."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def episode(rng: random.Random, seed: int, member: int) -> Trajectory:
    """Make six turns, each with a call of one of twelve tools, and a reward of two terms."""
    ledger, turns, messages = TokenLedger(), [], [Message("user", f"find {' '.join(rng.sample(WORDS, 12))}")]
    ledger.append_context([rng.randrange(400) for _ in range(60)], 0)
    for index in range(6):
        call = ToolCall(
            f"tool{rng.randrange(12)}", {"key": rng.choice(WORDS), "n": rng.randrange(99)}, "call_0", raw="<call>" * 8
        )
        error = "not_found" if rng.random() < 0.05 else None
        content = f"there is no '{rng.choice(WORDS)}' in row {rng.randrange(99)}" if error else " ".join(rng.sample(WORDS, 10))
        message = Message("assistant", " ".join(rng.sample(WORDS, 6)), (call,))
        ledger.append_sampled([rng.randrange(400) for _ in range(20)], [-rng.random() for _ in range(20)], [3] * 20, index)
        ledger.append_context([rng.randrange(400) for _ in range(20)], index + 1)
        turns.append(
            Turn(index, message, [ToolResult("call_0", call.name, content, None, error, 0.01)], None, 60, 20, 0, 79, 0.5)
        )
        messages += [message, Message("tool", content, tool_call_id="call_0", name=call.name)]
    reward = float(rng.random() < 0.6)
    leaves = [{"node": "text.equals", "at": f"/root/of/{n}", "value": reward, "id": f"term{n}", "evidence": {}} for n in range(2)]
    gold = {"answer": str(seed), "calls": [{"name": "tool1", "arguments": {"key": "word1"}}]}
    out = Trajectory(
        "bench/Env-v0", Task(f"bench/train/{seed}", seed, "train", {"goal": "x"}, gold), seed, member, messages, turns
    )
    out.ledgers, out.reward, out.success, out.env = [ledger], reward, reward == 1, f"env{seed % 3}"
    out.evidence = {"spec": "bench", "value": reward, "root": {"node": "all", "at": "/root", "value": reward, "of": leaves}}
    out.metrics, out.timings = {"term0": reward, "term1": reward}, {"episode_s": rng.random() * 9}
    return out


def write(folder: RunFolder, step: int, count: int, rng: random.Random, made: list[str]) -> None:
    """Write a file of `count` episodes in groups of eight: rows of `made` with new tasks, members and rewards."""

    def rows() -> Any:
        for place in range(count):
            row = json.loads(rng.choice(made))
            seed, reward = step * count + place // 8, float(rng.random() < 0.6)
            row["task"] |= {"id": f"bench/train/{seed}", "seed": seed}
            row |= {"member": place % 8, "reward": reward, "success": reward == 1, "stop": rng.choice(STOPS)}
            yield json.dumps(row) + "\n"

    (folder.trajectories / f"step_{step:06d}.jsonl").write_text("".join(rows()))
    folder.append_metrics({"step": step, "phase": "train", "success": 0.6, "tokens": 120 * count, "scored": count, "unscored": 0})


def page_requests(api: Api, last: int) -> dict[str, Callable[[], Any]]:
    """Return the requests of the page by name."""
    page: Callable[..., Any] = lambda **asked: lambda: api.episodes("run", {key: str(value) for key, value in asked.items()})  # noqa: E731
    return {
        "runs": lambda: api.runs({}),
        "run": lambda: api.run("run", {}),
        "metrics, new rows": lambda: api.metrics("run", {"after": str(last - 1)}),
        "first page": page(),
        "page at the end": page(offset=90_000),
        "page of a step, by reward": page(step=last, sort="reward", order="asc"),
        "page by tokens": page(sort="tokens", order="desc"),
        "page: tool, stop, reward": page(tool="tool3", stop="max_turns", max_reward=0.5),
        "page: two words": page(q="word17 word401"),
        "page: a term below 0.5": page(term="term1<0.5", sort="seconds"),
        "facets": lambda: api.facets("run", {}),
        "groups of a step": lambda: api.groups("run", {"step": str(last)}),
        "failures": lambda: api.failures("run", {}),
        "suspects": lambda: api.suspects("run", {}),
        "two steps compared": lambda: api.compare({"a": "run:1", "b": f"run:{last}"}),
        "one episode": lambda: api.episode("run", f"step_{last:06d}.7", {}),
        "its tokens": lambda: api.tokens("run", f"step_{last:06d}.7", {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=200)
    args = parser.parse_args()
    home, rng = Path(tempfile.mkdtemp(prefix="agentrl-view-")), random.Random(0)
    try:
        folder = RunFolder(home / "run")
        folder.trajectories.mkdir(parents=True)
        folder.config.write_text('name = "run"\nsteps = 200\n[env]\nid = "key_value"\n')
        made = [json.dumps(episode(rng, n, 0).to_json()) for n in range(256)]
        for step in range(1, args.files + 1):
            write(folder, step, args.episodes // args.files, rng, made)
        size = sum(path.stat().st_size for path in folder.trajectories.iterdir())
        library = Library([home])
        [one] = library.scan()
        before = memory()
        print(f"{args.episodes:,} episodes in {args.files} files, {size / 2**20:.0f} MiB")
        for name in ("index", "again", "one more"):
            if name == "one more":
                write(folder, args.files + 1, args.episodes // args.files, rng, made)
            began, cpu = time.perf_counter(), time.process_time()
            library.refresh(one)
            print(f"{name:<28}{time.perf_counter() - began:9.3f} s wall {time.process_time() - cpu:9.3f} s cpu")
        print(f"{'the index on disk':<28}{one.index.path.stat().st_size / 2**20:9.0f} MiB")
        print(f"{'memory for indexing':<28}{memory() - before:9.0f} MiB")
        for name, ask in page_requests(Api(library, envs=False), args.files).items():
            took = []
            for _ in range(7):
                began = time.perf_counter()
                found = json.dumps(ask())
                took.append(1000 * (time.perf_counter() - began))
            print(f"{name:<28}{statistics.median(took):9.1f} ms {max(took):9.1f} ms slowest {len(found) / 1024:9.0f} KiB")
        print(f"{'memory in all':<28}{memory():9.0f} MiB")
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
