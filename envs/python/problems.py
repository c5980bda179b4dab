"""Problem families: each proposes a statement, the answer, a solution in Python, and the files that it reads.

The answer is computed here, by a different method than the solution if that is cheap; the scripted gold
policy runs the solution in the sandbox.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date

from agentrl.data.trajectory import Json


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem; `answer` is an integer, `solution` prints it."""

    family: str
    statement: str
    answer: int
    solution: str
    files: dict[str, str] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Two problems are the same if their statements and files are."""
        return "\n".join([self.statement, *(f"{name}\n{text}" for name, text in sorted(self.files.items()))])


Family = Callable[[random.Random], Problem]


def _code(text: str, **values: Json) -> str:
    """A solution with its values filled in; `@name@` is a placeholder."""
    code = textwrap.dedent(text).strip("\n")
    for name, value in values.items():
        code = code.replace(f"@{name}@", repr(value))
    return code


# -- level 1: one formula or one loop ----------------------------------------------------------------


def digit_sum(rng: random.Random) -> Problem:
    base, power = rng.randint(2, 40), rng.randint(30, 300)
    answer = sum(map(int, str(base**power)))
    return Problem(
        "digit_sum",
        f"What is the sum of the decimal digits of {base} to the power of {power}?",
        answer,
        _code("print(sum(int(c) for c in str(@base@ ** @power@)))", base=base, power=power),
    )


def prime_count(rng: random.Random) -> Problem:
    low = rng.randint(1000, 8000)
    high = low + rng.randint(800, 4000)
    modulus = rng.choice([3, 4, 5, 7, 8])
    rest = rng.choice([r for r in range(1, modulus) if modulus % 2 or r % 2])
    sieve = bytearray([1]) * (high + 1)
    for i in range(2, int(high**0.5) + 1):
        if sieve[i]:
            sieve[i * i :: i] = bytes(len(range(i * i, high + 1, i)))
    answer = sum(1 for n in range(low, high + 1) if sieve[n] and n % modulus == rest)
    code = """
        def is_prime(n):
            if n < 2:
                return False
            d = 2
            while d * d <= n:
                if n % d == 0:
                    return False
                d += 1
            return True
        print(sum(1 for n in range(@low@, @high@ + 1) if n % @modulus@ == @rest@ and is_prime(n)))
    """
    return Problem(
        "prime_count",
        f"How many prime numbers p with {low} <= p <= {high} leave the remainder {rest} when divided by {modulus}?",
        answer,
        _code(code, low=low, high=high, modulus=modulus, rest=rest),
    )


def fridays(rng: random.Random) -> Problem:
    first = rng.randint(1900, 2000)
    last = first + rng.randint(12, 90)
    day = rng.randint(1, 28)
    weekday = rng.randrange(7)
    names = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    answer = sum(date(year, month, day).weekday() == weekday for year in range(first, last + 1) for month in range(1, 13))
    code = """
        from datetime import date
        months = [date(y, m, @day@) for y in range(@first@, @last@ + 1) for m in range(1, 13)]
        print(sum(day.weekday() == @weekday@ for day in months))
    """
    return Problem(
        "fridays",
        f"From January {first} to December {last}, in how many months is day {day} a {names[weekday]}?",
        answer,
        _code(code, day=day, weekday=weekday, first=first, last=last),
    )


# -- level 2: simulation, counting, reading a file ---------------------------------------------------


def generator(rng: random.Random) -> Problem:
    modulus = rng.randint(10_000, 1_000_000)
    a, c, x = (rng.randint(2, modulus - 1) for _ in range(3))
    steps = rng.randint(500, 5000)
    answer = x
    for _ in range(steps):
        answer = (a * answer + c) % modulus
    code = """
        x = @x@
        for _ in range(@steps@):
            x = (@a@ * x + @c@) % @modulus@
        print(x)
    """
    return Problem(
        "generator",
        f"A sequence starts with {x}. Each next term is ({a} times the term plus {c}) modulo {modulus}. "
        f"What is the term after {steps} steps?",
        answer,
        _code(code, x=x, steps=steps, a=a, c=c, modulus=modulus),
    )


def subset_count(rng: random.Random) -> Problem:
    numbers = sorted(rng.sample(range(2, 60), rng.randint(12, 18)))
    target = rng.randint(sum(numbers) // 4, sum(numbers) // 2)
    ways = [1] + [0] * target
    for number in numbers:
        for total in range(target, number - 1, -1):
            ways[total] += ways[total - number]
    code = """
        numbers, target = @numbers@, @target@
        ways = {0: 1}
        for number in numbers:
            for total, count in list(ways.items()):
                ways[total + number] = ways.get(total + number, 0) + count
        print(ways.get(target, 0))
    """
    return Problem(
        "subset_count",
        f"How many subsets of {{{', '.join(map(str, numbers))}}} add up to exactly {target}?",
        ways[target],
        _code(code, numbers=numbers, target=target),
    )


def sales(rng: random.Random) -> Problem:
    regions, items = ["north", "south", "east", "west"], ["pen", "ink", "pad", "cap"]
    rows = [(rng.choice(regions), rng.choice(items), rng.randint(1, 40), rng.randint(2, 99)) for _ in range(rng.randint(60, 200))]
    item = rng.choice(items)
    totals = {r: sum(n * p for region, i, n, p in rows if region == r and i == item) for r in regions}
    text = "region,item,units,price\n" + "".join(f"{r},{i},{n},{p}\n" for r, i, n, p in rows)
    code = """
        import csv
        totals = {}
        for row in csv.DictReader(open("sales.csv")):
            if row["item"] == @item@:
                totals[row["region"]] = totals.get(row["region"], 0) + int(row["units"]) * int(row["price"])
        print(max(totals.values()))
    """
    return Problem(
        "sales",
        "The file sales.csv lies in your folder. Revenue is units times price. "
        f"What is the revenue of the item {item} in the region where that revenue is highest?",
        max(totals.values()),
        _code(code, item=item),
        {"sales.csv": text},
    )


# -- level 3: dynamic programming and search ---------------------------------------------------------


def grid_paths(rng: random.Random) -> Problem:
    size = rng.randint(8, 14)
    rows = [["#" if rng.random() < 0.15 else "." for _ in range(size)] for _ in range(size)]
    rows[0][0] = rows[-1][-1] = "."
    counts = [0] * size
    for y in range(size):
        for x in range(size):
            if rows[y][x] == "#":
                counts[x] = 0
            elif x == 0:
                counts[x] = 1 if y == 0 else counts[0]
            else:
                counts[x] += counts[x - 1]
    text = "\n".join(map("".join, rows)) + "\n"
    code = """
        from functools import cache
        grid = open("grid.txt").read().split()
        @cache
        def paths(y, x):
            if y < 0 or x < 0 or grid[y][x] == "#":
                return 0
            return 1 if y == x == 0 else paths(y - 1, x) + paths(y, x - 1)
        print(paths(len(grid) - 1, len(grid[0]) - 1))
    """
    return Problem(
        "grid_paths",
        "The file grid.txt lies in your folder: '.' is free, '#' is blocked. How many ways lead from the top "
        "left to the bottom right cell when every step goes one cell right or one cell down?",
        counts[-1],
        _code(code),
        {"grid.txt": text},
    )


def knapsack(rng: random.Random) -> Problem:
    items = [(rng.randint(5, 60), rng.randint(10, 200)) for _ in range(rng.randint(15, 30))]
    room = sum(weight for weight, _ in items) // rng.choice([2, 3, 4])
    best = [0] * (room + 1)
    for weight, value in items:
        for left in range(room, weight - 1, -1):
            best[left] = max(best[left], best[left - weight] + value)
    text = "weight,value\n" + "".join(f"{w},{v}\n" for w, v in items)
    code = """
        items = [tuple(map(int, line.split(","))) for line in open("items.csv").read().split()[1:]]
        best = {0: 0}
        for weight, value in items:
            for used, total in list(best.items()):
                if used + weight <= @room@:
                    best[used + weight] = max(best.get(used + weight, 0), total + value)
        print(max(best.values()))
    """
    return Problem(
        "knapsack",
        "The file items.csv lies in your folder; every item can be taken once. What is the largest total "
        f"value of items whose total weight is at most {room}?",
        best[room],
        _code(code, room=room),
        {"items.csv": text},
    )


def shortest_path(rng: random.Random) -> Problem:
    count = rng.randint(20, 40)
    roads = {(i, i + 1): rng.randint(30, 99) for i in range(count - 1)}
    for _ in range(count * 3):
        a, b = sorted(rng.sample(range(count), 2))
        roads.setdefault((a, b), rng.randint(5, 99) + 12 * (b - a))
    distance = [10**9] * count
    distance[0] = 0
    for _ in range(count):  # Bellman and Ford
        for (a, b), length in roads.items():
            distance[b] = min(distance[b], distance[a] + length)
            distance[a] = min(distance[a], distance[b] + length)
    lines = [f"{a} {b} {length}" for (a, b), length in roads.items()]
    rng.shuffle(lines)
    code = """
        import heapq
        roads = {}
        for line in open("roads.txt"):
            a, b, length = map(int, line.split())
            roads.setdefault(a, []).append((b, length))
            roads.setdefault(b, []).append((a, length))
        queue, seen = [(0, 0)], set()
        while queue:
            far, town = heapq.heappop(queue)
            if town == @goal@:
                print(far)
                break
            if town not in seen:
                seen.add(town)
                for other, length in roads[town]:
                    heapq.heappush(queue, (far + length, other))
    """
    return Problem(
        "shortest_path",
        "Each line of the file roads.txt in your folder is a road: town, town, length; roads go both ways. "
        f"How long is the shortest way from town 0 to town {count - 1}?",
        distance[-1],
        _code(code, goal=count - 1),
        {"roads.txt": "\n".join(lines) + "\n"},
    )


FAMILIES: dict[int, tuple[Family, ...]] = {
    1: (digit_sum, prime_count, fridays),
    2: (generator, subset_count, sales),
    3: (grid_paths, knapsack, shortest_path),
}
