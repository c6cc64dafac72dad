"""Chooses the transport by which a rank reads from another one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.transports import Reader, Reading
from nccl_transfer.transports.base import HOST_TO_HOST, Route
from rlhf.errors import AttachFailed, TransferError

REMEMBERED_SOURCES = 4096
"""Maximum number of sources whose failed set-ups are remembered; above it the oldest is removed and tried again."""


T = TypeVar("T")


class NoTransport(TransferError):
    """No transport reaches a source by the route that is asked for."""


class ReaderChoice:
    """Reads from each source by the first transport, in order of preference, that reaches it and that could be set up
    with it so far. Thread-safe.

    Args:
        host_id: Id of this process's host, from `transports.host_id()`.
        readers: Readers of transports in order of preference; `close` closes them.
    """

    def __init__(self, host_id: str, readers: Sequence[Reader]) -> None:
        self._host_id = host_id
        self._readers = tuple(readers)
        self._failed: dict[Endpoint, dict[str, str]] = {}
        self._lock = threading.Lock()

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> tuple[str, Reading]:
        """Reads bytes of shards of one rank into host memory, as `Reader.read`; returns the name of the transport and
        the bytes. Raises as `use`."""
        return self.use(source, HOST_TO_HOST, lambda reader: reader.read(source, ranges, deadline))

    def use(
        self, source: Endpoint, route: Route, read: Callable[[Reader], T], otherwise: str = ""
    ) -> tuple[str, T]:
        """Reads from one rank by a route; returns the name of the transport and the result of `read`, which is called
        with its reader. If a transport cannot be set up with the source, and another transport or the caller's fallback
        `otherwise` can be used, the failure is logged, and the transport is not tried with this source again.

        Raises:
            NoTransport: No transport reaches the source; the message gives the reason of each. Other errors as raised
                by `read`.
        """
        reasons: list[str] = []
        failed: dict[str, str] = {}
        for reader in self._readers:
            reason = self._why_not(reader, source, route)
            if reason is None:
                self._remember(source, failed, reader.name)
                try:
                    return reader.name, read(reader)
                except AttachFailed as error:
                    reason = failed[reader.name] = str(error)
            reasons.append(f"{reader.name}: {reason}")
        if otherwise:
            self._remember(source, failed, otherwise)
        raise NoTransport(f"no transport reaches {source} ({'; '.join(reasons)})")

    def shares_memory(self, source: Endpoint) -> bool:
        """As `Fetcher.shares_memory`."""
        return any(
            reader.maps_memory and self._why_not(reader, source, HOST_TO_HOST) is None
            for reader in self._readers
        )

    def check_adverts(self, adverts: Mapping[str, bytes]) -> None:
        """As `Fetcher.check_adverts`."""
        for reader in self._readers:
            if reader.name in adverts:
                try:
                    reader.check_advert(adverts[reader.name])
                except ValueError as error:
                    raise ValueError(f"transport {reader.name}: {error}") from None

    def failures(self) -> dict[str, str]:
        """Returns the newest error of each transport that a source offers and that could not be set up with it, by name
        of the transport. The message names the source."""
        with self._lock:
            return {name: text for texts in self._failed.values() for name, text in texts.items()}

    def forget(self, source: Endpoint) -> None:
        """As `Fetcher.forget`."""
        with self._lock:
            self._failed.pop(source, None)
        for reader in self._readers:
            reader.forget(source)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _why_not(self, reader: Reader, source: Endpoint, route: Route) -> str | None:
        """Returns the reason why a reader cannot read from a source by a route, or None if it can."""
        if route not in reader.routes:
            return f"it has no route from {route.source} to {route.reader}"
        return self._why_failed(source, reader.name) or reader.why_not(source, self._host_id)

    def _why_failed(self, source: Endpoint, name: str) -> str | None:
        with self._lock:
            return self._failed.get(source, {}).get(name)

    def _remember(self, source: Endpoint, failed: Mapping[str, str], used: str) -> None:
        """Remembers the transports that could not be set up with a source, which transport `used` reads instead, and
        logs those that were not known."""
        with self._lock:
            known = self._failed.pop(source, {})
            if merged := {**known, **failed}:
                self._failed[source] = merged
            if len(self._failed) > REMEMBERED_SOURCES:
                del self._failed[next(iter(self._failed))]
        for name in failed.keys() - known.keys():
            logging.warning("%s is read by %s, since %s failed: %s", source, used, name, failed[name])
