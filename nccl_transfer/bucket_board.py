"""The offers of buckets of weights on one rank, and the RPC by which receivers take the buckets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TypeVar

from nccl_transfer.bucket_offer import Offer
from nccl_transfer.process_memory import OwnMemory
from nccl_transfer.refs.shards import Shard
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.common import check_epoch
from rlhf.errors import DeadlineExceeded, InvalidRequest, Refused, drop_frames
from rlhf.v1 import transfer_pb2 as pb

T = TypeVar("T")

REMEMBERED_TRANSFERS = 64
"""Maximum number of ended transfers that a rank remembers, so that late requests get the error of their transfer."""


class BucketBoard:
    """The offers of one rank, by id of the transfer. Thread-safe.

    Args:
        store: Store of the rank.

    Attributes:
        store: See Args.
    """

    def __init__(self, store: TensorStore) -> None:
        self.store = store
        self._own = OwnMemory()
        self._offers: dict[str, Future[Offer]] = {}
        self._waiters: dict[str, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def opened(self, offer: Offer) -> Iterator[None]:
        """Context manager of a block in which receivers have access to an offer of buckets in `store`. After the block
        no bucket is held: where it raised, receivers get its error.

        Raises:
            InvalidRequest: There was an offer of the same transfer.
        """
        transfer_id = offer.transfer_id
        with self._lock:
            begun = self._offers.setdefault(transfer_id, Future())
            if begun.done():
                raise InvalidRequest(f"transfer {transfer_id}: its id was used before")
            begun.set_result(offer)
            self._forget()
        error: BaseException = Refused(f"transfer {transfer_id} has ended: all its buckets were read")
        try:
            yield
        except BaseException as failure:
            error = failure
            raise
        finally:
            offer.end(error)

    @contextlib.contextmanager
    def reporting_failures(self, transfer_id: str) -> Iterator[None]:
        """Context manager of a block that offers the buckets of a transfer. If the block fails before it has offered
        them, the receivers that ask for buckets get its error."""
        try:
            yield
        except BaseException as error:
            drop_frames(error)
            with self._lock:
                begun = self._offers.setdefault(transfer_id, Future())
                if not begun.done():
                    begun.set_exception(error)
                self._forget()
            raise

    async def take(self, request: pb.TakeBucketRequest, timeout_s: float) -> pb.TakeBucketResponse:
        """Handles the TakeBucket RPC: notes what the receiver has read, waits for the bucket, and returns its place.

        Args:
            request: The transfer, the receiver, and the bucket.
            timeout_s: Maximum wait, in seconds.

        Raises:
            Refused: The request is for another epoch of the service.
            InvalidRequest: The bucket is none of the receiver's.
            DeadlineExceeded: The transfer did not begin here, or the bucket was not offered, within `timeout_s`.
            RlhfError: The transfer failed with this error.
        """
        check_epoch(self.store, request.epoch)
        try:
            async with asyncio.timeout(timeout_s):
                offer = await self._begun(request.transfer_id)
                offer.note_read(request.receiver, request.read_before)
                if not request.HasField("bucket"):
                    return pb.TakeBucketResponse()
                place = await _result(offer.bucket(request.receiver, request.bucket, packed=request.packed))
        except TimeoutError:
            raise DeadlineExceeded(
                f"transfer {request.transfer_id}: bucket {request.bucket} was not offered within {timeout_s:.1f} s"
            ) from None
        if isinstance(place, Shard):
            return pb.TakeBucketResponse(
                shard=place.id, offset=place.offset, nbytes=place.nbytes, checksums=place.checksums
            )
        return pb.TakeBucketResponse(
            in_place=[place, *offer.following(request.receiver, request.bucket)],
            memory=self._own.memory.to_proto(),
        )

    async def _begun(self, transfer_id: str) -> Offer:
        """Waits until a transfer has begun on this rank; returns its offer. Removes the entry of a transfer that has
        not begun once no receiver waits for it."""
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
