"""Take pictures of the viewer's pages, light and dark, for README and docs/viewer.md, into docs/images.

    python .ci/pictures.py                              train the quickstart with two seeds first (some minutes)
    python .ci/pictures.py runs/quickstart runs/seed1   use these runs; details are of the first one
    python .ci/pictures.py --real examples/real_model/runs/real_model     that run's curve and one of its episodes, for README

Needs Chromium and the package playwright (the extra `test`).
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tests.contrib.view.chromium import browser_path  # noqa: E402

OUT = ROOT / "docs" / "images"
SIZE: Any = {"width": 1280, "height": 800}
MOST = 150_000


def main() -> int:
    parser = argparse.ArgumentParser(description="pictures of the viewer's pages, into docs/images")
    parser.add_argument("runs", nargs="*", type=Path, help="run folders (default: two quickstart runs, trained first)")
    parser.add_argument("--real", type=Path, metavar="RUN", help="a run of examples/real_model: its curve and an episode alone")
    asked = parser.parse_args()
    if asked.real is not None:
        return _real(asked.real.absolute())
    given = asked.runs
    with tempfile.TemporaryDirectory() as folder:
        runs = [run.absolute() for run in given] or [_train(Path(folder), seed) for seed in (0, 1)]
        shutil.copy(runs[0] / "curve.png", OUT / "curve.png")  # as the run drew it, for README
        with _serving(runs) as base, _pages() as pages:
            for name, address in _views(base).items():
                for scheme, page in pages.items():
                    _write(OUT / f"view_{name}_{scheme}.png", _picture(page, f"{base}#/{address}"))
    return 0


def _real(run: Path) -> int:
    """Take pictures of a run's curve and of a successful episode of its last update."""
    shutil.copy(run / "curve.png", OUT / "real_model_curve.png")
    with _serving([run]) as base, _pages() as pages:
        name = _ask(base, "runs")[0]["run"]
        step = max(file["step"] for file in _whole(base, name) if file["phase"] == "train")
        members = [member for group in _ask(base, f"runs/{name}/groups", step=step) for member in group["members"]]
        episode = max((member for member in members if member["success"]), key=lambda member: member["turns"])["id"]
        for scheme, page in pages.items():
            _write(OUT / f"view_real_model_{scheme}.png", _picture(page, f"{base}#/run/{name}/episode/{episode}"))
    return 0


def _train(out: Path, seed: int) -> Path:
    """Train a quickstart run and return its folder."""
    name = "quickstart" if seed == 0 else f"seed{seed}"
    command = [sys.executable, "-m", "agentrl", "train", str(ROOT / "configs" / "quickstart.toml"), f"name={name}", f"out={out}"]
    subprocess.run([*command, f"seed={seed}"], cwd=ROOT, check=True)
    return out / name


@contextmanager
def _serving(runs: list[Path]) -> Iterator[str]:
    """Run the viewer by its command; yield its address with a trailing slash."""
    command = [sys.executable, "-m", "agentrl", "view", "--port", "0", "--no-browser", *map(str, runs)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.:]+", process.stdout.readline())
            if found is None:
                raise SystemExit("agentrl view does not say its address")
            yield f"{found[0]}/"
        finally:
            process.terminate()


@contextmanager
def _pages() -> Iterator[dict[str, Any]]:
    """Open a browser page for each color scheme."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        yield {
            scheme: browser.new_context(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce").new_page()
            for scheme in ("light", "dark")
        }
        browser.close()


def _ask(base: str, path: str, **query: Any) -> Any:
    with urllib.request.urlopen(f"{base}api/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
        return json.load(answer)


def _views(base: str) -> dict[str, str]:
    """Return the addresses of the pictures, with contents of the first run."""
    runs = _ask(base, "runs")
    run = runs[0]["run"]
    files = _whole(base, run)
    step = max(file["step"] for file in files if file["phase"] == "train")
    teaching = [group for group in _ask(base, f"runs/{run}/groups", step=step) if not group["advantage_zero"]]
    failed = [member for group in teaching for member in group["members"] if member["success"] is False]
    episode = max(failed, key=lambda member: (member["turns"] <= 6, member["turns"]))["id"]
    sides = {side: f"{run}:{next(file['file'] for file in files if file['phase'] == side)}" for side in ("before", "after")}
    pair = next(pair for pair in _ask(base, "compare", a=sides["before"], b=sides["after"])["pairs"] if pair["a"][0]["turns"] > 2)
    asked = {"a": sides["before"], "b": sides["after"], "task": pair["task"], "env": pair["env"]}
    metrics = "success~entropy~turns~tool_error_rate"
    return {
        "runs": f"?{urllib.parse.urlencode({'m': metrics, 'smooth': 0.4})}",
        "run": f"run/{run}",
        "episode": f"run/{run}/episode/{episode}",
        "tokens": f"run/{run}/episode/{episode}?view=tokens",
        "compare": f"compare?{urllib.parse.urlencode(asked)}",
    }


def _whole(base: str, run: str) -> list[Any]:
    """Wait until all episodes of the run are indexed, and return its recorded steps."""
    while True:
        found = _ask(base, f"runs/{run}/episodes", limit=1)
        if found["indexed"] >= found["of"]:
            files: list[Any] = _ask(base, f"runs/{run}")["steps"]
            return files


def _picture(page: Any, address: str) -> bytes:
    page.goto("about:blank")  # else an address with only another hash would keep the page and its state
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)
    if "view=tokens" in address:  # scroll to the end, where the episode went wrong
        page.evaluate("document.querySelector('.ledger').scrollIntoView({ block: 'end' })")
        page.wait_for_timeout(400)
    found: bytes = page.screenshot()
    return found


def _write(path: Path, png: bytes) -> None:
    """Write the picture with a palette, which takes a third of the size without a visible difference."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    pixels = np.asarray(image).reshape(-1, 3)
    colors, places, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    chosen = _palette(colors.astype(np.int32), counts)
    distances = ((colors[:, None, :].astype(np.int32) - chosen[None]) ** 2).sum(axis=2)
    small = Image.fromarray(distances.argmin(axis=1).astype(np.uint8)[places.reshape(-1)].reshape(image.height, image.width))
    small.putpalette(chosen.astype(np.uint8).tobytes())
    path.parent.mkdir(exist_ok=True)
    small.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes", flush=True)
    if path.stat().st_size > MOST:
        raise SystemExit(f"{path}: larger than {MOST:,} bytes")


def _palette(colors: Any, counts: Any) -> Any:
    """Choose 256 colors, [256, 3]: half are the most frequent ones, to keep backgrounds; then repeatedly the color farthest from
    those chosen, to keep the colors of small marks."""
    chosen = colors[np.argsort(-counts)[:128]]
    far = ((colors[:, None, :] - chosen[None]) ** 2).sum(axis=2).min(axis=1)
    while len(chosen) < 256 and far.max() > 0:
        chosen = np.concatenate([chosen, colors[far.argmax()][None]])
        far = np.minimum(far, ((colors - chosen[-1]) ** 2).sum(axis=1))
    return chosen


if __name__ == "__main__":
    sys.exit(main())
