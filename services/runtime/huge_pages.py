"""Huge pages for the tensors of a rank."""

from __future__ import annotations

import os


def use_huge_pages() -> None:
    """Asks torch to put tensors on the CPU of 2 MiB and more on huge pages where the kernel allows it (transparent
    huge pages, "madvise" or "always"): other processes read their weights there at twice the rate. Has to be called
    before the first tensor is made; a THP_MEM_ALLOC_ENABLE that the user has set stays."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
