"""Bytes of an arena on a GPU that are in use, and columns of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nccl_transfer.devices.cuda import Event
from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.refs.dtypes import CARRIERS, ITEM_BYTES
from nccl_transfer.store.device_arena import Block, DeviceArena


class Pin:
    """A pinned block, in use until `free`, or until the object and all bytes of it are garbage-collected.

    Args:
        arena: The arena.
        block: The block, whose pin this object takes over.
        event: Event that is complete once the bytes are there. Default: None; they are.
    """

    def __init__(self, arena: DeviceArena, block: Block, event: Event | None = None) -> None:
        self.pointer = arena.pointer + block.offset
        self.nbytes = block.nbytes
        self.event = event
        self._streams: set[int | None] = set()
        self._end = weakref.finalize(self, arena.drop, block, self._streams)
        self._end.atexit = False

    def wait(self, stream: int | None) -> None:
        """Makes later work on a stream, by default the private one of the GPU, wait until the bytes are there; that
        work may use them."""
        if self.event is not None:
            self.event.wait(stream)
        self._streams.add(stream)

    def free(self) -> None:
        """Ends the use of the bytes: by work that is enqueued already on streams of `wait`, once it is complete.
        Idempotent."""
        self._end()


class PinnedBytes:
    """Bytes of a pinned block, as `DeviceBytes`.

    Args:
        pin: The pin, which lives as long as this object.
        start: First byte in the block.
        nbytes: Size in bytes.
    """

    def __init__(self, pin: Pin, start: int, nbytes: int) -> None:
        self.pin = pin
        self.start = start
        self.pointer = pin.pointer + start
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A column on a GPU, or the entries of a jagged one. The bytes stay as they are while this object, or a tensor of
    it, is referenced. Other readers may have the same bytes, so they must not be modified.

    Attributes:
        dtype: Name of the element type.
        shape: Shape, rows or entries first.
        parts: The bytes in row order: on the GPU, or on the host as an array [elements, ...] in the carrier of `dtype`.
        tensors: Makes the tensors.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[PinnedBytes | np.ndarray]
    tensors: DeviceTensors = field(repr=False)

    def tensor(self) -> Any:
        """Returns the column as a tensor, without a copy if it is in one piece on the GPU. Work on the calling
        thread's current stream may use it; the stream waits, on the GPU, until the bytes are there. Work on other
        streams has to be ordered before the tensor is dropped."""
        stream, found = self.tensors.stream(), []
        for part in self.parts:
            if isinstance(part, np.ndarray):
                found.append(self.tensors.upload(part, self.dtype))
                continue
            part.pin.wait(stream)
            row_bytes = math.prod(self.shape[1:]) * self._item_bytes
            found.append(self.tensors.tensor(part, self.dtype, (part.nbytes // row_bytes, *self.shape[1:])))
        if not found:
            return self.tensors.upload(np.empty(self.shape, CARRIERS[self.dtype]), self.dtype)
        return found[0] if len(found) == 1 else self.tensors.join(found)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Returns `tensor()[index]`."""
        return self.tensor()[index]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self._item_bytes

    @property
    def _item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]
