"""Building blocks of config sections: bounded numbers with units, the base of sections, and registered components.

The text below a key is its documentation (`agentrl config docs`, docs/config_keys.md, comments in a run's config.toml).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of a number in a key's type: `Annotated[PositiveInt, Unit("tokens")]`. "1" is a ratio."""

    name: str

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the key's JSON Schema with a `unit`."""
        return {**handler(core), "unit": self.name}


NotNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Limit = Annotated[float, Field(gt=0.0, allow_inf_nan=True)]
Weight = Annotated[float, Field(ge=0.0)]

Fraction = Annotated[float, Field(ge=0.0, le=1.0), Unit("1")]
Beta = Annotated[float, Field(ge=0.0, lt=1.0), Unit("1")]
Rate = Annotated[float, Field(gt=0.0), Unit("1")]
Seconds = Annotated[float, Field(gt=0.0, le=1e9), Unit("seconds")]
Tokens = Annotated[PositiveInt, Unit("tokens")]
Turns = Annotated[int, Field(ge=1, le=32_767), Unit("turns")]  # columns.MAX_TURN: ledgers count turns as int16
Ranks = Annotated[PositiveInt, Unit("ranks")]
Temperature = Annotated[NotNegative, Unit("1")]
Prices = Annotated[tuple[NotNegative, NotNegative], Field(strict=False), Unit("USD per million tokens")]


def _one_folder(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise ValueError(f"{name!r} is not the name of one folder inside `out`; to write elsewhere, set out")
    return name


def _day(given: Any) -> str:
    try:
        return date.fromisoformat(str(given)).isoformat()  # TOML has a date type
    except ValueError:
        raise ValueError(f"{given!r} is not a day; write YYYY-MM-DD, as 2026-11-26") from None


Day = Annotated[str, BeforeValidator(_day)]
FolderName = Annotated[str, AfterValidator(_one_folder)]


_CALL = {
    "model": "the model's name (api:NAME, or a spec's)",
    "messages": "the conversation",
    "tools": "the environment and [tools]",
    "functions": "the environment and [tools]",
    "stream": "agentrl, which reads whole answers",
    "n": "the number of episodes (-k)",
    "api_key": "the environment variable that litellm reads, such as OPENAI_API_KEY",
    **dict.fromkeys(("num_retries", "max_retries"), "the key `retries` of this section"),
    **dict.fromkeys(("timeout", "request_timeout", "stream_timeout"), "the key `timeout` of this section"),
}
"""Arguments of litellm that agentrl sets by a key or otherwise, with that alternative."""
_POLICY = {
    **_CALL,
    **dict.fromkeys(("api_base", "base_url"), "api.base"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "rollout.max_turn_tokens"),
    "temperature": "eval.temperature (rollout.temperature in `agentrl rollout`)",
    "top_p": "rollout.top_p",
}
_JUDGE = {
    **_CALL,
    **dict.fromkeys(("api_base", "base_url"), "reward.judge.api_base"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_tokens of the judge leaf"),
    "response_format": "the judge leaf, whose verdict has a form",
}


def _without(taken: Mapping[str, str], args: dict[str, Any]) -> dict[str, Any]:
    for name in args:
        if name in taken:
            raise ValueError(f"{name} is set by {taken[name]}. Leave it out here")
    if not isinstance(args.get("extra_headers", {}), dict):
        raise ValueError('extra_headers: expected a table, such as {X-Name = "value"}')
    return args


ApiArgs = Annotated[dict[str, Any], AfterValidator(partial(_without, _POLICY))]
JudgeArgs = Annotated[dict[str, Any], AfterValidator(partial(_without, _JUDGE))]


class Frozen(BaseModel):
    """Base of sections: immutable; refuses unknown keys, strings for numbers, and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Choice(Frozen):
    """A registered component and its arguments, for example `name = "ppo_clip"` with `args.clip_high = 0.28`."""

    name: str
    """Registered name: one of agentrl, or of a file in `plugins/`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments by name; others have their defaults."""
