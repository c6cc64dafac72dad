"""Small collectives over all ranks of the default process group, by which ranks agree. Their tensors are in host
memory, so that they run on gloo on GPU ranks too: they neither wait for the GPU's work nor need memory there."""

from __future__ import annotations

import torch
import torch.distributed as dist

from services.engines.base import InferenceStopped
from services.runtime.ranks import known_to_all

_TEXT_BYTES = 400
"""Bytes of UTF-8 to which `texts_of_ranks` cuts a text."""


def stop_together(stop: bool) -> None:
    """Raises InferenceStopped on every rank if any rank passes True. Collective.

    Args:
        stop: Whether this rank wants to stop.
    """
    if max_over_ranks(stop):
        raise known_to_all(InferenceStopped("inference was stopped between micro-batches"))


def max_over_ranks(count: int, group: dist.ProcessGroup | None = None) -> int:
    """Returns the largest `count` that any rank of a group passes. Collective.

    Args:
        count: This rank's number.
        group: Process group with a backend for host memory. Default: the default one, of all ranks.
    """
    most = torch.tensor(int(count))
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def digest_of_rank_0(sha256: str) -> str:
    """Returns the sha256 (hex) that rank 0 passes, on every rank; the argument of other ranks is ignored.
    Collective."""
    return bytes_of_ranks(sha256.encode())[0].decode()


def texts_of_ranks(text: str) -> list[str]:
    """Returns the text that each rank passes, in rank order, on every rank; a long one is cut. Collective.

    Args:
        text: Text of this rank.
    """
    return [each.decode(errors="ignore") for each in bytes_of_ranks(text.encode()[:_TEXT_BYTES])]


def rows_of_ranks(table: torch.Tensor) -> list[torch.Tensor]:
    """Returns the table that each rank passes, in rank order, on the CPU of every rank. Collective.

    Args:
        table: Table of this rank [rows, columns], on the CPU; ranks may have different numbers of rows.
    """
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(table)]))
    sizes = [int(count) for count in counts]
    own = torch.zeros((max(sizes), table.shape[1]), dtype=table.dtype)
    own[: len(table)] = table
    gathered = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(gathered, own)
    return [each[:size] for each, size in zip(gathered, sizes, strict=True)]


def bytes_of_ranks(data: bytes) -> list[bytes]:
    """Returns the bytes that each rank passes, in rank order, on every rank. Collective.

    Args:
        data: Bytes of this rank, of any number.
    """
    table = torch.tensor(list(data), dtype=torch.uint8).reshape(-1, 1)
    return [each.numpy().tobytes() for each in rows_of_ranks(table)]
