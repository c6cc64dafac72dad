"""Bytes over gRPC streams: reaches every rank that serves, whatever the host."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import grpc
import grpc.experimental
import numpy as np

from nccl_transfer.arena import ByteRange
from nccl_transfer.batch import Endpoint
from nccl_transfer.store import TensorStore
from nccl_transfer.transports.base import Reading, Traffic, Transport, remaining_s
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import Refused, ServiceLost, TransferError, from_rpc_error
from rlhf.v1 import transfer_pb2 as pb
from rlhf.v1 import transfer_pb2_grpc as pb_grpc

ATTEMPTS = 3
"""How often a broken stream is taken up, the first time included."""

DEFAULT_CHUNK_BYTES = 1 << 20  # measured: the fastest; 2 MiB and more run at less than half its rate
MAX_CHUNK_BYTES = 4 << 20

_CLIENT_OPTIONS = (
    *CHANNEL_OPTIONS,
    # A connection of its own per channel: the back-off of an earlier one does not delay a rank that is back.
    ("grpc.use_local_subchannel_pool", 1),
    # Streams are read in the calling thread, without a helper thread each.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)


def insecure_channel(address: str) -> grpc.Channel:
    """A channel without encryption, for loopback and trusted networks."""
    return grpc.insecure_channel(address, options=_CLIENT_OPTIONS)


class _Sink:
    """Where the ranges of one read arrive, end to end; knows what is still missing."""

    def __init__(self, source: Endpoint, ranges: Sequence[ByteRange]) -> None:
        self._source = source
        self.views = [np.empty(r.nbytes, np.uint8).data for r in ranges]
        self._ranges = ranges
        self._range = 0
        self._filled = 0

    def missing(self) -> list[pb.ByteRange]:
        """What has not arrived, in order."""
        messages = []
        for number in range(self._range, len(self._ranges)):
            wanted = self._ranges[number]
            done = self._filled if number == self._range else 0
            if done < wanted.nbytes:
                start, nbytes = wanted.start + done, wanted.nbytes - done
                messages.append(pb.ByteRange(shard=wanted.shard.id, start=start, nbytes=nbytes))
        return messages

    def write(self, data: memoryview) -> None:
        """Takes the next bytes of the stream; those beyond the last range are the sender's error."""
        while len(data):
            if self._range == len(self.views):
                raise TransferError(f"{self._source}: sent {len(data)} bytes more than asked")
            target = self.views[self._range][self._filled :]
            count = min(len(target), len(data))
            target[:count] = data[:count]
            data = data[count:]
            self._filled += count
            if self._filled == len(self.views[self._range]):
                self._range, self._filled = self._range + 1, 0


class TcpTransport(Transport):
    """Streams ranges with TransferService.Fetch and takes up broken streams where they broke.

    Args:
        channel: Opens a channel to an address; called once per address.
    """

    name = "tcp"

    def __init__(self, channel: Callable[[str], grpc.Channel] = insecure_channel) -> None:
        self._open = channel
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        return None if source.address else "it has no address"

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        sink = _Sink(source, ranges)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._stream(source, sink, deadline)
                break
            except ServiceLost:
                if attempt == ATTEMPTS:
                    raise
        return Reading(sink.views)

    def close(self) -> None:
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def _stream(self, source: Endpoint, sink: _Sink, deadline: float) -> None:
        channel = self._channel(source.address)
        request = pb.FetchRequest(epoch=source.epoch, ranges=sink.missing())
        try:
            stub = pb_grpc.TransferServiceStub(channel)
            for response in stub.Fetch(request, timeout=remaining_s(deadline, source)):
                sink.write(memoryview(response.data))
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
        """Drops a broken channel. It is not closed here: other threads may learn from it why it broke."""
        with self._lock:
            if self._channels.get(address) is channel:
                del self._channels[address]


async def serve_fetch(
    store: TensorStore, epoch: int, request: pb.FetchRequest
) -> AsyncIterator[pb.FetchResponse]:
    """The stream that answers a Fetch. Every byte of it was read while its shard was there.

    Raises:
        Refused: The request is of another epoch, or a shard was released, if need be in the middle of the stream.
        TransferError: A range reaches beyond its shard.
    """
    if request.epoch not in (0, epoch):
        raise Refused(f"the epoch is {epoch}, the rows are of epoch {request.epoch}")
    chunk_bytes = min(request.chunk_bytes or DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES)
    pieces: list[bytes] = []
    room = chunk_bytes
    for wanted in request.ranges:
        start, stop = wanted.start, wanted.start + wanted.nbytes
        while start < stop:
            count = min(stop - start, room)
            pieces.append(store.read_bytes(wanted.shard, start, count))
            start, room = start + count, room - count
            if room == 0:
                yield pb.FetchResponse(data=b"".join(pieces))
                pieces, room = [], chunk_bytes
    if pieces:
        yield pb.FetchResponse(data=b"".join(pieces))


def stat_response(store: TensorStore, traffic: Mapping[str, Traffic]) -> pb.StatResponse:
    """The answer to a Stat; `traffic` as of `Fetcher.traffic`."""
    stat = store.stat()
    return pb.StatResponse(
        arena_bytes=stat.arena_bytes,
        used_bytes=stat.used_bytes,
        peak_bytes=stat.peak_bytes,
        shards=stat.shards,
        traffic={
            name: pb.Traffic(bytes=moved.bytes, seconds=moved.seconds, transfers=moved.transfers)
            for name, moved in traffic.items()
        },
    )
