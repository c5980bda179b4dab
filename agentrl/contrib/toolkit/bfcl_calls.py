"""Compare calls by the rules of the Berkeley function-calling leaderboard (BFCL v4). Also reads its Java and JavaScript literals,
and makes calls that match possible answers: gold solutions of the packaged environments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agentrl.data.trajectory import Json
from agentrl.reward.call_matching import CALL_FORMS, CallForm, CallRule, GoldCall
from agentrl.reward.values import NORMALIZERS, Normalizer

# Arguments as source text: in the categories `simple_java` and `simple_javascript` each is a text, read by its declared type.
#
# A text that does not have its declared type stays a text; types that the leaderboard does not read (a set, a queue) raise
# ValueError. Its readers take the first match of a pattern, split at every comma, and end an object at the first closing brace,
# so `"a, b"` in a list is two items. This is kept, because different verdicts would not be comparable.

Reader = Callable[[str, "str | None"], Any]
"""(text, declared type of the items) -> the value, or the text itself."""

_LONG = re.compile(r"-?\d+[lL]$")
_JAVA_FLOAT = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?[fF]$")
_JAVA_ARRAY = re.compile(r"new\s+\w+\[\]\s*\{(.*?)\}")
_LIST_OF = re.compile(r"new\s+ArrayList<\w*>\(Arrays\.asList\((.+?)\)\)")
_LIST_ADDED = re.compile(r"new\s+ArrayList<\w*>\(\)\s*\{\{\s*(.+?)\s*\}\}", re.DOTALL)
_LIST_EMPTY = re.compile(r"new\s+ArrayList<\w*>\(\)")
_ADD = re.compile(r"add\((.+?)\)")
_MAP = re.compile(r"new\s+HashMap<.*?>\s*\(\)\s*\{\s*\{?\s*(.*?)\s*\}?\s*\}", re.DOTALL)
_MAP_EMPTY = re.compile(r"new\s+HashMap<.*?>\s*\(\)")
_PUT = re.compile(r"put\(\"(.*?)\",\s*(.*?)\)")
_ROWS = re.compile(r"\[\s*\[.*?\]\s*(,\s*\[.*?\]\s*)*\]|\bnew\s+Array\(\s*\[.*?\]\s*(,\s*\[.*?\]\s*)*\)")
_ROW = re.compile(r"\[(.*?)\]")
_JS_ARRAY = re.compile(r"\[(.*?)\]|\bnew\s+Array\((.*?)\)")
_OBJECT = re.compile(r"\{(.*?)\}")
_PAIR = re.compile(r"([^:]+):\s*(.*?)(?:,\s*(?=[^,]+:)|$)")


def read_source(language: str, text: str, kind: str, items: str | None = None) -> Any:
    """Read a text as an expression of the declared type `kind` (`items`: the declared type of its items).

    Returns the text itself if it does not match. Raises ValueError for a type that the leaderboard does not read.
    """
    read = LANGUAGES[language].get(kind, (str, None))[1]
    if read is None:
        raise ValueError(f"no rule for the type {kind} of {language}")
    return read(text, items)


def _as_is(text: str, items: str | None) -> str:
    return text


def _boolean(text: str, items: str | None) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


def _if_like(pattern: str, make: Callable[[str], Any]) -> Reader:
    form = re.compile(pattern)
    return lambda text, items: make(text) if form.match(text) else text


def _untyped(text: str) -> int | float | bool | str:
    """Read a value without a declared type: a boolean, a number by Python's `int` or `float`, else the text."""
    if text in ("true", "false"):
        return text == "true"
    for make in (int, float):
        try:
            return make(text)
        except ValueError:
            continue
    return text


def _java_untyped(text: str) -> Any:
    if text.startswith('"') and text.endswith('"'):
        return text[1:-1]
    if _LONG.match(text):
        return int(text[:-1])
    return float(text[:-1]) if _JAVA_FLOAT.match(text) else _untyped(text)


def _java_item(text: str, kind: str | None) -> Any:
    return read_source("java", text, kind) if kind else _java_untyped(text)


def _java_array(text: str, items: str | None) -> Any:
    found = _JAVA_ARRAY.search(text)
    return text if found is None else [_java_item(part.strip(), items) for part in found[1].split(",") if part.strip()]


def _java_list(text: str, items: str | None) -> Any:
    if found := _LIST_OF.search(text):
        parts = found[1].split(",")
    elif found := _LIST_ADDED.search(text):
        parts = _ADD.findall(found[1])
    else:
        return [] if _LIST_EMPTY.search(text) else text
    # The leaderboard drops the first and last character of a text as quotes, without a check.
    return [part.strip()[1:-1] if items in ("char", "String") else _java_item(part.strip(), items) for part in parts]


def _java_map(text: str, items: str | None) -> Any:
    if found := _MAP.search(text):
        return {key: _java_untyped(value.strip()) for key, value in _PUT.findall(found[1])}
    return {} if _MAP_EMPTY.search(text) else text


def _js_text(text: str, items: str | None = None) -> str:
    return text[1:-1] if text[:1] in ("'", '"') and text.endswith(text[:1]) else text


def _js_untyped(text: str) -> Any:
    text = text.strip()
    unquoted = _js_text(text)
    return _untyped(text) if unquoted == text else unquoted


def _js_array(text: str, items: str | None) -> Any:
    text = text.strip()
    if rows := _ROWS.match(text):
        # The pattern of a row begins at the outer bracket, so the first row has one bracket more.
        inner = [row.strip() for row in _ROW.findall(rows[0])]
        inner[0] = inner[0].removeprefix("[")
        return [[_js_untyped(part) for part in row.split(",")] for row in inner]
    found = _JS_ARRAY.match(text)
    if found is None:
        return text
    inside = (found[1] if found[1] is not None else found[2]).strip()
    parts = [part.strip() for part in inside.split(",")] if inside else []
    if not items:
        return [_js_untyped(part) for part in parts]
    try:
        return [read_source("javascript", part, items, "String" if part[:1] in ("'", '"') else None) for part in parts]
    except ValueError:
        return text


def _js_object(text: str, items: str | None) -> Any:
    text = text.strip()
    if text == "{}":
        return {}
    found = _OBJECT.match(text)
    if found is None:
        return text
    return {key.strip().strip("'\""): _js_member(value.strip()) for key, value in _PAIR.findall(found[1])}


def _js_member(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return _js_array(text, None)
    if text.startswith("{") and text.endswith("}"):
        return _js_object(text, None)
    return _js_untyped(text.strip("'\""))


_INTEGER = _if_like(r"-?\d+$", int)

LANGUAGES: dict[str, dict[str, tuple[type, Reader | None]]] = {
    "java": {
        "byte": (int, _INTEGER), "short": (int, _INTEGER), "integer": (int, _INTEGER), "boolean": (bool, _boolean),
        "long": (int, _if_like(_LONG.pattern, lambda text: int(text.rstrip("\n")[:-1]))),
        "float": (float, _if_like(_JAVA_FLOAT.pattern, lambda text: float(text.rstrip("\n")[:-1]))),
        "double": (float, _if_like(r"-?\d+(\.\d+)?([eE][+-]?\d+)?$", float)),
        "char": (str, _as_is), "String": (str, _as_is), "any": (str, _as_is), "Array": (list, _java_array),
        "ArrayList": (list, _java_list), "Queue": (list, None), "Stack": (list, None), "Set": (set, None),
        "HashMap": (dict, _java_map), "Hashtable": (dict, None),
    },
    "javascript": {
        "String": (str, _js_text), "any": (str, _as_is), "integer": (int, _INTEGER), "Boolean": (bool, _boolean),
        "Bigint": (int, _if_like(r"-?\d+n$", lambda text: int(text[:-1]))), "float": (float, _if_like(r"-?\d+(\.\d+)?$", float)),
        "dict": (dict, _js_object), "array": (list, _js_array),
    },
}  # fmt: skip
"""Language -> declared type -> (Python type, reader or None if the leaderboard does not read the type)."""


# Compare a call with the possible answers, value by value.
#
# The leaderboard's rules are kept with their oddities: values are equal as in Python (1, 1.0 and True are), texts are normalized
# only at the depths where it does so, a value may have the type of the first possible answer instead of the declared one (then
# it must equal an answer exactly), and an empty list matches "" among the answers. Two differences: a value that makes its
# program fail does not fit, and lists of objects whose items have no declared type are compared as lists of objects.

_TYPES: Mapping[str, type] = {
    "string": str, "any": str, "integer": int, "float": float, "number": float, "boolean": bool,
    "array": list, "tuple": list, "dict": dict, "object": dict,
}  # fmt: skip
_WITH_ITEMS = frozenset({"Array", "ArrayList", "array"})
_SCALARS = frozenset({str, int, float, bool})
_BFCL_OBJECT = (dict, Mapping)
plain = NORMALIZERS["bfcl"]


def arguments_fit(
    made: Mapping[str, Json],
    gold: Mapping[str, Json],
    schema: Mapping[str, Json] | None,
    normalize: Normalizer = plain,
    language: str = "python",
) -> bool:
    """Return True if a call's arguments are among the possible ones. `gold`: argument -> possible values, with "" if it may be
    left out. `schema`: the function's declared parameters, None if unknown. `language`: the language of their types."""
    declared = (schema or {}).get("properties", {})
    # Plain loops: this runs for every pair of calls, and a generator would cost as much as the comparison.
    for key in () if schema is None else schema.get("required", ()):
        if key not in made:
            return False
    for key, value in made.items():
        if key not in gold or (schema is not None and key not in declared):
            return False
        if not value_fits(value, gold[key], declared.get(key), normalize, language):
            return False
    for key, allowed in gold.items():  # noqa: SIM110 - see above
        if key not in made and "" not in allowed:
            return False
    return True


@CALL_FORMS.register("bfcl")
class LeaderboardCalls(CallForm):
    """Expected calls in the leaderboard's format, {name: {argument: [allowed, ...]}}, compared by its rules."""

    shape = "{name: {argument: [values]}}"
    lists = True
    strings = "bfcl"
    languages = ("python", *LANGUAGES)

    @staticmethod
    def read(item: Mapping[str, Json]) -> tuple[Any, Any, Any, Any] | None:
        if len(item) != 1:
            return None
        name, arguments = next(iter(item.items()))
        return name, arguments, None, None

    @staticmethod
    def value_fits(made: Json, gold: Json, declared: Json, rule: CallRule) -> bool:
        return value_fits(made, gold, declared, rule.values.normalize, rule.language)

    @staticmethod
    def arguments_fit(made: Mapping[str, Json], gold: GoldCall, rule: CallRule) -> bool:
        return arguments_fit(made, gold.arguments, gold.schema, rule.values.normalize, rule.language)


def value_fits(
    value: Any, allowed: Sequence[Any], declared: Json = None, normalize: Normalizer = plain, language: str = "python"
) -> bool:
    """Return True if a value is among the possible ones and has the declared type (a JSON Schema; None: any) or theirs."""
    kind = declared.get("type") if isinstance(declared, _BFCL_OBJECT) else None
    if language != "python":  # the value is a text in that language's syntax
        types = LANGUAGES[language]
        if not isinstance(value, str) or kind not in types:
            return False
        items = _items(declared) if kind in _WITH_ITEMS else None
        try:
            value = read_source(language, value, kind, items)
        except ValueError:
            return False
        return _typed_fits(value, allowed, types[kind][0], types[items][0] if items in types else None, normalize)
    wanted: type = _TYPES.get(kind, type(value)) if isinstance(kind, str) else type(value)
    if wanted is float and type(value) is int:
        value = float(value)
    first = allowed[0] if allowed else None
    if first and first == value and type(first) is type(value) is wanted and wanted in _SCALARS:
        return True  # shortcut: the code below gives the same result, ten times slower
    if type(value) is wanted is type(first) is str and len(allowed) == 1 and first:
        return normalize(value) == normalize(first)  # shortcut, too
    inner = _TYPES.get(_items(declared) or "") if wanted is list else None
    return _typed_fits(value, allowed, wanted, inner, normalize)


def _typed_fits(value: Any, allowed: Sequence[Any], wanted: type, inner: type | None, normalize: Normalizer) -> bool:
    """Return True if a value fits. `wanted`: the declared type; `inner`: the declared type of list items, or None."""
    first = _first_type(allowed)
    if type(value) is wanted:
        items: Any = value
        # Each item has the declared type, or that of the first item of an option that is a list.
        if inner is not None and not any(
            not isinstance(option, list) or all(type(item) in (inner, _first_type(option)) for item in items)
            for option in allowed
        ):
            return False
        if first is None or first is wanted:
            if isinstance(value, dict):
                return any(_object_fits(value, option, normalize) for option in allowed)
            if isinstance(value, list) and (inner is dict or (inner is None and any(isinstance(item, dict) for item in value))):
                same_size = [option for option in allowed if isinstance(option, list | str) and len(option) == len(value)]
                return any(
                    all(_object_fits(item, wanted, normalize) for item, wanted in zip(value, option, strict=True))
                    for option in same_size
                )
            if isinstance(value, str):
                folded = normalize(value)
                return any(isinstance(option, str) and (option == value or normalize(option) == folded) for option in allowed)
            if isinstance(value, list):
                # A text counts as the list of its letters, so "" equals the empty list.
                return _fold_values(value, normalize) in [
                    _fold_values(option, normalize) for option in allowed if isinstance(option, list | str)
                ]
            return value in allowed
    elif first is None or type(value) is not first:
        return False
    return value in allowed  # for example a variable's name in place of a value


def _items(declared: Json) -> str | None:
    """Return the name of the declared type of a list's items."""
    items = declared.get("items") if isinstance(declared, _BFCL_OBJECT) else None
    kind = items.get("type") if isinstance(items, _BFCL_OBJECT) else None
    return kind if isinstance(kind, str) else None


def _first_type(allowed: Sequence[Any]) -> type | None:
    return next((type(option) for option in allowed if option != ""), None)


def _fold_values(items: Sequence[Json], normalize: Normalizer) -> list[Json]:
    return [normalize(item) if isinstance(item, str) else item for item in items]


def _object_fits(made: Json, option: Any, normalize: Normalizer) -> bool:
    """Return True if each key's value is in the option's list of that key; "" in such a list makes the key optional."""
    if not isinstance(made, dict) or not isinstance(option, _BFCL_OBJECT):
        return False
    for key, value in made.items():
        values = option.get(key)
        if not isinstance(values, list | str):
            return False
        value = normalize(value) if isinstance(value, str) else value
        if value not in _fold_values(values, normalize):
            return False
    return all(key in made or (isinstance(values, list | str) and "" in values) for key, values in option.items())


# Calls that match possible answers


def possible_call(
    call: Mapping[str, Json], functions: Mapping[str, Mapping[str, Json]], language: str = "python"
) -> tuple[str, dict[str, Json]]:
    """Return name and arguments of a call that matches `{name: {argument: [possible values]}}`: the first values that fit,
    without optional arguments ("" also stands for the empty list). `functions`: name -> declared parameters. An argument
    without a fitting value is None."""
    name, sets = next(iter(call.items()))
    declared = functions.get(name, {})
    required, properties = declared.get("required", ()), declared.get("properties", {})
    found: dict[str, Json] = {}
    for key, allowed in sets.items():
        if "" in allowed and key not in required:
            continue
        values = [*(_plain(value) for value in allowed if value != ""), *(["", []] if "" in allowed else [])]
        if language != "python":
            values = [text for value in values for text in _write_variants(value, language)]
        fits = (value for value in values if value_fits(value, allowed, properties.get(key), language=language))
        found[key] = next(fits, None)
    return name, found


def solvable(calls: list[dict[str, Json]], functions: Mapping[str, Mapping[str, Json]], language: str = "python") -> bool:
    """Return True if the expected calls can be made: some of the leaderboard have no possible value, or none of the declared
    type."""
    made = [(*possible_call(call, functions, language), call) for call in calls]
    return all(arguments_fit(given, call[name], functions.get(name), language=language) for name, given, call in made)


def _plain(first: Json) -> Json:
    """Turn a possible value, whose objects list the possible values of each key, into a value."""
    if isinstance(first, Mapping):
        return _possible_object(first)
    if isinstance(first, list):
        return [_possible_object(item) if isinstance(item, Mapping) else item for item in first]
    return first


def _possible_object(option: Mapping[str, Json]) -> dict[str, Json]:
    return {
        key: (next((v for v in values if v != ""), "") if isinstance(values, list) else values)
        for key, values in option.items()
        if not (isinstance(values, list) and "" in values)
    }


def _write_variants(value: Json, language: str) -> Iterator[str]:
    """Yield a value in the syntax of `language`, in all variants that its declared type may require."""
    plain = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, list) and language == "java":
        for items in (
            [json.dumps(item) for item in value],
            [_text(item) for item in value],
            [f"{_text(item)}L" for item in value],
        ):
            yield f"new Object[]{{{', '.join(items)}}}"
            yield f"new ArrayList<>(Arrays.asList({', '.join(items)}))" if items else "new ArrayList<>()"
    elif isinstance(value, dict) and language == "java":
        puts = " ".join(f"put({json.dumps(key)}, {json.dumps(item)});" for key, item in value.items())
        yield f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    yield plain
    if isinstance(value, list):
        yield f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, dict):
        yield f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    yield from (f"{plain}{suffix}" for suffix in ("L", "f", "n"))


def _text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)
