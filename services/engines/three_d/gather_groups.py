"""Groups of ranks that gather the weights of a generation model from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from nccl_transfer.refs.mesh import Mesh
from services.runtime.process_groups import own_group

Kind = Literal["hybridflow", "hybridflow_v", "gather_all"]


@dataclass(frozen=True)
class GatherGroup:
    """Ranks that all-gather weights from each other: for every pipeline stage and tensor part, `copies` ranks that each
    contribute a share."""

    stages: range
    parts: range
    copies: int
    ranks: tuple[int, ...]

    def member(self, stage: int, part: int, copy: int) -> int:
        """The group-local rank that holds the shard of a training stage and tensor index; `copy` counts the ranks with
        the same shard."""
        return (self.stages.index(stage) * len(self.parts) + self.parts.index(part)) * self.copies + copy

    def of_stages(self, stages: range) -> GatherGroup:
        """The subgroup of ranks of some of its stages."""
        first, last = (self.member(stage, self.parts[0], 0) for stage in (stages[0], stages[-1]))
        return replace(self, stages=stages, ranks=self.ranks[first : last + len(self.parts) * self.copies])


def gather_groups(mesh: Mesh, kind: Kind) -> list[GatherGroup]:
    """The gather groups of a transition; each rank is in one."""
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
        return [_model_group(mesh, *everywhere, range(d, d + 1)) for d in range(mesh.data)]
    return [_model_group(mesh, *everywhere, range(mesh.data))]


def _model_group(mesh: Mesh, stages: range, parts: range, copies: range) -> GatherGroup:
    ranks = tuple(mesh.rank(p, t, d) for p in stages for t in parts for d in copies)
    return GatherGroup(stages, parts, len(copies), ranks)


def gather_groups_of_tied(mesh: Mesh, groups: Sequence[GatherGroup]) -> list[GatherGroup]:
    """The gather groups of a tensor that the first and the last stage share. In a group with both, the last stage
    gathers on its own, so that it does not receive what it has."""
    ends, found = {0, mesh.pipeline - 1}, []
    for group in groups:
        if mesh.pipeline > 1 and ends <= set(group.stages):
            found += [group.of_stages(group.stages[:-1]), group.of_stages(group.stages[-1:])]
        else:
            found.append(group)
    return found


class JoinedGroup(NamedTuple):
    """The gather group of this rank, and its process group."""

    ranks: GatherGroup
    process_group: ProcessGroup


def join(groups: Sequence[GatherGroup]) -> JoinedGroup:
    """Creates the process groups of all gather groups; returns this rank's. Collective."""
    own = next(each for each in groups if dist.get_rank() in each.ranks)
    return JoinedGroup(own, own_group([each.ranks for each in groups]))
