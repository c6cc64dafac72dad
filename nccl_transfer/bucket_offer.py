"""Buckets of weights that a rank offers to the ranks of other services, a few at a time, until all have read them:
packed into shards, or in place, where the weights lie in its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from nccl_transfer.refs.shards import Shard
from nccl_transfer.refs.weight_plans import Bucket
from nccl_transfer.store.store import Lease, TensorStore
from rlhf.errors import DeadlineExceeded, InvalidRequest, OutOfSpace, drop_frames
from rlhf.v1 import transfer_pb2 as pb

Pack = Callable[[Bucket, memoryview], list[int]]
"""Writes a bucket to memory of `bucket.nbytes` bytes; returns the checksums of its blocks."""

Place = Shard | pb.BucketInPlace
"""Location of a bucket: a shard, or spans of the source's memory."""

BUCKETS_AHEAD = 3
"""Most packed buckets that a rank holds for its slowest reader: one that is read, one on its way, and one that is
packed."""
CHECK_S = 0.1
"""Seconds between two looks at whether a waiting sender has been asked to stop."""


class Offer:
    """The buckets of one transfer on its source. Thread-safe. Receivers have access to it by `BucketBoard.opened`.

    The sender's thread offers the buckets and waits until they are read. While it waits, it packs buckets that were
    offered in place for receivers that cannot read them in place.

    Args:
        transfer_id: Id of the transfer.
        store: Store that holds packed buckets while they are read.
        lease: Lease of the packed buckets.
        buckets: All buckets of this rank, in order.
        pack: Writes a bucket to memory, and returns its checksums.
        name_of: Returns the name of a receiver, for messages, by its index in the transfer.
        check: Called every CHECK_S seconds while the sender waits; ends the wait by raising.
        deadline: Time at which waits fail, on the clock of `time.monotonic`, in seconds.

    Attributes:
        transfer_id: See Args.
    """

    def __init__(
        self,
        transfer_id: str,
        store: TensorStore,
        lease: Lease,
        buckets: Sequence[Bucket],
        pack: Pack,
        name_of: Callable[[int], str],
        check: Callable[[], None],
        deadline: float,
    ) -> None:
        self.transfer_id, self._name = transfer_id, f"transfer {transfer_id}"
        self._store, self._lease = store, lease
        self._buckets, self._pack, self._name_of = tuple(buckets), pack, name_of
        self._check, self._deadline = check, deadline
        self._offered: list[Future[Place]] = [Future() for _ in buckets]
        self._repacked: dict[int, Future[Place]] = {}
        self._held: dict[int, Shard | None] = {}
        self._read_before = {receiver: 0 for bucket in buckets for receiver in bucket.destinations}
        self._able: set[int] = set()
        self._unable: set[int] = set()
        """Receivers that have read a bucket in place, and receivers that have reported that they cannot."""
        self._ended: BaseException | None = None
        self._changed = threading.Condition()

    def wait_until_read(self) -> None:
        """Blocks until every bucket that was offered has been read by all of its receivers.

        Raises:
            DeadlineExceeded: The message names a bucket that was not read, and the receivers that have not read it.
            OutOfSpace: A receiver cannot read a bucket in place, and the packed bucket does not fit into the arena.
        """
        self._wait(lambda: not self._held)

    def may_be_in_place(self, number: int) -> bool:
        """Returns False if a receiver of the bucket has reported that it cannot read in place, else True."""
        with self._changed:
            return self._unable.isdisjoint(self._buckets[number].destinations)

    def place(self, number: int, placed: pb.BucketInPlace) -> None:
        """Offers the next bucket in place to the receivers that wait for it. Its values must not change until it has
        been read or `end` was called."""
        with self._changed:
            self._held[number] = None
            self._offered[number].set_result(placed)

    def pack(self, number: int) -> None:
        """Packs the next bucket and offers it to the receivers that wait for it.

        Blocks while BUCKETS_AHEAD packed buckets are held, or while the bucket does not fit into the arena beside the
        packed buckets there. Also blocks while an earlier bucket in place may still have to be packed, that is, until
        each of its receivers has read some bucket in place, or the bucket has been packed for it: receivers read in
        order, so packing the later bucket first could fill the arena and cause a deadlock.

        Raises:
            OutOfSpace: The bucket does not fit into the arena.
            Refused: The session of the lease has ended. Other errors as for `wait_until_read`.
        """
        self._wait(
            lambda: self._num_in_arena() < BUCKETS_AHEAD and not any(map(self._may_need_repack, self._held))
        )
        self._fill(number, self._offered[number])

    def note_read(self, receiver: int, read_before: int) -> None:
        """Notes that a receiver has read all its buckets with numbers below `read_before`, and frees those that no
        other receiver has yet to read.

        Raises:
            InvalidRequest: No bucket is for this receiver, or one of those was not offered yet.
            RlhfError: The transfer had ended, with this error, before they were read.
        """
        if receiver not in self._read_before:
            raise InvalidRequest(f"{self._name}: receiver {receiver} gets no bucket of this rank")
        with self._changed:
            if self._ended is not None:
                if read_before > self._read_before[receiver]:
                    raise self._ended.with_traceback(None)
                return
            for bucket in self._buckets[self._read_before[receiver] : read_before]:
                if receiver in bucket.destinations and not self._offered[bucket.number].done():
                    raise InvalidRequest(
                        f"{self._name}: bucket {bucket.number} was not offered yet, so it was not read"
                    )
            self._read_before[receiver] = max(self._read_before[receiver], read_before)
            if any(
                shard is None and number < read_before and receiver in self._buckets[number].destinations
                for number, shard in self._held.items()
            ):
                self._able.add(receiver)
            for number in [number for number in self._held if not self._unread_by(number)]:
                self._free(number)
            self._changed.notify_all()

    def bucket(self, receiver: int, number: int, *, packed: bool) -> Future[Place]:
        """Returns a future of a bucket's place. The future fails if the transfer fails.

        Args:
            receiver: Index of the receiver.
            number: Number of the bucket.
            packed: Whether the receiver cannot read in place, so that the sender packs a bucket offered in place.

        Raises:
            InvalidRequest: The bucket is not for this receiver, or the receiver has read it already.
        """
        with self._changed:
            if self._ended is not None:
                return _failed(self._ended)
            if number >= len(self._buckets) or receiver not in self._buckets[number].destinations:
                raise InvalidRequest(
                    f"{self._name}: bucket {number} of this rank is not for receiver {receiver}"
                )
            if number < self._read_before[receiver]:
                raise InvalidRequest(f"{self._name}: receiver {receiver} has read bucket {number} already")
            if not packed:
                return self._offered[number]
            self._unable.add(receiver)
            if number not in self._held or self._held[number] is not None:
                return self._repacked.get(number, self._offered[number])
            self._changed.notify_all()
            return self._repacked.setdefault(number, Future())

    def following(self, receiver: int, number: int) -> list[pb.BucketInPlace]:
        """Returns the consecutive buckets of a receiver after bucket `number` that were offered in place."""
        found: list[pb.BucketInPlace] = []
        with self._changed:
            for bucket in self._buckets[number + 1 :]:
                if receiver in bucket.destinations:
                    offered = self._offered[bucket.number]
                    place = offered.result() if offered.done() else None
                    if not isinstance(place, pb.BucketInPlace):
                        break
                    found.append(place)
        return found

    def end(self, error: BaseException) -> None:
        """Frees all buckets and everything that refers to the weights, and passes the error to the receivers that wait
        for one now or later. Drops the frames of `error`."""
        drop_frames(error)
        with self._changed:
            self._ended = error
            for number in list(self._held):
                self._free(number)
            for future in (*self._offered, *self._repacked.values()):
                if not future.done():
                    future.set_exception(error)
            self._buckets, self._offered, self._repacked = (), [], {}
            del self._pack, self._name_of, self._check

    def _fill(self, number: int, offered: Future[Place]) -> None:
        """Packs a bucket, as `pack`, and makes it the result of a future."""
        bucket = self._buckets[number]
        while True:
            in_arena = self._num_in_arena()
            try:
                shard = self._store.fill(
                    bucket.nbytes, self._lease, lambda memory: self._pack(bucket, memory)
                )
                break
            except OutOfSpace:
                if not in_arena:
                    raise
                # Fewer buckets may fit.
                self._wait(lambda most=in_arena: self._num_in_arena() < most, repack=False)
        with self._changed:
            self._held[number] = shard
            offered.set_result(shard)

    def _wait(self, is_over: Callable[[], bool], *, repack: bool = True) -> None:
        """Blocks until `is_over`, which is called with the lock held, returns True. Unless `repack` is False, packs
        buckets meanwhile that receivers cannot read in place."""
        while True:
            with self._changed:
                wanted = self._to_repack() if repack else []
                if not wanted:
                    if is_over():
                        return
                    self._changed.wait(CHECK_S)
                self._check()
                if time.monotonic() > self._deadline and not is_over():
                    number = min(self._held)
                    late = ", ".join(map(self._name_of, self._unread_by(number)))
                    raise DeadlineExceeded(
                        f"{self._name}: bucket {number} of {len(self._buckets)} was not read by the deadline by {late}"
                    )
            for number, future in wanted:
                self._fill(number, future)

    def _to_repack(self) -> list[tuple[int, Future[Place]]]:
        """Returns the buckets in place that have to be packed, in order: those that receivers have requested packed,
        and earlier ones that will be requested, since later buckets could leave no space for them in the arena. The
        caller holds the lock."""
        asked = [number for number, shard in self._held.items() if shard is None and number in self._repacked]
        first = (number for number in sorted(self._held) if number <= max(asked, default=-1))
        return [
            (number, self._repacked.setdefault(number, Future()))
            for number in first
            if self._needs_repack(number)
        ]

    def _needs_repack(self, number: int) -> bool:
        """Returns whether a held bucket is in place and unread by a receiver that cannot read in place. The caller
        holds the lock."""
        return self._held[number] is None and not self._unable.isdisjoint(self._unread_by(number))

    def _may_need_repack(self, number: int) -> bool:
        """Returns whether a held bucket is in place and unread by a receiver that is not known to be able to read in
        place. The caller holds the lock."""
        return self._held[number] is None and not self._able.issuperset(self._unread_by(number))

    def _num_in_arena(self) -> int:
        with self._changed:
            return sum(shard is not None for shard in self._held.values())

    def _free(self, number: int) -> None:
        """Frees a bucket. The caller holds the lock."""
        shard = self._held.pop(number)
        if shard is not None:
            self._store.drop(shard)

    def _unread_by(self, number: int) -> list[int]:
        """Returns the receivers that have not read a bucket."""
        return [each for each in self._buckets[number].destinations if self._read_before[each] <= number]


def _failed(error: BaseException) -> Future[Place]:
    future: Future[Place] = Future()
    future.set_exception(error)
    return future
