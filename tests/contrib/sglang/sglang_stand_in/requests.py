"""The request classes of SGLang 0.5.23 by their description in requests.json.

    python -m tests.contrib.sglang.sglang_stand_in.requests    # writes it; needs sglang, without its kernels

A server of the package ignores fields that it does not know; here they are refused, as is a value of another type.
"""

import dataclasses
import importlib.util
import json
import typing
from pathlib import Path
from typing import Any

import jsonschema

VERSION = "0.5.23"
FROZEN = Path(__file__).with_name("requests.json")
INSTALLED = importlib.util.find_spec("sglang") is not None
CLASSES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
}
"""The class of the body that each route takes."""
SAMPLING = "SamplingParams"


class BadRequestError(Exception):
    """A body that the server would not take."""


class Frozen:
    """The description."""

    def __init__(self) -> None:
        self.table: dict[str, Any] = json.loads(FROZEN.read_text())
        # `jsonschema.validate` would check the schema itself each time, which takes 50 ms.
        self._validators = {name: jsonschema.Draft202012Validator(one) for name, one in self.table["classes"].items()}

    def build(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the defaults of its class. Raises BadRequestError."""
        for problem in self._validators[name].iter_errors(body):
            raise BadRequestError(f"{name}: {problem.json_path}: {problem.message}")
        return {field: one["default"] for field, one in self.table["classes"][name]["properties"].items()} | body


def _required(field: Any) -> bool:
    import msgspec

    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    return any(field.default is one for one in missing) and any(field.default_factory is one for one in missing)


def describe(name: str) -> dict[str, Any]:
    """A class of the package as JSON schema. Fields with types of their own (images and such) may have any value."""
    import msgspec
    from pydantic import TypeAdapter
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams

    kind: Any = SamplingParams if name == SAMPLING else getattr(io_struct, name)
    plain = not dataclasses.is_dataclass(kind)
    fields = {field.name: field for field in (msgspec.structs.fields(kind) if plain else dataclasses.fields(kind))}
    hints = typing.get_type_hints(kind, include_extras=not plain) if not plain else {n: f.type for n, f in fields.items()}
    properties: dict[str, Any] = {}
    for field in fields:
        try:
            schema = msgspec.json.schema(hints[field]) if plain else TypeAdapter(hints[field]).json_schema()
        except Exception:  # a type that JSON does not have
            schema = {}
        schema = {} if "$defs" in schema or "$ref" in str(schema) or "contentEncoding" in str(schema) else schema
        default = getattr(fields[field], "default", None)
        properties[field] = {**schema, "default": default if isinstance(default, (bool, int, float, str)) else None}
    required = [name for name, field in fields.items() if _required(field)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def frozen() -> dict[str, Any]:
    """The description of the installed package."""
    from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER

    return {
        "version": VERSION,
        "classes": {name: describe(name) for name in [*CLASSES.values(), SAMPLING]},
        "server_args": list(POSITIONAL_FIELD_ORDER),
    }


def text_of(description: dict[str, Any]) -> str:
    """As JSON with a class a line."""
    classes = ",\n".join(f'  "{name}": {json.dumps(one)}' for name, one in description.pop("classes").items())
    rest = "".join(f',\n "{name}": {json.dumps(one)}' for name, one in description.items())
    return f'{{"classes": {{\n{classes}\n }}{rest}\n}}\n'


if __name__ == "__main__":
    FROZEN.write_text(text_of(frozen()))
