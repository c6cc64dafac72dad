"""The platform of services: the properties that determine their results bitwise, apart from their config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.v1 import worker_pb2


def platform_of(services: Mapping[str, worker_pb2.DescribeResponse]) -> dict[str, dict[str, Any]]:
    """Returns the properties of each service, by name, that determine its results bitwise, apart from its config."""
    return {
        name: {
            "ranks": len(said.ranks),
            "mesh": _mesh(said.mesh),
            "device": said.ranks[0].device.partition(":")[0] if said.ranks else "",
            "engine": said.engine,
            "threads": said.threads,
            "matmul": said.matmul,
            "kernels": said.kernels,
            "cpu": said.cpu,
            "cpu_capability": said.cpu_capability,
            "gpu": said.gpu,
            "torch": said.torch,
            "libraries": dict(said.libraries),
            "version": said.version,
            "vocabulary": said.vocabulary_hash,
        }
        for name, said in services.items()
    }


def _mesh(mesh: worker_pb2.MeshShape) -> str:
    sizes = (mesh.pipeline, mesh.tensor, mesh.data, mesh.generation_pipeline, mesh.generation_tensor)
    return "-".join(map(str, sizes)) + ("-usual" if mesh.usual_order else "")
