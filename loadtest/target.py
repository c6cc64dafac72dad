"""The service under test: its description and clients of its ranks."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from client.rank import WORKER, RankClient
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.wire_ranks import mesh_from_proto
from rlhf.errors import ConfigError, RlhfError
from rlhf.roles import find_role
from rlhf.v1 import worker_pb2

CONNECT_S = 10.0
"""Timeout of Describe and of opening a session, in seconds."""

_NOT_SERVED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)


class Target:
    """A service under test.

    Args:
        address: host:port of rank 0.
        role: Role of the service, as `rlhf.roles.find_role` takes it.
        connections: Number of connections to each rank, which calls cycle through.
        description: Response of rank 0 to Describe; None for a server that does not serve it.
    """

    def __init__(
        self, address: str, role: str, connections: int, description: worker_pb2.DescribeResponse | None
    ) -> None:
        self.address = address
        self.role = role
        self.description = description
        self._connections = connections
        peers = description.ranks[1:] if description else ()
        self._addresses = [address, *(rank.endpoint.address for rank in peers)]

    @staticmethod
    async def find(address: str, role: str, connections: int) -> Target:
        """Calls Describe on the service at an address and makes its Target.

        Raises:
            ConfigError: The service has a different role.
            RlhfError: The service does not respond within `CONNECT_S`, or responds with an error.
        """
        client = RankClient(role, 0, address)
        try:
            description = await client.call(WORKER["Describe"], worker_pb2.DescribeRequest(), CONNECT_S)
        except RlhfError as error:
            cause = error.__cause__
            if not isinstance(cause, grpc.aio.AioRpcError) or cause.code() not in _NOT_SERVED:
                raise
            description = None
        finally:
            await client.close()
        if description and description.role and description.role != find_role(role).name:
            raise ConfigError(f"{address} serves role {description.role}, not {role}")
        return Target(address, role, connections, description)

    @property
    def num_ranks(self) -> int:
        return len(self._addresses)

    @property
    def mesh(self) -> Mesh:
        return mesh_from_proto(self.description.mesh) if self.description else Mesh()

    @property
    def wants_text(self) -> bool:
        """Whether the service, a reward, scores texts. True for a server that does not serve Describe."""
        return not self.description or self.description.input_form != worker_pb2.INPUT_FORM_TENSOR

    @property
    def dispatches(self) -> bool:
        """Whether the service serves WorkerService.Dispatch, so that calls can be sent over a stream."""
        return self.description is not None and self.description.dispatches

    def clients(self, session: str = "") -> list[list[RankClient]]:
        """Makes new clients, a list of one per connection for each rank. The caller must close them, see `close_all`.

        Args:
            session: Name of the session whose calls go over streams; empty: calls are unary. See `RankClient`.
        """
        is_ours = self.description is not None and self.description.epoch > 0
        return [
            [
                RankClient(
                    self.role, rank, address, is_ours=is_ours, session=session, shares_connection=False
                )
                for _ in range(self._connections)
            ]
            for rank, address in enumerate(self._addresses)
        ]


async def close_all(clients: list[list[RankClient]]) -> None:
    """Closes all clients at the same time."""
    await asyncio.gather(*(client.close() for connections in clients for client in connections))
