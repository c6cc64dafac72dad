"""The grpc transport: bytes over gRPC streams, from every rank that serves, on any host."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import grpc
import grpc.experimental

from nccl_transfer.refs.ranges import ByteRange, cut_chunks
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import (
    Reading,
    Traffic,
    Transport,
    check_epoch,
    check_request,
    remaining_s,
    with_retries,
)
from nccl_transfer.transports.sink import Sink
from rlhf.channels import open_channel
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import ServiceLost, TransferError, from_rpc_error
from rlhf.v1 import common_pb2
from rlhf.v1 import transfer_pb2 as pb
from rlhf.v1 import transfer_pb2_grpc as pb_grpc

MARK_CORRUPT_S = 2.0
"""Timeout of a MarkCorrupt call in seconds."""

DEFAULT_CHUNK_BYTES = 1 << 20  # measured: the fastest; 2 MiB and more run at less than half its rate
MAX_CHUNK_BYTES = 4 << 20

_CLIENT_OPTIONS = (
    *CHANNEL_OPTIONS,
    # One connection per channel: the back-off of an earlier channel does not delay a restarted rank.
    ("grpc.use_local_subchannel_pool", 1),
    # Streams are read in the calling thread, without a helper thread per stream.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)


def stream_channel(address: str) -> grpc.Channel:
    """Opens a channel that shares no connection with other channels and reads its streams in the calling thread."""
    return open_channel(address, _CLIENT_OPTIONS)


def mark_corrupt(shard: Shard, reason: str) -> None:
    """Reports a corrupt shard to the rank that holds it, and waits for its response, at most MARK_CORRUPT_S seconds.
    Logs a failure of the call instead of raising it: the caller also remembers the shard itself."""
    with stream_channel(shard.endpoint.address) as channel:
        request = pb.MarkCorruptRequest(epoch=shard.endpoint.epoch, shard=shard.id, reason=reason)
        try:
            pb_grpc.TransferServiceStub(channel).MarkCorrupt(request, timeout=MARK_CORRUPT_S)
        except grpc.RpcError as error:
            logging.warning("%s", from_rpc_error(error, f"{shard.endpoint}: marking shard {shard.id} bad"))


class GrpcTransport(Transport):
    """Streams ranges with TransferService.Fetch, and resumes broken streams where they broke.

    Args:
        channel: Opens a channel to an address; called once per address.
    """

    name = "grpc"

    def __init__(self, channel: Callable[[str], grpc.Channel] = stream_channel) -> None:
        self._open = channel
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        return None if source.address else "it has no address"

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        sink = Sink(ranges)
        with_retries(lambda: self._stream(source, sink, deadline))
        return Reading(sink.views)

    def close(self) -> None:
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def _stream(self, source: Endpoint, sink: Sink, deadline: float) -> None:
        channel = self._channel(source.address)
        request = pb.FetchRequest(epoch=source.epoch, ranges=sink.missing())
        try:
            stub = pb_grpc.TransferServiceStub(channel)
            for response in stub.Fetch(request, timeout=remaining_s(deadline, source)):
                _write(sink, memoryview(response.data), source)
        except grpc.RpcError as error:
            mapped = from_rpc_error(error, str(source))
            if isinstance(mapped, ServiceLost):
                self._forget(source.address, channel)
            raise mapped from error
        if sink.missing():
            raise TransferError(f"{source}: the stream ended before all bytes were sent")

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = self._open(address)
            return self._channels[address]

    def _forget(self, address: str, channel: grpc.Channel) -> None:
        """Removes a broken channel from the cache without closing it, since other threads may still read its
        error."""
        with self._lock:
            if self._channels.get(address) is channel:
                del self._channels[address]


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


def mark_corrupt_response(store: TensorStore, request: pb.MarkCorruptRequest) -> pb.MarkCorruptResponse:
    """Handles the MarkCorrupt RPC: marks a shard of the store, and logs the reader's reason. `found` of the response is
    False if the shard was released before.

    Raises:
        Refused: The request is for another epoch of the service.
    """
    check_epoch(store, request.epoch)
    logging.warning("shard %d is marked bad: %s", request.shard, request.reason)
    return pb.MarkCorruptResponse(found=store.mark_corrupt(request.shard))


def stat_response(
    store: TensorStore, traffic: Mapping[str, Traffic], unavailable: Mapping[str, str] | None = None
) -> pb.StatResponse:
    """Builds the response of the Stat RPC.

    Args:
        store: Store of this rank.
        traffic: Traffic by transport, from `Fetcher.traffic`.
        unavailable: Reasons by transport, from `registry.unavailable`. Default: none.
    """
    stat = store.stat()
    return pb.StatResponse(
        arena_bytes=stat.arena_bytes,
        used_bytes=stat.used_bytes,
        peak_bytes=stat.peak_bytes,
        shards=stat.shards,
        traffic=traffic_to_proto(traffic),
        unavailable_transports=unavailable or {},
    )


def traffic_to_proto(traffic: Mapping[str, Traffic]) -> dict[str, common_pb2.Traffic]:
    """Encodes traffic by transport as protobuf messages."""
    return {
        name: common_pb2.Traffic(bytes=moved.bytes, seconds=moved.seconds, transfers=moved.transfers)
        for name, moved in traffic.items()
    }
