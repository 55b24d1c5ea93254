"""A hub on this machine that speaks the part of the API that downloads use, and fails as the real one may."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    """private, gated: who may read. status: what every request is answered with, 0 for the truth. breaks: how many
    downloads of a file end in the middle. pause: seconds between the pieces of a file.
    """

    files: dict[str, bytes]
    private: bool = False
    gated: bool = False
    status: int = 0
    breaks: int = 0
    pause: float = 0.0


@dataclass
class FakeHub:
    repos: dict[str, Repo]
    token: str = "good"
    url: str = ""
    downloads: list[tuple[str, str | None]] = field(default_factory=list)  # file, range


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            name, kind, revision = match[1], match[2], match[3]
            repo = self._repo(name, revision)
            if repo is not None and kind == "tree":
                self._json(
                    [{"type": "file", "path": f, "size": len(d), "oid": _etag(d)} for f, d in repo.files.items()]
                )
            elif repo is not None:
                self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in repo.files]})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self._repo(match[1], match[2])
            if repo is not None and repo.gated and not self._has_token():
                self._refuse(403, "GatedRepo")
            elif repo is not None:
                self._file(repo, match[3])
        else:
            self._refuse(404)

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _repo(self, name: str, revision: str | None) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is not None and repo.status:
            self._refuse(repo.status)
        elif repo is None or (repo.private and not self._has_token()):
            self._refuse(401 if repo is not None else 404, "RepoNotFound")
        elif revision not in (None, "main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            return repo
        return None

    def _file(self, repo: Repo, name: str) -> None:
        data = repo.files[name]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        first = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.downloads.append((name, self.headers.get("Range")))
        rest = data[first:]
        if repo.breaks:
            repo.breaks -= 1
            self.wfile.write(rest[: len(rest) // 2])
            self.close_connection = True
            return
        for at in range(0, len(rest), 1 << 16):
            self.wfile.write(rest[at : at + (1 << 16)])
            time.sleep(repo.pause)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode())

    def _refuse(self, status: int, code: str | None = None) -> None:
        self._answer(status, b'{"error": "no"}', code)

    def _answer(self, status: int, body: bytes, code: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
