"""Selects deterministic kernels of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Context manager in which torch runs deterministic CUDA kernels where they exist. Does nothing for a CPU, whose
    kernels are deterministic for a fixed number of threads."""
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = deterministic  # the module's class defines the property, which type checkers do not see
    fills = settings.fill_uninitialized_memory
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling costs one more write of every tensor, and no kernel here reads memory it has not written.
    settings.fill_uninitialized_memory = False
    # cuDNN's attention, which torch may choose where it only warns, adds its gradient up in no fixed order.
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
