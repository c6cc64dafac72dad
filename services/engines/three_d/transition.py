"""From the weights of training to those of generation, on the same ranks (HybridFlow, section 5).

A rank of a p-t-d mesh keeps 1/(p t) of the model and generates with 1/(pg tg) of it. In between, ranks gather what they
lack from those that train it. Three ways to choose whom to gather with, by the names of the paper's Table 2:

    transition    ranks that gather           bytes received            most weights held
    hybridflow    the micro-DP group          (tp - tg pg)/(tg pg tp)   1/(tg pg)
    hybridflow_v  one model-parallel group    (tp - 1)/(tp)             1
    gather_all    all ranks, d of a part      (tpd - 1)/(tpd)           1

With `hybridflow` ranks are numbered so that what a rank trains is a part of what it generates with; its own part is
then in its place before and after, and the gather fills in the rest around it. The others exist to be compared with:
`hybridflow_v` numbers ranks in the usual order, so that parts do not nest, and `gather_all` is how DeepSpeed-Chat
leaves ZeRO-3.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nccl_transfer.refs.mesh import Mesh
from services.engines.three_d.stage import Memory
from services.runtime.process_groups import own_group
from services.storage.layout import Layout

Kind = Literal["hybridflow", "hybridflow_v", "gather_all"]

# Its name from torch 2.13 on, and the one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass
class ReceivedBytes:
    """Bytes that this rank got in gathers: of weights that are cut into parts, and of those kept whole (norms)."""

    cut: int = 0
    whole: int = 0


@dataclass(frozen=True)
class GatherGroup:
    """The ranks that gather from each other, by what they have: every stage of `stages` in every part of `parts`, each
    `copies` times, of which each gives its share."""

    stages: range
    parts: range
    copies: int
    ranks: tuple[int, ...]

    def member(self, stage: int, part: int, copy: int) -> int:
        """Number within the group."""
        return (self.stages.index(stage) * len(self.parts) + self.parts.index(part)) * self.copies + copy

    def of_stages(self, stages: range) -> GatherGroup:
        """Those of its ranks that have some of its stages."""
        first, last = (self.member(stage, self.parts[0], 0) for stage in (stages[0], stages[-1]))
        return replace(self, stages=stages, ranks=self.ranks[first : last + len(self.parts) * self.copies])


def gather_groups(mesh: Mesh, kind: Kind) -> list[GatherGroup]:
    """The groups of a transition; each rank is in one."""
    stages, parts = mesh.pipeline_ratio, mesh.tensor_ratio
    if kind == "hybridflow":
        return [
            GatherGroup(
                range(p, p + stages), range(t, t + parts), 1, tuple(mesh.micro_data_group(mesh.rank(p, t, d)))
            )
            for p in range(0, mesh.pipeline, stages)
            for t in range(0, mesh.tensor, parts)
            for d in range(mesh.data)
        ]
    everywhere = range(mesh.pipeline), range(mesh.tensor)
    if kind == "hybridflow_v":
        return [_gathering(mesh, *everywhere, range(d, d + 1)) for d in range(mesh.data)]
    return [_gathering(mesh, *everywhere, range(mesh.data))]


def _gathering(mesh: Mesh, stages: range, parts: range, copies: range) -> GatherGroup:
    ranks = tuple(mesh.rank(p, t, d) for p in stages for t in parts for d in copies)
    return GatherGroup(stages, parts, len(copies), ranks)


def gather_groups_of_tied(mesh: Mesh, groups: Sequence[GatherGroup]) -> list[GatherGroup]:
    """The groups for a tensor that first and last stage have alike: where one holds both, its last stage gathers apart,
    and is not sent what it has."""
    ends, found = {0, mesh.pipeline - 1}, []
    for group in groups:
        if mesh.pipeline > 1 and ends <= set(group.stages):
            found += [group.of_stages(group.stages[:-1]), group.of_stages(group.stages[-1:])]
        else:
            found.append(group)
    return found


@dataclass(frozen=True)
class Bundle:
    """Tensors of one shape that one collective gathers: the same weight of a layer of each stage, or a weight that one
    stage has."""

    names: tuple[str, ...]
    layout: Layout
    stages: tuple[int, ...]

    def buffer_shape(self, num_parts: int) -> tuple[int, ...]:
        """Of all parts that a gathering has, of all names."""
        rows, *rest = self.layout.kept_shape
        return (len(self.names), rows * (num_parts if self.layout.is_cut else 1), *rest)


class JoinedGroup(NamedTuple):
    """The gathering that a rank is in, and its process group."""

    gathering: GatherGroup
    group: ProcessGroup


class Transition:
    """Gathers the weights that this rank generates with. All ranks of the default process group make it and use it
    together.

    Args:
        layouts: Of all tensors, on the training mesh.
        in_place: Keep what is gathered in memory of its own, for life, of which the weights of training are a part.
            For `hybridflow` only.

    Attributes:
        layouts: Of all tensors, on the generation mesh.
        in_place: As above.
        received: Counted since it was made.
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
        assert not in_place or kind == "hybridflow", "only then the weights of training are a part"
        rank = dist.get_rank()
        self._mesh, self._dtype, self._device = mesh, dtype, device
        self._stage, self._part, _ = mesh.position(rank)
        self._generation_stage, self._generation_part, _ = mesh.generation_position(rank)
        groups = gather_groups(mesh, kind)
        self._joined = self._joined_for_tied = _join(groups)
        groups_of_tied = gather_groups_of_tied(mesh, groups)
        if groups_of_tied != groups and any(layout.tied for layout in layouts.values()):
            self._joined_for_tied = _join(groups_of_tied)
        self.layouts = {
            name: layout.merged(mesh.pipeline_ratio, mesh.tensor_ratio) for name, layout in layouts.items()
        }
        self._training = layouts
        self._buckets = self._bundled()
        bundles = [bundle for bucket in self._buckets for bundle in bucket]
        self._of_name = {name: bundle for bundle in bundles for name in bundle.names}
        self._buffers = {bundle: self._empty(bundle) for bundle in bundles} if in_place else None
        self.in_place = in_place
        self.received = ReceivedBytes()

    def training_memory(self) -> Memory:
        """Of the weights of training: parts of what generation reads."""

        buffers = self._buffers
        assert buffers is not None, "only weights that are gathered in place are parts of others"

        def memory(name: str) -> Tensor:
            bundle = self._of_name[name]
            return self._trained(bundle, buffers[bundle], bundle.stages.index(self._stage))

        return memory

    def generation_memory(self) -> Memory:
        """Of the weights of generation; where they are not gathered in place, none, in the right shape."""

        def memory(name: str) -> Tensor:
            bundle = self._of_name[name]
            if self._buffers is not None:
                return self._generated(bundle, self._buffers[bundle], bundle.names.index(name))
            nothing = torch.empty(1, dtype=self._dtype, device=self._device)
            return nothing.expand(self.layouts[name].kept_shape)

        return memory

    def resident(self) -> list[Tensor]:
        """The memory of what is gathered in place."""
        return list(self._buffers.values()) if self._buffers is not None else []

    @torch.no_grad()
    def gather(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All-gathers this rank's generation weights, by name, one layer of each stage at a time.

        Args:
            weights: Of this rank, in training.

        The iterator is collective: run it to its end on every rank. What was not gathered in place is the caller's.
        """
        for bucket in self._buckets:
            yield from self._gather_bucket(bucket, weights)

    def _gather_bucket(
        self, bucket: list[Bundle], weights: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
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
        """Whether this rank needs what a stage of training has of a bundle."""
        if bundle.layout.tied:
            return self._generation_stage in (0, self._mesh.generation_pipeline - 1)
        return stage // self._mesh.pipeline_ratio == self._generation_stage

    def _joined_for(self, layout: Layout) -> JoinedGroup:
        return self._joined_for_tied if layout.tied else self._joined

    def _bundled(self) -> list[list[Bundle]]:
        """All tensors of the stages that are gathered: first those that stand alone, then layer by layer."""
        stages, layouts = self._joined.gathering.stages, self._training
        per_stage = 1 + max(
            int(found[1]) for name, x in layouts.items() if x.stage == 0 and (found := _LAYER.search(name))
        )
        buckets: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, layout in layouts.items():
            if (found := _LAYER.search(name)) is not None:
                if layout.stage in stages:
                    number = int(found[1]) % per_stage
                    buckets[number][_LAYER.sub(f".layers.{number}.", name)].append(name)
            elif self._stage_of(name) is not None:
                buckets[-1][name].append(name)
        return [[self._bundle(names) for names in bucket.values()] for _, bucket in sorted(buckets.items())]

    def _bundle(self, names: list[str]) -> Bundle:
        staged = sorted((stage, name) for name in names if (stage := self._stage_of(name)) is not None)
        return Bundle(
            tuple(name for _, name in staged), self._training[names[0]], tuple(stage for stage, _ in staged)
        )

    def _stage_of(self, name: str) -> int | None:
        """The stage of the gathering that has a tensor. A tied one the last stage has too."""
        layout = self._training[name]
        has = [layout.stage, *([self._mesh.pipeline - 1] if layout.tied else [])]
        return next((stage for stage in has if stage in self._joined_for(layout).gathering.stages), None)

    def _empty(self, bundle: Bundle) -> Tensor:
        shape = bundle.buffer_shape(len(self._joined.gathering.parts))
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _trained(self, bundle: Bundle, buffer: Tensor, number: int) -> Tensor:
        """This rank's part of a buffer."""
        if not bundle.layout.is_cut:
            return buffer[number]
        rows = bundle.layout.kept_shape[0]
        return buffer[number].narrow(0, self._joined.gathering.parts.index(self._part) * rows, rows)

    def _generated(self, bundle: Bundle, buffer: Tensor, number: int) -> Tensor:
        """The part of a buffer that this rank generates with."""
        if not bundle.layout.is_cut:
            return buffer[number]
        rows = bundle.layout.kept_shape[0]
        first = self._generation_part * self._mesh.tensor_ratio - self._joined.gathering.parts.start
        return buffer[number].narrow(0, first * rows, self._mesh.tensor_ratio * rows)

    def _start(self, bundle: Bundle, buffer: Tensor, weights: Mapping[str, Tensor]) -> list[dist.Work]:
        """Begin to fill a buffer with what the ranks have of a bundle."""
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
        """Which member of the group gives which bytes of a buffer."""
        group, shares = self._joined_for(bundle.layout).gathering, []
        for number, stage in enumerate(bundle.stages):
            givers = [group.member(stage, part, copy) for part in group.parts for copy in range(group.copies)]
            # All of them have what is kept whole.
            givers = givers if bundle.layout.is_cut else givers[:1]
            shares += zip(givers, _bytes(buffer[number]).tensor_split(len(givers)), strict=True)
        return shares

    def _count(self, bundle: Bundle, nbytes: int) -> None:
        if bundle.layout.is_cut:
            self.received.cut += nbytes
        else:
            self.received.whole += nbytes


def _join(gather_groups: Sequence[GatherGroup]) -> JoinedGroup:
    own = next(each for each in gather_groups if dist.get_rank() in each.ranks)
    return JoinedGroup(own, own_group([each.ranks for each in gather_groups]))


def _bytes(x: Tensor) -> Tensor:
    """The same memory, as bytes: every backend moves them, whatever the type."""
    return x.view(-1).view(torch.uint8)


def _begun(work: dist.Work | None) -> list[dist.Work]:
    assert work is not None, "asynchronous collectives return their work"
    return [work]
