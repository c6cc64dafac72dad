"""Relays: one rank reads bytes from another host and keeps them, and the other ranks of its host map them.

`plans.plan_relays` assigns the readers.
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
from nccl_transfer.transports import Reader, Reading
from nccl_transfer.transports.common import Channels, check_epoch, remaining_s
from rlhf.errors import DeadlineExceeded, OutOfSpace, TransferError, drop_frames, from_rpc_error
from rlhf.v1 import transfer_pb2 as pb
from rlhf.v1 import transfer_pb2_grpc as pb_grpc

REMEMBERED_CALLS = 64
"""Maximum number of calls without waiting ranks whose shards stay available. A rank takes relayed bytes within the
call, so it misses them only if the reader is more than REMEMBERED_CALLS calls ahead of it."""


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """The relays of a call, as one rank passes them to `Fetcher.fetch`.

    Attributes:
        call_id: Id of the call, equal on all of its ranks.
        lease: Lease of the shards that a reader keeps for other ranks.
        relays: Relays of the call, of all hosts.
    """

    call_id: str
    lease: Lease
    relays: Sequence[Relay] = ()

    def kept_by(self, rank: Endpoint | None) -> dict[Endpoint, Relay]:
        """Returns the relays whose reader is `rank`, by source; empty for None, a process without a store."""
        return {relay.source: relay for relay in self.relays if relay.reader == rank}

    def taken_by(self, rank: Endpoint | None, host_id: str) -> dict[Endpoint, Relay]:
        """Returns the relays whose reader is a rank of host `host_id` other than `rank`, by source."""
        others = (relay for relay in self.relays if relay.reader != rank and relay.reader.host_id == host_id)
        return {relay.source: relay for relay in others}


@dataclass(frozen=True, slots=True)
class RelayedShard:
    """A shard of this rank that contains the concatenated bytes of `ranges`, which another rank holds."""

    ranges: tuple[ByteRange, ...]
    shard: Shard


@dataclass(slots=True)
class _Read:
    """The future of one source's relayed shard, and the number of ranks that wait for it."""

    future: Future[RelayedShard] = field(default_factory=Future)
    waiters: int = 0


class RelayBoard:
    """Shards that this rank has read for other ranks of its host, by call and source rank. Thread-safe.

    The board remembers all calls that have waiting ranks, and the most recent REMEMBERED_CALLS of the others.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._calls: dict[str, dict[str, _Read]] = {}
        self._lock = threading.Lock()

    def keep(
        self,
        relay: Relay,
        ranges: Sequence[ByteRange],
        views: Sequence[memoryview],
        relay_request: RelayRequest,
    ) -> None:
        """Copies bytes that this rank has read into a shard that ranks of this host can map, and wakes the ranks that
        wait for it.

        Args:
            relay: The relay whose reader is this rank.
            ranges: All ranges of the call's rows that the relay's source holds, in order.
            views: The bytes of each range.
            relay_request: The call's id, and the lease of the new shard.

        Raises:
            OutOfSpace: The bytes do not fit into the store; the caller passes the error to waiting ranks by `fail`.
            Refused: The lease was released during the copy, or its session has ended.
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
        kept = RelayedShard(tuple(ranges), shard)
        self._settle(relay_request.call_id, relay.source, lambda future: future.set_result(kept))

    def fail(self, relay: Relay, error: BaseException, call_id: str) -> None:
        """Passes the error of a failed read to the ranks that wait for its bytes now or later; a read that has
        succeeded stays available. Drops the frames of `error`."""
        drop_frames(error)
        self._settle(call_id, relay.source, lambda future: future.set_exception(error))

    async def take(self, request: pb.TakeRelayedRequest, timeout_s: float) -> pb.TakeRelayedResponse:
        """Handles the TakeRelayed RPC: waits until this rank has read the bytes; returns the place of their shard.

        Args:
            request: The call and the source.
            timeout_s: Maximum wait, in seconds.

        Raises:
            Refused: The request is for another epoch of the service.
            DeadlineExceeded: This rank did not read the bytes within `timeout_s`.
            RlhfError: This rank's read failed with this error.
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

    def _settle(self, call_id: str, source: Endpoint, settle: Callable[[Future[RelayedShard]], None]) -> None:
        """Calls `settle` with the future of a read unless it is done, and makes the call the last to be forgotten."""
        with self._lock:
            reads = self._calls[call_id] = self._calls.pop(call_id, {})
            read = reads.setdefault(source.address, _Read())
            if not read.future.done():
                settle(read.future)
            self._forget()

    @contextlib.contextmanager
    def _waiting(self, call_id: str, source: str) -> Iterator[Future[RelayedShard]]:
        """Context manager that yields the future of a read and counts one waiting rank within the block. After it, a
        future that is not done and for which no rank waits is forgotten."""
        with self._lock:
            read = self._calls.setdefault(call_id, {}).setdefault(source, _Read())
            read.waiters += 1
        try:
            yield read.future
        finally:
            with self._lock:
                read.waiters -= 1
                if not read.waiters and not read.future.done():
                    del self._calls[call_id][source]
                    if not self._calls[call_id]:
                        del self._calls[call_id]
                self._forget()

    def _forget(self) -> None:
        """Forgets the oldest calls without waiting ranks, beyond REMEMBERED_CALLS. The caller holds the lock."""
        idle = [
            call_id
            for call_id, reads in self._calls.items()
            if not any(read.waiters for read in reads.values())
        ]
        for call_id in idle[:-REMEMBERED_CALLS]:
            del self._calls[call_id]


class RelayTaker:
    """Takes bytes that other ranks of this host have read. Thread-safe.

    Args:
        memory: Reads memory of the other ranks; closed by `close`.
    """

    def __init__(self, memory: Reader) -> None:
        self._channels = Channels()
        self._memory = memory

    def take(self, relay: Relay, ranges: Sequence[ByteRange], call_id: str, deadline: float) -> Reading:
        """Blocks until the relay's reader, another rank of this host, has the bytes, and maps them.

        Args:
            relay: The source of the bytes, and the rank that reads them.
            ranges: All ranges of the call's rows that the source holds, in order.
            call_id: Id of the call.
            deadline: Time on the clock of `time.monotonic`, in seconds.

        Returns:
            The bytes, one view per range.

        Raises:
            RlhfError: The reader's read failed, with this error; or DeadlineExceeded, ServiceLost or Refused: the
                reader did not get the bytes in time, cannot be reached, or was restarted.
            TransferError: The reader has kept ranges that differ from `ranges`.
        """
        request = pb.TakeRelayedRequest(
            epoch=relay.reader.epoch, call_id=call_id, source=relay.source.address
        )
        try:
            stub = pb_grpc.TransferServiceStub(self._channels.to(relay.reader.address))
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

    def forget(self, reader: Endpoint) -> None:
        """Closes connections and mappings to a rank that no call can refer to any longer; as `Reader.forget`."""
        self._channels.forget(reader.address)
        self._memory.forget(reader)

    def close(self) -> None:
        """Closes all connections."""
        self._channels.close()
        self._memory.close()
