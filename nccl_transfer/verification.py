"""Verifies the checksums of bytes that were read, and remembers corrupt shards."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import grpc

from nccl_transfer.refs.checksums import first_mismatch
from nccl_transfer.refs.plans import Ranges
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.rows import ReadRanges
from nccl_transfer.store.arena import CORRUPT
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.common import stream_channel
from rlhf.errors import TransferError, from_rpc_error
from rlhf.v1 import transfer_pb2 as pb
from rlhf.v1 import transfer_pb2_grpc as pb_grpc

MARK_CORRUPT_S = 2.0
"""Timeout of a MarkCorrupt call in seconds."""


class ChecksumVerifier:
    """Compares bytes that were read with the checksums of their shards. A shard that does not match is marked corrupt
    at the rank that holds it, and remembered here in case that rank cannot be reached. Thread-safe.

    Args:
        store: This rank's own store, or None.
    """

    def __init__(self, store: TensorStore | None) -> None:
        self._store = store
        self._corrupt: set[tuple[Endpoint, int]] = set()

    def check(self, wanted: Ranges) -> None:
        """Checks the ranges of a fetch before they are read.

        Raises:
            TransferError: An earlier `verify` found one of the shards corrupt.
        """
        for source, ranges in wanted.items() if self._corrupt else ():
            for r in ranges:
                if (source, r.shard.id) in self._corrupt:
                    raise TransferError(f"{source}: {CORRUPT.format(r.shard.id)} (column {r.column!r})")

    def verify(self, read: Mapping[Endpoint, ReadRanges]) -> None:
        """Verifies the bytes of all ranges whose shards have checksums.

        Raises:
            TransferError: A block does not match its checksum; the shard is now marked corrupt.
        """
        for part in read.values():
            for r, view in zip(part.ranges, part.reading.views, strict=True):
                if r.shard.checksums:
                    self.verify_blocks(r.shard, r.start, view, r.column)

    def verify_blocks(self, shard: Shard, start: int, data: memoryview, name: str) -> None:
        """Verifies whole blocks of a shard that has checksums.

        Args:
            shard: The shard.
            start: Position of the first block in the shard, in bytes.
            data: Their bytes.
            name: Name of the shard's column, for messages.

        Raises:
            TransferError: A block does not match its checksum; the shard is now marked corrupt.
        """
        wrong = first_mismatch(data, start, shard.checksums)
        if wrong is not None:
            reason = (
                f"column {name!r}, shard {shard.id}: the bytes from {wrong} on do not match their checksum; the shard "
                "is marked bad"
            )
            self._mark(shard, reason)
            raise TransferError(f"{shard.endpoint}: {reason}")

    def _mark(self, shard: Shard, reason: str) -> None:
        """Remembers a corrupt shard, and marks it in this rank's store or, by RPC, at the rank that holds it."""
        self._corrupt.add((shard.endpoint, shard.id))
        if self._store is not None and shard.endpoint == self._store.endpoint:
            self._store.mark_corrupt(shard.id)
        else:
            mark_corrupt(shard, reason)


def mark_corrupt(shard: Shard, reason: str) -> None:
    """Reports a corrupt shard to the rank that holds it, and waits for its response, at most MARK_CORRUPT_S seconds.
    Logs a failure of the call instead of raising it: the caller also remembers the shard itself."""
    with stream_channel(shard.endpoint.address) as channel:
        request = pb.MarkCorruptRequest(epoch=shard.endpoint.epoch, shard=shard.id, reason=reason)
        try:
            pb_grpc.TransferServiceStub(channel).MarkCorrupt(request, timeout=MARK_CORRUPT_S)
        except grpc.RpcError as error:
            logging.warning("%s", from_rpc_error(error, f"{shard.endpoint}: marking shard {shard.id} bad"))
