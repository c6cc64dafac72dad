"""Buckets of slices of the weights that a rank holds: packed, or in place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import xxhash
from torch import Tensor

from nccl_transfer.process_memory import PART_BYTES, ProcessMemory, Runs, run_bytes
from nccl_transfer.refs.checksums import RunningDigests
from nccl_transfer.refs.plans import Slice
from nccl_transfer.refs.weight_plans import Bucket, WeightSlice
from nccl_transfer.refs.wire import ELEMENT_TYPES
from rlhf.errors import InvalidRequest
from rlhf.v1 import transfer_pb2 as pb
from services.storage.checkpoint import WeightShard
from services.weights.copying import bytes_of, copy_values

LEAST_RUN_BYTES = 4096
"""Fewest bytes that lie together in a slice in place: the kernel reads a page at a time, so torch packs shorter rows
faster."""


def slice_of(name: str, shard: WeightShard) -> WeightSlice:
    """Describes a shard of tensor `name`."""
    return WeightSlice(name, shard.whole, shard.place, dtype_name(shard.tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of an element type, such as "bfloat16" (`nccl_transfer.refs.dtypes`)."""
    return str(dtype).removeprefix("torch.")


class WeightPacker:
    """Makes buckets of slices of this rank's shards.

    Args:
        shards: Name and shard of each tensor that the rank holds, or a part of one; not copied. Their values must not
            change until the buckets have been read.
    """

    def __init__(self, shards: Iterable[tuple[str, WeightShard]]) -> None:
        self._shards: dict[str, list[tuple[Slice, Tensor]]] = {}
        for name, shard in shards:
            self._shards.setdefault(name, []).append((shard.place, shard.tensor.detach()))

    def check(self, slices: Iterable[WeightSlice]) -> None:
        """Checks that the rank holds slices, in these element types.

        Raises:
            InvalidRequest: The rank does not hold one of them; the message names it.
        """
        for each in slices:
            tensor = self.find(each)
            if dtype_name(tensor.dtype) != each.dtype:
                raise InvalidRequest(
                    f"weight {each.name} is {dtype_name(tensor.dtype)} here, not {each.dtype}"
                )

    def pack(self, bucket: Bucket, memory: memoryview) -> list[int]:
        """Writes the slices of a bucket to `memory`, which has `bucket.nbytes` bytes, and returns the checksums of its
        blocks. Casts the slices to the element type of the bucket, and copies them from the device where they are on
        one.

        Raises:
            InvalidRequest: The rank does not hold one of the slices.
        """
        checksums = RunningDigests(memory)
        for piece in bucket.pieces:
            part = memory[piece.start : piece.start + piece.slice.nbytes]
            target = torch.frombuffer(part, dtype=getattr(torch, piece.slice.dtype))
            copy_values(
                target.view(piece.slice.box.shape),
                self.find(piece.slice),
                after=lambda elements, piece=piece: checksums.advance(piece.position(elements)),
            )
        return checksums.values

    def place(self, bucket: Bucket, checksums: bool) -> pb.BucketInPlace | None:
        """Returns where the slices of a bucket lie in this process's memory; None where the bucket is better packed:
        the slices are on a device, or in short runs of bytes.

        Args:
            bucket: The bucket.
            checksums: Whether to add the checksums of the slices.

        Raises:
            InvalidRequest: The rank does not hold one of the slices.
        """
        tensors = [self.find(piece.slice) for piece in bucket.pieces]
        if any(x.device.type != "cpu" for x in tensors):
            return None
        if any(_run_bytes(x) < min(LEAST_RUN_BYTES, x.nbytes) for x in tensors):
            return None
        digests = (digest for x in tensors for digest in _part_digests(x)) if checksums else ()
        slices = (
            pb.PlacedSlice(
                address=x.data_ptr(), dtype=ELEMENT_TYPES[dtype_name(x.dtype)], strides=_byte_strides(x)
            )
            for x in tensors
        )
        return pb.BucketInPlace(bucket=bucket.number, slices=slices, checksums=digests)

    def find(self, wanted: WeightSlice) -> Tensor:
        """Returns a view of the values of a slice in the shards. Raises InvalidRequest if the rank does not hold it."""
        for box, tensor in self._shards.get(wanted.name, ()):
            if len(box.starts) == len(wanted.box.starts) and box.intersect(wanted.box) == wanted.box:
                return tensor[wanted.box.within(box)]
        raise InvalidRequest(
            f"weight {wanted.name}: this rank does not hold {list(wanted.box.starts)} to {list(wanted.box.stops)}"
        )


def _byte_strides(x: Tensor) -> list[int]:
    return [stride * x.element_size() for stride in x.stride()]


def _run_bytes(x: Tensor) -> int:
    return run_bytes(x.shape, _byte_strides(x), x.element_size())


def _part_digests(x: Tensor) -> Iterator[int]:
    """Yields the checksums of the parts of a tensor."""
    if x.is_contiguous():
        data = bytes_of(x)
        for start in range(0, x.nbytes, PART_BYTES):
            yield xxhash.xxh3_64(data[start : start + PART_BYTES].data).intdigest()
        return
    runs = Runs.of_box(x.data_ptr(), x.shape, _byte_strides(x), x.element_size())
    own, part = ProcessMemory(os.getpid(), 0, b""), np.empty(PART_BYTES, np.uint8)
    for start in range(0, x.nbytes, PART_BYTES):
        nbytes = min(PART_BYTES, x.nbytes - start)
        own.read(runs, start, start + nbytes, part[:nbytes])
        yield xxhash.xxh3_64(part[:nbytes].data).intdigest()
