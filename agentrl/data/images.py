"""Images of a conversation: checks of untrusted bytes, the line in a message's text, the form in files.

An image stands in the text of its message as one line (`Image.line`), which is all that a model of text alone is shown. The
message has the image itself next to its text (`Message.images`); who cuts or rewrites the text need not know of images: one whose
line is gone is shown to nobody. Bytes are kept as they came, in base64, so that an image is JSON wherever its message is."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.utils.errors import DependencyError, ImageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


MOST_BYTES = 8 << 20
"""Of an image as it comes."""
MOST_PIXELS = 1 << 24
"""Of an image as it is shown, 4096 x 4096: a few bytes may say that they unfold to gigabytes."""
MOST_RATIO = 200
"""Of the longer side to the shorter one: models' own processors refuse more."""
MOST_IMAGES = 16
"""Of one answer of a tool."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MEDIA_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)
_SHOWN = 12  # characters of the digest in a line


@dataclass(frozen=True, slots=True)
class Image:
    """One image. `data`: its file as base64; `sha256` of that file, in hexadecimal; `width` and `height` in pixels.

    Make one with `Image.read` or `Image.of`, which look at the bytes; equal files are equal images.
    """

    sha256: str
    media_type: str = field(compare=False)
    width: int = field(compare=False)
    height: int = field(compare=False)
    data: str = field(compare=False, repr=False)

    @classmethod
    def read(cls, data: bytes) -> Image:
        """An image of a file's bytes: PNG, JPEG, WebP or GIF (of an animation the first picture).

        Raises ImageError for anything else, for bytes that do not decode, and beyond `MOST_BYTES`, `MOST_PIXELS` or `MOST_RATIO`;
        DependencyError without Pillow.
        """
        picture = _open_picture(data)
        kind = f"image/{str(picture.format).lower()}"
        return cls(hashlib.sha256(data).hexdigest(), kind, *_turn_upright(picture).size, base64.b64encode(data).decode())

    @classmethod
    def of(cls, picture: Picture) -> Image:
        """An image of a Pillow picture, as PNG. Raises ImageError above the limits."""
        _check_size(picture)
        file = io.BytesIO()
        picture.save(file, "PNG")
        return cls.read(file.getvalue())

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Image:
        """Inverse of `dataclasses.asdict`. Raises ImageError if it is no such row, or the bytes are not those of its digest."""
        try:
            found = cls(**row)
            data = base64.b64decode(found.data, validate=True)
        except (TypeError, ValueError) as problem:
            raise ImageError(f"not the row of an image: {problem}"[:200]) from None
        sizes = type(found.width) is int and type(found.height) is int and min(found.width, found.height) > 0
        # As `read` makes them: a page shows it by these.
        if not sizes or found.width * found.height > MOST_PIXELS or found.media_type not in MEDIA_TYPES:
            raise ImageError(f"not the row of an image: {found.media_type!r}, {found.width!r} x {found.height!r}"[:200])
        if hashlib.sha256(data).hexdigest() != found.sha256:
            raise ImageError(f"image {str(found.sha256)[:_SHOWN]}: its bytes are not those of its digest; the file was changed")
        return found

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return 3 * len(self.data) // 4 - self.data.count("=", -2)

    @property
    def line(self) -> str:
        """Placeholder of the image in a text: plain ASCII, the same within JSON."""
        return f"[image {self.sha256[:_SHOWN]}: {self.media_type}, {self.width} x {self.height}, {self.size} bytes]"

    @property
    def about(self) -> dict[str, str | int]:
        """Facts about the image that a reward spec may read."""
        size = {"width": self.width, "height": self.height, "bytes": self.size}
        return {"sha256": self.sha256, "media_type": self.media_type, **size}

    def bytes(self) -> bytes:
        """The file."""
        return base64.b64decode(self.data)

    def picture(self) -> Picture:
        """Decode its pixels as RGB, as a page shows them: transparent ones become white, a photo is turned upright.

        Raises ImageError if it was not made from these bytes by `read`.
        """
        picture = _turn_upright(_open_picture(self.bytes()))
        # Pillow alone would cut grays of 16 bits off at 255, so that all is white, and show the color under transparent pixels,
        # which is black behind a plot's black lines.
        if picture.mode.startswith("I"):
            return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
        if not picture.has_transparency_data:
            return picture.convert("RGB")
        white = _pillow().new("RGBA", picture.size, "white")
        found: Picture = _pillow().alpha_composite(white, picture.convert("RGBA")).convert("RGB")
        return found


def by_digest(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Image]:
    """The images of a record, which has them by digest. Raises ImageError for one that stands under another's."""
    found = {sha256: Image.from_row(row) for sha256, row in rows.items()}
    if wrong := [sha256 for sha256, image in found.items() if image.sha256 != sha256]:
        raise ImageError(f"image {wrong[0][:_SHOWN]}: another stands in its place ({found[wrong[0]].sha256[:_SHOWN]})")
    return found


def split_at_images(text: str, images: Iterable[Image]) -> Iterator[str | Image]:
    """The text in pieces, with each image in the place of its line; an image without a line is left out."""
    places: list[tuple[int, Image]] = []
    after: dict[str, int] = {}
    for image in images:
        at = text.find(image.line, after.get(image.sha256, 0))
        if at >= 0:
            places.append((at, image))
            after[image.sha256] = at + len(image.line)
    done = 0
    for at, image in sorted(places, key=lambda place: place[0]):
        yield text[done:at]
        yield image
        done = at + len(image.line)
    yield text[done:]


def _open_picture(data: bytes) -> Picture:
    """The picture, decoded."""
    if len(data) > MOST_BYTES:
        raise ImageError(f"{len(data)} bytes, and at most {MOST_BYTES} are taken")
    if data.lstrip()[:1] == b"<":
        raise ImageError("SVG and other XML are not taken: an image is pixels (PNG, JPEG, WebP, GIF)")
    pillow = _pillow()
    try:
        picture: Picture = pillow.open(io.BytesIO(data), formats=FORMATS)
        # By its header, before a pixel of it is decoded.
        _check_size(picture)
        picture.load()
    except ImageError:
        raise
    except pillow.DecompressionBombError:  # far more, of which Pillow does not even say the size
        raise ImageError(f"far more than {MOST_PIXELS} pixels, and at most that many are taken") from None
    # What a decoder raises for broken bytes is not only its own error: a ValueError of a chunk, an IndexError of a palette...
    except Exception as problem:
        what = "no PNG, JPEG, WebP or GIF" if isinstance(problem, pillow.UnidentifiedImageError) else str(problem)[:120]
        raise ImageError(f"{len(data)} bytes that do not decode: {what}") from None
    return picture


def _turn_upright(picture: Picture) -> Picture:
    """The picture upright, by the orientation in its Exif data, as a page shows it."""
    from PIL.ImageOps import exif_transpose

    try:
        return exif_transpose(picture)
    except MemoryError:
        raise
    except Exception:  # whatever broken Exif data raises: a page shows such a picture too, as it is stored
        return picture


def _check_size(picture: Picture) -> None:
    size = f"{picture.width} x {picture.height} pixels"
    if picture.width * picture.height > MOST_PIXELS:
        raise ImageError(f"{size}, and at most {MOST_PIXELS} are taken")
    if max(picture.size) > MOST_RATIO * min(picture.size):
        raise ImageError(f"{size}: no side may be more than {MOST_RATIO} times the other")


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise DependencyError("images need Pillow: pip install 'agentrl[images]'") from None
    return PIL.Image
