"""Images of a conversation: checks of untrusted bytes, placeholder lines in texts, serialization.

A message's text has one placeholder line per image (`Image.line`), which text-only models see; `Message.images` holds the images.
Code that cuts or rewrites a text need not handle images: an image without its line is not shown. Bytes are stored unchanged, as
base64, so that an image is JSON like its message."""

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
"""Maximum bytes of an image file."""
MOST_PIXELS = 1 << 24
"""Maximum pixels of an image (4096 x 4096): a few bytes may decode to gigabytes."""
MOST_RATIO = 200
"""Maximum ratio of the longer to the shorter side: processors of models refuse more."""
MOST_IMAGES = 16
"""Maximum images of one tool result."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MEDIA_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)
_SHOWN = 12  # characters of the digest in a line


@dataclass(frozen=True, slots=True)
class Image:
    """One image. `data`: its file as base64; `sha256`: of that file, hexadecimal; `width`, `height`: pixels.

    Create it with `Image.read` or `Image.of`, which check the bytes; equal files are equal images.
    """

    sha256: str
    media_type: str = field(compare=False)
    width: int = field(compare=False)
    height: int = field(compare=False)
    data: str = field(compare=False, repr=False)

    @classmethod
    def read(cls, data: bytes) -> Image:
        """Create an image from the bytes of a PNG, JPEG, WebP or GIF file.

        Of an animation, it is the first frame. Raises ImageError for anything else, for bytes that do not decode, and beyond
        `MOST_BYTES`, `MOST_PIXELS` or `MOST_RATIO`; DependencyError without Pillow.
        """
        picture = _open_picture(data)
        kind = f"image/{str(picture.format).lower()}"
        return cls(hashlib.sha256(data).hexdigest(), kind, *_turn_upright(picture).size, base64.b64encode(data).decode())

    @classmethod
    def of(cls, picture: Picture) -> Image:
        """Create a PNG image from a Pillow picture. Raises ImageError above the limits."""
        _check_size(picture)
        file = io.BytesIO()
        picture.save(file, "PNG")
        return cls.read(file.getvalue())

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Image:
        """Parse a row of `dataclasses.asdict`. Raises ImageError for any other row, or if the digest does not match the bytes."""
        try:
            found = cls(**row)
            data = base64.b64decode(found.data, validate=True)
        except (TypeError, ValueError) as problem:
            raise ImageError(f"not the row of an image: {problem}"[:200]) from None
        sizes = type(found.width) is int and type(found.height) is int and min(found.width, found.height) > 0
        # Only values of `read`, because pages show the image by them.
        if not sizes or found.width * found.height > MOST_PIXELS or found.media_type not in MEDIA_TYPES:
            raise ImageError(f"not the row of an image: {found.media_type!r}, {found.width!r} x {found.height!r}"[:200])
        if hashlib.sha256(data).hexdigest() != found.sha256:
            raise ImageError(f"image {str(found.sha256)[:_SHOWN]}: its bytes are not those of its digest; the file was changed")
        return found

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return 3 * len(self.data) // 4 - self.data.count("=", -2)

    @property
    def line(self) -> str:
        """Return the placeholder of the image in a text: plain ASCII, equal within JSON."""
        return f"[image {self.sha256[:_SHOWN]}: {self.media_type}, {self.width} x {self.height}, {self.size} bytes]"

    @property
    def about(self) -> dict[str, str | int]:
        """Return facts about the image for reward specs."""
        size = {"width": self.width, "height": self.height, "bytes": self.size}
        return {"sha256": self.sha256, "media_type": self.media_type, **size}

    def bytes(self) -> bytes:
        """Return the file."""
        return base64.b64decode(self.data)

    def picture(self) -> Picture:
        """Decode to RGB as a browser shows it: transparent pixels become white, photos are turned upright.

        Raises ImageError if `read` would not accept the bytes.
        """
        picture = _turn_upright(_open_picture(self.bytes()))
        # Pillow alone would clip 16-bit grays at 255, i.e. to white, and show the color under transparent pixels, e.g. black
        # behind the black lines of a plot.
        if picture.mode.startswith("I"):
            return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
        if not picture.has_transparency_data:
            return picture.convert("RGB")
        white = _pillow().new("RGBA", picture.size, "white")
        found: Picture = _pillow().alpha_composite(white, picture.convert("RGBA")).convert("RGB")
        return found


def by_digest(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Image]:
    """Parse the images of a record by digest. Raises ImageError if a digest does not match its image."""
    found = {sha256: Image.from_row(row) for sha256, row in rows.items()}
    if wrong := [sha256 for sha256, image in found.items() if image.sha256 != sha256]:
        raise ImageError(f"image {wrong[0][:_SHOWN]}: another stands in its place ({found[wrong[0]].sha256[:_SHOWN]})")
    return found


def split_at_images(text: str, images: Iterable[Image]) -> Iterator[str | Image]:
    """Yield the text in pieces, with each image in place of its line; images without a line are omitted."""
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
    """Decode a picture after checking its size. Raises ImageError."""
    if len(data) > MOST_BYTES:
        raise ImageError(f"{len(data)} bytes, and at most {MOST_BYTES} are taken")
    if data.lstrip()[:1] == b"<":
        raise ImageError("SVG and other XML are not taken: an image is pixels (PNG, JPEG, WebP, GIF)")
    pillow = _pillow()
    try:
        picture: Picture = pillow.open(io.BytesIO(data), formats=FORMATS)
        # From its header, before decoding any pixel.
        _check_size(picture)
        picture.load()
    except ImageError:
        raise
    except pillow.DecompressionBombError:  # far more pixels; Pillow does not report the size
        raise ImageError(f"far more than {MOST_PIXELS} pixels, and at most that many are taken") from None
    # For broken bytes decoders raise many errors: a ValueError for a chunk, an IndexError for a palette...
    except Exception as problem:
        what = "no PNG, JPEG, WebP or GIF" if isinstance(problem, pillow.UnidentifiedImageError) else str(problem)[:120]
        raise ImageError(f"{len(data)} bytes that do not decode: {what}") from None
    return picture


def _turn_upright(picture: Picture) -> Picture:
    """Turn a picture upright by its Exif orientation, as a browser does."""
    from PIL.ImageOps import exif_transpose

    try:
        return exif_transpose(picture)
    except MemoryError:
        raise
    except Exception:  # any error of broken Exif data: browsers show such a picture as stored
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
