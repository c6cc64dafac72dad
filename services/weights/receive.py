"""Reads the weights that a receiving rank lacks from the ranks that hold them, bucket by bucket."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.refs.weight_plans import Bucket, WeightSlice, WeightTransfer, buckets_of, plan_weights
from nccl_transfer.transports import Reading
from nccl_transfer.transports.common import remaining_s, stream_channel
from rlhf.errors import from_rpc_error
from rlhf.v1 import transfer_pb2 as pb
from rlhf.v1 import transfer_pb2_grpc as pb_grpc

T = TypeVar("T")

CHECK_S = 0.1
"""Seconds between two calls of `check` while a bucket is waited for."""


def receive(
    transfer: WeightTransfer,
    receiver: int,
    fetcher: Fetcher,
    deadline: float,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[WeightSlice, Tensor]]:
    """Yields every element that a receiver lacks once, as boxes of tensors, in no order of names. At most two buckets
    of them are in this process's memory at a time. Their checksums have been verified.

    The next bucket is read while the caller uses the current one. To run the iterator to its end tells the sources that
    everything has been read. Closing it earlier ends its connections.

    Args:
        transfer: The transfer.
        receiver: Index of this rank in `transfer.receivers`.
        fetcher: Reads from the arenas of the sources, by the first transport that reaches them.
        deadline: Time at which the transfer fails, on the clock of `time.monotonic`, in seconds.
        check: Called at least every CHECK_S seconds while the iterator waits; ends it by raising.

    Yields:
        A box, in the element type that the receiver wants, and its values in host memory: row-major, of the box's
        shape, not to be modified, valid until the next element is asked for.

    Raises:
        DeadlineExceeded, ServiceLost, Refused: A source did not pack its buckets by the deadline, cannot be reached, or
            has another epoch or policy version; the message names it.
        TransferError: A bucket does not match its checksums (the message names its source and number), no transport
            reaches a source, or the transfer cannot be planned.
        RlhfError: SendWeights failed on a source, with this error.
    """
    plan = plan_weights(transfer)
    mine = buckets_of(plan, receiver)
    with _Sources(transfer, receiver, [len(each) for each in plan], fetcher, deadline) as sources:
        ahead = sources.begin(mine[0]) if mine else None
        for position, bucket in enumerate(mine):
            assert ahead is not None
            reading = _wait(ahead, check)
            after = mine[position + 1] if position + 1 < len(mine) else None
            ahead = sources.begin(after) if after else None
            yield from _pieces(bucket, reading.views[0])
            reading.verify()
            sources.note_read(bucket)
        sources.finish(check)


@dataclass(frozen=True, slots=True)
class _Source:
    """A rank that holds weights, and its RPCs."""

    endpoint: Endpoint
    channel: grpc.Channel
    stub: pb_grpc.TransferServiceStub


class _Sources:
    """The sources of a transfer as one receiver sees them: one bucket at a time is read on a thread. A context manager,
    which ends the reads after its block.

    Args:
        transfer, receiver, fetcher, deadline: As for `receive`.
        counts: Number of buckets of each source.
    """

    def __init__(
        self,
        transfer: WeightTransfer,
        receiver: int,
        counts: Sequence[int],
        fetcher: Fetcher,
        deadline: float,
    ) -> None:
        self._transfer, self._receiver, self._counts = transfer, receiver, counts
        self._fetcher, self._deadline = fetcher, deadline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._known: dict[int, _Source] = {}
        self._notes: list[tuple[Endpoint, Any]] = []

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        for source in self._known.values():
            source.channel.close()

    def begin(self, bucket: Bucket) -> Future[Reading]:
        """Begins to read a bucket; returns a future of its verified bytes."""
        return self._thread.submit(self._read, self._source(bucket.source), bucket)

    def note_read(self, bucket: Bucket) -> None:
        """Tells a source that a bucket has been read, without waiting for its answer.

        Raises:
            RlhfError: A source has answered an earlier note with this error.
        """
        source = self._source(bucket.source)
        request = self._request(source, read_before=bucket.number + 1)
        timeout_s = remaining_s(self._deadline, source.endpoint)
        # At once, also while the next bucket is waited for: other receivers may wait for one that follows this one.
        self._notes.append((source.endpoint, source.stub.TakeBucket.future(request, timeout=timeout_s)))
        while self._notes and self._notes[0][1].done():
            self._check_answer(*self._notes.pop(0))

    def finish(self, check: Callable[[], None]) -> None:
        """Waits until the sources have answered all notes. Raises as `note_read`."""
        for endpoint, answer in self._notes:
            while not answer.done():
                check()
                with contextlib.suppress(grpc.FutureTimeoutError):
                    answer.exception(CHECK_S)
            self._check_answer(endpoint, answer)

    def _read(self, source: _Source, bucket: Bucket) -> Reading:
        timeout_s = remaining_s(self._deadline, source.endpoint)
        try:
            taken = source.stub.TakeBucket(self._request(source, bucket=bucket.number), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, str(source.endpoint)) from error
        name = f"bucket {bucket.number} of {self._counts[bucket.source]} of transfer {self._transfer.id}"
        shard = Shard(source.endpoint, taken.shard, taken.offset, taken.nbytes, tuple(taken.checksums))
        return self._fetcher.read(ByteRange(shard, 0, bucket.nbytes, name), self._deadline)

    def _request(
        self, source: _Source, read_before: int = 0, bucket: int | None = None
    ) -> pb.TakeBucketRequest:
        return pb.TakeBucketRequest(
            epoch=source.endpoint.epoch,
            transfer_id=self._transfer.id,
            receiver=self._receiver,
            read_before=read_before,
            bucket=bucket,
        )

    def _check_answer(self, endpoint: Endpoint, answer: Any) -> None:
        """Raises the error of an RPC that has ended, if it has one, as one of ours that names its rank."""
        error = answer.exception()
        if error is not None:
            raise from_rpc_error(error, str(endpoint)) from error

    def _source(self, number: int) -> _Source:
        """Returns a source, with a connection of its own; called in the thread of the iterator alone."""
        if number not in self._known:
            endpoint = self._transfer.sources[number].endpoint
            channel = stream_channel(endpoint.address)
            self._known[number] = _Source(endpoint, channel, pb_grpc.TransferServiceStub(channel))
        return self._known[number]


def _wait(future: Future[T], check: Callable[[], None]) -> T:
    """Waits for a future and calls `check` every CHECK_S seconds meanwhile."""
    while True:
        try:
            return future.result(CHECK_S)
        except TimeoutError:
            if future.done():
                raise
            check()


def _pieces(bucket: Bucket, view: memoryview) -> Iterator[tuple[WeightSlice, Tensor]]:
    """Yields the slices of a bucket and their values, which share the memory of `view`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        values = torch.frombuffer(view, dtype=torch.uint8)
    for piece in bucket.pieces:
        part = values[piece.start : piece.start + piece.slice.nbytes]
        yield piece.slice, part.view(getattr(torch, piece.slice.dtype)).view(piece.slice.box.shape)
