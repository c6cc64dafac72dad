"""Creates the process groups of a rank along the axes of a mesh."""

from __future__ import annotations

import torch.distributed as dist

from nccl_transfer.refs.mesh import Mesh
from services.runtime.process_groups import own_group


class MeshGroups:
    """This rank's position on a mesh and its process group along each axis. Construction is collective over the
    default process group.

    Ranks of a group are in the order of its axis, whatever their numbers, so that a gather along the axis concatenates
    parts in order. (A `DeviceMesh` of rank numbers sorts them, which silently misplaces parts on a permuted mesh.)

    Attributes:
        mesh: The mesh.
        stage, tensor_index, data_index: Position of this rank on the pipeline, tensor and data axis.
        pipeline, tensor, data: Process group of the ranks along each axis that goes through this rank.
        ends: Process group of the first and the last stage at this rank's tensor and data index, in that order. A
            rank of a stage in between is alone in its group.

    Raises:
        ValueError: The sizes of the mesh and the default process group differ.
    """

    def __init__(self, mesh: Mesh) -> None:
        if mesh.size != dist.get_world_size():
            raise ValueError(f"mesh {mesh} has {mesh.size} ranks, and there are {dist.get_world_size()}")
        self.mesh = mesh
        self.stage, self.tensor_index, self.data_index = mesh.position(dist.get_rank())
        stages, tensors, datas = range(mesh.pipeline), range(mesh.tensor), range(mesh.data)
        self.pipeline = own_group([[mesh.rank(p, t, d) for p in stages] for t in tensors for d in datas])
        self.tensor = own_group([[mesh.rank(p, t, d) for t in tensors] for p in stages for d in datas])
        self.data = own_group([[mesh.rank(p, t, d) for d in datas] for p in stages for t in tensors])
        first, *between, last = stages if mesh.pipeline > 1 else (0, 0)
        ends = [
            list(dict.fromkeys(mesh.rank(p, t, d) for p in (first, last))) for t in tensors for d in datas
        ]
        self.ends = own_group(ends + [[mesh.rank(p, t, d)] for p in between for t in tensors for d in datas])

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is on the first pipeline stage."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is on the last pipeline stage."""
        return self.stage == self.mesh.pipeline - 1
