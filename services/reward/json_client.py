"""Client of HTTP endpoints that answer JSON with JSON: retries, bounded answers, and headers that stay secret."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from rlhf.errors import ConfigError, RewardFailed
from settings.endpoints import EndpointTable

if TYPE_CHECKING:
    import httpx

BUSY = frozenset({408, 409, 425, 429})
"""HTTP status codes, besides those from 500, after which a request is retried."""
MAX_RETRY_AFTER_S = 60.0
"""Longest Retry-After, in seconds, after which a request is retried; a longer one makes it fail."""
MAX_ANSWER_BYTES = 32 << 20
"""Maximum size of an answer, unpacked."""
ENCODINGS = frozenset({"identity", "gzip", "deflate"})
"""Encodings of answers that are unpacked. Others, and several on each other, may grow without bound at once."""
MIN_SECRET = 4
"""Minimum length of a header's value, or of its last word, that messages never contain."""
MAX_QUOTE = 200
"""Maximum number of characters of an answer that an error message quotes."""
FORMAT_WORDS = frozenset(
    {
        "scores",
        "results",
        "score",
        "metrics",
        "error",
        "choices",
        "message",
        "content",
        "finish_reason",
        "length",
    }
)
"""Words by which answers are read. They are no secrets, even where the value of a header is the same."""


class EndpointAnswer(NamedTuple):
    """Decoded JSON of an answer, and the address that gave it, as messages show it (see `shown_url`)."""

    url: str
    content: Any


class Busy(Exception):
    """A request failed; a retry after at least `wait_s` seconds may succeed."""

    def __init__(self, failure: str, wait_s: float = 0.0) -> None:
        super().__init__(failure)
        self.wait_s = wait_s


class JsonClient:
    """Posts JSON to endpoints. Certificates of https addresses are verified, against those that the environment
    variable SSL_CERT_FILE or SSL_CERT_DIR names if it is set. Redirects are not followed, since they would send rows
    and headers to an address that the configuration does not name.

    Args:
        urls: Addresses of equivalent endpoints, to which requests go in turn.
        table: Settings of the requests.
        headers: Headers of every request. Their values appear in no message.

    Raises:
        ConfigError: httpx is not installed, or cannot read an address or a certificate.
    """

    def __init__(self, urls: Sequence[str], table: EndpointTable, headers: Mapping[str, str]) -> None:
        if importlib.util.find_spec("httpx") is None:
            raise ConfigError("kind: judge and http need httpx; pip install 'rlhf-cluster[http]'")
        # Imported here: only rewards that ask an endpoint need it.
        import httpx

        for name in ("httpx", "httpcore"):  # which log requests and headers
            logging.getLogger(name).setLevel(logging.WARNING)
        self._urls, self._table = list(urls), table
        values = {part for value in headers.values() for part in (value, value.split()[-1])}
        forms = {form for value in values if len(value) >= MIN_SECRET for form in _forms(value)}
        self._secrets = sorted(forms, key=len, reverse=True)
        self._next = 0
        try:
            for url in urls:
                httpx.URL(url)
            self._client = httpx.AsyncClient(
                headers={**headers, "Accept-Encoding": "gzip, deflate"},
                verify=httpx.create_ssl_context(trust_env=True),
                limits=httpx.Limits(
                    max_connections=table.concurrency, max_keepalive_connections=table.concurrency
                ),
                trust_env=False,
            )
        except (httpx.InvalidURL, OSError, ValueError) as error:
            raise ConfigError(f"an HTTP client cannot be made: {error}") from error

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def post(self, body: Any) -> EndpointAnswer:
        """Posts a body and returns the answer, with retries. Texts and keys of the answer are `redacted`, so that
        it can then be cut and quoted safely.

        Raises:
            RewardFailed: A request failed for good, or all attempts failed; the text begins with the address.
        """
        tries = self._table.retries + 1
        failure, first = "", self._next
        self._next += 1
        for attempt in range(tries):
            url = self._urls[(first + attempt) % len(self._urls)]
            try:
                return EndpointAnswer(shown_url(url), self._decoded(url, await self._content(url, body)))
            except Busy as busy:
                failure, wait_s = str(busy), busy.wait_s
            if attempt + 1 < tries:
                await asyncio.sleep(max(self._table.backoff_s * 2**attempt, wait_s))
        raise RewardFailed(f"{failure}, after {tries} tries")

    def redacted(self, text: str) -> str:
        """Returns a text with *** in place of the values of the headers, which an endpoint may repeat."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def quote(self, text: str) -> str:
        """Quotes the beginning of an answer for a message, `redacted`."""
        return quoted(self.redacted(text))

    def _redacted_answer(self, answer: Any) -> Any:
        """Returns the decoded JSON of an answer with all texts and keys `redacted`, except `FORMAT_WORDS`. Changes its
        lists and objects in place; not recursive, since answers may be nested deeply."""
        if not self._secrets:
            return answer
        whole = [answer]
        containers: list[Any] = [whole]
        while containers:
            container = containers.pop()
            if isinstance(container, dict):
                items = [(self._redacted_text(key), value) for key, value in container.items()]
                container.clear()
            else:
                items = list(enumerate(container))
            for key, value in items:
                container[key] = self._redacted_text(value) if isinstance(value, str) else value
                if isinstance(value, dict | list):
                    containers.append(value)
        return whole[0]

    def _redacted_text(self, text: str) -> str:
        return text if text in FORMAT_WORDS else self.redacted(text)

    async def _content(self, url: str, body: Any) -> bytes:
        """Sends one request and returns the content of a successful answer.

        Raises:
            Busy: The request failed, and a retry may succeed.
            RewardFailed: The request failed, and a retry would fail too.
        """
        import httpx

        shown, limit_s = shown_url(url), self._table.request_timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream("POST", url, json=body, timeout=None) as reply,
            ):
                self._check_busy(shown, reply)
                content = await self._read(shown, reply)
        except TimeoutError:
            raise Busy(f"{shown}: no answer within {limit_s:g} s") from None
        except httpx.TransportError as error:
            raise Busy(f"{shown} cannot be reached: {_described(error)}") from error
        except httpx.RequestError as error:
            raise Busy(f"{shown}: the answer cannot be read: {_described(error)}") from error
        if reply.has_redirect_location:
            target = shown_url(self.redacted(reply.headers["location"]), url)
            raise RewardFailed(
                f"{shown}: HTTP {reply.status_code} redirects to {target}; redirects are not followed, so the "
                "configuration has to name the final address"
            )
        if not reply.is_success:
            said = self.quote(content.decode(errors="replace"))
            raise RewardFailed(f"{shown}: HTTP {reply.status_code}: {said}")
        return content

    def _check_busy(self, shown: str, reply: httpx.Response) -> None:
        code = reply.status_code
        if code not in BUSY and code < 500:
            return
        wait_s = retry_after_s(reply.headers.get("retry-after", ""))
        if wait_s > MAX_RETRY_AFTER_S:
            raise RewardFailed(
                f"{shown}: HTTP {code} with Retry-After {wait_s:g} s; the longest allowed is {MAX_RETRY_AFTER_S:g} s"
            )
        raise Busy(f"{shown}: HTTP {code}", wait_s)

    async def _read(self, shown: str, reply: httpx.Response) -> bytes:
        encoding = reply.headers.get("content-encoding", "identity").lower()
        if encoding not in ENCODINGS:
            raise RewardFailed(
                f"{shown}: the answer has Content-Encoding {self.quote(encoding)}, which was not asked for"
            )
        content = bytearray()
        async for chunk in reply.aiter_bytes():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise RewardFailed(f"{shown}: the answer has more than {MAX_ANSWER_BYTES} bytes")
        return bytes(content)

    def _decoded(self, url: str, content: bytes) -> Any:
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            said = self.quote(content.decode(errors="replace"))
            raise RewardFailed(f"{shown_url(url)}: the answer is not valid JSON: {said}") from None
        return self._redacted_answer(answer)


def header_of(variable: str, key: str) -> str:
    """Returns the value of a header from an environment variable.

    Args:
        variable: Name of the variable.
        key: Key of the configuration that names it, for messages.

    Raises:
        ConfigError: The variable is not set or empty, or its value cannot be that of a header; the text does not
            contain the value.
    """
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(f"{key}: the environment has no {variable}")
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{key}: the value of {variable} has characters that a header cannot have")
    return value


def quoted(text: str) -> str:
    """Quotes the beginning of a text for a message."""
    return repr(text if len(text) <= MAX_QUOTE else f"{text[:MAX_QUOTE]}...")


def shown_url(url: str, base: str = "") -> str:
    """Returns an address without user, password, query and fragment, which may contain secrets; at most `MAX_QUOTE`
    characters of it.

    Args:
        url: The address.
        base: Address that it is relative to. Default: it is whole.
    """
    try:
        parts = urlsplit(urljoin(base, url))
    except ValueError:
        return "an address that cannot be read"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:MAX_QUOTE]


def retry_after_s(header: str) -> float:
    """Returns the seconds from now that a Retry-After header names, as a number or as a date; 0 if it is neither."""
    if header.isascii() and header.isdigit():
        return float(header[:9]) if len(header) <= 9 else math.inf
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _forms(secret: str) -> set[str]:
    """Returns a secret as it is, as JSON may write it, and as Python's repr does."""
    escaped = json.dumps(secret)[1:-1]
    return {secret, escaped, escaped.replace("/", "\\/"), repr(secret)[1:-1]}


def _described(error: Exception) -> str:
    return f"{type(error).__name__} {error}".rstrip()
