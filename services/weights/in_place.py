"""Copies slices of weights from the memory of the rank that holds them, another process of this host, to their places
here: one copy, whose parts are verified while they are in the processor's cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait

import numpy as np
import torch
import xxhash
from torch import Tensor

from nccl_transfer.process_memory import PART_BYTES, ProcessMemory, Runs, num_parts
from nccl_transfer.refs.dtypes import ITEM_BYTES
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.weight_plans import Bucket, WeightSlice
from nccl_transfer.refs.wire import DTYPES
from nccl_transfer.transports import Traffic
from rlhf.errors import ServiceLost, TransferError
from rlhf.v1 import transfer_pb2 as pb
from services.weights.copying import Incoming, bytes_of, copy_values

SHARED_PARTS = 4
"""Fewest parts of a slice that a second thread helps to copy."""


class BucketInPlace:
    """A bucket in the memory of its source.

    Args:
        bucket: The bucket.
        place: Where it lies.
        memory: The source's memory.
        source: The rank that holds it.
        name: Name of the bucket, for messages.
        helper: Runs the second thread that copies: one core alone is slower than the memory.
        explain: Called where bytes cannot be read or do not match. Raises the error by which the source's call has
            ended, if it has.
        count: Called with the traffic of the bucket, once it was copied.

    Attributes:
        bucket: The bucket.

    Raises:
        TransferError: It is not the place of this bucket.
    """

    def __init__(
        self,
        bucket: Bucket,
        place: pb.BucketInPlace,
        memory: ProcessMemory,
        source: Endpoint,
        name: str,
        helper: Executor,
        explain: Callable[[], None],
        count: Callable[[Traffic], None],
    ) -> None:
        self.bucket, self._count = bucket, count
        self._values: list[tuple[WeightSlice, ValuesInPlace]] = []
        copier = _Copier(memory, f"{source}: {name}", source, helper, explain)
        checksums = list(place.checksums)
        for piece, box in zip(bucket.pieces, place.slices, strict=False):
            dtype, shape = DTYPES.get(box.dtype, ""), piece.slice.box.shape
            if dtype not in ITEM_BYTES or len(box.strides) != len(shape):
                raise TransferError(f"{source}: {name}: the place of {piece.slice.name} is none of its shape")
            runs = Runs.of_box(box.address, shape, box.strides, ITEM_BYTES[dtype])
            own, checksums = checksums[: num_parts(runs.nbytes)], checksums[num_parts(runs.nbytes) :]
            if len(own) != num_parts(runs.nbytes):
                raise TransferError(f"{source}: {name}: checksums of {piece.slice.name} are missing")
            values = ValuesInPlace(copier, piece.slice, runs, getattr(torch, dtype), own)
            self._values.append((piece.slice, values))
        if len(self._values) != len(bucket.pieces) or checksums:
            raise TransferError(f"{source}: {name} came with other slices than planned")

    def pieces(self) -> Iterator[tuple[WeightSlice, Incoming]]:
        """Yields the slices of the bucket and their values."""
        yield from self._values

    def verify(self) -> None:
        """Counts the traffic of the bucket; what was copied was verified then."""
        copied = [values for _, values in self._values]
        self._count(
            Traffic(sum(each.copied_bytes for each in copied), sum(each.seconds for each in copied), 1)
        )


class ValuesInPlace(Incoming):
    """A slice of weights in the memory of its source.

    Args:
        copier: Copies from there.
        slice_: The slice.
        runs: Where it lies.
        dtype: Element type in which it lies there.
        checksums: Of its parts.

    Attributes:
        copied_bytes: Bytes that were copied from there.
        seconds: Seconds of the copies.
    """

    def __init__(
        self, copier: _Copier, slice_: WeightSlice, runs: Runs, dtype: torch.dtype, checksums: Sequence[int]
    ) -> None:
        self._copier, self._slice = copier, slice_
        self._runs, self._dtype, self._checksums = runs, dtype, checksums
        self.copied_bytes, self.seconds = 0, 0.0

    @torch.no_grad()
    def copy_to(self, target: Tensor) -> None:
        """Copies the values, and verifies each part before the next one; a target in other memory, or of another
        layout or element type than wanted, gets them all by way of memory of this process, after they were verified.

        Raises:
            TransferError, ServiceLost: The values cannot be read, or are not those that were sent; `target` may have
                wrong ones.
            RlhfError: The source's call has ended, with this error.
        """
        began = time.perf_counter()
        wanted = getattr(torch, self._slice.dtype)
        if target.device.type == "cpu" and target.dtype == wanted and target.is_contiguous():
            self._copy_parts(target.detach().view(-1))
        else:
            whole = torch.empty(self._slice.box.shape, dtype=wanted)
            self._copy_parts(whole.view(-1))
            copy_values(target, whole)
        self.copied_bytes += self._runs.nbytes
        self.seconds += time.perf_counter() - began

    def _copy_parts(self, target: Tensor) -> None:
        """Copies all parts to a flat tensor, larger slices on two threads."""
        copy = self._parts_into if target.dtype == self._dtype else self._parts_cast_into
        starts = iter(range(0, self._runs.nbytes, PART_BYTES))  # each is taken by one thread
        if len(self._checksums) < SHARED_PARTS:
            copy(target, starts)
            return
        helped = self._copier.helper.submit(copy, target, starts)
        try:
            copy(target, starts)
        finally:
            wait([helped])
        helped.result()

    def _parts_into(self, target: Tensor, starts: Iterator[int]) -> None:
        data = bytes_of(target)
        for start in starts:
            self._read(start, data[start : start + PART_BYTES])

    def _parts_cast_into(self, target: Tensor, starts: Iterator[int]) -> None:
        item_bytes = self._dtype.itemsize
        part = torch.empty(PART_BYTES // item_bytes, dtype=self._dtype)
        data = bytes_of(part)
        for start in starts:
            nbytes = min(PART_BYTES, self._runs.nbytes - start)
            self._read(start, data[:nbytes])
            first, last = start // item_bytes, (start + nbytes) // item_bytes
            target[first:last].copy_(part[: last - first])

    def _read(self, start: int, target: np.ndarray) -> None:
        """Reads the part from byte `start` on, and verifies it."""
        checksum = self._checksums[start // PART_BYTES]
        self._copier.read(self._runs, start, target, checksum, self._slice.name)


class _Copier:
    """Reads parts of slices of one bucket. Arguments as for `BucketInPlace`."""

    def __init__(
        self,
        memory: ProcessMemory,
        name: str,
        source: Endpoint,
        helper: Executor,
        explain: Callable[[], None],
    ) -> None:
        self._memory, self._name, self._source = memory, name, source
        self.helper, self._explain = helper, explain

    def read(self, runs: Runs, start: int, target: np.ndarray, checksum: int, weight: str) -> None:
        """Reads a part, and verifies it.

        Args:
            runs: Where the slice lies.
            start: First byte of the part.
            target: Array of its size.
            checksum: Checksum of the part.
            weight: Name of the weight, for messages.

        Raises:
            TransferError, ServiceLost, RlhfError: As for `ValuesInPlace.copy_to`.
        """
        try:
            self._memory.read(runs, start, start + len(target), target)
        except ProcessLookupError as error:
            raise ServiceLost(f"{self._source}: cannot be reached or died: its process has ended") from error
        except OSError as error:
            self._explain()
            raise TransferError(f"{self._name}: {weight} cannot be read: {error.strerror}") from error
        if xxhash.xxh3_64_intdigest(target.data) != checksum:
            self._explain()
            raise TransferError(
                f"{self._name}: the bytes of {weight} from {start} on do not match their checksum"
            )
