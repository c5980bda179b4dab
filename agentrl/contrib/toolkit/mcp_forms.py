"""Tools and answers in the form of a server of MCP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.data.images import Image
from agentrl.data.trajectory import Json


def tool_list(schemas: Iterable[Mapping[str, Json]]) -> list[Any]:
    """Tools in OpenAI's function format as a server of MCP lists them."""
    import mcp_types as types

    functions = [schema["function"] for schema in schemas]
    return [
        types.Tool(name=one["name"], description=one.get("description", ""), input_schema=one["parameters"]) for one in functions
    ]


def call_result(text: str, images: Iterable[Image] = (), *, error: bool = False) -> Any:
    """A text with its images as a server of MCP answers a call: each image in the place of its line."""
    import mcp_types as types

    left = {image.line: image for image in images}
    blocks: list[Any] = []
    lines: list[str] = []

    def flush() -> None:
        if lines:
            blocks.append(types.TextContent(type="text", text="\n".join(lines)))
            lines.clear()

    for line in text.split("\n"):
        if line in left:
            flush()
            blocks.append(_picture(left.pop(line)))
        else:
            lines.append(line)
    flush()
    # Within a line, of JSON say: the text stays whole.
    blocks += [_picture(image) for line, image in left.items() if line in text]
    return types.CallToolResult(content=blocks, is_error=error)


def _picture(image: Image) -> Any:
    import mcp_types as types

    return types.ImageContent(type="image", data=image.data, mime_type=image.media_type)
