"""An HTTP server of the tests' own, which answers JSON with JSON as a test says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], Any]
"""Code, headers, and a body: JSON, or text as it is."""


class Endpoint:
    """A server on loopback.

    Attributes:
        answer: The reply to a request's body; its number, from 0, goes before.
        requests: What was asked, with its headers.
        most: Most requests that were under way at the same time.
    """

    def __init__(self) -> None:
        self.answer: Callable[[int, Any], Reply] = lambda number, body: (404, {}, "no answer is set")
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.most = 0
        self._under_way = 0
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                code, headers, reply = endpoint.handle(self.path, dict(self.headers), body)
                content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                with contextlib.suppress(ConnectionError):  # of a client that has given up
                    self.send_response(code)
                    for name, value in {**headers, "content-length": str(len(content))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def handle(self, path: str, headers: dict[str, str], body: Any) -> Reply:
        with self._lock:
            number = len(self.requests)
            self.requests.append((path, headers, body))
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        try:
            return self.answer(number, body)
        finally:
            with self._lock:
                self._under_way -= 1


@contextlib.contextmanager
def serving() -> Iterator[Endpoint]:
    """An endpoint that serves."""
    endpoint = Endpoint()
    thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.server.shutdown()
        endpoint.server.server_close()
        thread.join()
