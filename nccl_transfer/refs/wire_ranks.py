"""Conversion of endpoints and meshes to and from protobuf messages."""

from __future__ import annotations

from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.shards import Endpoint
from rlhf.v1 import common_pb2 as pb
from rlhf.v1 import worker_pb2


def endpoint_to_proto(endpoint: Endpoint) -> pb.Endpoint:
    return pb.Endpoint(
        address=endpoint.address,
        host_id=endpoint.host_id,
        epoch=endpoint.epoch,
        service=endpoint.service,
        rank=endpoint.rank,
        adverts=endpoint.adverts,
    )


def endpoint_from_proto(message: pb.Endpoint) -> Endpoint:
    return Endpoint(
        message.address,
        message.host_id,
        message.epoch,
        message.service,
        message.rank,
        dict(message.adverts),
    )


def mesh_to_proto(mesh: Mesh) -> worker_pb2.MeshShape:
    return worker_pb2.MeshShape(
        pipeline=mesh.pipeline,
        tensor=mesh.tensor,
        data=mesh.data,
        generation_pipeline=mesh.generation_pipeline,
        generation_tensor=mesh.generation_tensor,
        usual_order=mesh.usual_order,
    )


def mesh_from_proto(shape: worker_pb2.MeshShape) -> Mesh:
    """Decodes a mesh. Unset sizes of the training mesh are 1, those of the generation mesh are the training ones.
    Raises ConfigError where the training sizes are not divisible by the generation sizes."""
    return Mesh(
        shape.pipeline or 1,
        shape.tensor or 1,
        shape.data or 1,
        shape.generation_pipeline,
        shape.generation_tensor,
        usual_order=shape.usual_order,
    )
