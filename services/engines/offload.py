"""Moves the storages of tensors to host memory and back, or drops their values. The tensor objects and their views
remain, and can be used again afterwards.

Memory may run out at any allocation. So each direction first allocates everything, then copies everything, and frees
the source last: a failure before that changes nothing. Copies between a GPU and host memory, which is pinned there, are
enqueued one after another and waited for once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OffloadedStorage:
    """A storage on the device (`storage`), and a copy of its bytes in host memory (`host`)."""

    storage: torch.UntypedStorage
    host: torch.UntypedStorage


def copy_to_host(tensors: Iterable[Tensor]) -> list[OffloadedStorage]:
    """Copies the storages of tensors to host memory; returns each storage with its copy, one that several tensors
    share only once. The tensors keep their storage until `free`.

    Raises:
        RuntimeError: memory ran out.
    """
    offloaded = [OffloadedStorage(storage, _allocate(storage)) for storage in _storages(tensors)]
    for item in offloaded:
        item.host.copy_(item.storage, non_blocking=True)
    wait_for_copies(item.storage.device for item in offloaded)
    return offloaded


def free(offloaded: Iterable[OffloadedStorage]) -> None:
    """Frees the storages on the device. Their tensors must not be read until `bring_back`."""
    for item in offloaded:
        item.storage.resize_(0)


def bring_back(offloaded: Sequence[OffloadedStorage]) -> None:
    """Allocates the storages on the device again and copies their bytes back. The copies in host memory remain.

    Raises:
        RuntimeError: memory ran out; the storages are still freed.
    """
    try:
        for item in offloaded:
            _grow(item.storage, item.host.nbytes())
        for item in offloaded:
            item.storage.copy_(item.host, non_blocking=True)
        wait_for_copies(item.storage.device for item in offloaded)
    except BaseException:
        free(offloaded)
        raise


@dataclass(frozen=True, eq=False)
class DroppedStorage:
    """A storage on the device that `drop` has freed, and the size in bytes that it had."""

    storage: torch.UntypedStorage
    num_bytes: int


def drop(tensors: Iterable[Tensor]) -> list[DroppedStorage]:
    """Frees the storages of tensors, whose values are lost; returns them, one that several tensors share only once.
    The tensors must not be read until `allocate_again` and until they have new values."""
    dropped = [DroppedStorage(storage, storage.nbytes()) for storage in _storages(tensors)]
    for item in dropped:
        item.storage.resize_(0)
    return dropped


def allocate_again(dropped: Sequence[DroppedStorage]) -> int:
    """Allocates the storages that `drop` has freed again, without values; returns their bytes.

    Raises:
        RuntimeError: memory ran out; the storages are still freed.
    """
    try:
        for item in dropped:
            _grow(item.storage, item.num_bytes)
    except BaseException:
        for item in dropped:
            item.storage.resize_(0)
        raise
    return sum(item.num_bytes for item in dropped)


def num_bytes(offloaded: Iterable[OffloadedStorage]) -> int:
    """Returns the total size of the storages in bytes."""
    return sum(item.host.nbytes() for item in offloaded)


def wait_for_copies(devices: Iterable[torch.device]) -> None:
    """Waits, once for each GPU among the devices, for all work enqueued on its current stream, such as copies with
    `non_blocking`. Does nothing for a CPU."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Returns the storages of tensors that have elements, each once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.numel()}
    return list(storages.values())


def _allocate(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Returns a new storage in host memory, as large as `storage` and without values; pinned if that is on a GPU."""
    pinned = storage.device.type == "cuda"
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()


def _grow(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """Allocates the memory of a freed storage again, without values."""
    storage.resize_(num_bytes)
