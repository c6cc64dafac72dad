"""The offer of a transfer's buckets, which may end while a receiver asks for one."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Any

import pytest

from nccl_transfer.bucket_offer import Offer
from nccl_transfer.refs.weight_plans import Bucket
from nccl_transfer.store.store import Lease, TensorStore
from rlhf.errors import CallCancelled


class EndsIt:
    """The lock of an offer, at whose first release the transfer ends."""

    def __init__(self, offer: Offer) -> None:
        self.offer, self.lock, self.releases = offer, offer._changed, 0

    def __enter__(self) -> Any:
        return self.lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.__exit__(kind, error, trace)
        self.releases += 1
        if self.releases == 1:
            self.offer.end(CallCancelled("the transfer was cancelled"))

    def notify_all(self) -> None:
        self.lock.notify_all()


@pytest.mark.parametrize("packed", [False, True])
def test_a_receiver_gets_the_error_of_a_transfer_that_ends_meanwhile(packed: bool) -> None:
    with contextlib.closing(TensorStore(1 << 16)) as store:
        bucket = Bucket(0, 0, (0,), (), 64)
        nothing: Any = None
        offer = Offer("t", store, Lease("s", 1), [bucket], nothing, str, lambda: None, time.monotonic() + 60)
        lock: Any = EndsIt(offer)
        offer._changed = lock
        place = offer.bucket(0, 0, packed=packed)
        with pytest.raises(CallCancelled, match="the transfer was cancelled"):
            place.result(10)
