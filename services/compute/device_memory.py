"""Memory of the device that a rank computes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def free_bytes(device: torch.device) -> float:
    """Returns the bytes that this process can still allocate on a GPU, those in torch's cache included; inf for any
    other device, which does not report them."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def allocated_bytes(device: torch.device) -> int:
    """Returns the bytes that this process has allocated on a GPU; 0 for a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_allocated_bytes(device: torch.device) -> int:
    """Returns the most bytes that this process had allocated on a GPU at a time, since the last
    `peak_memory_measured` block began; 0 for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


@contextmanager
def peak_memory_measured(device: torch.device, *, releases_cache: bool) -> Iterator[None]:
    """Context manager that resets the peak that `peak_allocated_bytes` returns, so that it is that of the block.

    Args:
        device: Device to measure; nothing happens unless it is a GPU.
        releases_cache: Whether torch returns its cached memory to the device after the block, for other processes
            that share the device.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        if releases_cache:
            torch.cuda.empty_cache()
