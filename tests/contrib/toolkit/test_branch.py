"""A branch of a large state behaves as a deep copy of it, changes nothing but itself, and holds only what was touched."""

import copy
import heapq
import json
import pickle
import random
import sys
import threading
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel

from agentrl.contrib.toolkit.branches import BranchDict, branch, changes, differences, looking
from agentrl.data.trajectory import Task

from tests.env.toyenvs import Notes  # isort: skip


def base_of(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice([None, True, 1, 2.5, "a", "b"])
    if kind < 0.5:
        return [base_of(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {f"k{i}": base_of(rng, depth - 1) for i in range(rng.randrange(5))}


def places(tree: Any, found: list[tuple[Any, ...]], here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all dictionaries and lists."""
    if isinstance(tree, dict | list):
        found.append(here)
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            places(tree[key], found, (*here, key))
    return found


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def act(node: Any, how: int, rng: random.Random) -> Any:
    """One of the things that may be done to a dictionary or a list, by its number; what it answers, or the error's name."""
    new = base_of(rng, 1)
    key = rng.choice([*(node if isinstance(node, dict) else range(len(node))), "k9" if isinstance(node, dict) else 0])
    on_dict = [
        lambda: node[key], lambda: node.get(key, "none"), lambda: node.__setitem__(key, new), lambda: node.__delitem__(key),
        lambda: node.pop(key, "none"), lambda: node.popitem(), lambda: node.setdefault(key, new),
        lambda: node.update({key: new}, k7=1), lambda: node.update(dict(node)), lambda: {**node, "x": 1},
        lambda: node | {"x": 1}, lambda: {"x": 1} | node, lambda: node.__ior__({key: new}),
        lambda: (list(node), list(node.values()), list(node.items()), list(reversed(node)), len(node), key in node),
        lambda: node.copy(), lambda: json.dumps(node), lambda: (node == dict(node), repr(node), bool(node)),
        lambda: node.clear() if rng.random() < 0.2 else None,
        lambda: [value.append(3) for value in node.values() if isinstance(value, list)],
        lambda: [value.update(z=3) for value in dict(node).values() if isinstance(value, dict)],
    ]  # fmt: skip
    on_list = [
        lambda: node[key],
        lambda: node[key:],
        lambda: node.__setitem__(key, new),
        lambda: node.__setitem__(slice(0, 1), [new, new]),
        lambda: node.__delitem__(key),
        lambda: node.append(new),
        lambda: node.insert(key, new),
        lambda: node.extend([new, 4]),
        lambda: node.__iadd__([new]),
        lambda: node.__imul__(2) if len(node) < 8 else None,
        lambda: node.pop(),
        lambda: node.remove(new),
        lambda: node.reverse(),
        lambda: node.sort(key=lambda item: json.dumps(item)),
        lambda: (node + [1], [1] + node, node * 2, 2 * node, [*node], tuple(node), sorted(node, key=repr)),  # noqa: RUF005
        lambda: (list(node), list(reversed(node)), len(node), new in node, node.count(new), node.index(new)),
        lambda: node.copy(),
        lambda: json.dumps(node),
        lambda: [item.update(z=3) for item in [0, *node] if isinstance(item, dict)],
        lambda: [item.append(3) for item in [*node][1:] if isinstance(item, list)],
    ]
    try:
        return (on_dict if isinstance(node, dict) else on_list)[how]()
    except Exception as fault:
        return type(fault).__name__


def test_whatever_is_done_to_a_branch_is_as_on_a_deep_copy_and_nobody_else_sees_it() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        base = {f"t{i}": base_of(rng) for i in range(3)}
        text = json.dumps(base)
        ours, sibling, plain = branch(base), branch(base), copy.deepcopy(base)
        for step in range(12):
            if step == 6:
                ours = rng.choice([copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree)), lambda tree: tree])(ours)
            path, how, seeds = rng.choice(places(plain, [])), rng.randrange(20), rng.random()
            answers = [act(at(tree, path), how, random.Random(seeds)) for tree in (ours, plain)]
            assert answers[0] == answers[1] and type(answers[0]) in (type(answers[1]), BranchDict), (seed, step, how)
            assert ours == plain and json.dumps(base) == text, (seed, step, how)
        assert sibling == base and json.dumps(sibling) == text
        assert json.dumps(ours) == json.dumps(plain)  # the order of keys too


class Queue(BaseModel):
    jobs: list[dict[str, Any]]


def test_what_reads_a_list_below_python_gets_items_of_its_own() -> None:
    base = {"heap": [[1, {"n": 1}], [2, {"n": 2}]], "jobs": [{"n": 1}], "log": [], "rows": {"a": {"n": 1}, "b": {"n": 2}}}
    text = json.dumps(base)
    ours = branch(base)
    heapq.heappop(ours["heap"])[1]["n"] = 9
    Queue(jobs=ours["jobs"]).jobs[0]["n"] = 9
    assert json.dumps(base) == text
    ours, log = branch(base), []
    same = log
    log += ours["jobs"]  # in place, as of a plain list
    same[0]["n"] = 9
    assert same is log and json.dumps(base) == text and ours["jobs"] == [{"n": 9}]
    assert [row["n"] for row in reversed(ours["rows"].values())] == [2, 1]
    for _, row in reversed(ours["rows"].items()):
        row["n"] = 9
    assert json.dumps(base) == text and [row["n"] for row in ours["rows"].values()] == [9, 9]


def test_changes_are_those_of_a_deep_copy_and_tell_equal_states_from_others() -> None:
    told = set()
    for seed in range(300):
        rng = random.Random(seed)
        base = {f"t{i}": base_of(rng) for i in range(3)}
        ours, plain = branch(base), copy.deepcopy(base)
        for _ in range(rng.randrange(4)):
            path, how, seeds = rng.choice(places(plain, [])), rng.randrange(20), rng.random()
            for tree in (ours, plain):
                act(at(tree, path), how, random.Random(seeds))
        found = changes(base, ours)
        assert found == changes(base, plain)
        assert (found == {"set": {}, "removed": []}) == (json.dumps(base, sort_keys=True) == json.dumps(plain, sort_keys=True))
        told.add(json.dumps(found))
    assert len(told) > 100


def test_changes_say_what_where() -> None:
    base = {"orders": {"a/b": {"status": "open", "items": [1, 2]}, "c": {"status": "open"}}, "n": 1}
    ours = branch(base)
    ours["orders"]["a/b"]["status"] = "sent"
    ours["orders"]["a/b"]["items"].append(3)
    ours["orders"]["d"] = {"status": "new"}
    ours["orders"]["c"]["status"] = "open"  # written, and the same
    ours["n"] = True
    del ours["orders"]["c"]["status"]
    assert changes(base, ours) == {
        "set": {"/n": True, "/orders/a~1b/items": [1, 2, 3], "/orders/a~1b/status": "sent", "/orders/d": {"status": "new"}},
        "removed": ["/orders/c/status"],
    }


class Name(BaseModel):
    first: str


class Person(BaseModel):
    name: Name
    tags: list[str] = []
    money: dict[str, float] = {}


class Shop(BaseModel):
    people: dict[str, Person]


@dataclass
class Box:
    rows: list[dict[str, int]] = field(default_factory=list)


def test_models_and_dataclasses_are_branched_too() -> None:
    base = Shop(people={name: Person(name=Name(first=name), money={"card": 1.0}) for name in ("ann", "bob")})
    one, two = branch(base), branch(base)
    one.people["ann"].name.first = "eve"
    one.people["ann"].tags.append("x")
    one.people["bob"].money["card"] = 2.0
    assert isinstance(one, Shop) and one.model_dump()["people"]["ann"] == {
        "name": {"first": "eve"},
        "tags": ["x"],
        "money": {"card": 1.0},
    }
    assert two == base and base.people["ann"].model_dump() == {"name": {"first": "ann"}, "tags": [], "money": {"card": 1.0}}
    assert changes(base, one) == {
        "set": {"/people/ann/name/first": "eve", "/people/ann/tags": ["x"], "/people/bob/money/card": 2.0}, "removed": []
    }  # fmt: skip
    assert Shop.model_validate(one.model_dump()) == one and changes(base, two)["set"] == {}
    box = Box([{"a": 1}])
    ours = branch(box)
    ours.rows[0]["a"] = 2
    ours.rows.append({})
    assert (box.rows, ours.rows) == ([{"a": 1}], [{"a": 2}, {}])


def test_looking_copies_nothing_and_changes_stay_apart() -> None:
    base: dict[str, Any] = {"a": {"rows": [{"x": 1}]}, "b": [{"y": 2}], "c": Box([{"z": 3}])}
    ours = branch(base)
    with looking():
        assert ours["a"] is ours.get("a") is base["a"] and [*ours.values()][1] is base["b"] and dict(ours.items()) == base
    assert changes(base, ours) == {"set": {}, "removed": []}
    ours["a"]["rows"][0]["x"] = 4
    ours["b"].append({})
    with looking():
        assert ours["a"]["rows"] == [{"x": 4}] and ours["b"][0] == {"y": 2} and ours["c"] is base["c"]
    assert base == {"a": {"rows": [{"x": 1}]}, "b": [{"y": 2}], "c": Box([{"z": 3}])}
    ours["b"][0]["y"] = 5
    assert base["b"] == [{"y": 2}] and changes(base, ours)["set"] == {"/a/rows": [{"x": 4}], "/b": [{"y": 5}, {}]}


def test_changes_are_told_against_any_base_also_by_a_copy_of_a_branch() -> None:
    base = {"a": [1], "b": {"n": 1}, "c": 1}
    ours = branch(base)
    ours["b"]["n"] = 2
    del ours["c"]
    ours["d"] = 3
    wanted = {"set": {"/b/n": 2, "/d": 3}, "removed": ["/c"]}
    for made in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert changes(base, made) == changes(copy.deepcopy(base), made) == wanted
        assert changes({"a": [2], "e": 1}, made)["set"] == {"/a": [1], "/b": {"n": 2}, "/d": 3}


def test_a_part_that_another_thread_copies_between_two_looks_is_the_copy() -> None:
    """Not the shared one, which was read before the other thread had made it the branch's own."""
    base = {"a": {"x": 1}}
    ours = branch(base)

    class Key(str):
        looks = 0

        def __hash__(self) -> int:
            Key.looks += 1
            if Key.looks == 2:  # the value was read, and whether it is the branch's own is asked
                ours["a"]["x"] = 2
            return str.__hash__(self)

    assert ours[Key("a")] == {"x": 2} and Key.looks >= 2
    assert base == {"a": {"x": 1}}


def test_threads_that_read_a_part_at_once_get_the_same_copy() -> None:
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            ours = branch({"a": {str(i): i for i in range(50)}, "l": [{"x": 1}]})
            got: list[Any] = []
            start = threading.Barrier(4)

            def read(ours: Any = ours, got: Any = got, start: Any = start) -> None:
                start.wait()
                got.append((id(ours["a"]), id(ours["l"][0])))

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(set(got)) == 1
    finally:
        sys.setswitchinterval(0.005)


BASE = {"users": {f"u{i}": {"name": f"n{i}", "cards": [{"n": i}]} for i in range(3000)}}


class Branched(Notes):
    id = "tests/Branched-v0"

    async def setup(self, task: Task) -> None:
        await super().setup(task)
        self.db = branch(BASE)

    def state(self) -> Any:
        return changes(BASE, self.db)


def test_an_environments_forks_share_what_no_episode_touched() -> None:
    env = Branched()
    env.reset(seed=1)
    env.db["users"]["u1"]["name"] = "new"
    snapshot = env.snapshot()
    fork: Any = env.fork()
    env.db["users"]["u1"]["name"] = "newer"
    fork.db["users"]["u2"]["cards"].append({"n": 0})
    frozen: Any = pickle.loads(pickle.dumps(env.db))
    names = [made["users"]["u1"]["name"] for made in (env.db, fork.db, frozen)]
    assert names == ["newer", "new", "newer"] and BASE["users"]["u1"]["name"] == "n1"
    assert fork.state() == {"set": {"/users/u1/name": "new", "/users/u2/cards": [{"n": 2}, {"n": 0}]}, "removed": []}
    assert dict.__getitem__(fork.db["users"], "u7") is BASE["users"]["u7"], "the very same row, not an equal one"
    env.restore(snapshot)
    assert env.state() == {"set": {"/users/u1/name": "new"}, "removed": []}


def test_an_episode_takes_the_memory_of_what_it_reads() -> None:
    """A hundredth of a deep copy if it reads a row; deep copies of 3,000 rows would take 3.6 MB each."""

    def grown(make: Any) -> int:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        kept = [make() for _ in range(4)]
        size = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return size // len(kept)

    def one_row() -> Any:
        ours = branch(BASE)
        ours["users"]["u5"]["name"] = "x"
        return ours

    whole, table = grown(lambda: copy.deepcopy(BASE)), sys.getsizeof(dict(BASE["users"]))
    assert grown(lambda: branch(BASE)) < 2_000
    assert grown(one_row) < table + 10_000 < whole / 10
    with pytest.raises(KeyError):
        branch(BASE)["none"]


@pytest.mark.parametrize("before, after, found", [
    ({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 2]}, []), ({"a": 1}, {"a": 2}, [("/a", "changed", 1, 2)]),
    ({"a": 1}, {"b": None}, [("/a", "removed", 1, None), ("/b", "added", None, None)]),
    ({"x": [{"k": 1}, 2]}, {"x": [{"k": 3}]}, [("/x/0/k", "changed", 1, 3), ("/x/1", "removed", 2, None)]),
    ({"a/b": {"~": True}}, {"a/b": {"~": 1}}, [("/a~1b/~0", "changed", True, 1)]),
    ([1], {"a": 1}, [("/", "changed", [1], {"a": 1})]),
    ({"a": {"x": 1, "y": 2}}, {}, [("/a", "removed", {"x": 1, "y": 2}, None)]), ([1], [1, 2], [("/1", "added", None, 2)]),
    ([1, 2, 3], [1], [("/1", "removed", 2, None), ("/2", "removed", 3, None)]),
])  # fmt: skip
def test_where_two_states_differ(before: Any, after: Any, found: list[Any]) -> None:
    assert [tuple(item.values()) for item in differences(before, after)] == found
