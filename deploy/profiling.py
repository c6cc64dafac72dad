"""Asks the ranks of a service that runs to trace their next calls."""

from __future__ import annotations

from pathlib import Path

import grpc

from deploy.health import ANSWER_TIMEOUT_S, CHANNEL_OPTIONS
from rlhf.access import Access
from rlhf.channels import open_channel
from rlhf.errors import ConfigError, from_rpc_error
from rlhf.v1 import worker_pb2, worker_pb2_grpc


def request_traces(service: str, address: str, directory: Path, calls: int) -> list[tuple[str, str]]:
    """Asks every rank of a service to trace its next calls, whichever run makes them.

    Args:
        service: Name of the service, for errors.
        address: Its address.
        directory: Directory of the traces on the ranks' hosts, below one of the service's `output_roots`.
        calls: Number of calls, 1 to 100.

    Returns:
        Address of each rank, and path of the trace that it writes after the last of the calls, in rank order.

    Raises:
        RlhfError: A rank cannot be reached, or refuses.
        ConfigError: The service has no ranks of this package, which alone are sent the token of class administer.
    """
    with open_channel(address, CHANNEL_OPTIONS, Access.READ) as channel:
        try:
            described = worker_pb2_grpc.WorkerServiceStub(channel).Describe(
                worker_pb2.DescribeRequest(), timeout=ANSWER_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"services.{service} at {address}: Describe") from error
    if not described.epoch:
        raise ConfigError(
            f"services.{service} at {address}: a server that is not of this package writes no traces"
        )
    request = worker_pb2.ProfileRequest(directory=str(directory), calls=calls)
    return [
        (rank.endpoint.address, _trace(service, rank.endpoint.address, request)) for rank in described.ranks
    ]


def _trace(service: str, address: str, request: worker_pb2.ProfileRequest) -> str:
    with open_channel(address, CHANNEL_OPTIONS, Access.ADMINISTER) as channel:
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return stub.Profile(request, timeout=ANSWER_TIMEOUT_S).path
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"services.{service} at {address}: Profile") from error
