"""Calls that meet possible answers of the Berkeley function-calling leaderboard: gold solutions of the shelf's environments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from agentrl.contrib.toolkit.bfcl_calls import arguments_fit, value_fits
from agentrl.data.trajectory import Json


def possible_call(
    call: Mapping[str, Json], functions: Mapping[str, Mapping[str, Json]], language: str = "python"
) -> tuple[str, dict[str, Json]]:
    """Name and arguments of a call that matches `{name: {argument: [possible values]}}`: the first values that fit, without what
    may be left out. `functions`: the declared parameters of each function. An argument that no value fits is None."""
    name, sets = next(iter(call.items()))
    declared = functions.get(name, {})
    required, properties = declared.get("required", ()), declared.get("properties", {})
    chosen = {key: allowed for key, allowed in sets.items() if "" not in allowed or key in required}
    return name, {key: _fitting(allowed, properties.get(key), language) for key, allowed in chosen.items()}


def solvable(calls: list[dict[str, Json]], functions: Mapping[str, Mapping[str, Json]], language: str = "python") -> bool:
    """Return True if expected calls can be made at all: some of the leaderboard's have no possible value, or none of the
    declared type."""
    made = [(*possible_call(call, functions, language), call) for call in calls]
    return all(arguments_fit(given, call[name], functions.get(name), language=language) for name, given, call in made)


def _fitting(allowed: list[Json], declared: Json, language: str) -> Json:
    """The first possible value that is one for the leaderboard; "" stands for the empty list too, else None."""
    values = [*(_plain(value) for value in allowed if value != ""), *(["", []] if "" in allowed else [])]
    if language != "python":
        values = [text for value in values for text in _write_variants(value, language)]
    return next((value for value in values if value_fits(value, allowed, declared, language=language)), None)


def _plain(first: Json) -> Json:
    """A possible value, in which objects list the possible values of each key, as a value."""
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
    """A value in another language's syntax, in the ways that its declared type may ask for."""
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
