"""Buckets of weights that were read from a shard of their source."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch

from nccl_transfer.refs.checksums import whole_blocks
from nccl_transfer.refs.shards import Shard
from nccl_transfer.refs.weight_plans import Bucket, WeightSlice
from nccl_transfer.transports import Reading
from nccl_transfer.verification import ChecksumVerifier
from rlhf.errors import Refused
from services.weights.copying import Incoming, Values


class PackedBucket:
    """A bucket in this process's memory. Each block is verified right before it is copied, while it is in the
    processor's cache.

    Args:
        bucket: The bucket.
        shard: The shard that contains it.
        name: Name of the bucket, for messages.
        reading: Its bytes.
        verifier: Verifies them.
        explain: As for `BucketInPlace`.

    Attributes:
        bucket: The bucket.
    """

    ahead = 0
    """Number of later buckets that may begin while this bucket is in memory."""

    def __init__(
        self,
        bucket: Bucket,
        shard: Shard,
        name: str,
        reading: Reading,
        verifier: ChecksumVerifier,
        explain: Callable[[], None],
    ) -> None:
        self.bucket, self._shard, self._name = bucket, shard, name
        self._reading, self._verifier, self._explain = reading, verifier, explain
        self._verified = 0

    def pieces(self) -> Iterator[tuple[WeightSlice, Incoming]]:
        """Yields the slices of the bucket and their values, which share its memory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            values = torch.frombuffer(self._reading.views[0], dtype=torch.uint8)
        for piece in self.bucket.pieces:
            part = values[piece.start : piece.start + piece.slice.nbytes]
            tensor = part.view(getattr(torch, piece.slice.dtype)).view(piece.slice.box.shape)
            yield (
                piece.slice,
                Values(tensor, lambda elements, piece=piece: self._verify(piece.position(elements))),
            )

    def verify(self) -> None:
        """Checks that the source has not freed the bucket.

        Raises:
            RlhfError: The source has freed the bucket; the error with which its SendWeights ended.
        """
        try:
            self._reading.verify()
        except Refused:
            self._explain()
            raise

    def _verify(self, stop: int) -> None:
        """Verifies the blocks that contain the bytes before `stop` and were not verified yet. Raises TransferError."""
        if stop > self._verified:
            start = self._verified
            _, nbytes = whole_blocks(start, stop - start, self.bucket.nbytes)
            self._verified = start + nbytes
            data = self._reading.views[0][start : self._verified]
            self._verifier.verify_blocks(self._shard, start, data, self._name)
