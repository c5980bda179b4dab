"""Look an algorithm up by name and bind its arguments, with errors that name what is near."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


def lookup(kind: str, table: Mapping[str, Function], name: str) -> Function:
    """The function of that name. Raises ConfigError with the nearest name."""
    if name in table:
        return table[name]
    listed = ", ".join(sorted(table))
    raise ConfigError(f"{kind}: unknown name {name!r}{nearest(name, table)}; known: {listed}")


def bind(kind: str, table: Mapping[str, Function], name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of that name with its keyword arguments bound.

    Raises ConfigError for an unknown name, an unknown argument or a value of another type or range.
    """
    function = lookup(kind, table, name)
    known = {
        key: parameter
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    hints = get_type_hints(function, include_extras=True)
    bound = {}
    for key, value in args.items():
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{kind} {name!r}: unknown argument {key!r}{nearest(key, known)}; known: {listed}")
        try:
            bound[key] = TypeAdapter(hints[key]).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{kind} {name!r}: argument {key} = {value!r}: {reason}") from None
    missing = [key for key, p in known.items() if p.default is inspect.Parameter.empty and key not in bound]
    if missing:
        raise ConfigError(f"{kind} {name!r}: argument {missing[0]!r} is required")
    return partial(function, **bound)


def nearest(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""
