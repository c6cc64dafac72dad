"""Copies slices of weights from the memory of the rank that holds them, another process of this host, to their places
here: one copy. Where the source offers checksums, parts are verified while they are in the processor's cache."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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

COPIERS = 2
"""Threads that copy: one core alone is slower than the memory."""
COPIED_BYTES = 16 << 20
"""Bytes that are copied at a time where they are neither verified nor cast."""


class Copiers:
    """The COPIERS threads that copy the slices of a transfer. Each has memory for the part that it casts."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COPIERS, thread_name_prefix="weights-copy")
        self._own = threading.local()

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        """Calls a function on one of the threads; returns the future of its end."""
        return self._threads.submit(function, *arguments)

    def part(self) -> Tensor:
        """Returns the memory of the calling thread, [PART_BYTES] uint8."""
        if not hasattr(self._own, "part"):
            self._own.part = torch.empty(PART_BYTES, dtype=torch.uint8)
        return self._own.part

    def close(self) -> None:
        """Ends the threads: waits for copies that have begun and cancels the others."""
        self._threads.shutdown(cancel_futures=True)


class BucketInPlace:
    """A bucket in the memory of its source.

    Args:
        bucket: The bucket.
        place: Where it lies.
        memory: The source's memory.
        source: The rank that holds it.
        name: Name of the bucket, for messages.
        copiers: The threads that copy.
        explain: Called if bytes cannot be read or do not match. Raises the error with which the source's call
            ended, if it has ended.
        count: Called with the traffic of the bucket after it is copied.

    Attributes:
        bucket: The bucket.

    Raises:
        TransferError: `place` does not match the bucket.
    """

    ahead = 3
    """Number of later buckets that may begin before this bucket is copied, so that the copying threads stay busy."""

    def __init__(
        self,
        bucket: Bucket,
        place: pb.BucketInPlace,
        memory: ProcessMemory,
        source: Endpoint,
        name: str,
        copiers: Copiers,
        explain: Callable[[], None],
        count: Callable[[Traffic], None],
    ) -> None:
        self.bucket, self._count = bucket, count
        self._values: list[tuple[WeightSlice, ValuesInPlace]] = []
        reader = _Reader(memory, f"{source}: {name}", source, explain)
        digests = list(place.checksums)
        if len(place.slices) != len(bucket.pieces):
            raise TransferError(f"{source}: {name} came with other slices than planned")
        for piece, box in zip(bucket.pieces, place.slices, strict=True):
            dtype, shape = DTYPES.get(box.dtype, ""), piece.slice.box.shape
            if dtype not in ITEM_BYTES or len(box.strides) != len(shape):
                raise TransferError(
                    f"{source}: {name}: element type or strides of {piece.slice.name} do not match the planned slice"
                )
            runs = Runs.of_box(box.address, shape, box.strides, ITEM_BYTES[dtype])
            parts = num_parts(runs.nbytes) if place.checksums else 0
            own, digests = digests[:parts], digests[parts:]
            if len(own) != parts:
                raise TransferError(f"{source}: {name}: checksums of {piece.slice.name} are missing")
            values = ValuesInPlace(reader, copiers, piece.slice, runs, getattr(torch, dtype), own)
            self._values.append((piece.slice, values))
        if digests:
            raise TransferError(f"{source}: {name} came with more checksums than parts")

    def pieces(self) -> Iterator[tuple[WeightSlice, Incoming]]:
        """Yields the slices of the bucket and their values."""
        yield from self._values

    def verify(self) -> None:
        """Waits until all that is copied is at its place, and matches the checksums that were offered. Raises as
        `ValuesInPlace.wait`."""
        for _, values in self._values:
            values.wait()
        copied = [values for _, values in self._values]
        self._count(
            Traffic(sum(each.copied_bytes for each in copied), sum(each.seconds for each in copied), 1)
        )


class ValuesInPlace(Incoming):
    """A slice of weights in the memory of its source.

    Args:
        reader: Reads from there.
        copiers: As for `BucketInPlace`.
        slice_: The slice.
        runs: Where it lies.
        dtype: Element type in which it lies there.
        checksums: Of its parts; empty where the source offers none.

    Attributes:
        copied_bytes: Bytes that are copied from there.
        seconds: Seconds that threads have spent with it.
    """

    def __init__(
        self,
        reader: _Reader,
        copiers: Copiers,
        slice_: WeightSlice,
        runs: Runs,
        dtype: torch.dtype,
        checksums: Sequence[int],
    ) -> None:
        self._reader, self._copiers, self._slice = reader, copiers, slice_
        self._runs, self._dtype, self._checksums = runs, dtype, checksums
        self._copies: list[Future[None]] = []
        self.copied_bytes, self.seconds = 0, 0.0

    @torch.no_grad()
    def copy_to(self, target: Tensor) -> None:
        """Begins to copy the values, part by part: where there are checksums, each is verified while it is in the
        cache. A target in other memory, or of another layout or element type than wanted, gets them all by way of
        memory of this process, after they were verified.

        Raises:
            TransferError, ServiceLost, RlhfError: As for `wait`.
        """
        self.copied_bytes += self._runs.nbytes
        wanted = getattr(torch, self._slice.dtype)
        if target.device.type == "cpu" and target.dtype == wanted and target.is_contiguous():
            self._begin(target)
            return
        whole = torch.empty(self._slice.box.shape, dtype=wanted)
        self._begin(whole)
        self.wait()
        copy_values(target, whole)

    def wait(self) -> None:
        """Waits until the values are at their place.

        Raises:
            TransferError, ServiceLost: The values cannot be read, or do not match their checksums; the target may have
                wrong ones.
            RlhfError: The source's call has ended, with this error.
        """
        for copy in self._copies:
            copy.result()

    def _begin(self, target: Tensor) -> None:
        """Begins to copy all parts to a contiguous tensor."""
        part_bytes = PART_BYTES
        if target.dtype != self._dtype:
            copy = functools.partial(self._parts_cast_into, target.detach().view(-1))
        else:
            part_bytes = PART_BYTES if self._checksums else COPIED_BYTES
            copy = functools.partial(self._parts_into, bytes_of(target), part_bytes)
        starts = range(0, self._runs.nbytes, part_bytes)
        untaken = iter(starts)  # each is taken by one thread
        for _ in range(min(COPIERS, len(starts))):
            self._copies.append(self._copiers.submit(self._timed, copy, untaken))

    def _timed(self, copy: Callable[[Iterator[int]], None], starts: Iterator[int]) -> None:
        began = time.perf_counter()
        copy(starts)
        self.seconds += time.perf_counter() - began

    def _parts_into(self, data: np.ndarray, part_bytes: int, starts: Iterator[int]) -> None:
        for start in starts:
            self._read(start, data[start : start + part_bytes])

    def _parts_cast_into(self, target: Tensor, starts: Iterator[int]) -> None:
        item_bytes = self._dtype.itemsize
        memory = self._copiers.part()
        data, part = memory.numpy(), memory.view(self._dtype)
        for start in starts:
            nbytes = min(PART_BYTES, self._runs.nbytes - start)
            self._read(start, data[:nbytes])
            first, last = start // item_bytes, (start + nbytes) // item_bytes
            target[first:last].copy_(part[: last - first])

    def _read(self, start: int, target: np.ndarray) -> None:
        """Reads the part from byte `start` on, and verifies it where it has a checksum."""
        checksum = self._checksums[start // PART_BYTES] if self._checksums else None
        self._reader.read(self._runs, start, target, checksum, self._slice.name)


class _Reader:
    """Reads parts of slices of one bucket. Arguments as for `BucketInPlace`."""

    def __init__(
        self, memory: ProcessMemory, name: str, source: Endpoint, explain: Callable[[], None]
    ) -> None:
        self._memory, self._name, self._source, self._explain = memory, name, source, explain

    def read(self, runs: Runs, start: int, target: np.ndarray, checksum: int | None, weight: str) -> None:
        """Reads a part, and verifies it where it has a checksum.

        Args:
            runs: Where the slice lies.
            start: First byte of the part.
            target: Array of its size.
            checksum: Checksum of the part, if there is one.
            weight: Name of the weight, for messages.

        Raises:
            TransferError, ServiceLost, RlhfError: As for `ValuesInPlace.wait`.
        """
        try:
            self._memory.read(runs, start, start + len(target), target)
        except ProcessLookupError as error:
            raise ServiceLost(f"{self._source}: cannot be reached or died: its process has ended") from error
        except OSError as error:
            self._explain()
            raise TransferError(f"{self._name}: {weight} cannot be read: {error.strerror}") from error
        if checksum is not None and xxhash.xxh3_64(target.data).intdigest() != checksum:
            self._explain()
            raise TransferError(
                f"{self._name}: the bytes of {weight} from {start} on do not match their checksum"
            )
