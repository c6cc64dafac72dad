"""Bytes that cross to a host once: one rank reads them from the other host and keeps them, its neighbours map them.

`plans.plan_relays` chooses who reads what.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import grpc

from nccl_transfer.refs.plans import Relay
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import MemfdTransport, Reading
from nccl_transfer.transports.base import check_epoch, remaining_s
from nccl_transfer.transports.grpc_stream import stream_channel
from rlhf.errors import DeadlineExceeded, OutOfSpace, TransferError, drop_frames, from_rpc_error
from rlhf.v1 import transfer_pb2 as pb
from rlhf.v1 import transfer_pb2_grpc as pb_grpc

REMEMBERED_CALLS = 64
"""Calls whose reads are kept findable though nobody waits for one now. Neighbours ask within the call, so more than
that a reader would have to be ahead of them."""


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """The relays of a call, and under which lease a rank keeps what it reads for others."""

    call_id: str
    lease: Lease
    relays: Sequence[Relay] = ()

    def kept_by(self, rank: Endpoint | None) -> dict[Endpoint, Relay]:
        """The relays that this rank reads for others, by source."""
        return {relay.source: relay for relay in self.relays if relay.reader == rank}

    def taken_by(self, rank: Endpoint | None, host_id: str) -> dict[Endpoint, Relay]:
        """The relays that another rank of its host reads for this one, by source."""
        others = (relay for relay in self.relays if relay.reader != rank and relay.reader.host_id == host_id)
        return {relay.source: relay for relay in others}


@dataclass(frozen=True, slots=True)
class Kept:
    """Ranges of another rank's shards, end to end in a shard of this rank."""

    ranges: tuple[ByteRange, ...]
    shard: Shard


@dataclass(slots=True)
class _Promise:
    """A read that was made or failed, or that somebody waits for: one that is neither is forgotten."""

    future: Future[Kept] = field(default_factory=Future)
    waiters: int = 0


class RelayBoard:
    """Shards that this rank has read on behalf of its neighbours, by call and source rank. Thread-safe.

    It holds what is waited for, and of the calls nobody waits for the last REMEMBERED_CALLS, whole.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._calls: dict[str, dict[str, _Promise]] = {}
        self._lock = threading.Lock()

    def keep(
        self,
        relay: Relay,
        ranges: Sequence[ByteRange],
        views: Sequence[memoryview],
        relay_request: RelayRequest,
    ) -> None:
        """Puts bytes that were read where neighbours can map them, and tells those who wait.

        Args:
            relay: Whose bytes they are.
            ranges: All bytes of the call's rows that the source holds, in order.
            views: The bytes of each range.
            relay_request: Of which call, under which lease.

        Raises:
            OutOfSpace: They do not fit; those who wait hear of it by `fail`.
            Refused: As in `TensorStore.fill`.
        """

        def write(memory: memoryview) -> None:
            start = 0
            for view in views:
                memory[start : start + len(view)] = view
                start += len(view)

        try:
            shard = self._store.fill(sum(map(len, views)), relay_request.lease, write)
        except OutOfSpace as error:
            raise OutOfSpace(
                f"{error}; they are of {relay.source}, kept for other ranks of this host"
            ) from None
        kept = Kept(tuple(ranges), shard)
        self._settle(relay_request.call_id, relay.source, lambda future: future.set_result(kept))

    def fail(self, relay: Relay, error: BaseException, call_id: str) -> None:
        """Tells those who wait that the bytes will not come; those that came stay."""
        drop_frames(error)
        self._settle(call_id, relay.source, lambda future: future.set_exception(error))

    async def take(self, request: pb.TakeRelayedRequest, timeout_s: float) -> pb.TakeRelayedResponse:
        """The answer to a TakeRelayed.

        Raises:
            Refused: The request is of another epoch.
            DeadlineExceeded: The bytes did not come.
        """
        check_epoch(self._store, request.epoch)
        with self._waiting(request.call_id, request.source) as future:
            try:
                kept = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout_s)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"call {request.call_id} did not read from {request.source} within {timeout_s:.1f} s"
                ) from None
        ranges = [pb.ByteRange(shard=r.shard.id, start=r.start, nbytes=r.nbytes) for r in kept.ranges]
        shard = kept.shard
        return pb.TakeRelayedResponse(shard=shard.id, offset=shard.offset, nbytes=shard.nbytes, ranges=ranges)

    def _settle(self, call_id: str, source: Endpoint, settle: Callable[[Future[Kept]], None]) -> None:
        """Says how a read ended, unless that is known; the call is now the youngest."""
        with self._lock:
            promises = self._calls[call_id] = self._calls.pop(call_id, {})
            promise = promises.setdefault(source.address, _Promise())
            if not promise.future.done():
                settle(promise.future)
            self._forget()

    @contextlib.contextmanager
    def _waiting(self, call_id: str, source: str) -> Iterator[Future[Kept]]:
        """A read's future, to be waited for within the block."""
        with self._lock:
            promise = self._calls.setdefault(call_id, {}).setdefault(source, _Promise())
            promise.waiters += 1
        try:
            yield promise.future
        finally:
            with self._lock:
                promise.waiters -= 1
                if not promise.waiters and not promise.future.done():
                    del self._calls[call_id][source]
                    if not self._calls[call_id]:
                        del self._calls[call_id]
                self._forget()

    def _forget(self) -> None:
        idle = [
            call_id
            for call_id, promises in self._calls.items()
            if not any(promise.waiters for promise in promises.values())
        ]
        for call_id in idle[:-REMEMBERED_CALLS]:
            del self._calls[call_id]


class RelayTaker:
    """Takes bytes that neighbours have read. Thread-safe."""

    def __init__(self, channel: Callable[[str], grpc.Channel] = stream_channel) -> None:
        self._open = channel
        self._channels: dict[str, grpc.Channel] = {}
        self._memory = MemfdTransport()
        self._lock = threading.Lock()

    def take(self, relay: Relay, ranges: Sequence[ByteRange], call_id: str, deadline: float) -> Reading:
        """All bytes of the call's rows that the relay's source holds: `ranges`, in order.

        Raises:
            DeadlineExceeded, ServiceLost, Refused: The neighbour did not get them, or is gone.
            TransferError: It kept other bytes: its call has other rows.
        """
        request = pb.TakeRelayedRequest(
            epoch=relay.reader.epoch, call_id=call_id, source=relay.source.address
        )
        try:
            stub = pb_grpc.TransferServiceStub(self._channel(relay.reader))
            answer = stub.TakeRelayed(request, timeout=remaining_s(deadline, relay.reader))
        except grpc.RpcError as error:
            raise from_rpc_error(error, str(relay.reader)) from error
        shard = Shard(relay.reader, answer.shard, answer.offset, answer.nbytes)
        wanted = [(r.shard.id, r.start, r.nbytes) for r in ranges]
        if wanted != [(r.shard, r.start, r.nbytes) for r in answer.ranges]:
            raise TransferError(
                f"{relay.reader}: kept other bytes of {relay.source} than call {call_id} has here"
            )
        starts = itertools.accumulate((r.nbytes for r in ranges), initial=0)
        pieces = [ByteRange(shard, start, r.nbytes) for r, start in zip(ranges, starts, strict=False)]
        return self._memory.read(relay.reader, pieces, deadline)

    def close(self) -> None:
        """Closes all connections."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()
        self._memory.close()

    def _channel(self, reader: Endpoint) -> grpc.Channel:
        with self._lock:
            if reader.address not in self._channels:
                self._channels[reader.address] = self._open(reader.address)
            return self._channels[reader.address]
