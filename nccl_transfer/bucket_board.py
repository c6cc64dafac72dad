"""Buckets of weights that a rank offers to the ranks of other services, a few at a time, until all have read them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from nccl_transfer.refs.shards import Shard
from nccl_transfer.refs.weight_plans import Bucket
from nccl_transfer.store.columns import Write
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports.common import check_epoch
from rlhf.errors import DeadlineExceeded, InvalidRequest, Refused, drop_frames
from rlhf.v1 import transfer_pb2 as pb

T = TypeVar("T")

BUCKETS_AHEAD = 3
"""Most buckets that a rank holds for its slowest reader: one that is read, one on its way, and one that is packed."""
REMEMBERED_TRANSFERS = 64
"""Maximum number of ended transfers that a rank remembers, so that late requests get the error of their transfer."""
CHECK_S = 0.1
"""Seconds between two looks at whether a waiting sender has been asked to stop."""


class Offer:
    """The buckets of one transfer on its source. Thread-safe. Made by `BucketBoard.offer`.

    Args:
        transfer_id: Id of the transfer.
        store: Store that holds the buckets while they are read.
        lease: Lease of the buckets.
        buckets: All buckets of this rank, in order.
        name_of: Returns the name of a receiver, for messages, by its index in the transfer.
    """

    def __init__(
        self,
        transfer_id: str,
        store: TensorStore,
        lease: Lease,
        buckets: Sequence[Bucket],
        name_of: Callable[[int], str],
    ) -> None:
        self._name = f"transfer {transfer_id}"
        self._store, self._lease = store, lease
        self._buckets, self._name_of = tuple(buckets), name_of
        self._packed: list[Future[Shard]] = [Future() for _ in buckets]
        self._held: dict[int, Shard] = {}
        self._read_before = {receiver: 0 for bucket in buckets for receiver in bucket.destinations}
        self._changed = threading.Condition()

    def pack(self, number: int, write: Write) -> None:
        """Makes the next bucket, which `write` fills, and gives it to the receivers that wait for it. `write`
        returns its checksums.

        Raises:
            OutOfSpace: The bucket does not fit into the arena.
            Refused: The session of the lease has ended.
        """
        shard = self._store.fill(self._buckets[number].nbytes, self._lease, write)
        with self._changed:
            self._held[number] = shard
            self._packed[number].set_result(shard)

    def wait_for_room(self, check: Callable[[], None], deadline: float) -> None:
        """Blocks until fewer than BUCKETS_AHEAD buckets are held. Arguments and errors as for `wait_until_read`."""
        self._wait(BUCKETS_AHEAD - 1, check, deadline)

    def wait_for_one(self, check: Callable[[], None], deadline: float) -> bool:
        """Blocks until one bucket less is held, and returns True; returns False if none is. Arguments and errors as for
        `wait_until_read`."""
        with self._changed:
            held = len(self._held)
        self._wait(max(held - 1, 0), check, deadline)
        return held > 0

    def wait_until_read(self, check: Callable[[], None], deadline: float) -> None:
        """Blocks until every bucket that was packed has been read by all of its receivers.

        Args:
            check: Called every CHECK_S seconds; ends the wait by raising.
            deadline: Time at which the wait fails, on the clock of `time.monotonic`, in seconds.

        Raises:
            DeadlineExceeded: The message names a bucket that was not read, and the receivers that have not read it.
        """
        self._wait(0, check, deadline)

    def note_read(self, receiver: int, read_before: int) -> None:
        """Notes that a receiver has read all its buckets with numbers below `read_before`, and frees those that no
        other receiver has yet to read.

        Raises:
            InvalidRequest: No bucket is for this receiver, or one of those was not packed yet.
        """
        if receiver not in self._read_before:
            raise InvalidRequest(f"{self._name}: receiver {receiver} gets no bucket of this rank")
        with self._changed:
            for bucket in self._buckets[self._read_before[receiver] : read_before]:
                if receiver in bucket.destinations and not self._packed[bucket.number].done():
                    raise InvalidRequest(
                        f"{self._name}: bucket {bucket.number} was not offered yet, so it was not read"
                    )
            self._read_before[receiver] = max(self._read_before[receiver], read_before)
            for number in [number for number in self._held if not self._unread_by(number)]:
                self._store.drop(self._held.pop(number))
            self._changed.notify_all()

    def bucket(self, receiver: int, number: int) -> Future[Shard]:
        """Returns a future of a bucket's shard, which fails where the transfer does.

        Raises:
            InvalidRequest: The bucket is none of this receiver's, or it has read it.
        """
        if number >= len(self._buckets) or receiver not in self._buckets[number].destinations:
            raise InvalidRequest(f"{self._name}: bucket {number} of this rank is not for receiver {receiver}")
        if number < self._read_before[receiver]:
            raise InvalidRequest(f"{self._name}: receiver {receiver} has read bucket {number} already")
        return self._packed[number]

    def end(self, error: BaseException) -> None:
        """Frees all buckets, and passes the error to the receivers that wait for one now or later. Drops the frames of
        `error`."""
        drop_frames(error)
        with self._changed:
            for shard in self._held.values():
                self._store.drop(shard)
            self._held.clear()
            for number, future in enumerate(self._packed):
                if future.done():
                    self._packed[number] = future = Future()
                future.set_exception(error)

    def _wait(self, most: int, check: Callable[[], None], deadline: float) -> None:
        """Blocks until at most `most` buckets are held. Other arguments and errors as for `wait_until_read`."""
        with self._changed:
            while len(self._held) > most:
                check()
                if time.monotonic() > deadline:
                    number = min(self._held)
                    late = ", ".join(map(self._name_of, self._unread_by(number)))
                    raise DeadlineExceeded(
                        f"{self._name}: bucket {number} of {len(self._buckets)} was not read by the deadline by {late}"
                    )
                self._changed.wait(CHECK_S)

    def _unread_by(self, number: int) -> list[int]:
        """Returns the receivers that have not read a bucket."""
        return [each for each in self._buckets[number].destinations if self._read_before[each] <= number]


class BucketBoard:
    """The offers of one rank, by id of the transfer. Thread-safe.

    Args:
        store: Store of the rank.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._offers: dict[str, Future[Offer]] = {}
        self._waiters: dict[str, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def offer(
        self, transfer_id: str, lease: Lease, buckets: Sequence[Bucket], name_of: Callable[[int], str]
    ) -> Iterator[Offer]:
        """Context manager that yields the offer of a transfer, to which receivers have access from now on. After the
        block no bucket is held: where it raised, receivers get its error.

        Args:
            transfer_id: Id of the transfer.
            lease, buckets, name_of: As for `Offer`.

        Raises:
            InvalidRequest: There was a transfer of this id.
        """
        offer = Offer(transfer_id, self._store, lease, buckets, name_of)
        with self._lock:
            begun = self._offers.setdefault(transfer_id, Future())
            if begun.done():
                raise InvalidRequest(f"transfer {transfer_id}: its id was used before")
            begun.set_result(offer)
            self._forget()
        error: BaseException = Refused(f"transfer {transfer_id} has ended: all its buckets were read")
        try:
            yield offer
        except BaseException as failure:
            error = failure
            raise
        finally:
            offer.end(error)

    async def take(self, request: pb.TakeBucketRequest, timeout_s: float) -> pb.TakeBucketResponse:
        """Handles the TakeBucket RPC: notes what the receiver has read, waits for the bucket, and returns its place.

        Args:
            request: The transfer, the receiver, and the bucket.
            timeout_s: Maximum wait, in seconds.

        Raises:
            Refused: The request is for another epoch of the service.
            InvalidRequest: The bucket is none of the receiver's.
            DeadlineExceeded: The transfer did not begin here, or the bucket was not packed, within `timeout_s`.
            RlhfError: The transfer failed with this error.
        """
        check_epoch(self._store, request.epoch)
        try:
            async with asyncio.timeout(timeout_s):
                offer = await self._begun(request.transfer_id)
                offer.note_read(request.receiver, request.read_before)
                if not request.HasField("bucket"):
                    return pb.TakeBucketResponse()
                shard = await _result(offer.bucket(request.receiver, request.bucket))
        except TimeoutError:
            raise DeadlineExceeded(
                f"transfer {request.transfer_id}: bucket {request.bucket} was not packed within {timeout_s:.1f} s"
            ) from None
        return pb.TakeBucketResponse(
            shard=shard.id, offset=shard.offset, nbytes=shard.nbytes, checksums=shard.checksums
        )

    async def _begun(self, transfer_id: str) -> Offer:
        """Waits until a transfer has begun here; returns its offer. One that nobody waits for is forgotten."""
        with self._lock:
            begun = self._offers.setdefault(transfer_id, Future())
            self._waiters[transfer_id] = self._waiters.get(transfer_id, 0) + 1
        try:
            return await _result(begun)
        finally:
            with self._lock:
                self._waiters[transfer_id] -= 1
                if not self._waiters[transfer_id]:
                    del self._waiters[transfer_id]
                    if not begun.done():
                        del self._offers[transfer_id]

    def _forget(self) -> None:
        """Forgets the oldest transfers beyond REMEMBERED_TRANSFERS that have begun. The caller holds the lock."""
        begun = [transfer_id for transfer_id, offer in self._offers.items() if offer.done()]
        for transfer_id in begun[:-REMEMBERED_TRANSFERS]:
            del self._offers[transfer_id]


async def _result(future: Future[T]) -> T:
    """Waits for a future without cancelling it where the wait is."""
    return await asyncio.shield(asyncio.wrap_future(future))
