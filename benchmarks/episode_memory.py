"""Measure the memory of episodes with separate databases: deep copies, or branches (contrib/toolkit/branches.py).

    python benchmarks/episode_memory.py [--episodes 256] [--mb 3.0] [--copies 32]

A generated shop (users, orders, products; about 3 MB of JSON, as the databases of tau2) is loaded once. In each episode a policy
finds its user by a scan over all users, reads the user's orders, cancels one and adds another; then the episode stays open. The
figures are the growth of the process's resident memory for all episodes together; deep copies would not fit, so a few are made
and the rest is extrapolated. Both are of one run, each in a separate process. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentrl.contrib.toolkit.branches import branch, changes

AIM_MB = 1000.0


def database(megabytes: float) -> dict[str, Any]:
    """Make users, orders and products with seed 0, about so many million characters of JSON."""
    rng = random.Random(0)
    tables: dict[str, Any] = {"users": {}, "orders": {}, "products": {}}
    for number in range(round(megabytes * 360)):
        user, orders = f"user_{number}", [f"#W{number}{k}" for k in range(4)]
        tables["users"][user] = {
            "name": {"first": f"first{number % 97}", "last": f"last{number}"}, "email": f"{user}@example.com", "orders": orders,
            "address": {"street": f"{number} Main Street", "city": "Springfield", "zip": f"{10000 + number}", "country": "USA"},
            "payments": {f"card_{number}": {"source": "credit_card", "brand": "visa", "last_four": f"{number % 10000:04}"}},
        }  # fmt: skip
        for order in orders:
            items = [item(rng) for _ in range(rng.randint(2, 5))]
            tables["orders"][order] = {
                "user": user, "status": rng.choice(["pending", "delivered"]), "items": items, "tracking": [{"ids": [order]}],
                "address": {"street": f"{number} Main Street", "city": "Springfield", "zip": f"{10000 + number}"},
                "paid": [{"amount": sum(part["price"] for part in items)}],
            }  # fmt: skip
    for number in range(50):
        variants = {f"{number}{k}": {"available": k % 3 > 0, "price": 10.0 + k, "options": {"size": k}} for k in range(12)}
        tables["products"][f"p{number}"] = {"name": f"thing {number}", "variants": variants}
    return tables


def item(rng: random.Random) -> dict[str, Any]:
    options = {"color": "red", "size": rng.choice("SML")}
    price = round(rng.uniform(5, 500), 2)
    return {"name": f"thing {rng.randrange(50)}", "id": f"{rng.randrange(10**10)}", "price": price, "options": options}


def play(tables: dict[str, Any], number: int) -> None:
    """Do the work of one episode's tools."""
    email = f"user_{number % len(tables['users'])}@example.com"
    user = [name for name, row in tables["users"].items() if row["email"] == email][-1]
    orders = [tables["orders"][order] for order in tables["users"][user]["orders"]]
    orders[0]["status"] = "cancelled"
    orders[1]["items"].append({"name": "new", "price": 1.0})
    tables["users"][user]["address"]["city"] = "Shelbyville"
    tables["orders"]["#new"] = {"user": user, "status": "pending", "items": []}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def once(how: str, episodes: int, megabytes: float) -> dict[str, float]:
    """Measure the growth of the process by open episodes, seconds per episode, and the size of their final state."""
    base = json.loads(json.dumps(database(megabytes)))
    gc.collect()
    before, start, held = resident_mb(), time.process_time(), []
    for number in range(episodes):
        tables = copy.deepcopy(base) if how == "deepcopy" else branch(base)
        play(tables, number)
        held.append(tables)
    seconds = (time.process_time() - start) / episodes
    state = held[0] if how == "deepcopy" else changes(base, held[0])
    return {"mb": resident_mb() - before, "ms": 1000 * seconds, "state_kb": len(json.dumps(state)) / 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--mb", type=float, default=3.0, help="size of the database as JSON")
    parser.add_argument("--copies", type=int, default=32, help="deep copies that are really made")
    parser.add_argument("--once", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once is not None:
        print(json.dumps(once(args.once[0], int(args.once[1]), args.mb)))
        return
    found = {}
    for how, count in (("deepcopy", args.copies), ("branch", args.episodes)):
        command = [sys.executable, __file__, "--mb", str(args.mb), "--once", how, str(count)]
        found[how] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found[how]["mb"] *= args.episodes / count
        row = found[how]
        print(f"{how:<9}{row['mb']:>8.0f} MB  {row['ms']:>8.2f} ms an episode  state {row['state_kb']:>8.1f} kB", file=sys.stderr)
    ratios = {key: round(found["branch"][key] / found["deepcopy"][key], 4) for key in found["branch"]}
    size = len(json.dumps(database(args.mb))) / 1e6
    result = {"benchmark": "episode_memory", "episodes": args.episodes, "database_mb": round(size, 2), **found, "ratios": ratios}
    print(json.dumps({**result, "of_the_aim": round(found["branch"]["mb"] / AIM_MB, 3)}))


if __name__ == "__main__":
    main()
