"""Process groups of a service's ranks, and sums over them."""

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
"""Above any deadline of a call. gloo ends a collective at the shorter of this and the wait's own timeout, so it
must not be what ends one: the call's deadline is."""
BUCKET_BYTES = 4 << 20
BUCKETS_UNDER_WAY = 8
"""Of tensors that are added up together: one collective for many small ones, and a bound on what is copied for it."""


def own_group(groups: Sequence[Sequence[int]]) -> ProcessGroup:
    """Makes all groups, which is collective, and returns the one that this rank is in."""
    own = None
    with _one_gloo_device():
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT, sort_ranks=False)
            if dist.get_rank() in ranks:
                own = group
    assert isinstance(own, ProcessGroup), "the groups of an axis hold every rank once"
    return own


@torch.no_grad()
def add_up(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Adds to each of some tensors of one type, in place, those of the other ranks of a group. Small ones are copied
    into buckets for it, large ones are not. Collective."""
    buckets = list(_buckets(tensors))
    for first in range(0, len(buckets), BUCKETS_UNDER_WAY):
        wave = buckets[first : first + BUCKETS_UNDER_WAY]
        flat = [_laid_flat(bucket) for bucket in wave]
        works = [dist.all_reduce(each, group=group, async_op=True) for each in flat]
        for bucket, total, work in zip(wave, flat, works, strict=True):
            assert work is not None
            work.wait()
            if total.data_ptr() == bucket[0].data_ptr():
                continue  # it was added up where it is
            for x, part in zip(bucket, total.split([x.numel() for x in bucket]), strict=True):
                x.copy_(part.view_as(x))


def _laid_flat(bucket: Sequence[Tensor]) -> Tensor:
    """All elements of a bucket in one dimension; where it holds one tensor that allows it, a view of that."""
    if len(bucket) == 1:
        return bucket[0].reshape(-1)
    return torch.cat([x.flatten() for x in bucket])


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, cut where a bucket is full."""
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
    """Within, groups communicate through the device of the default group. torch would give each one of its own, whose
    thread wakes up a hundred times a second for as long as the group is there, also when nothing is to be done."""
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
