"""What a push of a data set to the Hugging Face hub, and loading it again, ask of its API; a wheel of the Prime hub."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "1" * 40
REPO = r"/api/datasets/(?P<repo>[^/]+/[^/]+)"


class Hub:
    """Repositories of data sets, by name, as files by path."""

    def __init__(self, wheels: Path | None = None) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.uploads: dict[str, bytes] = {}
        self.unknown: list[str] = []
        self.wheels = wheels
        self.url = ""
        self.fault: int | None = None  # the status that everything is answered with; 0: the connection is dropped

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if self.fault is not None:
            return self.fault, {"error": "Repository not found" if self.fault == 404 else "no"}
        for wanted, pattern, reply in ROUTES:
            found = re.fullmatch(pattern, path)
            if method in wanted and found:
                return getattr(self, reply)(body=body, query=query, **found.groupdict())
        self.unknown.append(f"{method} {path}")
        return 404, {"error": "Repository not found"}

    def whoami(self, **_: Any) -> tuple[int, Any]:
        token = {"type": "access_token", "accessToken": {"role": "write"}}
        return 200, {"type": "user", "name": "me", "orgs": [], "auth": token}

    def create(self, body: bytes, **_: Any) -> tuple[int, Any]:
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        self.repos.setdefault(name, {})
        return 200, {"url": f"{self.url}/datasets/{name}", "name": name, "id": "1"}

    def info(self, repo: str, **_: Any) -> tuple[int, Any]:
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}
        at = "2026-01-01T00:00:00.000Z"
        siblings = [{"rfilename": path} for path in self.repos[repo]]
        common = {"private": False, "disabled": False, "gated": False, "downloads": 0, "likes": 0, "tags": []}
        return 200, {"id": repo, "sha": COMMIT, "siblings": siblings, "lastModified": at, "createdAt": at, **common}

    def upload_modes(self, body: bytes, **_: Any) -> tuple[int, Any]:
        def mode(path: str) -> str:
            return "lfs" if path.endswith(".parquet") else "regular"

        files = json.loads(body)["files"]
        return 200, {
            "files": [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False} for f in files]
        }

    def large_files(self, body: bytes, **_: Any) -> tuple[int, Any]:
        wanted = json.loads(body)["objects"]
        action = {"upload": {"href": f"{self.url}/upload/%s", "header": {}}}
        objects = [
            {**one, "authenticated": True, "actions": json.loads(json.dumps(action) % one["oid"])} for one in wanted
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def upload(self, digest: str, body: bytes, **_: Any) -> tuple[int, Any]:
        assert hashlib.sha256(body).hexdigest() == digest
        self.uploads[digest] = body
        return 200, b""

    def commit(self, repo: str, body: bytes, **_: Any) -> tuple[int, Any]:
        files = self.repos[repo]
        for line in body.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                files[value["path"]] = self.uploads[value["oid"]]
            elif one["key"] == "deletedFile":
                files.pop(value["path"], None)
        return 200, {"commitUrl": f"{self.url}/datasets/{repo}/commit/{COMMIT}", "commitOid": COMMIT, "hookOutput": ""}

    def validate(self, **_: Any) -> tuple[int, Any]:
        return 200, {"errors": [], "warnings": []}

    def tree(self, repo: str, under: str | None, query: dict[str, list[str]], **_: Any) -> tuple[int, Any]:
        files, start = self.repos[repo], f"{under}/" if under else ""
        entries = {}
        for path in files:
            if not path.startswith(start):
                continue
            first, _, deeper = path.removeprefix(start).partition("/")
            if deeper and query.get("recursive", ["false"])[0].lower() != "true":
                entries[first] = {"type": "directory", "path": start + first, "size": 0, "oid": "0" * 40}
            else:
                entries[path] = self._entry(repo, path)
        return (200, list(entries.values())) if entries or not start else (404, {"error": "Entry not found"})

    def paths_info(self, repo: str, body: bytes, **_: Any) -> tuple[int, Any]:
        text = body.decode()
        paths = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text)["paths"]
        return 200, [self._entry(repo, path) for path in paths if path in self.repos[repo]]

    def resolve(self, repo: str, path: str, **_: Any) -> tuple[int, Any]:
        found = self.repos.get(repo, {}).get(unquote(path))
        return (404, {"error": "Entry not found"}) if found is None else (200, found)

    def _entry(self, repo: str, path: str) -> dict[str, Any]:
        content = self.repos[repo][path]
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    # --- the Prime environments hub -------------------------------------------------------------------------------

    def environment(self, owner: str, name: str, **_: Any) -> tuple[int, Any]:
        assert self.wheels is not None
        (wheel,) = self.wheels.glob(f"{name.replace('-', '_')}-*.whl")
        about = {"id": "1", "name": name, "owner": owner, "visibility": "PUBLIC", "semantic_version": "0.1.0"}
        where = {"wheel_url": f"{self.url}/wheels/{wheel.name}", "simple_index_url": None, "url_dependencies": []}
        return 200, {"data": {**about, "content_hash": "0", **where}}

    def wheel(self, name: str, **_: Any) -> tuple[int, Any]:
        assert self.wheels is not None
        return 200, (self.wheels / name).read_bytes()


ROUTES = [
    (("GET",), r"/api/whoami-v2", "whoami"),
    (("POST",), r"/api/repos/create", "create"),
    (("POST",), r"/api/validate-yaml", "validate"),
    (("POST",), REPO + r"/preupload/[^/]+", "upload_modes"),
    (("POST",), REPO + r"/commit/[^/]+", "commit"),
    (("GET",), REPO + r"/tree/[^/]+(?:/(?P<under>.+))?", "tree"),
    (("POST",), REPO + r"/paths-info/[^/]+", "paths_info"),
    (("GET",), REPO + r"(?:/revision/[^/]+)?", "info"),
    (("POST",), r"/datasets/(?P<repo>.+)\.git/info/lfs/objects/batch", "large_files"),
    (("PUT",), r"/upload/(?P<digest>\w+)", "upload"),
    (("GET", "HEAD"), r"/datasets/(?P<repo>[^/]+/[^/]+)/resolve/[^/]+/(?P<path>.+)", "resolve"),
    (("GET",), r"/api/v1/environmentshub/(?P<owner>[^/]+)/(?P<name>[^/]+)/@.+", "environment"),
    (("GET", "HEAD"), r"/wheels/(?P<name>[^/]+)", "wheel"),
]


class _Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def reply(self) -> None:
        asked = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._chunks())
        if self.server.hub.fault == 0:
            self.close_connection = True
            return
        status, said = self.server.hub.answer(self.command, unquote(asked.path), parse_qs(asked.query), body)
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if said is content else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            kind = "RepoNotFound" if "Repository" in str(said) else "EntryNotFound"
            self.send_header("X-Error-Code", kind)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_HEAD = reply

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def log_message(self, *_: Any) -> None:
        """Not on the terminal of the tests."""


@contextlib.contextmanager
def serve_hub(wheels: Path | None = None) -> Iterator[Hub]:
    hub = Hub(wheels)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = hub  # type: ignore[attr-defined]
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
