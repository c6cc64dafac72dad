"""Huge pages for the tensors of a rank."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_BYTES = 2 << 20
"""Bytes of a huge page (x86-64, and AArch64 with pages of 4 KiB)."""

_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def use_huge_pages() -> None:
    """Asks torch to put tensors on the CPU of 2 MiB and more on huge pages where the kernel allows it (transparent
    huge pages, "madvise" or "always"): other processes read their weights there at twice the rate. Has to be called
    before the first tensor is made; a THP_MEM_ALLOC_ENABLE that the user has set stays."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def blocks_of(tensor: Tensor) -> range:
    """Returns the numbers of the blocks of BLOCK_BYTES of this process's memory that a tensor lies in; none where it is
    on a device."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, nbytes = tensor.data_ptr(), (last + 1) * tensor.element_size()
    return range(first // BLOCK_BYTES, -(-(first + nbytes) // BLOCK_BYTES))


def move_to_huge_pages(blocks: Iterable[range]) -> None:
    """Moves blocks of memory to huge pages, in place, where `use_huge_pages` was called. Torch aligns no tensor to
    them, so without this each begins and ends on small ones, and tensors below 2 MiB lie on no other.

    The kernel does so since Linux 6.1. What it refuses stays as it is: blocks that are not mapped to their ends, or for
    which no huge page is free.
    """
    if os.environ.get("THP_MEM_ALLOC_ENABLE") != "1":
        return
    for block in sorted(set(chain.from_iterable(blocks))):
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            _libc.madvise(block * BLOCK_BYTES, BLOCK_BYTES, advice)
