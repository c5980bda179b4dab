"""A Hugging Face hub on loopback, as much of it as `huggingface_hub` asks for in an upload of a folder and a download."""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.rollout.loopback import LoopbackServer


class Hub(LoopbackServer):
    """`repos`: "models/me/x" -> revisions, oldest first, each (commit, path -> content). `private`: repositories made so."""

    def __init__(self) -> None:
        super().__init__()
        self.url = self.url.removesuffix("/v1")
        self.repos: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: list[str] = []
        self.fails_at: str | None = None
        self.sent: list[str] = []
        handler: Any = self.http.RequestHandlerClass
        handler.do_HEAD = handler.do_POST

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        if handler.command != "POST":
            content, headers, status = self.shown(path.lstrip("/"), handler.command == "GET")
        else:
            answer = self.changed(path, handler.rfile.read(int(handler.headers.get("Content-Length") or 0)))
            content, headers, status = json.dumps(answer).encode(), {"Content-Type": "application/json"}, 200
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def changed(self, path: str, body: bytes) -> Any:
        """The answer to a request that changes something."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('type') or 'model'}s/{asked.get('organization') or 'me'}/{asked['name']}"
            self.repos.setdefault(repo, [])
            self.private += [repo] if asked.get("private") or asked.get("visibility") == "private" else []
            return {"url": f"{self.url}/{repo.removeprefix('models/')}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
        repo, _, commit = path.removeprefix("/api/").partition("/commit/")
        assert commit, path
        made = [json.loads(line) for line in body.splitlines()]
        last = self.repos[repo][-1][1] if self.repos[repo] else {}
        added = {one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in made if one["key"] == "file"}
        commit = hashlib.sha1(body).hexdigest()
        self.repos[repo].append((commit, last | added))
        return {"commitUrl": f"{self.url}/{repo.removeprefix('models/')}/commit/{commit}", "commitOid": commit}

    def shown(self, path: str, whole: bool) -> tuple[bytes, dict[str, str], int]:
        """Content, headers and status of a page or a file; `whole`: it is sent."""
        for repo, revisions in self.repos.items():
            found = dict(revisions) | ({"main": revisions[-1][1]} if revisions else {})
            for name, files in found.items():
                commit = next(commit for commit, content in reversed(revisions) if content is files)
                if path in (f"api/{repo}/revision/{name}", f"api/{repo}"):
                    siblings = [{"rfilename": file} for file in files]
                    page: Any = {"id": repo.partition("/")[2], "sha": commit, "siblings": siblings, "private": True}
                    return json.dumps(page).encode(), {"Content-Type": "application/json"}, 200
                if path.startswith(f"api/{repo}/tree/{name}"):
                    page = [{"type": "file", "path": file, "size": len(data), "oid": "0"} for file, data in files.items()]
                    return json.dumps(page).encode(), {"Content-Type": "application/json"}, 200
                file = path.removeprefix(f"{repo.removeprefix('models/')}/resolve/{name}/")
                if file != path and file in files:
                    self.sent += [file] if whole else []
                    if whole and file == self.fails_at:
                        return b"", {}, 403
                    etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
                    return files[file], {"ETag": etag, "X-Repo-Commit": commit}, 200
        return b"", {"X-Error-Code": "RepoNotFound"}, 404
