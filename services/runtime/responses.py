"""Keeps the responses of one rank's calls by call id, so that a retry receives the first attempt's response."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf.contract import Method
from rlhf.errors import InvalidRequest
from rlhf.v1 import common_pb2

REMEMBERED_CALLS = 256
"""Most responses of a session kept for retries after their calls have ended; far more than a controller has in
flight."""

REMEMBERED_BYTES = 16 << 20
"""Maximum total size, serialized, of the responses of a session that are kept for retries. References to many rows take
up to a mebibyte per call."""

REMEMBERED_SESSIONS = 32
"""Maximum number of sessions whose responses are kept; more than can be open at a time."""


@dataclass(frozen=True, slots=True)
class _Known:
    path: str
    session: str
    response: asyncio.Future[Any]


class _Ended:
    """Responses of calls of one session that have ended, by call id; those that ended first come first.

    Attributes:
        nbytes: Bytes of the responses, serialized.
    """

    def __init__(self) -> None:
        self.calls: OrderedDict[str, _Known] = OrderedDict()
        self.nbytes = 0

    def add(self, call_id: str, known: _Known) -> None:
        """Adds a call that has just ended, and drops the oldest ones above the limits."""
        self.calls[call_id] = known
        self.nbytes += _size(known.response)
        while len(self.calls) > 1 and (len(self.calls) > REMEMBERED_CALLS or self.nbytes > REMEMBERED_BYTES):
            _, oldest = self.calls.popitem(last=False)
            self.nbytes -= _size(oldest.response)


class ResponseMemory:
    """Futures of the responses of all running calls and of the most recently ended calls.

    The limits REMEMBERED_CALLS and REMEMBERED_BYTES apply per session, so sessions that share the rank do not evict
    each other's responses. Above a limit, the responses of the calls that ended first are dropped; the response of the
    last call is kept whatever its size. Calls without a sequence number count as one session. Not thread-safe: used
    from the event loop only.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Known] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()

    def __contains__(self, call_id: str) -> bool:
        return self._find(call_id) is not None

    @property
    def to_come(self) -> list[asyncio.Future[Any]]:
        """Futures of the responses of all calls that have not ended."""
        return [known.response for known in self._open.values()]

    def find(self, method: Method, call: common_pb2.Call) -> asyncio.Future[Any] | None:
        """Returns the future of the response of the call with this id; None if no such call is known.

        Raises:
            InvalidRequest: The id was used for a call of a different method or session.
        """
        known = self._find(call.call_id)
        if known is None:
            return None
        if (known.path, known.session) != (method.path, call.session):
            raise InvalidRequest(
                f"{method.name}: call id {call.call_id} belongs to a call of another method or session; call ids must "
                "be unique"
            )
        return known.response

    def add(self, method: Method, call: common_pb2.Call, response: asyncio.Future[Any]) -> None:
        """Adds the future of the response of a new call, under the call's id, which no known call may have."""
        self._open[call.call_id] = _Known(method.path, call.session, response)
        response.add_done_callback(partial(self._end, call.call_id, call.session if call.sequence else ""))

    def _find(self, call_id: str) -> _Known | None:
        """Returns the call with this id; None if it is not known."""
        if known := self._open.get(call_id):
            return known
        return next((ended.calls[call_id] for ended in self._ended.values() if call_id in ended.calls), None)

    def _end(self, call_id: str, session: str, response: asyncio.Future[Any]) -> None:
        """Moves a call whose response is done to the ended calls of its session. Drops the responses of the least
        recently used session if there are too many sessions."""
        ended = self._ended.pop(session, None) or _Ended()
        self._ended[session] = ended
        ended.add(call_id, self._open.pop(call_id))
        if len(self._ended) > REMEMBERED_SESSIONS:
            self._ended.popitem(last=False)


def _size(response: asyncio.Future[Any]) -> int:
    """Returns the serialized size of a response that is done, in bytes; 0 for an error. Reading the error also keeps
    asyncio from logging it as never retrieved."""
    return 0 if response.cancelled() or response.exception() else response.result().ByteSize()
