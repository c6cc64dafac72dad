"""Process groups of a service's ranks, and bucketed all-reduces over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Timeout of every process group, meant to be longer than any call. gloo ends a collective at this timeout or at the
timeout of the wait for it, whichever is shorter; the latter, the call's deadline, must take effect."""
BUCKET_BYTES = 4 << 20
"""Bytes of the buckets that small tensors are copied into, so that they share an all-reduce."""
BUCKETS_UNDER_WAY = 8
"""Most all-reduces in flight, which limits the memory of the buckets."""


def own_group(groups: Sequence[Sequence[int]], backend: str | None = None) -> ProcessGroup:
    """Creates a process group for each list of ranks; returns the one that contains this rank. Collective over all
    ranks, each of which must pass the same lists.

    Args:
        groups: Ranks of each group, which together contain every rank once. The order within a group is kept.
        backend: Backend of the groups. Default: those of the default group, gloo for tensors in host memory and, on
            GPUs, NCCL for others.
    """
    own = None
    with _one_gloo_device():
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT, backend=backend, sort_ranks=False)
            if dist.get_rank() in ranks:
                own = group
    assert isinstance(own, ProcessGroup), "the groups of an axis hold every rank once"
    return own


@torch.no_grad()
def add_up(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """All-reduces tensors in place, by sum over a group. Tensors below BUCKET_BYTES are copied into shared buckets.
    Collective.

    Args:
        tensors: Tensors of one dtype, in the same order on every rank.
        group: Process group to sum over.
    """
    buckets = list(_buckets(tensors))
    for first in range(0, len(buckets), BUCKETS_UNDER_WAY):
        wave = buckets[first : first + BUCKETS_UNDER_WAY]
        flat = [_laid_flat(bucket) for bucket in wave]
        works = [dist.all_reduce(each, group=group, async_op=True) for each in flat]
        for bucket, total, work in zip(wave, flat, works, strict=True):
            assert work is not None
            work.wait()
            if total.data_ptr() == bucket[0].data_ptr():
                continue  # reduced in place
            for x, part in zip(bucket, total.split([x.numel() for x in bucket]), strict=True):
                x.copy_(part.view_as(x))


def _laid_flat(bucket: Sequence[Tensor]) -> Tensor:
    """Returns the elements of all tensors of a bucket in one dimension: a view if the bucket is one contiguous
    tensor, otherwise a copy."""
    if len(bucket) == 1:
        return bucket[0].reshape(-1)
    return torch.cat([x.flatten() for x in bucket])


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the tensors in order, in lists of at most BUCKET_BYTES; a larger tensor is alone in its list."""
    bucket, num_bytes = [], 0
    for x in tensors:
        if bucket and num_bytes + x.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(x)
        num_bytes += x.nbytes
    if bucket:
        yield bucket


@contextmanager
def _one_gloo_device() -> Iterator[None]:
    """Context manager in which new process groups share the gloo device of the default group. torch would create a
    device for each group, whose thread wakes up a hundred times a second even when idle."""
    whole: Any = dist.group.WORLD
    devices = whole._get_backend(torch.device("cpu")).options._devices
    of_torch: Any = distributed_c10d.ProcessGroupGloo

    class Gloo(of_torch):
        def __init__(self, store: distributed_c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = of_torch._Options()
            options._timeout, options._devices = timeout, devices
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Gloo
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = of_torch
