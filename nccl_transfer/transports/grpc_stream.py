"""The grpc transport: bytes over gRPC streams, from every rank that serves, on any host."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.experimental

from nccl_transfer.refs.ranges import ByteRange, cut_chunks
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Handler, Reader, Reading, Source, Transport
from nccl_transfer.transports.common import Channels, check_request, remaining_s, with_retries
from nccl_transfer.transports.sink import Sink
from rlhf.errors import Refused, ServiceLost, TransferError, from_rpc_error
from rlhf.v1 import transfer_pb2 as pb
from rlhf.v1 import transfer_pb2_grpc as pb_grpc

DEFAULT_CHUNK_BYTES = 1 << 20  # measured: the fastest; 2 MiB and more run at less than half its rate
MAX_CHUNK_BYTES = 4 << 20


class GrpcReader(Reader):
    """Streams ranges with TransferService.Fetch, and resumes broken streams where they broke."""

    name = "grpc"

    def __init__(self) -> None:
        self._channels = Channels()
        self._streams: dict[Any, Endpoint] = {}
        """Responses of reads under way, and their sources."""
        self._lock = threading.Lock()

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        return None if source.address else "it has no address"

    def check_advert(self, advert: bytes) -> None:
        if advert:
            raise ValueError(f"{len(advert)} bytes, where there are none")

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        sink = Sink(ranges)
        with_retries(lambda: self._stream(source, sink, deadline))
        return Reading(sink.views)

    def forget(self, source: Endpoint) -> None:
        # The last read that uses the channel may be from a new rank at the same address.
        self._channels.forget(source.address)
        with self._lock:
            forgotten = [each for each, known in self._streams.items() if known == source]
        for responses in forgotten:
            responses.cancel()

    def close(self) -> None:
        self._channels.close()

    def _stream(self, source: Endpoint, sink: Sink, deadline: float) -> None:
        channel = self._channels.to(source.address)
        request = pb.FetchRequest(epoch=source.epoch, ranges=sink.missing())
        stub = pb_grpc.TransferServiceStub(channel)
        responses: Any = stub.Fetch(request, timeout=remaining_s(deadline, source))
        with self._lock:
            self._streams[responses] = source
        try:
            for response in responses:
                _write(sink, memoryview(response.data), source)
        except grpc.RpcError as error:
            if responses.cancelled():
                raise Refused(f"{source}: no session introduces this endpoint any longer") from error
            mapped = from_rpc_error(error, str(source))
            if isinstance(mapped, ServiceLost):
                self._channels.forget(source.address, channel)  # other threads may still read its error
            raise mapped from error
        finally:
            with self._lock:
                del self._streams[responses]
        if sink.missing():
            raise TransferError(f"{source}: the stream ended before all bytes were sent")


def _write(sink: Sink, data: memoryview, source: Endpoint) -> None:
    """Writes the next bytes of a stream into the sink.

    Raises:
        TransferError: There are bytes beyond the last range.
    """
    while len(data):
        room = sink.room(len(data))
        if not room:
            raise TransferError(f"{source}: sent {len(data)} bytes more than asked")
        for target in room:
            target[:] = data[: len(target)]
            data = data[len(target) :]
            sink.advance(len(target))


async def serve_fetch(store: TensorStore, request: pb.FetchRequest) -> AsyncIterator[pb.FetchResponse]:
    """Handles the Fetch RPC: yields the requested ranges in chunks. The bytes of a chunk are copied without a lock,
    and the shards checked afterwards, before the chunk is sent.

    Raises:
        Refused: The request is for another epoch of the service, or a shard was released, possibly in the middle of
            the stream.
        TransferError: A range reaches beyond its shard, or a shard was marked corrupt.
    """
    check_request(store, request)
    chunk_bytes = min(request.chunk_bytes or DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES)
    ranges = request.ranges
    for chunk in cut_chunks((r.nbytes for r in ranges), chunk_bytes):
        pieces = (
            store.read_bytes(ranges[n].shard, ranges[n].start + start, size) for n, start, size in chunk
        )
        yield pb.FetchResponse(data=b"".join(pieces))


class GrpcSource(Source):
    """Serves the RPC Fetch of TransferService.

    Args:
        store: Store that holds the shards.
    """

    service = "rlhf.v1.transfer_pb2:TransferService"

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def advert(self) -> bytes:
        """Returns no bytes: readers need the rank's address alone."""
        return b""

    def handlers(self) -> Mapping[str, Handler]:
        return {"Fetch": lambda request, _: serve_fetch(self._store, request)}

    def close(self) -> None:
        """Does nothing: each stream ends by itself."""


class GrpcTransport(Transport):
    """Streams of TransferService.Fetch, also from servers of others, which have no adverts."""

    name = GrpcReader.name
    is_secure = True

    def source(self, store: TensorStore, host: str) -> GrpcSource:
        return GrpcSource(store)

    def reader(self) -> GrpcReader:
        return GrpcReader()
