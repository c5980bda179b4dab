"""A Hugging Face hub on loopback, as much of it as `huggingface_hub` asks for in an upload of a folder and a download."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """`repos`: "models/me/x" -> revisions, oldest first, each (commit, path -> content). `private`: repositories made so."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: list[str] = []
        self.fails_at: str | None = None
        self.sent: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, content: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any) -> None:
        self._answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('type') or 'model'}s/{asked.get('organization') or 'me'}/{asked['name']}"
            self.server.repos.setdefault(repo, [])
            self.server.private += [repo] if asked.get("private") or asked.get("visibility") == "private" else []
            self._json({"url": f"{self.server.url}/{repo.removeprefix('models/')}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            self._json({"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]})
        elif "/commit/" in path:
            repo = path.removeprefix("/api/").partition("/commit/")[0]
            made = [json.loads(line) for line in body.splitlines()]
            last = self.server.repos[repo][-1][1] if self.server.repos[repo] else {}
            files = {one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in made if one["key"] == "file"}
            commit = hashlib.sha1(body).hexdigest()
            self.server.repos[repo].append((commit, last | files))
            self._json({"commitUrl": f"{self.server.url}/{repo.removeprefix('models/')}/commit/{commit}", "commitOid": commit})
        else:
            self._answer(b"", status=404)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        for repo, revisions in self.server.repos.items():
            found = dict(revisions) | ({"main": revisions[-1][1]} if revisions else {})
            for name, files in found.items():
                commit = next(commit for commit, content in reversed(revisions) if content is files)
                if path in (f"api/{repo}/revision/{name}", f"api/{repo}"):
                    siblings = [{"rfilename": file} for file in files]
                    return self._json({"id": repo.partition("/")[2], "sha": commit, "siblings": siblings, "private": True})
                if path.startswith(f"api/{repo}/tree/{name}"):
                    rows = [{"type": "file", "path": file, "size": len(data), "oid": "0"} for file, data in files.items()]
                    return self._json(rows)
                file = path.removeprefix(f"{repo.removeprefix('models/')}/resolve/{name}/")
                if file != path and file in files:
                    if self.command == "GET":
                        self.server.sent.append(file)
                        if file == self.server.fails_at:
                            return self._answer(b"", status=403)
                    etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
                    return self._answer(files[file], {"ETag": etag, "X-Repo-Commit": commit})
        return self._answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET


@contextmanager
def hub_on_loopback() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
