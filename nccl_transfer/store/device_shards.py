"""The shards of one rank on its GPU. Their headers are in the arena of host memory, where readers of the host see at
once that a shard was released; their bytes are in blocks of the arena on the GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.dtypes import ITEM_BYTES
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Shard
from nccl_transfer.store.arena import DevicePlace
from nccl_transfer.store.device_arena import Block, DeviceArena
from nccl_transfer.store.device_arrays import Pin
from nccl_transfer.store.leases import Lease
from rlhf.errors import DeadlineExceeded, InvalidRequest, OutOfSpace, Refused

POLL_S = 50e-6
"""Pause between two queries of an event, in seconds."""


class HostShards(Protocol):
    """Shards of the same rank in host memory, and headers of those on the GPU: the store."""

    def put(self, array: np.ndarray, lease: Lease) -> Shard: ...

    def fill(self, nbytes: int, lease: Lease, write: Callable[[memoryview], None]) -> Shard: ...

    def add_device_shard(self, nbytes: int, lease: Lease, free: Callable[[int], None]) -> Shard: ...

    def set_place(self, shard: Shard, place: DevicePlace) -> None: ...

    def check(self, shard_ids: list[int]) -> None: ...

    def drop(self, shard: Shard) -> None: ...


@dataclass(eq=False)
class _DeviceShard:
    """A shard on the GPU. `copy` is the shard in host memory that has its bytes too; None while there is none."""

    shard: Shard
    lease: Lease
    block: Block
    ready: int
    copy: Shard | None = None
    copying: threading.Lock = field(default_factory=threading.Lock)


class DeviceShards:
    """Shards on a GPU. Thread-safe.

    Args:
        arena: The arena on the GPU.
        tensors: Makes tensors of its bytes.
        host: The rank's shards in host memory.

    Attributes:
        arena, tensors: As above.
        spilled_bytes: Bytes that were put into host memory, since the arena was full.
        host_copied_bytes: Bytes that were copied to host memory by `copy_to_host`.
    """

    def __init__(self, arena: DeviceArena, tensors: DeviceTensors, host: HostShards) -> None:
        self.arena = arena
        self.tensors = tensors
        self.spilled_bytes = self.host_copied_bytes = 0
        self._host = host
        self._shards: dict[int, _DeviceShard] = {}
        self._lock = threading.Lock()

    def put_column(self, values: Any, lease: Lease) -> RemoteColumn:
        """Copies a tensor on the GPU, or a jagged array of one, into a shard there, on the current stream of the
        calling thread, without waiting for the GPU. Where the arena on the GPU is full, copies it to host memory
        instead, which waits.

        Args:
            values: Tensor [rows, ...], or Jagged of a tensor; need not be contiguous.
            lease: Lease of the shard.

        Raises:
            InvalidRequest: Columns cannot have the tensor's element type.
            OutOfSpace, Refused: As `TensorStore.put`.
        """
        tensor = values.values if isinstance(values, Jagged) else values
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise InvalidRequest(f"tensors of {dtype} cannot be stored; allowed: {', '.join(ITEM_BYTES)}")
        shard = self._put(tensor.detach().contiguous(), lease)
        rows = values.lengths if isinstance(values, Jagged) else len(tensor)
        return RemoteColumn.of_shard(dtype, tuple(tensor.shape[1:]), rows, shard)

    def _put(self, tensor: Any, lease: Lease) -> Shard:
        stream, nbytes = self.tensors.stream(), tensor.numel() * tensor.element_size()
        try:
            block = self.arena.allocate(nbytes, stream)
        except OutOfSpace:
            shard = self._host.put(self.tensors.download(tensor), lease)
            with self._lock:
                self.spilled_bytes += nbytes
            return shard
        try:
            shard = self._host.add_device_shard(nbytes, lease, lambda number: self._free(number, block))
        except BaseException:
            self.arena.free(block)
            self.arena.unpin(block)
            raise
        arena = self.arena
        arena.cuda.copy(arena.pointer + block.offset, self.tensors.pointer(tensor), nbytes, stream)
        ready = arena.record_ready(stream)
        with self._lock:
            if not block.is_free:
                self._shards[shard.id] = _DeviceShard(shard, lease, block, ready)
        self._host.set_place(shard, DevicePlace(block.offset, ready))
        arena.unpin(block, [stream])
        return shard

    def _free(self, shard_id: int, block: Block) -> None:
        """Frees the block of a shard that was released, perhaps while it is put."""
        with self._lock:
            self.arena.free(block)
            self._shards.pop(shard_id, None)

    def __contains__(self, shard_id: int) -> bool:
        """Whether the shard is on the GPU."""
        with self._lock:
            return shard_id in self._shards

    def pin(self, shard_id: int, start: int, nbytes: int) -> Pin:
        """Keeps the block of a shard as it is, for a use of `nbytes` bytes from byte `start` on.

        Raises:
            Refused: The shard was released.
            TransferError: The range reaches beyond the shard, or the shard was marked corrupt.
        """
        self._host.check([shard_id])
        with self._lock:
            found = self._find(shard_id)
            ByteRange(found.shard, start, nbytes)
            self.arena.pin(found.block)
            return Pin(self.arena, found.block, self.arena.ready[found.ready])

    def borrow(self, nbytes: int) -> Pin:
        """Returns bytes of the arena that are in no shard, for work on the private stream of the GPU.

        Raises:
            OutOfSpace: The arena is full.
        """
        block = self.arena.allocate(nbytes)
        pin = Pin(self.arena, block)
        pin.wait(None)
        self.arena.free(block)
        return pin

    def copy_to_host(self, shard_id: int, deadline: float) -> Shard:
        """Returns the shard in host memory that contains the bytes of a shard on the GPU: of an earlier call, or copied
        now. It lives as long as the other. Blocks until the bytes are there.

        Args:
            shard_id: Number of the shard on the GPU.
            deadline: Time on the clock of `time.monotonic`, in seconds.

        Raises:
            Refused: The shard was released, or is not on the GPU.
            DeadlineExceeded: The bytes were not there by the deadline.
            OutOfSpace: The copy does not fit into the arena of host memory.
            TransferError: The shard was marked corrupt.
        """
        pin = self.pin(shard_id, 0, 0)
        try:
            with self._lock:
                found = self._find(shard_id)
            if not found.copying.acquire(timeout=max(deadline - time.monotonic(), 0)):
                raise DeadlineExceeded(
                    f"shard {shard_id}: an earlier copy to the host took until the deadline"
                )
            try:
                found.copy = found.copy or self._copy(found, pin, deadline)
                return found.copy
            finally:
                found.copying.release()
        finally:
            pin.free()

    def _copy(self, found: _DeviceShard, pin: Pin, deadline: float) -> Shard:
        shard_id, nbytes = found.shard.id, found.shard.nbytes
        wait_until_done(pin, deadline, f"shard {shard_id}")
        cuda = self.arena.cuda
        copied = self._host.fill(nbytes, found.lease, lambda data: cuda.copy_out(data, pin.pointer))
        with self._lock:
            self.host_copied_bytes += nbytes
            if shard_id in self._shards:
                return copied
        self._host.drop(copied)  # the lease was released during the copy
        raise Refused(f"shard {shard_id} was released")

    def _find(self, shard_id: int) -> _DeviceShard:
        """Returns a shard. Raises Refused if there is none. The caller holds the lock."""
        if shard_id not in self._shards:
            raise Refused(f"shard {shard_id} was released, or is not on the GPU")
        return self._shards[shard_id]


def wait_until_done(pin: Pin, deadline: float, where: str) -> None:
    """Blocks until the bytes of a pin are there. Raises DeadlineExceeded, with `where`, at the deadline. Queries the
    event, since CUDA's own wait for one takes no deadline."""
    while pin.event is not None and not pin.event.done():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{where}: its bytes were not complete on the GPU by the deadline")
        time.sleep(POLL_S)
