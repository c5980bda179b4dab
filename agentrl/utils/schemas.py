"""Match untrusted regular expressions and validate untrusted JSON Schemas with a time limit."""

from __future__ import annotations

import contextlib
import contextvars
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, Literal
from urllib.parse import unquote

import regex
from jsonschema import Draft7Validator, Draft202012Validator, ValidationError, validators
from jsonschema.exceptions import best_match
from referencing.jsonschema import EMPTY_REGISTRY

from agentrl.utils.parsing import nfc, own_name, put_once
from agentrl.utils.threads import QUICK, TooLongError

# Untrusted patterns and policy text: matched with a time limit, and never for long on an event loop.
#
# A regular expression may take exponential time on a crafted text; `re` can neither be interrupted nor release the interpreter
# lock. `regex` can do both. Patterns that it reads differently from `re` are rewritten into a form with one meaning.

AT_ONCE_S = 0.005
"""CPU seconds of this process that a match may take on an event loop, by the clock of `regex`: waiting for the CPU does not
count, but computation of other threads does."""


def within_seconds(look: Callable[..., Any], text: str, seconds: float) -> Any:
    """Call `look(text)`, a method of a compiled `regex` pattern, with a time limit.

    Raises TimeoutError after `seconds` of this thread's CPU time; TextTooLongError, a subclass, for a text longer than
    `MOST_TEXT`; TooLongError if it is slow and tried on an event loop (`threads.at_once`). Never because other threads computed,
    although the clock of `regex` counts that: whether a thread does the work decides which requests share an engine step, and
    thus last digits.
    """
    if len(text) > MOST_TEXT:
        raise TextTooLongError(f"a text of {len(text)} characters; patterns are searched in at most {MOST_TEXT}")
    hurry = QUICK.get() and seconds > AT_ONCE_S
    own_limit = limit = AT_ONCE_S if hurry else seconds
    for _ in range(2 if hurry else _TRIES):
        began = time.thread_time()
        with contextlib.suppress(TimeoutError):
            return look(text, timeout=limit)
        if (own := time.thread_time() - began) > 0.8 * own_limit:
            break
        limit *= min(1.25 * own_limit / max(own, 1e-9), 8.0)
    raise TooLongError if hurry else TimeoutError


_TRIES = 5
"""Tries of a match whose thread hardly ran; the limit of the last is up to 4,096 times that of the first."""
MOST_PATTERN = 10_000
"""Maximum characters of a pattern."""
MOST_COPIES = 10_000
"""Maximum parts of a pattern, multiplied by their minimum repeats: `regex` expands these copies."""
MOST_TEXT = 1_000_000
"""Maximum characters of a searched text: `regex` stores group matches per position."""
_TOKEN = regex.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*)(?:,\d*)?\}|[()]|.", regex.DOTALL)
_RECURSION = regex.compile(r"\(\?(?:R|[+-]?\d+|&\w*|P>\w*)\)")
_BRACKET = regex.compile(r"\\.|\[", regex.DOTALL)
_NAMED = frozenset({r"\p", r"\P", r"\N", r"\x"})
"""Escapes followed by a name in braces."""
_SPACED = regex.compile(r"\(\?[\w-]*x")


def compile_pattern(pattern: str, flags: int = regex.VERSION0) -> Any:
    """Compile a pattern with `regex`. Raises ValueError if it is invalid, too long, recursive, or has so many repeats that its
    compiled form fills the memory: such a pattern could exceed the time limit of a match."""
    if len(pattern) > MOST_PATTERN:
        raise ValueError(f"a pattern of {len(pattern)} characters; at most {MOST_PATTERN} are allowed")
    if _RECURSION.search(pattern):
        raise ValueError(f"{pattern[:80]!r} calls itself, which no time limit ends")
    if (copies := _copies(pattern)) > MOST_COPIES:
        raise ValueError(f"{pattern[:80]!r} repeats a part {copies:.0e} times; at most {MOST_COPIES} are allowed")
    # Reject syntax of `regex` alone: fuzzy matches such as a{e<=1}, and classes like [:alpha:] within brackets.
    tokens, before = list[str](), ""
    for token in _TOKEN.finditer(pattern):
        text = token.group()
        if text in ("{", "{}") and before[:2] not in _NAMED:
            text = text.replace("{", "\\{")
        elif text[0] == "[":
            text = "[" + _BRACKET.sub(lambda found: "\\[" if found.group() == "[" else found.group(), text[1:])
        tokens.append(text)
        before = text
    try:
        return regex.compile("".join(tokens), flags)
    except (regex.error, RecursionError, OverflowError) as problem:
        raise ValueError(f"{pattern[:80]!r} is not a regular expression: {problem}") from None


def _copies(pattern: str) -> float:
    """Estimate the copies of its parts after expanding every repeat to its minimum."""
    flat = _SPACED.search(pattern) is not None  # comments may contain brackets, so assume nested repeats
    groups, last = [0.0], 0.0
    for token in _TOKEN.finditer(pattern):
        match token.group():
            case "(":
                groups.append(0.0)
                last = 0.0
            case ")":
                last = groups.pop() if len(groups) > 1 else 0.0
                groups[-1] += last
            case _ if token.group(1) is not None:
                times = float(token.group(1) or 0)
                groups[-1] += last * max(times - 1, 0)
                last *= max(times, 1)
                if flat:
                    groups = [max(item, 1) * max(times, 1) for item in groups]
            case _:
                last = 1.0
                groups[-1] += 1
    return sum(groups)


class TextTooLongError(TimeoutError):
    """A text is longer than `MOST_TEXT`, so no pattern is searched in it."""


# Untrusted JSON Schemas (of a tool, a server, a task), in draft 2020-12 (https://json-schema.org/draft/2020-12), except `$id` and
# `$schema` below the root, and references to other documents.
#
# A schema is a small program: it may fetch documents, recurse endlessly, contain patterns of exponential time, or be of any size.
# `check_schema` rejects such schemas, and `first_fault` stops after `SCHEMA_S`.

SCHEMA_S = 1.0
"""CPU seconds for checking a value against a schema; waiting on a busy machine does not count."""
AT_ONCE = 1000
"""Comparisons of a value with a schema's keywords made on an event loop, about 5 ms. They are counted, not timed: time depends on
the machine's load, and whether a thread does the work decides which requests share an engine step."""
AT_ONCE_CPU_S = 0.05
"""CPU seconds for these comparisons, ten times the usual: limits many patterns that are each fast."""
MOST_DEPTH = 64
"""Maximum nesting of objects and arrays in a schema."""
MOST_NODES = 100_000
"""Maximum values in a schema, over all levels."""
MOST_CHARACTERS = 1_000_000
"""Maximum characters of all names and texts in a schema."""
MOST_WORK = 10_000
"""Maximum schemas that apply to the same value, through `allOf`, `anyOf`, `$ref` and the like, recursively."""
MOST_CHAIN = 64
"""Maximum chain of references and the like that apply to the same value."""


class BadSchemaError(ValueError):
    """An unusable schema: `place` (a JSON Pointer), the finding, the remedy."""

    def __init__(self, place: str, found: str, remedy: str) -> None:
        super().__init__(f"at {place or '(the root)'}: {found}; {remedy}")
        self.place = place


Kind = Literal["schema", "map", "data"]
DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are data, not schemas."""
_MAPS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_ONES = ("not", "if", "then", "else")


def check_schema(schema: Any) -> None:
    """Raise BadSchemaError if using the schema could fetch documents, never end, or take too much time or memory. Invalid schemas
    pass (`checked_validator` rejects them)."""
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        text = ""  # the walk explains it
    if text and len(text) <= MOST_CHARACTERS:
        _check_text(text)
    else:
        _Walk(as_2020(schema)).check()


@lru_cache(maxsize=4096)
def _check_text(text: str) -> None:
    _Walk(as_2020(json.loads(text))).check()


@dataclass
class _Walk:
    """One traversal of a schema; iterative, because a deep schema would overflow the stack."""

    root: Any
    nodes: int = 0
    characters: int = 0
    anchors: dict[str, Any] = field(default_factory=dict)
    schemas: dict[int, tuple[Any, str]] = field(default_factory=dict)
    references: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)
    uses: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        if not isinstance(self.root, dict | bool):
            raise BadSchemaError("", f"a schema is an object, not {_short(self.root)}", "give an object")
        self._look(self.root, "")
        targets: dict[tuple[int, str], Any] = {}
        for holder, key, above in self.references:  # grows while targets outside of known schemas are traversed
            reference, place = holder[key], f"{above}/{key}"
            if not isinstance(reference, str) or not reference.startswith("#"):
                raise BadSchemaError(
                    place,
                    f"a reference to {_short(reference)}, which would have to be fetched; nothing is",
                    "put that schema under $defs and refer to it by '#/$defs/NAME'",
                )
            target = targets[id(holder), key] = resolve_reference(reference, self.root, self.anchors)
            if not isinstance(target, dict | bool):
                wrong = f"a reference to {_short(reference)}, where there is no schema"
                raise BadSchemaError(place, wrong, "define it under $defs")
            if id(target) not in self.schemas:
                self._look(target, place)
        if "unevaluatedProperties" in self.uses and "patternProperties" in self.uses:
            raise BadSchemaError(
                self.uses["unevaluatedProperties"],
                "unevaluatedProperties in a schema with patternProperties, whose patterns would have no time limit",
                "use additionalProperties",
            )
        _check_work(self.schemas, targets)

    def _look(self, start: Any, where: str) -> None:
        stack: list[tuple[Any, str, int, Kind]] = [(start, where, 1, "schema")]
        while stack:
            node, place, depth, kind = stack.pop()
            self._count(node, place, depth)
            if isinstance(node, dict):
                if kind == "schema":
                    self.schemas[id(node)] = node, place
                    self._look_at(node, place)
                for key, value in node.items():
                    inner: Kind = "data" if kind == "data" or (kind == "schema" and key in DATA) else "schema"
                    if kind == "schema" and key in _MAPS:
                        inner = "map"
                    stack.append((value, f"{place}/{_escape_pointer(key)}", depth + 1, inner))
            elif isinstance(node, list | tuple):
                stack += [(item, f"{place}/{i}", depth + 1, "schema" if kind == "map" else kind) for i, item in enumerate(node)]

    def _count(self, node: Any, place: str, depth: int) -> None:
        shown = place if len(place) < 200 else f"{place[:200]}..."
        self.nodes += 1
        if depth > MOST_DEPTH:
            raise BadSchemaError(shown, f"nested deeper than {MOST_DEPTH} levels", "define parts under $defs and refer to them")
        if self.nodes > MOST_NODES:
            raise BadSchemaError(shown, f"a schema of more than {MOST_NODES} values", "leave out what a model need not know")
        for text in node if isinstance(node, dict) else [node] if isinstance(node, str) else ():
            if not isinstance(text, str):
                raise BadSchemaError(shown, f"the key {_short(text)} is no string", "give JSON")
            self.characters += len(text)
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise BadSchemaError(shown, "a lone surrogate in a text", "give Unicode text")
        if self.characters > MOST_CHARACTERS:
            raise BadSchemaError(
                shown, f"a schema of more than {MOST_CHARACTERS} characters", "leave out what a model need not know"
            )
        if isinstance(node, float) and not math.isfinite(node):
            raise BadSchemaError(shown, f"{node} is not JSON", "give a finite number")
        if not isinstance(node, dict | list | tuple | str | int | float | None):
            raise BadSchemaError(shown, f"{type(node).__name__} is not JSON", "give JSON")

    def _look_at(self, node: dict[str, Any], place: str) -> None:
        for key in ("$id", "$schema"):
            if place and isinstance(node.get(key), str):
                raise BadSchemaError(
                    f"{place}/{key}", f"{_short(node[key])} begins a schema of its own within a schema", "leave it out"
                )
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self.anchors[node[key]] = node
        self.references += [(node, key, place) for key in _REFERENCES if key in node]
        patterns = [(f"{place}/pattern", node["pattern"])] if isinstance(node.get("pattern"), str) else []
        if isinstance(node.get("patternProperties"), dict):
            patterns += [(f"{place}/patternProperties", pattern) for pattern in node["patternProperties"]]
        for where, pattern in patterns:
            try:
                compile_pattern(pattern)
            except ValueError as problem:
                raise BadSchemaError(where, str(problem), "write a shorter or simpler pattern") from None
        for key in ("unevaluatedProperties", "patternProperties"):
            if key in node:
                self.uses.setdefault(key, f"{place}/{key}")


# Parts of a schema, to interpret a call without validation.


def resolve_reference(reference: str, root: Any, anchors: Mapping[str, Any] | None = None) -> Any:
    """Return the part of schema `root` that `reference` names by JSON Pointer (RFC 6901) or anchor after `#`; None if there is
    none. `anchors`: the known parts by anchor, else they are searched."""
    name = unquote(reference.removeprefix("#"))
    if name and not name.startswith("/"):
        if anchors is not None:
            return anchors.get(name)
        rest = [root]
        while rest:
            part = rest.pop()
            if isinstance(part, Mapping):
                if name in (part.get("$anchor"), part.get("$dynamicAnchor")):
                    return part
                rest += part.values()
            elif isinstance(part, list | tuple):
                rest += part
        return None
    found = root
    for part in name.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list | tuple) and key.isdecimal() and len(key) < 7 and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def schema_parts(node: Any, root: Any) -> list[Mapping[str, Any]]:
    """Return a schema with its alternatives, conditionals and references, each once, so that cycles end."""
    found = dict[int, Mapping[str, Any]]()
    for part in (rest := [node]):  # grows
        if isinstance(part, Mapping) and id(part) not in found:
            found[id(part)] = part
            rest += _subschemas(part, ("then", "else"))
            rest += [resolve_reference(part[word], root) for word in _REFERENCES if isinstance(part.get(word), str)]
    return list(found.values())


def property_schemas(parts: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """Return the schemas of an object's property: by name, else by pattern, else of additional properties."""
    named = [known[own] for part in parts if (own := own_name(name, known := part.get("properties") or {})) in known]
    matched = list[Any]()
    for pattern, inner in [pair for part in parts for pair in (part.get("patternProperties") or {}).items()] if not named else ():
        with contextlib.suppress(ValueError, TimeoutError):  # an invalid or slow pattern matches nothing
            matched += [inner] if found_in_time(pattern, name) else []
    return named or matched or [part["additionalProperties"] for part in parts if "additionalProperties" in part]


def _item_schemas(parts: Iterable[Mapping[str, Any]], place: int) -> list[Any]:
    """Return the schemas of an array item by index, in the keywords of any draft."""
    found = list[Any]()
    for part in parts:
        items = part.get("items")
        old = items if isinstance(items, list) else None
        first = part.get("prefixItems") or [] if old is None else old
        found.append(first[place] if place < len(first) else items if old is None else part.get("additionalItems"))
    return found


# Unicode spellings of tool and parameter names. NFC and NFD spell the same name differently, and some tokenizers show a policy
# another spelling than the schema's.


def own_names(arguments: Any, schema: Mapping[str, Any], *, integers: bool = False) -> Any:
    """Return a call's arguments with names and enum texts spelled as in the schema, at all depths; with `integers` also 3.0 as 3
    for an integer. Raises TwiceError if two names of an object coincide."""
    if not isinstance(arguments, dict) or _is_plain(arguments, integers):
        return arguments
    whole = [arguments]
    late = _LATE.set(time.thread_time() + SCHEMA_S)  # for all patterns of names together
    try:
        _take_own_names([(whole, 0, schema)], schema, integers)
    finally:
        _LATE.reset(late)
    return whole[0]


def _take_own_names(rest: list[tuple[Any, Any, Any]], root: Mapping[str, Any], integers: bool) -> None:
    """Replace values by copies as in `own_names`; `rest`: (container, key, schema)."""
    while rest:  # iterative: a policy may nest deeper than Python's stack
        holder, place, node = rest.pop()
        value, parts = holder[place], schema_parts(node, root)
        if isinstance(value, str):
            listed = (item for part in parts for item in (*(part.get("enum") or ()), part.get("const")))
            holder[place] = own_name(value, {item: None for item in listed if isinstance(item, str)})
            continue
        if isinstance(value, float):
            kinds = str([part.get("type") for part in parts])
            holder[place] = int(value) if "integer" in kinds and "number" not in kinds and abs(value) < 2**53 else value
            continue
        made: dict[str, Any] | list[Any]
        if isinstance(value, dict):
            chosen = [part["propertyNames"] for part in parts if isinstance(part.get("propertyNames"), Mapping)]
            names = [*(part.get("properties") or () for part in parts), *(part.get("enum") or () for part in chosen)]
            own, made = {nfc(name): name for listed in names for name in listed if isinstance(name, str)}, {}
            for name, item in value.items():
                put_once(made, own.get(nfc(name)) or name, item)
        else:
            made = value.copy()
        holder[place] = made
        for key, item in made.items() if isinstance(made, dict) else enumerate(made):
            if isinstance(item, dict | list) or _is_spelled(item, integers):
                below = property_schemas(parts, key) if isinstance(key, str) else _item_schemas(parts, key)
                rest.append((made, key, {"anyOf": below}))


def _is_plain(value: Any, integers: bool) -> bool:
    """Return True if no name, text or number in a JSON value may have another spelling."""
    for part in (rest := [value]):  # grows
        if isinstance(part, dict):
            rest += (*part, *part.values())
        elif isinstance(part, list):
            rest += part
        elif _is_spelled(part, integers):
            return False
    return True


def _is_spelled(value: Any, integers: bool) -> bool:
    """Return True if a text or number may have another spelling: not ASCII, or 3.0."""
    return not value.isascii() if isinstance(value, str) else integers and isinstance(value, float) and value.is_integer()


def _check_work(schemas: Mapping[int, tuple[Any, str]], targets: Mapping[tuple[int, str], Any]) -> None:
    """Raise BadSchemaError if too many schemas, or the same one recursively, apply to a single value."""
    work: dict[int, tuple[int, int]] = {}  # (total schemas, longest chain)
    for first in schemas:
        stack, open_ones = [first], set[int]()
        while stack:
            number = stack[-1]
            node, place = schemas[number]
            if number in work:
                stack.pop()
                continue
            following = [id(item) for item in _at_once(node, targets) if id(item) in schemas]
            rest = [item for item in following if item not in work]
            if not rest:
                own = [work[item] for item in following]
                work[number] = 1 + sum(item[0] for item in own), 1 + max((item[1] for item in own), default=0)
                if work[number][0] > MOST_WORK or work[number][1] > MOST_CHAIN:
                    raise BadSchemaError(
                        place, f"one value would have to fit {work[number][0]} schemas at once", "write fewer alternatives"
                    )
                open_ones.discard(number)
                stack.pop()
                continue
            open_ones.add(number)
            if again := [item for item in rest if item in open_ones]:
                raise BadSchemaError(
                    place,
                    f"it leads to itself by way of {schemas[again[0]][1] or 'the root'}",
                    "refer to it below a property or item",
                )
            stack += rest


def _at_once(node: dict[str, Any], targets: Mapping[tuple[int, str], Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that apply to the same value."""
    found = [targets[id(node), key] for key in _REFERENCES if (id(node), key) in targets]
    return (item for item in (*found, *_subschemas(node, _ONES)) if isinstance(item, dict))


def _subschemas(node: Mapping[str, Any], ones: Sequence[str]) -> list[Any]:
    """Return the subschemas for the same value: alternatives, `ones` and dependencies."""
    found = [node[key] for key in ones if key in node]
    for key in ALTERNATIVES:
        found += node[key] if isinstance(node.get(key), list) else []
    for key in ("dependencies", "dependentSchemas"):
        found += node[key].values() if isinstance(node.get(key), dict) else []
    return found


def as_2020(schema: Any) -> Any:
    """Convert a schema to draft 2020-12 without "$schema". Older drafts (4 to 2019-09) are rewritten by their rules; without a
    declared draft, so are keywords in forms that only older drafts have: a list under "items", "dependencies", a boolean
    "exclusiveMinimum". Raises BadSchemaError for an unknown draft."""
    if not isinstance(schema, Mapping):
        return schema
    declared = schema.get("$schema", "")
    draft = str(declared).partition("://")[2].rstrip("#")
    if declared and draft not in (_NEWEST, "json-schema.org/schema", _RECURSIVE, *_OLDER):
        raise BadSchemaError("/$schema", f"{_short(declared)} is no draft from 4 to 2020-12", f"name https://{_NEWEST}, or none")
    plain = {key: value for key, value in schema.items() if key != "$schema"}
    try:
        return plain if draft == _NEWEST else _rewrite_schema(plain, plain, draft in _OLDER)
    except RecursionError:
        return plain  # `check_schema` reports the depth


_NEWEST = "json-schema.org/draft/2020-12/schema"
_RECURSIVE = "json-schema.org/draft/2019-09/schema"
_OLDER = tuple(f"json-schema.org/draft-0{number}/schema" for number in (4, 6, 7))
_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$defs", "definitions"}
)


def _rewrite_schema(node: Any, root: Any, alone: bool) -> Any:
    """`alone`: drafts 4 to 7, where keywords next to "$ref" are ignored, and an id such as "#a" is an anchor."""
    if not isinstance(node, Mapping):
        return node
    new: dict[str, Any] = {}
    again = partial(_rewrite_schema, root=root, alone=alone)
    for key, value in node.items():
        if alone and "$ref" in node and key != "$ref" and key not in _NOTES:
            continue
        if key == "$recursiveRef":  # differs only in nested schema resources, which are refused
            new["$ref"] = value
        elif key == "$ref" and isinstance(value, str):
            new[key] = _move_pointer(value, root)
        elif alone and key in ("$id", "id") and isinstance(value, str) and value.startswith("#"):
            new["$anchor"] = value[1:]
        elif key == "items" and isinstance(value, list):
            new["prefixItems"] = list(map(again, value))
        elif key == "additionalItems":
            if isinstance(node.get("items"), list):
                new["items"] = again(value)
        elif key == "dependencies" and isinstance(value, Mapping):
            lists = {name: item for name, item in value.items() if isinstance(item, list)}
            schemas = {name: again(item) for name, item in value.items() if name not in lists}
            new |= ({"dependentRequired": lists} if lists else {}) | ({"dependentSchemas": schemas} if schemas else {})
        elif key in _LIMITS and isinstance(value, bool):
            if value and _LIMITS[key] in node:
                new[key] = node[_LIMITS[key]]
        elif key in _LIMITS.values() and node.get(_EXCLUSIVE[key]) is True:
            continue
        else:
            new[key] = _change_inside(key, value, again)
    return new


_NULL = {"type": "null"}


def _change_inside(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the schemas in a keyword's value."""
    if key in _MAPS and isinstance(value, Mapping):
        return {name: change(item) for name, item in value.items()}
    if key in DATA:
        return value
    return list(map(change, value)) if isinstance(value, list) else change(value)


def with_nulls(node: Any) -> Any:
    """Express `nullable: true`, which only agentrl's own check of a call reads, by types, for grammars."""
    if not isinstance(node, Mapping):
        return node
    new = {key: _change_inside(key, value, with_nulls) for key, value in node.items()}
    if new.pop("nullable", None) is not True:
        return {**new, "nullable": node["nullable"]} if "nullable" in node else new
    if new.keys() & {"$ref", "allOf", "not", "if"}:
        return {"anyOf": [new, _NULL]}
    # In place, so that pointers into it remain valid.
    kinds = new.get("type", [])
    new |= {"type": list(dict.fromkeys([*([kinds] if isinstance(kinds, str) else kinds), "null"]))} if kinds else {}
    if values := [new.pop("const")] if "const" in new else new.get("enum"):
        new["enum"] = [*values, *([] if None in values else [None])]
    return new | {key: [*new[key], _NULL] for key in ("anyOf", "oneOf") if key in new}


_LIMITS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_EXCLUSIVE = {plain: exclusive for exclusive, plain in _LIMITS.items()}


def _move_pointer(reference: str, root: Any) -> str:
    """Adapt a pointer reference to keywords that `_rewrite_schema` renames."""
    if not reference.startswith("#/"):
        return reference
    node, parts, named = root, [], False
    for part in reference[2:].split("/"):
        renamed = {} if named else {"dependencies": "dependentSchemas"}
        if not named and isinstance(node, Mapping) and isinstance(node.get("items"), list):
            renamed |= {"items": "prefixItems", "additionalItems": "items"}
        parts.append(renamed.get(part, part))
        named = not named and part in _MAPS
        node = resolve_reference(f"#/{part}", node)
    return "#/" + "/".join(parts)


def _escape_pointer(key: Any) -> str:
    return str(key)[:80].replace("~", "~0").replace("/", "~1")


def _short(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "an array"
    return repr(value[:80] if isinstance(value, str) else value)


_LATE: contextvars.ContextVar[float] = contextvars.ContextVar("agentrl_schema_late", default=math.inf)
_LEFT: contextvars.ContextVar[Iterator[int]] = contextvars.ContextVar("agentrl_schema_left")


def _in_time() -> float:
    """Return the seconds left. Raises TimeoutError, or TooLongError on an event loop, at the limit."""
    left = _LATE.get() - time.thread_time()
    if left > 0:
        return left
    if QUICK.get():
        raise TooLongError
    raise TimeoutError(f"the check against its schema took longer than {SCHEMA_S:g} s")


def found_in_time(pattern: str, text: str) -> bool:
    left = _in_time()
    try:
        return within_seconds(_compiled(pattern).search, text, min(left, SCHEMA_S)) is not None
    except TimeoutError:
        if QUICK.get():
            raise TooLongError from None
        raise TimeoutError(f"the pattern {pattern!r} took longer than {SCHEMA_S:g} s on {len(text)} characters") from None


_compiled = lru_cache(maxsize=4096)(compile_pattern)
Keyword = Callable[[Any, Any, Any, Any], Any]
_PLAIN: dict[str, Keyword] = dict(Draft202012Validator.VALIDATORS)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not found_in_time(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if found_in_time(pattern, name):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check `additionalProperties` with a time limit; jsonschema matches the neighbouring patterns with `re`."""
    if not schema.get("patternProperties") or not validator.is_type(instance, "object"):
        yield from _PLAIN["additionalProperties"](validator, wanted, instance, schema) or ()
        return
    known, patterns = schema.get("properties", {}), list(schema["patternProperties"])
    others = [name for name in instance if name not in known and not any(found_in_time(pattern, name) for pattern in patterns)]
    if isinstance(wanted, dict):
        for name in others:
            yield from validator.descend(instance[name], wanted, path=name)
    elif not wanted and others:
        yield ValidationError(f"{', '.join(map(repr, sorted(others)))} match none of the patterns {patterns!r}")


def _unique(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check `uniqueItems` in linear time; jsonschema compares each pair of objects."""
    if wanted and validator.is_type(instance, "array") and len({_identity(item) for item in instance}) < len(instance):
        yield ValidationError(f"{instance!r} has non-unique elements")


def _identity(value: Any) -> Any:
    """Return a key that is equal for values equal in JSON Schema: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((key, _identity(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return "array", tuple(map(_identity, value))
    return isinstance(value, bool), value


def _multiple(validator: Any, of: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    try:
        if isinstance(instance, float) or isinstance(of, float):  # 19.99 is a multiple of 0.01, though not in binary
            instance, of = Decimal(repr(instance)), Decimal(repr(of))
        yield from _PLAIN["multipleOf"](validator, of, instance, schema) or ()
    except (OverflowError, ValueError, ZeroDivisionError):
        yield ValidationError(f"a number too large to say whether it is a multiple of {of}")


def _timed_keyword(keyword: Keyword) -> Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if QUICK.get() and next(_LEFT.get(), None) is None:
            raise TooLongError
        _in_time()
        if instance is None and schema.get("nullable") is True:  # OpenAPI 3.0: null is allowed too
            return ()
        return keyword(validator, value, instance, schema)

    return check


_extend: Callable[..., Any] = validators.extend
_OWN: dict[str, Keyword] = {
    "additionalProperties": _additional, "multipleOf": _multiple, "pattern": _pattern, "patternProperties": _pattern_properties,
    "uniqueItems": _unique, "dependencies": Draft7Validator.VALIDATORS["dependencies"],
}  # fmt: skip


SchemaValidator = _extend(Draft202012Validator, {name: _timed_keyword(keyword) for name, keyword in {**_PLAIN, **_OWN}.items()})
"""Validator of draft 2020-12 whose patterns and work are limited (`first_fault`)."""


validator = partial(SchemaValidator, registry=EMPTY_REGISTRY)
"""Builds a `SchemaValidator` of a trusted or checked schema; it fetches nothing."""


def checked_validator(schema: Any) -> Any:
    """Build a `SchemaValidator` of an untrusted schema. Raises BadSchemaError if it is unusable (`check_schema`) or invalid."""
    check_schema(schema)
    plain = as_2020(schema)
    try:
        fault = first_fault(_META, plain, at_once=False)
    except TimeoutError as late:
        raise BadSchemaError("", str(late), "leave out what a model need not know") from None
    if fault is not None:
        place = "".join(f"/{_escape_pointer(part)}" for part in fault.absolute_path)
        raise BadSchemaError(place, fault_words(fault, 300), "see https://json-schema.org/draft/2020-12")
    return validator(plain)


_META = SchemaValidator(Draft202012Validator.META_SCHEMA)


def fault_words(fault: ValidationError, most: int = 200) -> str:
    """Format the reason of a fault in at most `most` characters; a long quoted value is cut."""
    shown = repr(fault.instance)
    text = fault.message.replace(shown, f"{shown[:80]}...") if len(shown) > 80 else fault.message
    return text if len(text) <= most else f"{text[: most - 3]}..."


def first_fault(validator: Any, instance: Any, *, at_once: bool = True) -> ValidationError | None:
    """Return the most informative validation error, or None. Raises TimeoutError after `SCHEMA_S`, and, if `at_once`,
    TooLongError if it is slow and tried on an event loop (`threads.at_once`)."""
    hurry = at_once and QUICK.get()
    late = _LATE.set(time.thread_time() + (AT_ONCE_CPU_S if hurry else SCHEMA_S))
    quick, count = QUICK.set(hurry), _LEFT.set(iter(range(AT_ONCE)))
    try:
        found: ValidationError | None = best_match(validator.iter_errors(instance))
        return found
    except RecursionError:
        raise TimeoutError("the value is nested too deep to be checked against its schema") from None
    finally:
        _LATE.reset(late)
        QUICK.reset(quick)
        _LEFT.reset(count)
