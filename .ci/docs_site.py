"""Stage the repository's pages, build the documentation site with Zensical, and check every link.

    python .ci/docs_site.py build              build/site; fails on warnings, broken links or anchors, and unlisted pages
    python .ci/docs_site.py serve [PORT]       serve it on 127.0.0.1, and rebuild when a page changes
    python .ci/docs_site.py external           check every external address in the pages (needs a network)

Pages are plain Markdown for a forge, with relative links, also to source files. They are staged under the same paths, so that
links stay valid, and docs/README.md, the table of contents on a forge, is also the site's navigation. The site loads no font,
script or image from other servers.
"""

from __future__ import annotations

import http.server
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import tomli_w

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
STAGE, SITE = BUILD / "pages", BUILD / "site"
CONTENTS = ROOT / "docs" / "README.md"
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md", "benchmarks/learning/README.md", "envs/*/README.md")
IMAGES = ("docs/**/*.png", "docs/**/*.svg", "benchmarks/*.png")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
# The second word of a code fence is the name of the shown file; Zensical expects it as a title.
FENCE = re.compile(r"^(```\w+) ([\w./-]+)$", re.MULTILINE)
SHIM = '<script src="https://unpkg.com/iframe-worker/shim" type="text/javascript"></script>'
"""External script of Zensical's offline search: browsers start no worker for a page from a file."""
WORKER = """<script>
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), {hidden: true}));
    const inside = frame.contentWindow, said = (data) => {
      const event = new MessageEvent("message", {data});
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    };
    this.terminate = () => frame.remove();
    inside.postMessage = (data) => setTimeout(() => said(data));
    this.ready = new Promise((done) => {
      const script = Object.assign(inside.document.createElement("script"), {src: new URL(url, location), onload: done});
      inside.document.body.appendChild(script);
    });
    this.postMessage = (data) => this.ready.then(() => {
      const event = new inside.MessageEvent("message", {data});
      inside.dispatchEvent(event);
    });
  }
};
</script>"""
"""Replacement of SHIM: the same script in a frame."""
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class SiteError(SystemExit):
    """A problem with the site, as the command's error."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join([*problems, f"site: {len(problems)} problems"]))


def pages(root: Path = ROOT) -> list[Path]:
    """List every page, relative to the root."""
    found = {path for pattern in PAGES for path in root.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(root) for path in found)


def stage() -> None:
    """Copy the pages and their images, and linked source files as text that a browser shows."""
    shutil.rmtree(STAGE, ignore_errors=True)
    for page in pages():
        text = LINK.sub(partial(_link, page), (ROOT / page).read_text(encoding="utf-8"))
        _write(page, FENCE.sub(r'\1 title="\2"', text))
    for image in (path for pattern in IMAGES for path in ROOT.glob(pattern)):
        target = STAGE / image.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, target)


def _link(page: Path, found: re.Match[str]) -> str:
    """Convert a link for the site: a folder becomes its README, a source file gets the suffix `.txt`."""
    before, target, after = found.groups()
    path = (ROOT / page.parent / target).resolve()
    if "://" in target or not path.exists() or not path.is_relative_to(ROOT):
        return found[0]
    if path.is_dir():
        return f"{before}{target.rstrip('/')}/README.md{after}"
    if path.suffix in (".md", ".png", ".svg"):
        return found[0]
    _write(path.relative_to(ROOT).with_name(path.name + ".txt"), path.read_text(encoding="utf-8"))
    return f"{before}{target}.txt{after}"


def _write(path: Path, text: str) -> None:
    (STAGE / path).parent.mkdir(parents=True, exist_ok=True)
    if not (STAGE / path).is_file() or (STAGE / path).read_text(encoding="utf-8") != text:
        (STAGE / path).write_text(text, encoding="utf-8")


def navigation(text: str) -> list[dict[str, object]]:
    """Convert the sections of docs/README.md (`## Title`, then nested `- [title](page)` lines) to Zensical's `nav`, with the
    front page first. A line that links to an anchor has no page; it is the title of the lines below it."""
    nav: list[dict[str, object]] = [{"agentrl": "README.md"}]
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        inside: list[dict[str, object]] = []
        for indent, name, link in re.findall(r"^( *)- \[([^]]+)\]\(([^)]+)\)", body, re.MULTILINE):
            page = (CONTENTS.parent / urldefrag(link).url).resolve().relative_to(ROOT).as_posix()
            if not indent:
                inside.append({name: [] if "#" in link else page})
                continue
            [(above, entry)] = inside[-1].items()
            inside[-1] = {above: [*(entry if isinstance(entry, list) else [{above: entry}]), {name: page}]}
        nav.append({title: inside})
    return nav


def listed(nav: object) -> list[str]:
    """List the pages of a navigation in order."""
    if isinstance(nav, str):
        return [nav]
    values = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return [page for value in values for page in listed(value)]


def misplaced(nav: list[dict[str, object]]) -> list[str]:
    """List the pages that docs/README.md omits or has twice."""
    there = listed(nav)
    want = {page.as_posix() for page in pages()} - {CONTENTS.relative_to(ROOT).as_posix()}
    gone = [f"docs/README.md: {page} is not listed: give it a place" for page in sorted(want - set(there))]
    return gone + [f"docs/README.md: {page} is listed twice" for page in sorted({p for p in there if there.count(p) > 1})]


def build() -> None:
    """Stage and check the pages, and build the site in strict mode. Raises SiteError."""
    nav = navigation(CONTENTS.read_text(encoding="utf-8"))
    if problems := misplaced(nav):
        raise SiteError(problems)
    stage()
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    config["project"] |= {"nav": nav, "docs_dir": str(STAGE.relative_to(BUILD)), "site_dir": str(SITE.relative_to(BUILD))}
    (BUILD / "zensical.toml").write_text(tomli_w.dumps(config))
    program = Path(sys.executable).with_name("zensical")
    subprocess.run([program, "build", "--strict", "--clean", "--config-file", BUILD / "zensical.toml"], check=True, cwd=BUILD)
    for page in SITE.rglob("*.html"):
        page.write_text(page.read_text(encoding="utf-8").replace(SHIM, WORKER), encoding="utf-8")
    if problems := check(SITE):
        raise SiteError(problems)


class Page(HTMLParser):
    """Collects a built page's anchors, links, and addresses from which a browser loads files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value for key, value in attrs if value is not None}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if (key := LOADED.get(tag)) in given and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(given[str(key)])


def check(site: Path) -> list[str]:
    """List the faults of a built site: missing pages and anchors, and files loaded from other servers."""
    parsed = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in parsed.items():
        if path.name == "404.html":  # served for any address, so its links start at the root
            continue
        where = path.relative_to(site)
        problems += [f"{where}: it loads {link} from elsewhere" for link in page.loads if urlsplit(link).netloc]
        for link in [*page.links, *(link for link in page.loads if not urlsplit(link).netloc)]:
            if urlsplit(link).scheme or urlsplit(link).netloc:
                continue
            file, anchor = urldefrag(link)
            target = (path.parent / unquote(file)).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                problems.append(f"{where}: {link} leads nowhere")
            elif anchor and target in parsed and unquote(anchor) not in parsed[target].anchors | {"__tabbed", "__top"}:
                problems.append(f"{where}: {link}: no such anchor")
    return problems


def serve(port: int) -> None:
    """Serve the site, and rebuild it when a page or image changes."""
    build()
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)

    def newest() -> float:
        files = [ROOT / page for page in pages()] + [path for pattern in IMAGES for path in ROOT.glob(pattern)]
        return max(path.stat().st_mtime for path in [*files, ROOT / "zensical.toml"])

    seen = newest()
    while True:
        time.sleep(0.5)
        if (now := newest()) > seen:
            seen = now
            try:
                build()
            except (SiteError, subprocess.CalledProcessError) as problem:
                print(problem, flush=True)


def outside() -> dict[str, list[str]]:
    """Return the pages of every external address that they link to or name."""
    found: dict[str, list[str]] = {}
    for page in pages():
        text = re.sub(r"^```.*?^```|`[^`]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"https?://[^\s)>\]\"']+", text):
            if (urlsplit(link).hostname or "").rpartition(".")[2].isalpha() and page.as_posix() not in found.setdefault(link, []):
                found[link].append(page.as_posix())
    return found


def external() -> None:
    """Request every external address. Raises SiteError for missing ones; a refusal of automated requests is only printed."""
    problems = []
    for link, where in sorted(outside().items()):
        try:
            request = urllib.request.Request(link, headers={"User-Agent": "agentrl link check"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                said = str(answer.status)
        except urllib.error.HTTPError as problem:
            said = str(problem.code)
        except OSError as problem:
            said = str(problem)
        print(f"{said}  {link}  ({', '.join(where)})")
        if said not in ("200", "401", "403", "429"):
            problems.append(f"{link}: {said} ({', '.join(where)})")
    if problems:
        raise SiteError(problems)


def main(words: list[str]) -> None:
    """Run the command line."""
    if words[:1] == ["serve"]:
        serve(int(words[1]) if words[1:] else 8123)
    elif words == ["external"]:
        external()
    elif words in ([], ["build"]):
        build()
        print(f"{SITE.relative_to(ROOT)}/index.html: {len(pages())} pages, every link and anchor there")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
