"""Memory for the copy of an engine's state that an update goes back to if it fails."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from services.compute.device_memory import allocated_bytes, free_bytes, peak_allocated_bytes
from services.engines.offload import wait_for_copies

_ALIGNMENT = 64


class SnapshotMemory:
    """Keeps copies of tensors: on their device where it has room for them, else in pinned host memory that is allocated
    once, to which a stream of its own copies while the device computes on.

    Args:
        device: Device of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._resting: int | None = None
        self._largest_step: int | None = None
        self._pinned: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._in_pinned: Callable[[], Copies | None] = lambda: None

    def copy(self, state: Mapping[str, Tensor]) -> Copies:
        """Returns copies of tensors by name. `wait` must precede work that changes the tensors or reads the copies.

        They are made on the device if it has free memory for them and for the largest step so far besides, or for twice
        as much before any step. Only one set of copies is in the preallocated host memory: while it lives, further ones
        are in pinned memory of their own.
        """
        if self._device.type == "cpu":
            return in_host_memory(state)
        needed = sum(x.nbytes for x in state.values() if x.device == self._device)
        beside = 2 * needed if self._largest_step is None else self._largest_step
        if needed + beside <= free_bytes(self._device):
            copies = Copies({name: x.detach().clone() for name, x in state.items()})
        elif self._in_pinned() is None:
            copies = self._to_pinned(state)
            self._in_pinned = weakref.ref(copies)
        else:
            copies = in_host_memory(state)
        self._resting = allocated_bytes(self._device)
        return copies

    def wait(self) -> None:
        """Makes all work that is enqueued on the device from now on wait for the copies; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Blocks until the copies are made, after which the host may write to them."""
        if self._stream is not None:
            self._stream.synchronize()

    def stepped(self) -> None:
        """Notes the memory that a step has taken beside the state and its copy. Called after each step, also one that
        has failed, as of memory that ran out. What a step has taken before the first copy is not known: its peak
        includes the state."""
        if self._resting is None:
            return
        taken = peak_allocated_bytes(self._device) - self._resting
        self._largest_step = max(taken, self._largest_step or 0)

    def _to_pinned(self, state: Mapping[str, Tensor]) -> Copies:
        """Copies tensors to the preallocated memory, on the copying stream; returns views of it. The first call
        allocates it, for this state."""
        sizes = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in state.values()]
        if self._pinned is None or self._pinned.nbytes < sum(sizes):
            self._pinned = own_mapping(sum(sizes), self._device)
            self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        copies = _views(self._pinned[: sum(sizes)], sizes, state)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for name, x in state.items():
                copies[name].copy_(x.detach(), non_blocking=True)
        return copies


class Copies(dict[str, Tensor]):
    """Copies of tensors, by name; a dictionary to which there can be weak references."""

    __slots__ = ("__weakref__",)


def in_host_memory(state: Mapping[str, Tensor]) -> Copies:
    """Returns copies of tensors in host memory, by name; pinned if they are on a GPU, since torch caches pinned memory
    for the next copy."""
    copies = Copies(
        (name, torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x.detach(), non_blocking=True))
        for name, x in state.items()
    )
    wait_for_copies(x.device for x in state.values())
    return copies


def _views(memory: Tensor, sizes: Sequence[int], state: Mapping[str, Tensor]) -> Copies:
    """Returns views of host memory, uint8, with the types and shapes of tensors; each has as many bytes of it as
    `sizes` says."""
    return Copies(
        (name, place[: x.nbytes].view(x.dtype).view(x.shape))
        for (name, x), place in zip(state.items(), memory.split(sizes), strict=True)
    )


class ReusedMemory:
    """Host memory that one copy after another is made in: fresh pages take the kernel longer than the copy itself.

    Args:
        device: Device of the rank, for which the memory is pinned if it is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._taken: Callable[[], Tensor | None] = lambda: None

    def take(self, num_bytes: int) -> Tensor:
        """Returns host memory, [num_bytes] uint8, as `own_mapping`: the same as last time if it has this size and the
        tensor that was returned is gone."""
        if self._taken() is not None:
            return own_mapping(num_bytes, self._device)
        if self._memory is None or self._memory.nbytes != num_bytes:
            self._memory = None
            self._memory = own_mapping(num_bytes, self._device)
        taken = self._memory.view(-1)
        self._taken = weakref.ref(taken)
        return taken


def own_mapping(num_bytes: int, device: torch.device) -> Tensor:
    """Returns host memory, [num_bytes] uint8, in a mapping of its own that begins at a page, pinned if `device` is a
    GPU; it is returned to the operating system with this tensor, of which views must not outlive it.

    In the heap, which later allocations of other sizes share, copies of every checkpoint would leave gaps; and torch's
    own allocator of pinned memory rounds up to a power of two. Raises RuntimeError if it cannot be pinned."""
    mapping = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        mapping.madvise(mmap.MADV_HUGEPAGE)  # a sixth of the time until all of it is in memory
    memory = torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]
    if device.type == "cuda" and num_bytes:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        # The view that is returned does not own the memory, so that it is unpinned before it is freed.
        view = memory.view(-1)
        weakref.finalize(view, lambda: runtime.cudaHostUnregister(memory.data_ptr()))
        return view
    return memory
