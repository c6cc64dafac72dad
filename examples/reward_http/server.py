"""A reward behind HTTP, for `kind = "http"`: python server.py --port 8080.

It answers POST /score with one result for each row. Change `score`; the rest can stay. It needs Python alone.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY_VARIABLE = "VERIFIER_KEY"
"""Environment variable with a key; if it is set, requests need the header "Authorization: Bearer KEY"."""
MAX_REQUEST_BYTES = 64 << 20
"""Largest request that is read."""
IDLE_S = 300
"""Seconds after which a connection without a request is closed."""


def score(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the result for a row: 1 for a response that is the ground truth, else 0.

    Args:
        row: The texts "prompt", "response" and "ground_truth", which is empty where the row has none, and "metadata",
            an object with all other fields of the row in the data set; where it is known, "response_tokens", the number
            of tokens of the response, as many as a list of scores has to have.

    Returns:
        "score": the score, a list with one number per response token, or None where the row cannot be scored.
        "error", optional: the cause of that. "metrics", optional: further numbers by name, whose mean over the rows is
        logged.
    """
    truth, response = row["ground_truth"].strip(), row["response"].strip()
    if not truth:
        return {"score": None, "error": "the row has no ground truth"}
    return {"score": float(response == truth), "metrics": {"characters": len(response)}}


def answer_to(request: Any) -> dict[str, Any]:
    """Returns the answer to a request. An exception of `score` becomes the error of its row."""
    results = []
    for row in request["rows"]:
        try:
            results.append(score(row))
        except Exception as error:  # noqa: BLE001 - any error belongs to its row alone
            results.append({"score": None, "error": f"{type(error).__name__}: {error}"})
    return {"results": results}


class Handler(BaseHTTPRequestHandler):
    """Serves one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_S

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or len(length) > 12:
            return self._end(411, {"error": "a request needs content-length"})
        if int(length) > MAX_REQUEST_BYTES:
            return self._end(413, {"error": f"a request may have {MAX_REQUEST_BYTES} bytes"})
        body = self.rfile.read(int(length))
        if self.path != "/score":
            return self._answer(404, {"error": "there is /score alone"})
        if not self._is_allowed():
            return self._answer(401, {"error": "the header Authorization has another key"})
        try:
            answer = answer_to(json.loads(body))
        except (ValueError, KeyError, TypeError) as error:
            return self._answer(400, {"error": f"not a request for scores: {type(error).__name__}: {error}"})
        return self._answer(200, answer)

    def _is_allowed(self) -> bool:
        key = os.environ.get(KEY_VARIABLE, "")
        given = self.headers.get("authorization", "")
        return not key or hmac.compare_digest(given.encode(), f"Bearer {key}".encode())

    def _end(self, code: int, answer: dict[str, Any]) -> None:
        """Answers a request whose body was not read, after which the connection cannot go on."""
        self.close_connection = True
        self._answer(code, answer)

    def _answer(self, code: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing for each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores rows by HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8080, help="port; 0 takes a free one (default: %(default)s)"
    )
    arguments = parser.parse_args()
    server = ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    print(f"serving http://{arguments.host}:{server.server_port}/score", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
