"""Functions that several transports share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import grpc
import grpc.experimental

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.arena import ArenaReader, align
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Reading
from rlhf.channels import open_channel
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import DeadlineExceeded, Restarted, ServiceLost
from rlhf.v1 import transfer_pb2 as pb

ATTEMPTS = 3
"""Maximum number of attempts at a stream that breaks, the first included."""

STREAM_OPTIONS = (
    *CHANNEL_OPTIONS,
    # One connection per channel: the back-off of an earlier channel does not delay a restarted rank.
    ("grpc.use_local_subchannel_pool", 1),
    # Streams are read in the calling thread, without a helper thread per stream.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)


def stream_channel(address: str) -> grpc.Channel:
    """Opens a channel that shares no connection with other channels and reads its streams in the calling thread."""
    return open_channel(address, STREAM_OPTIONS)


class Channels:
    """Channels of `stream_channel` by address, each of which is opened when it is first used. Thread-safe."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()

    def to(self, address: str) -> grpc.Channel:
        """Returns the channel to an address."""
        with self._lock:
            if address not in self._channels:
                self._channels[address] = stream_channel(address)
            return self._channels[address]

    def forget(self, address: str, channel: grpc.Channel | None = None) -> None:
        """Removes the channel to an address, so that the next `to` opens another one. It is not closed: its connection
        ends with the last call that uses it.

        Args:
            address: The address.
            channel: A broken channel; another one to this address, opened since, is kept. Default: any.
        """
        with self._lock:
            if channel is None or self._channels.get(address) is channel:
                self._channels.pop(address, None)

    def close(self) -> None:
        """Closes all channels."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()


def read_in_place(reader: ArenaReader, ranges: Sequence[ByteRange]) -> Reading:
    """Returns a reading of views of an arena, without a copy. The headers of the shards are checked now, and again by
    `Reading.verify`.

    Raises:
        Refused: A shard was released.
        TransferError: A shard was marked corrupt.
    """
    check = partial(reader.check, [r.shard for r in ranges])
    check()
    return Reading(reader.views(ranges), check, partial(reader.private_views, ranges))


def remaining_s(deadline: float, source: Endpoint) -> float:
    """Returns the seconds until `deadline` (`time.monotonic`), more than 0.

    Raises:
        DeadlineExceeded: The deadline has passed; the message names `source`.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(f"{source}: nothing received by the deadline")
    return left


def with_retries(stream: Callable[[], None]) -> None:
    """Calls `stream` until it succeeds, at most ATTEMPTS times; each call resumes where the previous one broke.

    Raises:
        ServiceLost: Every attempt raised ServiceLost. Other errors are raised at once.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return stream()
        except ServiceLost:
            if attempt == ATTEMPTS:
                raise


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Returns the aligned offset of each item in one buffer, and the size of the buffer, in bytes. Both sides of a
    transfer lay out their buffers by it."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += align(size)
    return offsets, total


def check_request(store: TensorStore, request: pb.FetchRequest) -> None:
    """Checks all ranges of a request before the first byte is sent. A reader allocates memory for all ranges when the
    first bytes arrive, so every range must exist by then.

    Raises:
        Refused: The request is for another epoch of the service, or a shard was released.
        TransferError: A range reaches beyond its shard, or a shard was marked corrupt.
    """
    check_epoch(store, request.epoch)
    for wanted in request.ranges:
        store.check_range(wanted.shard, wanted.start, wanted.nbytes)


def check_epoch(store: TensorStore, epoch: int) -> None:
    """Checks that a request is for the current epoch of the service; epoch 0 stands for any.

    Raises:
        Restarted: The request is for another epoch.
    """
    assert store.endpoint is not None
    if epoch not in (0, store.endpoint.epoch):
        raise Restarted(f"the epoch is {store.endpoint.epoch}, the rows are of epoch {epoch}")
