"""Measure the cost of a call in each local sandbox of this machine.

    python benchmarks/sandboxes.py [--calls 60]

One sandbox of each provider, with alternating calls, so that all have the same conditions: `sh` is the command `true`, `python`
the code `1 + 1` with the limits of the python environment, `start` starting and stopping a sandbox with one file. Milliseconds
of wall-clock time, median and 90th percentile. Processor time is not measured: the first process in bubblewrap's namespace ends
with its children, whose time is not reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agentrl.contrib.sandboxes.contract import SANDBOXES, SandboxProvider, SandboxSpec
from agentrl.env.catalog import make_env

PROVIDERS = ("local", "bubblewrap")


async def calls(provider: SandboxProvider) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the timed calls by name; their sandboxes are folders that are removed with this process."""
    shell = await provider.start(SandboxSpec())
    wanted: SandboxSpec = make_env("python", sandbox={"provider": provider.name}).unwrapped.wanted  # type: ignore[attr-defined]
    code = await provider.start(wanted)

    async def started() -> None:
        await (await provider.start(SandboxSpec(files={"a.txt": b"one\n"}))).stop()

    return {"sh": lambda: shell.exec("true"), "python": lambda: code.python("1 + 1"), "start": started}


async def measure(count: int) -> dict[str, dict[str, dict[str, float]]]:
    providers = [SANDBOXES.bind(name, {})() for name in PROVIDERS]
    available = {provider.name: await calls(provider) for provider in providers if provider.unavailable() is None}
    wall: dict[tuple[str, str], list[float]] = {}
    for number in range(count + 1):
        for name, works in available.items():
            for what, work in works.items():
                began = time.perf_counter()
                await work()
                if number:  # the first call probes the machine
                    wall.setdefault((name, what), []).append(time.perf_counter() - began)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (name, what), seconds in wall.items():
        row = {"ms": statistics.median(seconds), "p90_ms": statistics.quantiles(seconds, n=10)[-1]}
        found.setdefault(name, {})[what] = {key: round(1000 * value, 1) for key, value in row.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=60, help="calls per kind and provider")
    load = os.getloadavg()[0]
    found = asyncio.run(measure(parser.parse_args().calls))
    for name, works in found.items():
        for what, row in works.items():
            print(f"{name:12s} {what:7s} {row['ms']:7.1f} ms (p90 {row['p90_ms']:.1f})")
    print(json.dumps({"benchmark": "sandboxes", "load": round(load, 2), **found}))


if __name__ == "__main__":
    main()
