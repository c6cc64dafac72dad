"""Small collectives over all ranks of the default process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from services.engines.base import InferenceStopped
from services.runtime.ranks import known_to_all

_SHA256_BYTES = 32


def stop_together(stop: bool, device: torch.device) -> None:
    """Raises InferenceStopped on every rank if any rank passes True. Collective.

    Args:
        stop: Whether this rank wants to stop.
        device: Device of this rank.
    """
    stopping = torch.tensor(stop, dtype=torch.int64, device=device)
    dist.all_reduce(stopping)
    if stopping:
        raise known_to_all(InferenceStopped("inference was stopped between micro-batches"))


def max_over_ranks(count: int, device: torch.device) -> int:
    """Returns the largest `count` that any rank passes. Collective.

    Args:
        count: This rank's number.
        device: Device of this rank.
    """
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def digest_of_rank_0(sha256: str, device: torch.device) -> str:
    """Returns the sha256 (hex) that rank 0 passes, on every rank; the argument of other ranks is ignored.
    Collective."""
    digest = bytes.fromhex(sha256) if dist.get_rank() == 0 else bytes(_SHA256_BYTES)
    shared = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    dist.broadcast(shared, src=0)
    return bytes(shared.tolist()).hex()
