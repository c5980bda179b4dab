"""A headless Chromium on the viewer's page, and the server behind it."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.contrib.toolkit.http_server import ThreadServer, open_listener
from agentrl.contrib.view.library import Library
from agentrl.contrib.view.server import guard_app, make_app

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browser_path() -> str:
    """The machine's Chromium; without one the test is skipped, or fails if AGENTRL_REQUIRE_BROWSER is set."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    why = "" if path else f"no browser on this machine: none of {', '.join(NAMES)} is on the path"
    try:
        import playwright  # noqa: F401
    except ImportError:
        why = "the package playwright is not installed (pip install 'agentrl[test]')"
    if path is None or why:
        if os.environ.get("AGENTRL_REQUIRE_BROWSER") == "1":
            pytest.fail(why)
        pytest.skip(why)
    return path


@contextmanager
def serving(*paths: Path) -> Iterator[str]:
    """The viewer's server for these folders, in a thread; yields its address, which ends with /."""
    library = Library(paths)
    for one in library.scan():
        library.refresh(one)
    listener = open_listener("127.0.0.1", 0)
    server = ThreadServer(guard_app(make_app(library)), "127.0.0.1", listener)
    library.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.close()
        library.close()


class Tab:
    """A page of the browser at the viewer, with what it complained about and what it asked for."""

    def __init__(self, context: Any, base: str) -> None:
        self.base = base
        self.page = context.new_page()
        self.page.set_default_timeout(10_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(base)

    def go(self, address: str, shows: str) -> None:
        """Go to `#/address` by way of an empty page, and wait until `shows`, a selector, is there."""
        self.page.evaluate("location.hash = '#/-'")
        self.page.wait_for_selector("text=There is no such page")
        self.page.evaluate("to => { location.hash = to; scrollTo(0, 0); }", f"#/{address}")
        self.page.wait_for_selector(shows)

    def texts(self, selector: str) -> list[str]:
        """The text of each element as it is seen, its spaces as one."""
        found = self.page.eval_on_selector_all(selector, "all => all.map(one => one.innerText)")
        return [" ".join(text.split()) for text in found]

    def wait(self, condition: str, argument: Any = None) -> None:
        """Until a JavaScript expression is true."""
        self.page.wait_for_function(condition, arg=argument)

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def column(self, table: str, heading: str) -> list[str]:
        """The cells of a table's column, from the top."""
        names = [name.rstrip(" ↑↓") for name in self.texts(f"{table} thead th")]
        return self.texts(f"{table} tbody tr > :nth-child({names.index(heading) + 1})")


def luminance(color: Sequence[float]) -> float:
    """Relative luminance of an sRGB color, 0 to 255 a channel (WCAG 2.2)."""
    parts = [value / 255 for value in color[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """The contrast ratio of two colors (WCAG 2.2): 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def rgb(color: str) -> list[float]:
    """The channels of a computed color, `rgb(1, 2, 3)` or `rgba(1, 2, 3, 0.5)`."""
    return [float(part) for part in color[color.index("(") + 1 : -1].split(",")]
