"""Images of messages: what is taken, where they stand, and that they arrive whole wherever an episode goes."""

import base64
import hashlib
import io
import json
import pickle
import struct
import zlib
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pictures
from PIL.PngImagePlugin import PngInfo

from agentrl.config.schema import McpServerConfig
from agentrl.contrib.mcp.client import McpSource
from agentrl.contrib.remote_envs import wire
from agentrl.contrib.remote_envs.client import Link, RemoteEnv
from agentrl.data.images import MOST_BYTES, MOST_IMAGES, Image, split_at_images
from agentrl.data.token_ledger import PromptIds, TokenLedger
from agentrl.data.trajectory import Message, ToolCall, Trajectory, as_row, message_of
from agentrl.env import Toolbox, tool
from agentrl.env.address import EnvRequest
from agentrl.env.catalog import EnvRef
from agentrl.reward import compile_spec
from agentrl.rollout.context import elide_outputs
from agentrl.utils.errors import EnvError, ImageError
from agentrl.utils.redaction import remember
from tests.contrib.remote_envs.served import TOKEN, served


def picture(color: tuple[int, int, int] = (220, 30, 30), size: tuple[int, int] = (5, 4)) -> Pictures.Image:
    return Pictures.new("RGB", size, color)


def file_of(picture: Pictures.Image, kind: str = "PNG", **more: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **more)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says a size, with one byte of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_is_what_its_bytes_say(kind: str) -> None:
    data = file_of(picture(), kind)
    image = Image.read(data)
    assert (image.media_type, image.width, image.height, image.bytes()) == (f"image/{kind.lower()}", 5, 4, data)
    assert image.sha256 == hashlib.sha256(data).hexdigest() and image.size == len(data)
    assert image.line == f"[image {image.sha256[:12]}: image/{kind.lower()}, 5 x 4, {len(data)} bytes]"
    assert np.abs(np.asarray(image.picture(), int) - (220, 30, 30)).max() < 8  # JPEG rounds
    assert Image.from_row(json.loads(json.dumps(asdict(image)))) == image


def test_a_model_sees_what_a_page_shows() -> None:
    """What is transparent is white, and grays of 16 bits are gray: a plot was black on black, a scan all white."""
    gray = Pictures.fromarray((np.arange(256, dtype=np.uint16) * 257).reshape(16, 16))
    assert (np.asarray(Image.read(file_of(gray)).picture())[..., 1] == np.arange(256).reshape(16, 16)).all()
    plot = Pictures.new("RGBA", (4, 4), (0, 0, 0, 0))
    plot.paste((0, 0, 0, 255), (1, 1, 3, 3))
    line = np.full((4, 4), 255)
    line[1:3, 1:3] = 0
    palette = Pictures.fromarray((line == 0).astype(np.uint8), "L").convert("P")
    faint = np.asarray(Image.of(Pictures.new("LA", (2, 2), (0, 51))).picture())
    assert (np.asarray(Image.of(plot).picture()) == line[..., None]).all() and (faint == 204).all()
    palette.putpalette([0, 0, 0] * 2)
    assert (np.asarray(Image.read(file_of(palette, transparency=0)).picture()) == line[..., None]).all()
    cyan = Image.read(file_of(Pictures.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG"))
    assert np.abs(np.asarray(cyan.picture(), int) - (0, 255, 255)).max() < 8
    frames = [picture((n, 0, 0)) for n in (200, 10)]
    animated = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(Image.read(animated).picture()).max() == 200, "of an animation the first"


@pytest.mark.parametrize(("orientation", "turned"), [(3, 2), (6, 3), (8, 1)])
def test_a_photo_is_turned_as_its_camera_was_held(orientation: int, turned: int) -> None:
    """A camera that is held upright writes the pixels lying on their side and says so beside them (Exif 2.32, Orientation)."""
    stored = picture((0, 0, 0), (32, 16))
    stored.paste((255, 255, 255), (0, 0, 16, 8))
    exif = Pictures.Exif()
    exif[0x0112] = orientation
    image = Image.read(data := file_of(stored, "JPEG", exif=exif, quality=100))
    expected = np.rot90(np.asarray(stored, int), turned)
    assert (image.height, image.width) == expected.shape[:2] and image.bytes() == data
    assert np.abs(np.asarray(image.picture(), int) - expected).max() < 8


def test_a_photo_whose_orientation_cannot_be_read_stays_as_it_is() -> None:
    image = Image.read(file_of(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"))
    assert (image.width, image.height) == (5, 4) == image.picture().size


@pytest.mark.parametrize(("data", "why"), [
    (b"", "0 bytes that do not decode: no PNG, JPEG, WebP or GIF"),
    (b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>', "SVG and other XML are not taken"),
    (b"\n<?xml version='1.0'?><svg/>", "SVG and other XML are not taken"), (file_of(picture())[:-34], "do not decode"),
    (file_of(picture(), "JPEG")[:300], "do not decode"), (file_of(picture(), "TIFF"), "no PNG, JPEG, WebP or GIF"),
    (png_header(60_000, 60_000), "far more than 16777216 pixels"),
    (png_header(4097, 4096), "4097 x 4096 pixels, and at most 16777216 are taken"), (png_header(100, 100), "do not decode"),
    (file_of(picture(size=(201, 1))), "201 x 1 pixels: no side may be more than 200 times the other"),
    (file_of(picture()) + bytes(MOST_BYTES), f"bytes, and at most {MOST_BYTES} are taken"),
])  # fmt: skip
def test_what_is_no_image_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        Image.read(data)


def test_a_row_whose_bytes_were_changed_is_refused() -> None:
    row = asdict(Image.of(picture()))
    other = base64.b64encode(file_of(picture((0, 0, 0)))).decode()
    digest: list[dict[str, Any]] = [{"data": other}, {"sha256": None}]
    form: list[dict[str, Any]] = [
        {"media_type": "image/svg+xml"}, {"width": "<b>"}, {"data": "?"}, {"more": 1}, {"width": -5}, {"height": 10**9},
    ]  # fmt: skip
    for changes, why in ((digest, "not those of its digest"), (form, "not the row of an image")):
        for change in changes:
            with pytest.raises(ImageError, match=why):
                Image.from_row({**row, **change})


def test_an_image_stands_where_its_line_does() -> None:
    red, blue = Image.of(picture()), Image.of(picture((0, 0, 250)))
    text = f"a {blue.line} b {red.line}{red.line}"
    assert list(split_at_images(text, (red, blue, red))) == ["a ", blue, " b ", red, "", red, ""]
    # A line that somebody spells is text, and an image whose line was cut away is not shown.
    assert list(split_at_images(text, (red,))) == [f"a {blue.line} b ", red, red.line]
    assert list(split_at_images("nothing", (red,))) == ["nothing"]
    [elided] = elide_outputs([Message("tool", red.line, images=(red,))])
    assert list(split_at_images(elided.content, (red,))) == [f"[{len(red.line)} characters left out]"]


async def answered(answer: Any, **options: Any) -> Any:
    return await Toolbox([tool(name="f", **options)(lambda: answer)]).call(ToolCall("f", {}, "c"))


async def test_what_tools_answer() -> None:
    red, blue = Image.of(picture()), Image.of(picture((0, 0, 250)))
    for one in (red, picture()):  # as Pillow has it: a PNG is made of it
        result = await answered(one)
        assert (result.content, result.value, result.images) == (red.line, red.line, (red,))
    result = await answered(["before", red, blue, "after"])
    assert result.content == f"before\n{red.line}\n{blue.line}\nafter" and result.images == (red, blue)
    result = await answered({"shots": [{"at": 1, "image": red}]})
    assert json.loads(result.content) == {"shots": [{"at": 1, "image": red.line}]} and result.images == (red,)
    result = await answered([red] * (MOST_IMAGES + 2))
    assert len(result.images) == MOST_IMAGES and result.content.count("not shown: an answer may hold 16") == 2
    # A budget of text takes no image away: the line that it cut stands behind the cut.
    result = await answered(["before", red, blue, "after"], max_output=12)
    assert result.content.startswith("before") and "[cut:" in result.content and red.line in result.content
    assert [part for part in split_at_images(result.content, result.images) if isinstance(part, Image)] == [red, blue]


async def test_a_secret_in_a_file_and_a_picture_that_is_too_large() -> None:
    remember("a-secret-of-this-test")
    info = PngInfo()
    info.add_text("comment", "key a-secret-of-this-test")
    result = await answered(Image.read(file_of(picture(), pnginfo=info)))
    assert not result.images and " of this run stands in its file" in result.content
    with pytest.raises(EnvError, match=r"tool f returned an image that cannot be used: 5000 x 5000 pixels"):
        await answered(Pictures.new("1", (5000, 5000)))


async def test_images_of_an_mcp_server() -> None:
    pytest.importorskip("mcp", reason="needs the MCP SDK: pip install 'agentrl[mcp]'")
    import mcp_types as types
    from mcp.server import MCPServer

    def block(data: bytes, said: str = "image/png") -> Any:
        return types.ImageContent(type="image", data=base64.b64encode(data).decode(), mime_type=said)

    red = Image.of(picture())
    server = MCPServer("camera")

    @server.tool()
    def shot() -> list[Any]:
        lies = block(file_of(picture(), "JPEG"))  # says that it is a PNG
        svg = block(b"<svg/>", "image/svg+xml")
        bomb = block(png_header(60_000, 60_000))
        return [types.TextContent(type="text", text="here"), block(red.bytes()), lies, svg, bomb]

    env = EnvRef("color_square", {}).build()
    env.add_source(McpSource("camera", McpServerConfig(), lambda: server))
    await env.areset(seed=0)
    [message] = (await env.astep(Message("assistant", tool_calls=(ToolCall("shot", {}, "c"),))))[0]
    lines = message.content.split("\n")
    assert lines[:2] == ["here", red.line] and message.images[0] == red
    assert [image.media_type for image in message.images] == ["image/png", "image/jpeg"]
    assert "not shown: SVG" in lines[3] and "not shown: far more than" in lines[4] and len(lines) == 5
    await env.aclose()


def played(seed: int = 0) -> Trajectory:
    """An episode that looks twice, so that an image is in two messages and two results."""
    env = EnvRef("color_square", {}).build()
    env.reset(seed=seed)
    look = Message("assistant", tool_calls=(ToolCall("look", {}),))
    for said in (look, look, "red"):
        env.step(said)
    trajectory: Trajectory = env.trajectory
    return trajectory


def test_a_row_has_each_image_once_and_is_the_episode_again() -> None:
    whole = played()
    [image] = whole.images.values()
    assert [turn.results[0].images for turn in whole.turns[:2]] == [(image,)] * 2
    assert image.width == image.height == 56
    text = "".join(whole.json_chunks())
    assert text.count(image.data) == 1 and json.loads(text) == json.loads(json.dumps(whole.to_json()))
    again = Trajectory.from_json(json.loads(text))
    assert again == whole and again.images[image.sha256].bytes() == image.bytes()
    # Between a worker and the driver, and to a server of environments and back.
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert [message_of(row) for row in json.loads(wire.dumps(whole.messages))] == whole.messages
    assert message_of(json.loads(json.dumps(as_row(whole.messages[3])))).images == (image,)
    ledger = TokenLedger()
    ledger.append_context(PromptIds([1, 2], [image]), 0)
    with pytest.raises(ValueError, match="cannot fork a ledger with images"):
        ledger.fork(1)
    changed = json.loads(text)
    changed["images"][image.sha256]["data"] = base64.b64encode(file_of(picture())).decode()
    with pytest.raises(ImageError, match="not those of its digest"):
        Trajectory.from_json(changed)
    changed["images"][image.sha256] = asdict(other := Image.of(picture()))
    with pytest.raises(ImageError, match=f"image {image.sha256[:12]}: another stands in its place .{other.sha256[:12]}"):
        Trajectory.from_json(changed)


def test_an_episode_without_images_has_no_word_of_them() -> None:
    env = EnvRef("key_value", {}).build()
    env.reset(seed=0)
    env.step(env.gold_turns(env.task)[0])
    text = "".join(env.trajectory.json_chunks())
    assert "images" not in text and "images" not in json.dumps(env.trajectory.to_json())


async def test_an_image_of_an_environment_that_is_served() -> None:
    here, look = played(), Message("assistant", tool_calls=(ToolCall("look", {}),))
    with served("color_square") as running:
        env = RemoteEnv(Link(running.url, TOKEN), EnvRequest("color_square"))
        try:
            await env.areset(seed=0)
            [message] = (await env.astep(look))[0]
            assert message == here.messages[3] and message.images[0].bytes() == here.messages[3].images[0].bytes()
            assert env.trajectory.turns[0].results[0].images == message.images
        finally:
            await env.aclose()


async def test_a_spec_reads_of_images() -> None:
    """A node that is skipped unless its predicate over the images holds: the mean of the others is the value."""
    whole = played()
    [image] = whole.images.values()

    async def value(predicate: dict[str, Any], scope: str) -> float | None:
        leaf = {"use": "text.equals", "args": {"expect": "red", "where": "answer"}}
        parts = {} if scope == "episode" else {"scope": scope, "reduce": "min"}
        wrong = {"use": "format.regex", "args": {"pattern": "x"}, "when": predicate, "missing": "skip", **parts}
        root = {"op": "mean", "of": [leaf, wrong]}
        return (await compile_spec({"agentrl_reward": 1, "name": "t", "root": root}).ascore(whole)).value

    right = await value({"$": "/episode/images", "eq": 2}, "episode")
    for pointer, scope, expect, other in [
        ("/episode/images", "episode", 1, 2),
        ("/turn/images/0/sha256", "turn", image.sha256, "0"),
        ("/call/images/0/width", "call", 56, 57),
        ("/call/images/0/bytes", "call", image.size, 0),
    ]:
        assert await value({"$": pointer, "eq": other}, scope) == right
        assert await value({"$": pointer, "eq": expect}, scope) == right / 2  # type: ignore[operator]
