"""The device that a rank computes on, and its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf.errors import ConfigError


def rank_device() -> torch.device:
    """The GPU of this process's local rank, which becomes the current device of the thread; the CPU on a host without
    GPUs.

    Raises:
        ConfigError: The host has fewer GPUs than the service has ranks there.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise ConfigError(
            f"ranks: local rank {local_rank} has no GPU, this host shows {num_gpus}; each rank of a service on a "
            "host needs one of its own, or CUDA_VISIBLE_DEVICES= (empty) for all ranks to compute on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def device_identity(device: torch.device) -> dict[str, str]:
    """Fields `device` and `device_uuid` of RankInfo."""
    if device.type != "cuda":
        return {"device": "cpu", "device_uuid": ""}
    return {"device": str(device), "device_uuid": f"GPU-{torch.cuda.get_device_properties(device).uuid}"}


def allocated_bytes(device: torch.device) -> int:
    """Bytes allocated on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_allocated_bytes(device: torch.device) -> int:
    """Most bytes allocated on a GPU at a time since the last `peak_memory_measured`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


@contextmanager
def peak_memory_measured(device: torch.device, *, releases_cache: bool) -> Iterator[None]:
    """A block whose peak of allocated memory is measured.

    Args:
        releases_cache: Return cached memory to the device after the block, for other processes that take turns on it.
    """
    if device.type == "cpu":
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        if releases_cache:
            torch.cuda.empty_cache()
