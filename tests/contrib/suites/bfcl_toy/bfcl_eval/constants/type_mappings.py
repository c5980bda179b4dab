"""The types' names in JSON Schema."""

GORILLA_TO_OPENAPI = {
    "dict": "object",
    "float": "number",
    "integer": "integer",
    "string": "string",
    "any": "string",
    "array": "array",
}
