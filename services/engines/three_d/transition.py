"""Transition from training to generation weights on the same ranks (HybridFlow, section 5).

A rank of a p-t-d mesh trains 1/(p t) of the model and generates with 1/(pg tg) of it. Before generation, it gathers the
missing weights from the ranks that train them, in one of three ways, named as in the paper's Table 2:

    transition    ranks that gather           bytes received            most weights held
    hybridflow    the micro-DP group          (tp - tg pg)/(tg pg tp)   1/(tg pg)
    hybridflow_v  one model-parallel group    (tp - 1)/(tp)             1
    gather_all    all ranks, d of a part      (tpd - 1)/(tpd)           1

With `hybridflow` ranks are numbered so that each rank's training shard is a part of its generation shard: it stays in
place, and the gather fills in the rest around it. The other two are baselines for comparison: `hybridflow_v` numbers
ranks in the usual order, so shards do not nest, and `gather_all` is how DeepSpeed-Chat leaves ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nccl_transfer.refs.mesh import Mesh
from services.engines.three_d.bundles import Bundle, bundle_layers
from services.engines.three_d.gather_groups import (
    JoinedGroup,
    Kind,
    gather_groups,
    gather_groups_of_tied,
    join,
)
from services.engines.three_d.stage import Memory
from services.storage.layout import Layout

# The name since torch 2.13, and the one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class ReceivedBytes:
    """Bytes that this rank has received in gathers.

    Attributes:
        cut: Bytes of weights that are cut into tensor-parallel parts.
        whole: Bytes of weights that are not cut, such as those of norms.
    """

    cut: int = 0
    whole: int = 0


class Transition:
    """Gathers this rank's generation weights from the training weights of several ranks. Construction and `gather`
    are collective over the default process group.

    Args:
        layouts: Layouts of all tensors on the training mesh, by name.
        mesh: Training and generation mesh.
        kind: Which ranks gather from each other; see the table above.
        dtype: Type of the gathered weights.
        device: Device of this rank.
        in_place: Whether to gather into permanent buffers of which the training weights are views. Only for
            "hybridflow".

    Attributes:
        layouts: Layouts of all tensors on the generation mesh, by name.
        in_place: Whether weights are gathered into permanent buffers.
        received: Bytes that this rank has received since construction.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        kind: Kind,
        *,
        dtype: torch.dtype,
        device: torch.device,
        in_place: bool,
    ) -> None:
        assert not in_place or kind == "hybridflow", "only hybridflow trains in generation memory"
        rank = dist.get_rank()
        self._mesh, self._dtype, self._device = mesh, dtype, device
        self._stage, self._part, _ = mesh.position(rank)
        self._generation_stage, self._generation_part, _ = mesh.generation_position(rank)
        groups = gather_groups(mesh, kind)
        self._joined = self._joined_for_tied = join(groups)
        groups_of_tied = gather_groups_of_tied(mesh, groups)
        if groups_of_tied != groups and any(layout.tied for layout in layouts.values()):
            self._joined_for_tied = join(groups_of_tied)
        self.layouts = {
            name: layout.merged(mesh.pipeline_ratio, mesh.tensor_ratio) for name, layout in layouts.items()
        }
        self._buckets = bundle_layers(
            layouts,
            self._joined.ranks.stages,
            self._joined_for_tied.ranks.stages,
            last_stage=mesh.pipeline - 1,
        )
        bundles = [bundle for bucket in self._buckets for bundle in bucket]
        self._of_name = {name: bundle for bundle in bundles for name in bundle.names}
        self._buffers = {bundle: self._empty(bundle) for bundle in bundles} if in_place else None
        self.in_place = in_place
        self.received = ReceivedBytes()

    def training_memory(self) -> Memory:
        """Returns a function that maps the name of a training weight to the memory of this rank's training shard, a
        view of a permanent buffer. Only with `in_place`."""
        buffers = self._buffers
        assert buffers is not None, "only with in_place are training weights views of the buffers"

        def memory(name: str) -> Tensor:
            bundle = self._of_name[name]
            return self._trained(bundle, buffers[bundle], bundle.stages.index(self._stage))

        return memory

    def generation_memory(self) -> Memory:
        """Returns a function that maps the name of a generation weight to the memory of this rank's generation shard:
        a view of a permanent buffer, or, without `in_place`, a placeholder: one uninitialized element on the device,
        expanded to the shard's shape, which must not be written."""

        def memory(name: str) -> Tensor:
            bundle = self._of_name[name]
            if self._buffers is not None:
                return self._generated(bundle, self._buffers[bundle], bundle.names.index(name))
            nothing = torch.empty(1, dtype=self._dtype, device=self._device)
            return nothing.expand(self.layouts[name].kept_shape)

        return memory

    def resident(self) -> list[Tensor]:
        """Returns the permanent buffers; an empty list without `in_place`."""
        return list(self._buffers.values()) if self._buffers is not None else []

    @torch.no_grad()
    def gather(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All-gathers this rank's generation shards, one layer of each stage at a time. The iterator is collective:
        run it to its end on every rank.

        Args:
            weights: This rank's training shards, by name; not read with `in_place`, since the buffers contain them.

        Yields:
            Name and generation shard of each weight: a view of a permanent buffer, or, without `in_place`, of a new
            one, which is freed with the tensor.
        """
        for bucket in self._buckets:
            yield from self._gather_bucket(bucket, weights)

    def _gather_bucket(
        self, bucket: list[Bundle], weights: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """All-gathers one bucket: starts the collectives of all of its bundles, waits for them, and yields as `gather`.
        Collective."""
        buffers = [
            self._buffers[bundle] if self._buffers is not None else self._empty(bundle) for bundle in bucket
        ]
        works = []
        for bundle, buffer in zip(bucket, buffers, strict=True):
            works += self._start(bundle, buffer, weights)
        for work in works:
            work.wait()
        for bundle, buffer in zip(bucket, buffers, strict=True):
            for number, (name, stage) in enumerate(zip(bundle.names, bundle.stages, strict=True)):
                if self._generates_with(bundle, stage):
                    yield name, self._generated(bundle, buffer, number)

    def _generates_with(self, bundle: Bundle, stage: int) -> bool:
        """Returns whether a bundle's tensor of the given training stage is one of this rank's generation weights."""
        if bundle.layout.tied:
            return self._generation_stage in (0, self._mesh.generation_pipeline - 1)
        return stage // self._mesh.pipeline_ratio == self._generation_stage

    def _joined_for(self, layout: Layout) -> JoinedGroup:
        """Returns this rank's gather group for a tensor of the given layout."""
        return self._joined_for_tied if layout.tied else self._joined

    def _empty(self, bundle: Bundle) -> Tensor:
        """Returns a new gather buffer for a bundle, without values."""
        shape = bundle.buffer_shape(len(self._joined.ranks.parts))
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _trained(self, bundle: Bundle, buffer: Tensor, number: int) -> Tensor:
        """Returns this rank's training shard of the bundle's tensor `number`, a view of the bundle's buffer."""
        if not bundle.layout.is_cut:
            return buffer[number]
        rows = bundle.layout.kept_shape[0]
        return buffer[number].narrow(0, self._joined.ranks.parts.index(self._part) * rows, rows)

    def _generated(self, bundle: Bundle, buffer: Tensor, number: int) -> Tensor:
        """Returns this rank's generation shard of the bundle's tensor `number`, a view of the bundle's buffer."""
        if not bundle.layout.is_cut:
            return buffer[number]
        rows = bundle.layout.kept_shape[0]
        first = self._generation_part * self._mesh.tensor_ratio - self._joined.ranks.parts.start
        return buffer[number].narrow(0, first * rows, self._mesh.tensor_ratio * rows)

    def _start(self, bundle: Bundle, buffer: Tensor, weights: Mapping[str, Tensor]) -> list[dist.Work]:
        """Starts the collectives that fill a bundle's buffer, and counts the bytes they bring; returns their works,
        to wait for, or an empty list if this rank has all of it already."""
        if self._buffers is None and self._stage in bundle.stages:
            number = bundle.stages.index(self._stage)
            self._trained(bundle, buffer, number).copy_(weights[bundle.names[number]])
        group, process_group = self._joined_for(bundle.layout)
        if len(group.ranks) == 1 or (len(group.stages) == 1 and not bundle.layout.is_cut):
            return []
        shares = self._shares(bundle, buffer)
        member = group.ranks.index(dist.get_rank())
        self._count(bundle, sum(share.nbytes for source, share in shares if source != member))
        all_give = [source for source, _ in shares] == [*range(len(group.ranks))]
        if all_give and len({len(share) for _, share in shares}) == 1:
            own = shares[member][1]
            return _begun(_all_gather(_bytes(buffer), own, group=process_group, async_op=True))
        return [
            work
            for source, share in shares
            for work in _begun(dist.broadcast(share, group=process_group, group_src=source, async_op=True))
        ]

    def _shares(self, bundle: Bundle, buffer: Tensor) -> list[tuple[int, Tensor]]:
        """Returns (group rank, view of the bytes) for each part of a bundle's buffer that a member of the group
        contributes."""
        group, shares = self._joined_for(bundle.layout).ranks, []
        for number, stage in enumerate(bundle.stages):
            givers = [group.member(stage, part, copy) for part in group.parts for copy in range(group.copies)]
            # A tensor that is not cut is the same on all members.
            givers = givers if bundle.layout.is_cut else givers[:1]
            shares += zip(givers, _bytes(buffer[number]).tensor_split(len(givers)), strict=True)
        return shares

    def _count(self, bundle: Bundle, nbytes: int) -> None:
        """Adds the bytes that this rank receives in gathering a bundle to `received`."""
        if bundle.layout.is_cut:
            self.received.cut += nbytes
        else:
            self.received.whole += nbytes


def _bytes(x: Tensor) -> Tensor:
    """Returns a flat view of a tensor as bytes, a type that every backend transfers."""
    return x.view(-1).view(torch.uint8)


def _begun(work: dist.Work | None) -> list[dist.Work]:
    """Returns the work of an asynchronous collective as a list."""
    assert work is not None, "asynchronous collectives return their work"
    return [work]
