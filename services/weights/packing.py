"""Packs slices of the weights that a rank holds into buckets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nccl_transfer.refs.checksums import RunningDigests
from nccl_transfer.refs.plans import Slice
from nccl_transfer.refs.weight_plans import Bucket, WeightSlice
from rlhf.errors import InvalidRequest
from services.storage.checkpoint import WeightShard
from services.weights.copying import copy_values


def slice_of(name: str, shard: WeightShard) -> WeightSlice:
    """Describes a shard of tensor `name`."""
    return WeightSlice(name, shard.whole, box_of(shard), dtype_name(shard.tensor.dtype))


def box_of(shard: WeightShard) -> Slice:
    """Returns the place of a shard in its tensor."""
    stops = tuple(start + size for start, size in zip(shard.offsets, shard.tensor.shape, strict=True))
    return Slice(tuple(shard.offsets), stops)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of an element type, such as "bfloat16" (`nccl_transfer.refs.dtypes`)."""
    return str(dtype).removeprefix("torch.")


class WeightPacker:
    """Writes slices of this rank's shards into buckets, in any element type.

    Args:
        shards: Name and shard of each tensor that the rank holds, or a part of one; not copied. Their values must not
            change while buckets are packed.
    """

    def __init__(self, shards: Iterable[tuple[str, WeightShard]]) -> None:
        self._shards: dict[str, list[tuple[Slice, Tensor]]] = {}
        for name, shard in shards:
            self._shards.setdefault(name, []).append((box_of(shard), shard.tensor.detach()))

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

    def find(self, wanted: WeightSlice) -> Tensor:
        """Returns a view of the values of a slice in the shards. Raises InvalidRequest if the rank does not hold it."""
        for box, tensor in self._shards.get(wanted.name, ()):
            if len(box.starts) == len(wanted.box.starts) and box.intersect(wanted.box) == wanted.box:
                return tensor[wanted.box.within(box)]
        raise InvalidRequest(
            f"weight {wanted.name}: this rank does not hold {list(wanted.box.starts)} to {list(wanted.box.stops)}"
        )
