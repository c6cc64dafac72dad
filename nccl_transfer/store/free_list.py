"""Allocator of spans of bytes, of host memory or of a GPU."""

from __future__ import annotations

import bisect


class FreeList:
    """First-fit allocator of a span of bytes. Prefers low offsets, so that warm pages are reused. Not thread-safe.

    Args:
        nbytes: Size of the span in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self._offsets = [0]
        self._sizes = [nbytes]

    def allocate(self, nbytes: int) -> int | None:
        """Allocates `nbytes` bytes (at least 1) and returns their offset, or None if no gap is large enough."""
        for index, size in enumerate(self._sizes):
            if size >= nbytes:
                offset = self._offsets[index]
                if size == nbytes:
                    del self._offsets[index], self._sizes[index]
                else:
                    self._offsets[index] += nbytes
                    self._sizes[index] -= nbytes
                return offset
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Frees the `nbytes` bytes at `offset`, as allocated by `allocate`, and merges them with adjacent gaps."""
        index = bisect.bisect(self._offsets, offset)
        if index < len(self._offsets) and offset + nbytes == self._offsets[index]:
            nbytes += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += nbytes
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, nbytes)

    @property
    def largest(self) -> int:
        """Size of the largest gap in bytes."""
        return max(self._sizes, default=0)
