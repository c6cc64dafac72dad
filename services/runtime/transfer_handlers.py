"""Handlers of TransferService on one rank that belong to no transport: they take rows, and report its traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from nccl_transfer.bucket_board import BucketBoard
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.spill import spill_response
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transfer_service import mark_corrupt_response, stat_response
from nccl_transfer.transports.base import Handler
from rlhf.errors import Refused
from rlhf.v1 import transfer_pb2
from services.runtime.boundary import timeout_s
from services.runtime.sessions import Sessions


class TransferHandlers:
    """Handlers of TakeRelayed, TakeBucket, Put, Spill, Stat and MarkCorrupt.

    Args:
        store: Store of the rank's rows.
        fetcher: Fetches rows from other ranks and counts the traffic.
        buckets: Buckets of weights that this rank offers.
        sessions: Sessions of the rank; Put stores rows for no other.
        unavailable: For each transport that is not available on this host, the reason, by name.
    """

    def __init__(
        self,
        store: TensorStore,
        fetcher: Fetcher,
        buckets: BucketBoard,
        sessions: Sessions,
        unavailable: Mapping[str, str],
    ) -> None:
        self._store = store
        self._fetcher = fetcher
        self._buckets = buckets
        self._sessions = sessions
        self._unavailable = unavailable

    def handlers(self) -> dict[str, Handler]:
        """Returns the handlers by method name."""
        return {
            "TakeRelayed": self._take_relayed,
            "TakeBucket": self._take_bucket,
            "Put": self._put,
            "Spill": self._spill,
            "Stat": self._stat,
            "MarkCorrupt": self._mark_corrupt,
        }

    async def _take_relayed(self, request: Any, context: Any) -> transfer_pb2.TakeRelayedResponse:
        return await self._fetcher.relays.take(request, timeout_s(context))

    async def _take_bucket(self, request: Any, context: Any) -> transfer_pb2.TakeBucketResponse:
        return await self._buckets.take(request, timeout_s(context))

    async def _put(self, request: transfer_pb2.PutRequest, context: Any) -> transfer_pb2.PutResponse:
        """Stores the request's rows and returns references to them; raises Refused for a session that is not open."""
        if not request.session or request.session not in self._sessions.names:
            raise Refused(f"session {request.session!r} is not open here, so its rows are not kept")
        batch, lease = from_proto(request.batch), Lease(request.session, request.step)
        stored = await asyncio.to_thread(self._store.put_batch, batch, lease)
        return transfer_pb2.PutResponse(batch=to_proto(stored))

    async def _spill(self, request: Any, context: Any) -> transfer_pb2.SpillResponse:
        return await spill_response(self._store, request, timeout_s(context))

    async def _stat(self, request: Any, context: Any) -> transfer_pb2.StatResponse:
        return stat_response(
            self._store, self._fetcher.traffic(), self._unavailable, self._fetcher.failures()
        )

    async def _mark_corrupt(self, request: Any, context: Any) -> transfer_pb2.MarkCorruptResponse:
        return mark_corrupt_response(self._store, request)
