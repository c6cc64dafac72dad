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
"""Most responses kept for retries after their calls have ended; far more than a controller has in flight."""

REMEMBERED_BYTES = 16 << 20
"""Most bytes, serialized, of the responses kept for retries. References to many rows take up to a mebibyte per
call."""


@dataclass(frozen=True, slots=True)
class _Known:
    path: str
    session: str
    response: asyncio.Future[Any]


class ResponseMemory:
    """Futures of the responses of calls: of all calls that have not ended, and of those that ended most recently.

    If more than REMEMBERED_CALLS or REMEMBERED_BYTES of ended calls are kept, those that ended first are dropped; the
    response of the call that ended last is kept whatever its size. Not thread-safe: used from the event loop alone.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Known] = {}
        self._ended: OrderedDict[str, _Known] = OrderedDict()
        self._ended_bytes = 0

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._open or call_id in self._ended

    @property
    def to_come(self) -> list[asyncio.Future[Any]]:
        """Futures of the responses of all calls that have not ended."""
        return [known.response for known in self._open.values()]

    def find(self, method: Method, call: common_pb2.Call) -> asyncio.Future[Any] | None:
        """Returns the future of the response of the call with this id; None if no such call is known.

        Raises:
            InvalidRequest: The id was used for a call of a different method or session.
        """
        known = self._open.get(call.call_id) or self._ended.get(call.call_id)
        if known is None:
            return None
        if (known.path, known.session) != (method.path, call.session):
            raise InvalidRequest(f"{method.name}: call {call.call_id} was another one; an id is used once")
        return known.response

    def add(self, method: Method, call: common_pb2.Call, response: asyncio.Future[Any]) -> None:
        """Adds the future of the response of a new call, under the call's id, which no known call may have."""
        self._open[call.call_id] = _Known(method.path, call.session, response)
        response.add_done_callback(partial(self._end, call.call_id))

    def _end(self, call_id: str, response: asyncio.Future[Any]) -> None:
        """Moves a call whose response is done to those that have ended, and drops the oldest of these above the
        limits."""
        self._ended[call_id] = self._open.pop(call_id)
        self._ended_bytes += _size(response)
        while len(self._ended) > 1 and (
            len(self._ended) > REMEMBERED_CALLS or self._ended_bytes > REMEMBERED_BYTES
        ):
            _, oldest = self._ended.popitem(last=False)
            self._ended_bytes -= _size(oldest.response)


def _size(response: asyncio.Future[Any]) -> int:
    """Returns the serialized size of a response that is done, in bytes; 0 for an error. Reading the error also keeps
    asyncio from logging it as never retrieved."""
    return 0 if response.cancelled() or response.exception() else response.result().ByteSize()
