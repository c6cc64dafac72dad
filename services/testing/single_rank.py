"""A default process group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def single_rank(device: torch.device, directory: Path) -> Iterator[None]:
    """Context manager in whose block this process is the only rank of the default process group (over gloo on a CPU,
    NCCL on a GPU) and torch computes with one thread, as a rank does by default. The file of the group's store is
    created in `directory`. The group ends with the block."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{directory / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        # vLLM may have ended it.
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(num_threads)
