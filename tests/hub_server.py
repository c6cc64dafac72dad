"""A server on loopback that speaks what huggingface_hub needs of the hub's API to download a model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The hub.

    Attributes:
        models: Files of each model by path, by owner/name. Each has a branch main and a tag v1, both at COMMIT.
        token: Token without which no model is shown; empty: none is needed.
        gated: Models that are shown to nobody but those who were given access.
        pause: Files wait for this event before their bytes come.
        downloads: How often each file was downloaded.
        url: HF_ENDPOINT.
    """

    models: Mapping[str, Mapping[str, bytes]]
    token: str = ""
    gated: frozenset[str] = frozenset()
    pause: threading.Event = field(default_factory=threading.Event)
    downloads: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def __post_init__(self) -> None:
        self.pause.set()

    @contextlib.contextmanager
    def serving(self) -> Iterator[Hub]:
        """Context manager that serves the hub in its block."""
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            self.pause.set()
            server.shutdown()
            server.server_close()
            thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if words[:2] == ["api", "models"]:
            name, rest = "/".join(words[2:4]), words[4:]
        else:
            name, rest = "/".join(words[:2]), words[2:]
        files = self.hub.models.get(name)
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._refuse(401, "RepoNotFound")
        if files is None:
            return self._refuse(404, "RepoNotFound")
        if name in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        what, revision, *path = rest or ["revision", "main"]
        if revision not in ("main", "v1", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if what == "revision":
            siblings = [{"rfilename": each} for each in files]
            return self._send_json(
                {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
            )
        if what == "tree":
            return self._send_json(
                [
                    {"type": "file", "path": each, "size": len(data), "oid": _etag(data)}
                    for each, data in files.items()
                ]
            )
        data = files.get("/".join(path))
        if what != "resolve" or data is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(data)}"', "Content-Length": str(len(data))}
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if not is_head:
            self.hub.downloads[f"{name}/{'/'.join(path)}"] += 1
            self.hub.pause.wait(30)
            with contextlib.suppress(OSError):  # the client gave up
                self.wfile.write(data)
        return None

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
