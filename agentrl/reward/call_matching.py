"""Matching of made calls to expected calls: gold calls, equality by hash, assignment."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.data.trajectory import Json, ToolCall
from agentrl.reward.values import LITERAL, EqualityRule, UnscorableError, brief, by_kind, equality_key, exact, same, with_nfc_keys
from agentrl.utils.registry import Registry

# Expected calls


_PLAIN = frozenset({str, int, float})
_OBJECT = (dict, Mapping)  # dict first: a check against the abstract class alone is five times as slow
ARGUMENTS = ("exact", "subset", "superset", "names", "ignore")

CALL_FORMS: Registry[type[CallForm]] = Registry("reward.form", "CALL_FORMS", "agentrl.reward")
"""Forms of expected calls, by `form` of the leaf calls.match."""


class GoldCall(NamedTuple):
    """An expected call. In forms that list values, each argument has a list of allowed values, and `optional` names the
    arguments that may be omitted. `schema`: the function's declared parameters, None if unknown. `by`: the caller, "assistant"
    or "user", None if unspecified. `compare`: the arguments that are compared; None: all."""

    name: str
    arguments: Mapping[str, Json]
    optional: frozenset[str] = frozenset()
    schema: Mapping[str, Json] | None = None
    by: str | None = None
    compare: tuple[str, ...] | None = None


@CALL_FORMS.register("literal")
class CallForm:
    """Expected calls as {"name", "arguments"} with literal values; base class of other forms."""

    shape: ClassVar[str] = '{"name", "arguments"}'
    lists: ClassVar[bool] = False
    """True if each argument has a list of allowed values, in which "" means that it may be omitted."""
    strings: ClassVar[str] = "exact"
    """Default normalizer of texts."""
    languages: ClassVar[tuple[str, ...]] = ()
    """Languages whose types a function's declaration may use; empty if the form ignores declarations."""

    @staticmethod
    def read(item: Mapping[str, Json]) -> tuple[Any, Any, Any, Any] | None:
        """Read name, arguments, `by` (the caller) and `compare` (the compared arguments); None for another form."""
        if "name" in item and ("arguments" in item or item.keys() <= {"name", "by", "compare"}):
            return item["name"], item.get("arguments", {}), item.get("by"), item.get("compare")
        return None  # the arguments have another key

    @staticmethod
    def value_fits(made: Json, gold: Json, declared: Json, rule: CallRule) -> bool:
        """Return True if an argument's value is correct; `declared`: its JSON Schema, None if unknown."""
        return same(made, gold, rule.values)

    @staticmethod
    def arguments_fit(made: Mapping[str, Json], gold: GoldCall, rule: CallRule) -> bool:
        """Return True if all arguments are correct, for a form with `languages`."""
        raise NotImplementedError


@CALL_FORMS.register("sets")
class AllowedValues(CallForm):
    """Expected calls with a list of allowed values for each argument."""

    lists = True

    @staticmethod
    def value_fits(made: Json, gold: Json, declared: Json, rule: CallRule) -> bool:
        return any(same(made, allowed, rule.values) for allowed in gold)


def gold_calls(value: Json, form: type[CallForm] = CallForm, *, to_make: bool = False) -> list[GoldCall]:
    """Read a list of gold calls in a form. Raises UnscorableError if it has another shape. `to_make`: keep names unchanged, to
    make the calls, instead of normalizing them for comparison."""
    if not isinstance(value, (list, tuple)):
        raise UnscorableError(f"expected calls must be a list, not {brief(value, 80)!r}")
    found = []
    for index, item in enumerate(value):
        read = form.read(item) if isinstance(item, _OBJECT) else None
        if read is None:
            raise UnscorableError(f"expected call {index} must be {form.shape}, not {brief(item, 80)!r}")
        name, arguments, by, compare = read
        if not isinstance(name, str) or not isinstance(arguments, _OBJECT):
            raise UnscorableError(f"expected call {index} needs a string name and an object of arguments")
        if not (to_make or form.languages):  # with declarations, the declared names are compared
            name, arguments = exact(name), with_nfc_keys(arguments)
        if by not in (None, "assistant", "user"):
            raise UnscorableError(f"expected call {index}: by must be 'assistant' or 'user', not {brief(by, 80)!r}")
        if compare is not None:
            if not (isinstance(compare, (list, tuple)) and all(isinstance(key, str) for key in compare)):
                wrong = f"compare must be a list of arguments' names, not {brief(compare, 80)!r}"
                raise UnscorableError(f"expected call {index}: {wrong}")
            compare = tuple(map(exact, compare))
        optional = frozenset[str]()
        for key, allowed in arguments.items() if form.lists else ():
            if not isinstance(allowed, (list, tuple)):
                raise UnscorableError(f"expected call {index}: argument {key!r} must be a list of allowed values")
            if "" in allowed:
                optional |= {key}
        found.append(GoldCall(name, arguments, optional, None, by, compare))
    return found


def declared_gold(gold: list[GoldCall], tools: Sequence[Mapping[str, Json]]) -> list[GoldCall]:
    """Add the declared parameters of `tools` (offered tools, or a list of functions) to gold calls."""
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {f["name"]: f.get("parameters", {}) for f in functions if isinstance(f, Mapping) and "name" in f}
    known = {name: schema for name, schema in schemas.items() if isinstance(schema, Mapping)}
    return [
        call._replace(optional=call.optional - frozenset(schema.get("required", ())), schema=schema)
        if (schema := known.get(call.name)) is not None
        else call
        for call in gold
    ]


@dataclass(frozen=True, slots=True)
class CallRule:
    """The rule by which a made call matches an expected one."""

    form: type[CallForm] = CallForm
    arguments: str = "exact"
    values: EqualityRule = LITERAL
    language: str = "python"

    def value_fits(self, key: str, made: Json, call: GoldCall) -> bool:
        """Return True if one argument's value matches."""
        declared = None if call.schema is None else call.schema.get("properties", {}).get(key)
        return self.form.value_fits(made, call.arguments[key], declared, self)

    def full(self, made: ToolCall, gold: GoldCall) -> bool:
        """Return True if a made call fully matches an expected one."""
        arguments = made.arguments
        if made.name != gold.name or arguments is None:
            return False
        if self.arguments == "ignore":
            return True
        if gold.compare is not None:
            return len(self._equal_arguments(arguments, gold)) == len(gold.compare)
        wanted = gold.arguments
        if self.form.languages and self.arguments == "exact":
            return self.form.arguments_fit(arguments, gold, self)
        if arguments.keys() != wanted.keys():
            if self.arguments != "superset" and any(key not in wanted for key in arguments):
                return False
            if self.arguments != "subset" and not all(key in arguments or key in gold.optional for key in wanted):
                return False
        if self.arguments == "names":
            return True
        literal = self.form is CallForm
        for key, value in arguments.items():
            # A fast path for identical texts and numbers.
            if literal and key in wanted and type(value) in _PLAIN and type(value) is type(wanted[key]) and value == wanted[key]:
                continue
            if key in wanted and not self.value_fits(key, value, gold):
                return False
        return True

    def _equal_arguments(self, made: Mapping[str, Json], gold: GoldCall) -> list[str]:
        """Return the compared arguments that match in both calls or are missing in both."""

        def fits(key: str) -> bool:
            if key not in made or key not in gold.arguments:
                return (key in made) == (key in gold.arguments) or (key not in made and key in gold.optional)
            return self.arguments == "names" or self.value_fits(key, made[key], gold)

        return [key for key in gold.compare or () if fits(key)]

    def part(self, made: ToolCall, gold: GoldCall) -> float:
        """Compute partial credit: (1 + correct arguments) / (1 + counted arguments); 0 if the names differ.

        Counted are the arguments of either call ("exact", "names"), of the made call ("subset"), of the expected call
        ("superset"), or those in `compare`. A full match gets 1.
        """
        if self.full(made, gold):
            return 1.0
        arguments = made.arguments
        if made.name != gold.name or arguments is None:
            return 0.0
        if gold.compare is not None:
            return (1 + len(self._equal_arguments(arguments, gold))) / (1 + len(gold.compare))
        shared = arguments.keys() & gold.arguments.keys()
        correct = sum(self.arguments == "names" or self.value_fits(key, arguments[key], gold) for key in shared)
        needed = set(gold.arguments) - gold.optional | (set(arguments) & gold.optional)
        counted = {"subset": len(arguments), "superset": len(needed)}
        return (1 + correct) / (1 + counted.get(self.arguments, len(needed | set(arguments))))


# Assignment

Matrix = npt.NDArray[np.float64]
Weights = Sequence[Sequence[float]] | Matrix
Pairs = list[tuple[int, int]]

MANY = 256
"""Number of pairs of calls from which on vectorized code is faster."""
MOST_PAIRS = 16_000_000
"""Largest number of pairs of calls that are compared: their weights take 128 MB."""
_EPS = 1e-12  # weights are sums of fractions; a smaller difference is a rounding error


def optimal(weights: Weights) -> Pairs:
    """Find one-to-one pairs (row, column) of maximum total weight, without pairs of weight 0; weights >= 0.

    Hungarian method by shortest augmenting paths with potentials (Kuhn 1955; Jonker and Volgenant 1987), in
    O(min(n, m)^2 max(n, m)).
    """
    n, m = len(weights), len(weights[0]) if len(weights) else 0
    if n == 0 or m == 0:
        return []
    if n > m:
        return sorted((row, column) for column, row in optimal(np.asarray(weights).T))
    pairs = [(row, column) for column, row in enumerate(_augment(np.asarray(weights, dtype=np.float64))) if row >= 0]
    return sorted((row, column) for row, column in pairs if weights[row][column] > _EPS)


def by_name(names: Sequence[str]) -> dict[str, list[int]]:
    """Map each name to its positions in ascending order."""
    indices: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        indices.setdefault(name, []).append(place)
    return indices


def _augment(weights: Matrix) -> list[int]:
    """Return the row assigned to each column (-1: none) at maximum total weight, for no more rows than columns. Rows first take
    their best column; those that find it taken search an augmenting path by Dijkstra over reduced costs (price sums minus
    weights)."""
    n, m = weights.shape
    costs, row_price, column_price = -weights, -weights.max(axis=1), np.zeros(m)
    row_of, placed = np.full(m, -1), np.zeros(n, dtype=bool)
    for row, column in zip(*np.nonzero(costs - row_price[:, None] <= _EPS), strict=True):
        if row_of[column] < 0 and not placed[row]:
            row_of[column], placed[row] = row, True
    for start in np.nonzero(~placed)[0]:
        distance, before, open_ = np.full(m, np.inf), np.full(m, -1), np.ones(m, dtype=bool)
        row, column, reached = start, -1, 0.0
        while True:
            step = costs[row] - column_price
            step += reached - row_price[row]
            nearer = step < distance - _EPS
            nearer &= open_
            distance[nearer], before[nearer] = step[nearer], column
            column = int(np.where(open_, distance, np.inf).argmin())
            reached = distance[column]
            open_[column] = False
            if row_of[column] < 0:
                break
            row = row_of[column]
        row_price[start] += reached  # the updated potentials keep all reduced costs >= 0, as the next search requires
        open_[column] = True
        done = np.nonzero(~open_)[0]
        row_price[row_of[done]] += reached - distance[done]
        column_price[done] += distance[done] - reached
        while column >= 0:  # augment: shift the assignments along the path
            previous = int(before[column])
            row_of[column] = start if previous < 0 else row_of[previous]
            column = previous
    return [int(row) for row in row_of]


def in_order(weights: Weights) -> Pairs:
    """Find pairs of maximum total weight with rows and columns both ascending: an alignment in O(n m)."""
    n, m = len(weights), len(weights[0]) if len(weights) else 0
    best: Any = np.zeros((n + 1, m + 1))
    if n * m < MANY:
        best = best.tolist()
    for i in range(n - 1, -1, -1):
        here, below, offers = best[i], best[i + 1], weights[i]
        if n * m >= MANY:
            here[:-1] = np.maximum.accumulate(np.maximum(below[:-1], below[1:] + offers)[::-1])[::-1]
            continue
        for j in range(m - 1, -1, -1):
            here[j] = max(below[j], here[j + 1], below[j + 1] + offers[j])
    pairs: Pairs = []
    i = j = 0
    while i < n and j < m:
        if weights[i][j] > _EPS and best[i][j] <= best[i + 1][j + 1] + weights[i][j] + _EPS:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i + 1][j] >= best[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs


# Equal calls by hash

BlockWeights = Callable[[Sequence[ToolCall], Sequence[GoldCall]], Weights]


def equal_pairs(made: Sequence[ToolCall], gold: Sequence[GoldCall], rule: EqualityRule) -> Pairs:
    """Pair equal calls (made, expected), each at most once, the earliest first. Only for a rule without tolerances, with which
    equality is transitive, so that no other choice yields more pairs."""
    pairs: Pairs = []
    for place, (call, wanted) in enumerate(zip(made, gold, strict=False)):  # no keys are needed for equal calls in order
        if not _surely_equal(call, wanted):
            break
        pairs.append((place, place))
    begin = len(pairs)
    if begin == min(len(made), len(gold)):
        return pairs
    # Key -> positions of the calls with it, last first, so that `pop` returns the earliest.
    known: dict[Hashable, list[int]] = {}
    for i in range(len(made) - 1, begin - 1, -1):
        arguments = made[i].arguments
        if arguments is not None:
            known.setdefault(call_key(made[i].name, arguments, rule), []).append(i)
    for j, wanted in enumerate(gold[begin:], begin):
        rows = known.get(call_key(wanted.name, wanted.arguments, rule))
        if rows:
            pairs.append((rows.pop(), j))
    return sorted(pairs)


def pair_rest(made: Sequence[ToolCall], gold: Sequence[GoldCall], sure: Pairs, weights: BlockWeights) -> Pairs:
    """Find pairs of maximum total weight among the calls that are not in `sure`. Only calls with the same name pair, so each name
    is a separate problem, with weights from `weights`."""
    taken, met = {i for i, _ in sure}, {j for _, j in sure}
    pairs: Pairs = []
    for rows, columns in _same_names(made, gold):
        left, right = [i for i in rows if i not in taken], [j for j in columns if j not in met]
        if left and right:
            _check_pairs(len(left), len(right))
            best = optimal(weights([made[i] for i in left], [gold[j] for j in right]))
            pairs.extend((left[i], right[j]) for i, j in best)
    return sorted(pairs)


def all_weights(made: Sequence[ToolCall], gold: Sequence[GoldCall], weights: BlockWeights) -> Weights:
    """Compute the weight of each pair of calls; with many pairs only of those with the same name, else 0."""
    _check_pairs(len(made), len(gold))
    if len(made) * len(gold) < MANY:
        return weights(made, gold)
    table = np.zeros((len(made), len(gold)))
    for rows, columns in _same_names(made, gold):
        table[np.ix_(rows, columns)] = weights([made[i] for i in rows], [gold[j] for j in columns])
    return table


def _same_names(made: Sequence[ToolCall], gold: Sequence[GoldCall]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the positions of made (with arguments) and of expected calls, for each name in both."""
    columns = by_name([call.name for call in gold])
    for name, rows in by_name([call.name for call in made]).items():
        here = [i for i in rows if made[i].arguments is not None]
        if here and name in columns:
            yield here, columns[name]


def _check_pairs(made: int, gold: int) -> None:
    if made * gold > MOST_PAIRS:
        raise UnscorableError(f"{made} calls against {gold} expected ones are more than {MOST_PAIRS} pairs. Expect fewer calls")


def _surely_equal(call: ToolCall, wanted: GoldCall) -> bool:
    """Return True if a cheap test shows that calls are equal by any rule: identical texts and numbers."""
    if call.name != wanted.name or call.arguments != wanted.arguments or call.arguments is None:
        return False
    # In Python True equals 1, hence the type check of both; and a container with the same NaN object equals itself.
    for value in (*call.arguments.values(), *wanted.arguments.values()):
        if type(value) not in _PLAIN or value != value:
            return False
    return True


def call_key(name: str, arguments: Mapping[str, Json], rule: EqualityRule) -> Hashable:
    """Make a key that two calls share exactly if a rule without tolerances finds them equal."""
    if rule.normalize is exact:
        # ASCII texts and numbers are their own keys; not booleans, which equal numbers in Python, nor NaN, which equals nothing.
        for value in arguments.values():
            if type(value) not in _PLAIN or value != value or (type(value) is str and not value.isascii()):
                break
        else:
            return name, frozenset(arguments.items())
    return name, frozenset((key, equality_key(value, rule.normalize)) for key, value in arguments.items())


def parts(made: Sequence[ToolCall], gold: Sequence[GoldCall], rule: CallRule) -> Matrix:
    """Compute `rule.part` for all pairs of calls of one function (rows, columns), all with arguments; not for arguments: ignore,
    nor for expected calls with `compare`."""
    shared, fitting, optional = shared_arguments(made, gold, rule)
    own = np.array([float(len(call.arguments or ())) for call in made])[:, None]
    needed = np.array([float(len(call.arguments) - len(call.optional)) for call in gold]) + optional
    counted = {"subset": own, "superset": needed}.get(rule.arguments, own + needed - shared)
    return (1.0 + fitting) / (1.0 + counted)


def shared_arguments(made: Sequence[ToolCall], gold: Sequence[GoldCall], rule: CallRule) -> tuple[Matrix, Matrix, Matrix]:
    """Count per pair the shared arguments, those with matching values, and the optional ones. Each pair of distinct values is
    compared once by `rule.value_fits`, except texts and numbers of the literal form."""
    given = [call.arguments or {} for call in made]
    shared, fitting, optional = (np.zeros((len(made), len(gold))) for _ in range(3))
    for key in {key for arguments in given for key in arguments} & {key for call in gold for key in call.arguments}:
        rows = [i for i, arguments in enumerate(given) if key in arguments]
        columns = [j for j, call in enumerate(gold) if key in call.arguments]
        here = np.ix_(rows, columns)
        shared[here] += 1.0
        optional[here] += np.array([key in gold[j].optional for j in columns])
        values, wanted = [given[i][key] for i in rows], [gold[j].arguments[key] for j in columns]
        if rule.arguments == "names":
            fitting[here] += 1.0
        else:
            (like, of), (match, to) = _distinct(values), _distinct(wanted)
            if rule.form is CallForm:
                table = _literal_fits([values[i] for i in of], [wanted[j] for j in to], rule.values)
            else:
                table = np.array([[rule.value_fits(key, values[i], gold[columns[j]]) for j in to] for i in of])
            fitting[here] += table[np.ix_(like, match)]
    return shared, fitting, optional


def _literal_fits(made: Sequence[Json], gold: Sequence[Json], rule: EqualityRule) -> npt.NDArray[np.bool_]:
    """Apply `same` to each pair of values."""
    ids: dict[Hashable, int] = {}
    own, wanted = (np.array([ids.setdefault(equality_key(v, rule.normalize), len(ids)) for v in s]) for s in (made, gold))
    table: npt.NDArray[np.bool_] = own[:, None] == wanted
    if rule.strict:
        return table
    (shapes, odd), (gold_shapes, gold_odd) = (by_kind(values, rule) for values in (made, gold))
    for shape in shapes.keys() & gold_shapes.keys():
        rows, columns = shapes[shape], gold_shapes[shape]
        near = np.ones((len(rows), len(columns)), dtype=bool)
        for left, right in zip(np.array([*rows.values()]).T, np.array([*columns.values()]).T, strict=True):
            near &= np.abs(left[:, None] - right) <= np.maximum(rule.absolute, rule.relative * np.abs(right))
            if not near.any():
                break
        table[np.ix_([*rows], [*columns])] = near
    for rest, others in ((odd, range(len(gold))), (range(len(made)), gold_odd)):
        for i, j in product(rest, others):
            table[i, j] = same(made[i], gold[j], rule)
    return table


def _distinct(values: Sequence[Json]) -> tuple[list[int], list[int]]:
    """Return each value's index among the distinct ones, and their first positions; 1, 1.0 and true are distinct."""
    scalars = (str, int, float, bool)
    keys = [(type(value), value if type(value) in scalars else json.dumps(value, default=repr)) for value in values]
    first: dict[Hashable, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(key, place)
    numbers = {key: number for number, key in enumerate(first)}
    return [numbers[key] for key in keys], list(first.values())
