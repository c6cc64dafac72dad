"""Choice of the transport by which the rows of a rank are read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.transports import Reader
from nccl_transfer.transports.base import NoRoute, Route
from rlhf.errors import TransferError


class Reach:
    """The readers of a process, and the ranks that they do not reach. Thread-safe.

    Args:
        host_id: Id of this process's host.
        readers: Readers of transports in order of preference.
    """

    def __init__(self, host_id: str, readers: Sequence[Reader]) -> None:
        self._host_id = host_id
        self._readers = tuple(readers)
        self._lost: dict[tuple[str, Endpoint], str] = {}
        self._lock = threading.Lock()

    def find(self, source: Endpoint, route: Route) -> Reader:
        """Returns the first reader that reaches a rank by a route.

        Raises:
            TransferError: None does; the message has the reason of each.
        """
        reasons = []
        for reader in self._readers:
            reason = self._why_not(reader, source, route)
            if reason is None:
                return reader
            reasons.append(f"{reader.name}: {reason}")
        raise TransferError(f"no transport reaches {source} ({'; '.join(reasons)})")

    def give_up(self, reader: Reader, source: Endpoint, error: NoRoute) -> None:
        """Remembers, and logs once, that a reader found no way to a rank; `find` no longer returns it for that rank
        until it restarts."""
        with self._lock:
            is_new = (reader.name, source) not in self._lost
            self._lost[reader.name, source] = str(error)
        if is_new:
            logging.warning("%s; transport %s is not used with it any more", error, reader.name)

    def _why_not(self, reader: Reader, source: Endpoint, route: Route) -> str | None:
        if route not in reader.routes:
            return f"it has no route from {route.source} to {route.reader}"
        if (reader.name, source) in self._lost:
            return f"it found no way: {self._lost[reader.name, source]}"
        return reader.why_not(source, self._host_id)
