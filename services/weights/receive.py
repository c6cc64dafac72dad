"""Reads the weights that a receiving rank lacks from the ranks that hold them, bucket by bucket."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import grpc

from nccl_transfer.fetch import Fetcher
from nccl_transfer.process_memory import ProcessMemory
from nccl_transfer.refs.checksums import num_blocks
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.refs.weight_plans import Bucket, WeightSlice, WeightTransfer, buckets_of, plan_weights
from nccl_transfer.transports.common import remaining_s, stream_channel
from rlhf.errors import Refused, TransferError, from_rpc_error
from rlhf.v1 import transfer_pb2 as pb
from rlhf.v1 import transfer_pb2_grpc as pb_grpc
from services.weights.copying import Incoming
from services.weights.in_place import BucketInPlace, Copiers
from services.weights.packed import PackedBucket

T = TypeVar("T")
Piece = tuple[WeightSlice, Incoming]
"""A box of a tensor that has arrived, with its values."""

IN_PLACE = "in_place"
"""Name under which the traffic of buckets in place is counted, like the name of a transport."""
CHECK_S = 0.02
"""Seconds between two calls of `check` while a bucket is waited for; before each, the sources are notified of the
buckets that were read."""


def receive(
    transfer: WeightTransfer,
    receiver: int,
    fetcher: Fetcher,
    deadline: float,
    check: Callable[[], None] = lambda: None,
) -> Generator[Piece, None, None]:
    """Yields every element that a receiver lacks once, as boxes of tensors in arbitrary order. At most two
    buckets are in this process's memory at a time. Checksums, which packed buckets always have, are verified during the
    copy.

    Buckets in the memory of a rank on this host are read by the caller's copy, on threads that may go on with it after
    `Incoming.copy_to`; all that was copied is there once the iterator has ended. Where that is not possible, the next
    bucket is read while the caller copies the current one. To run the iterator to its end tells the sources that
    everything has been read, which they acknowledge only while their calls hold the weights: so nothing has changed
    meanwhile. Closing it earlier ends its connections.

    Args:
        transfer: The transfer.
        receiver: Index of this rank in `transfer.receivers`.
        fetcher: Reads from the arenas of the sources, by the first transport that reaches them.
        deadline: Time at which the transfer fails, on the clock of `time.monotonic`, in seconds.
        check: Called between two buckets, and every CHECK_S seconds while one is waited for; ends the iterator by
            raising.

    Yields:
        A box, in the element type that the receiver wants, and its values, which can be copied until the next element
        is asked for.

    Raises:
        DeadlineExceeded, ServiceLost, Refused: A source did not pack its buckets by the deadline, cannot be reached, or
            has another epoch or policy version; the message names it.
        TransferError: No transport reaches a source, or the transfer cannot be planned. A bucket does not match
            its checksums, which `Incoming.copy_to` may raise, too; the message names its source and number.
        RlhfError: SendWeights failed on a source, with this error.
    """
    plan = plan_weights(transfer)
    mine = buckets_of(plan, receiver)
    with _Sources(transfer, receiver, [len(each) for each in plan], fetcher, deadline) as sources:
        for bucket in mine[:2]:
            sources.ask(bucket)
        ahead = sources.begin(mine[0]) if mine else None
        for _, after, third in zip_longest(mine, mine[1:], mine[2:]):
            assert ahead is not None
            reading = _wait(ahead, functools.partial(sources.go_on, check))
            ahead = sources.begin(after) if after else None
            yield from reading.pieces()
            sources.copied.append(reading)
            sources.note_copied(reading.ahead)
            if third:
                sources.ask(third)
            check()  # in place, none is waited for
        sources.note_copied()
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
        self.copied: deque[PackedBucket | BucketInPlace] = deque()
        """Buckets of which copies were begun, in order."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._copiers = Copiers()
        self._memories: dict[int, ProcessMemory] = {}
        self._packs = {
            number
            for number, source in enumerate(transfer.sources)
            if not fetcher.shares_memory(source.endpoint)
        }
        self._known: dict[int, _Source] = {}
        self._asked: dict[tuple[int, int], Any] = {}
        self._placed: dict[tuple[int, int], pb.BucketInPlace] = {}
        self._read_before: dict[int, int] = {}
        self._unnoted: set[int] = set()
        self._notes: list[tuple[Endpoint, Any]] = []

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._copiers.close()  # nothing is written to the receiver's memory after this
        for source in self._known.values():
            source.channel.close()

    def ask(self, bucket: Bucket) -> None:
        """Asks for a bucket, which `begin` reads later, unless its place is known."""
        for (source, _), asked in self._asked.items():
            if asked.done() and not asked.exception():
                self._note_places(source, asked.result())
        if (bucket.source, bucket.number) not in self._placed:
            self._asked[bucket.source, bucket.number] = self._send(bucket.source, bucket.number)

    def begin(self, bucket: Bucket) -> Future[PackedBucket | BucketInPlace]:
        """Begins to read a bucket that was asked for; returns a future of its bytes."""
        asked = self._asked.pop((bucket.source, bucket.number), None)
        return self._thread.submit(self._read, bucket, asked)

    def go_on(self, check: Callable[[], None]) -> None:
        """Tells the sources what has been read, since they may offer no further bucket before; then calls `check`."""
        self.note_copied()
        self.send_notes()
        check()

    def note_copied(self, most: int = 0) -> None:
        """Calls `note_read` for the first of the buckets in `copied`, until at most `most` are left there."""
        while len(self.copied) > most:
            self.note_read(self.copied.popleft())

    def note_read(self, bucket: PackedBucket | BucketInPlace) -> None:
        """Verifies a bucket, and tells its source that it has been read, with the next request where that suffices;
        does not wait for the answer.

        Raises:
            RlhfError: The bucket is not as it was sent, or a source has answered an earlier note with this error.
        """
        bucket.verify()
        source = bucket.bucket.source
        self._read_before[source] = bucket.bucket.number + 1
        self._unnoted.add(source)
        if isinstance(bucket, PackedBucket):
            # At once, also while the next bucket is waited for: other receivers may wait for one that follows this one.
            self._note(source)
        while self._notes and self._notes[0][1].done():
            _answer_of(*self._notes.pop(0))

    def send_notes(self) -> None:
        """Tells the sources what has been read, unless a request has done so; does not wait for their answers."""
        for source in list(self._unnoted):
            self._note(source)

    def finish(self, check: Callable[[], None]) -> None:
        """Tells the sources what has been read, and waits until they have answered. Raises as `note_read`."""
        self.send_notes()
        for endpoint, answer in self._notes:
            while not answer.done():
                check()
                with contextlib.suppress(grpc.FutureTimeoutError):
                    answer.exception(CHECK_S)
            _answer_of(endpoint, answer)

    def _read(self, bucket: Bucket, asked: Any) -> PackedBucket | BucketInPlace:
        """Waits for the place of a bucket, and reads it where it is in a shard."""
        source = self._source(bucket.source).endpoint
        name = f"bucket {bucket.number} of {self._counts[bucket.source]} of transfer {self._transfer.id}"
        explain = functools.partial(self._explain, bucket)
        taken = _answer_of(source, asked) if asked is not None else pb.TakeBucketResponse()
        while True:
            self._note_places(bucket.source, taken)
            place = self._placed.pop((bucket.source, bucket.number), None)
            if place is not None:
                memory, count = self._memories[bucket.source], functools.partial(self._fetcher.note, IN_PLACE)
                return BucketInPlace(bucket, place, memory, source, name, self._copiers, explain, count)
            if not taken.in_place:
                break
            taken = self._take_again(bucket)
        if len(taken.checksums) != num_blocks(bucket.nbytes):
            raise TransferError(
                f"{source}: {name} came with {len(taken.checksums)} checksums, expected {num_blocks(bucket.nbytes)}"
            )
        shard = Shard(source, taken.shard, taken.offset, taken.nbytes, tuple(taken.checksums))
        try:
            reading = self._fetcher.read(ByteRange(shard, 0, bucket.nbytes, name), self._deadline)
        except Refused:
            explain()
            raise
        return PackedBucket(bucket, shard, name, reading, self._fetcher.verifier, explain)

    def _note_places(self, source: int, taken: pb.TakeBucketResponse) -> None:
        """Notes the places of buckets that a source has told, if this process can read its memory, which is tried
        once."""
        if taken.in_place and source not in self._memories and source not in self._packs:
            memory = ProcessMemory.from_proto(taken.memory)
            reason = memory.why_not()
            if reason is None:
                self._memories[source] = memory
            else:
                self._packs.add(source)
                logging.info("%s packs its weights: %s", self._source(source).endpoint, reason)
        if source in self._memories:
            self._placed |= {(source, place.bucket): place for place in taken.in_place}

    def _note(self, source: int) -> None:
        """Tells a source what has been read, unless a request has done so."""
        if source in self._unnoted:
            self._notes.append((self._source(source).endpoint, self._send(source)))

    def _explain(self, bucket: Bucket) -> None:
        """Raises the error for which a source has freed a bucket that was not read, if it says one."""
        self._take_again(bucket)

    def _take_again(self, bucket: Bucket) -> pb.TakeBucketResponse:
        """Asks for the place of a bucket, and waits for it."""
        asked = self._send(bucket.source, bucket.number)
        return _answer_of(self._source(bucket.source).endpoint, asked)

    def _send(self, number: int, bucket: int | None = None) -> Any:
        """Calls TakeBucket of a source, without waiting for the answer."""
        source = self._source(number)
        self._unnoted.discard(number)
        request = pb.TakeBucketRequest(
            epoch=source.endpoint.epoch,
            transfer_id=self._transfer.id,
            receiver=self._receiver,
            read_before=self._read_before.get(number, 0),
            bucket=bucket,
            packed=number in self._packs,
        )
        return source.stub.TakeBucket.future(request, timeout=remaining_s(self._deadline, source.endpoint))

    def _source(self, number: int) -> _Source:
        """Returns a source, with a connection of its own."""
        if number not in self._known:
            endpoint = self._transfer.sources[number].endpoint
            channel = stream_channel(endpoint.address)
            self._known[number] = _Source(endpoint, channel, pb_grpc.TransferServiceStub(channel))
        return self._known[number]


def _answer_of(source: Endpoint, answer: Any) -> pb.TakeBucketResponse:
    """Waits for the answer of an RPC; converts its error to an RlhfError that names the source."""
    try:
        return answer.result()
    except grpc.RpcError as error:
        raise from_rpc_error(error, str(source)) from error


def _wait(future: Future[T], check: Callable[[], None]) -> T:
    """Waits for a future and calls `check` every CHECK_S seconds meanwhile."""
    while not wait([future], CHECK_S).done:
        check()
    return future.result()
