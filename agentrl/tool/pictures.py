"""Images that a tool answers: taken out of its answer, whose text has their lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.errors import EnvError, ImageError
from agentrl.images import MOST_IMAGES, Image
from agentrl.redaction import redact


def pictured(name: str, answer: Any) -> tuple[Any, tuple[Image, ...]]:
    """The answer with lines in the places of its images, and the images. A list of texts and images is text, line by line.

    Raises EnvError for a Pillow picture that is too large, which is an error in the tool.
    """
    if not _pictures(answer):
        return answer, ()
    found: list[Image] = []
    put = _put(name, answer, found)
    texts = isinstance(put, list) and all(isinstance(item, str) for item in put)
    return "\n".join(put) if texts else put, tuple(found)


def read(data: bytes, size: str) -> Image | str:
    """An image of bytes from elsewhere; for what is not taken, the line that says so and why. `size`: in the line's words."""
    try:
        return Image.read(data)
    except ImageError as problem:
        return f"[image, {size}, not shown: {problem}]"


def with_lines(text: str, images: Sequence[Image]) -> str:
    """A text that was cut, with the lines that the cut took from it after its end: no image is left out silently."""
    return "\n".join([text, *dict.fromkeys(image.line for image in images if image.line not in text)])


def _is_picture(item: object) -> bool:
    return isinstance(item, Image) or type(item).__module__.startswith("PIL.")


def _pictures(answer: Any) -> bool:
    """Whether there is one in lists and dictionaries of the answer."""
    rest = [answer]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            rest += item.values()
        elif isinstance(item, list | tuple):
            rest += item
        elif _is_picture(item):
            return True
    return False


def _put(name: str, item: Any, found: list[Image]) -> Any:
    if isinstance(item, dict):
        return {key: _put(name, value, found) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_put(name, value, found) for value in item]
    if not _is_picture(item):
        return item
    try:
        image = item if isinstance(item, Image) else Image.of(item)
    except ImageError as problem:
        raise EnvError(f"tool {name} returned an image that is not taken: {problem}") from None
    if len(found) >= MOST_IMAGES:
        return f"[image, {image.size} bytes, not shown: an answer may hold {MOST_IMAGES}]"
    data = image.bytes().decode("latin-1")
    if redact(data) != data:  # within a picture's comment, say; a file cannot be cut as text is
        return f"[image, {image.size} bytes, not shown: a secret of this run stands in its file]"
    found.append(image)
    return image.line
