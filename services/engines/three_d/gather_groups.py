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
    """Ranks that all-gather weights from each other.

    Attributes:
        stages: Pipeline stages of the training mesh whose weights the group gathers.
        parts: Tensor-parallel indices of the training mesh whose shards the group gathers.
        copies: Number of ranks with the same stage and tensor index. Each contributes a share of their shard.
        ranks: The ranks, ordered by stage, tensor index and copy.
    """

    stages: range
    parts: range
    copies: int
    ranks: tuple[int, ...]

    def member(self, stage: int, part: int, copy: int) -> int:
        """Returns the index in `ranks` of a member.

        Args:
            stage: Pipeline stage of the member in training.
            part: Tensor-parallel index of the member in training.
            copy: Number of the member among those with the same stage and index, from 0.
        """
        return (self.stages.index(stage) * len(self.parts) + self.parts.index(part)) * self.copies + copy

    def of_stages(self, stages: range) -> GatherGroup:
        """Returns the subgroup of the ranks of some consecutive stages of this group."""
        first, last = (self.member(stage, self.parts[0], 0) for stage in (stages[0], stages[-1]))
        return replace(self, stages=stages, ranks=self.ranks[first : last + len(self.parts) * self.copies])


def gather_groups(mesh: Mesh, kind: Kind) -> list[GatherGroup]:
    """Returns all gather groups of a mesh; each of its ranks is in exactly one. For "hybridflow" each micro-DP group
    is one, for "hybridflow_v" the ranks of each data index, and for "gather_all" all ranks are one."""
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
    """Returns the group of the ranks with these stages, tensor and data indices on the training mesh."""
    ranks = tuple(mesh.rank(p, t, d) for p in stages for t in parts for d in copies)
    return GatherGroup(stages, parts, len(copies), ranks)


def gather_groups_of_tied(mesh: Mesh, groups: Sequence[GatherGroup]) -> list[GatherGroup]:
    """Returns the gather groups for a tied tensor, which the first and the last stage have. A group of `groups` with
    both stages is split in two, the ranks of the last stage and the others, so that the former do not receive a
    tensor that they have. With one stage, or no such group, returns groups equal to `groups`."""
    ends, found = {0, mesh.pipeline - 1}, []
    for group in groups:
        if mesh.pipeline > 1 and ends <= set(group.stages):
            found += [group.of_stages(group.stages[:-1]), group.of_stages(group.stages[-1:])]
        else:
            found.append(group)
    return found


class JoinedGroup(NamedTuple):
    """The gather group of this rank (`ranks`), and torch's process group of the same ranks."""

    ranks: GatherGroup
    process_group: ProcessGroup


def join(groups: Sequence[GatherGroup]) -> JoinedGroup:
    """Creates a process group for each gather group; returns this rank's. Collective over all ranks."""
    own = next(each for each in groups if dist.get_rank() in each.ranks)
    return JoinedGroup(own, own_group([each.ranks for each in groups]))
