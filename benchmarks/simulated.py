"""Simulated ranks of one service: real gRPC ports, all in one process, that answer every call at once and compute
nothing. With them the controller's own cost can be measured at the size of a cluster.

Run as a script, so that the same ranks serve any checkout's controller: prints the port of rank 0, serves until its
standard input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.columns import Jagged, encode_texts
from nccl_transfer.refs.dtypes import TEXT
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.refs.wire_ranks import mesh_from_proto
from rlhf.contract import SERVICES, Method, group_methods
from rlhf.v1 import common_pb2, transfer_pb2, worker_pb2
from services.runtime.server import SERVER_OPTIONS

EPOCH = 1
RANKS_PER_SERVER = 64
"""A gRPC server drops calls at random while 1,000 of them wait for their handlers."""
WORKER, PUT = SERVICES["worker"], SERVICES["transfer"]["Put"]
ADVERTS = {"tcp": bytes(18)}
"""As many bytes as a rank has."""
HOLDER = Endpoint("127.0.0.1:1", epoch=EPOCH)


class SimulatedService:
    """All ranks of a service, whose answers do not depend on which of them is asked.

    Args:
        role: Role of the service.
        mesh: Sizes p, t and d.
        ranks_per_host: So many ranks say that they run on the same host.
    """

    def __init__(self, role: str, mesh: tuple[int, int, int], ranks_per_host: int) -> None:
        self._role = role
        self._shape = worker_pb2.MeshShape(pipeline=mesh[0], tensor=mesh[1], data=mesh[2])
        self._ranks_per_host = ranks_per_host
        self._answers = {
            method.path: self._answer_of(method).SerializeToString()
            for method in group_methods(role).values()
        }
        self._ports: list[int] = []
        self._servers: list[grpc.aio.Server] = []
        self._stopped = asyncio.Event()

    async def start(self) -> int:
        """Listens on one port per rank; returns that of rank 0."""
        handlers = {
            "Describe": self._describe,
            "Cancel": self._cancel,
            "Release": self._release,
            "Introduce": self._introduce,
        }
        table = {name: _unary(WORKER[name], handler) for name, handler in handlers.items()}
        table["Watch"] = grpc.unary_stream_rpc_method_handler(
            self._watch,
            worker_pb2.WatchRequest.FromString,
            worker_pb2.WatchResponse.SerializeToString,
        )
        table["Dispatch"] = grpc.stream_stream_rpc_method_handler(
            self._dispatch,
            worker_pb2.DispatchRequest.FromString,
            worker_pb2.DispatchResponse.SerializeToString,
        )
        service = WORKER["Describe"].service
        handler = grpc.method_handlers_generic_handler(service, table)
        puts = {PUT.name: _unary(PUT, self._put)}
        transfers = grpc.method_handlers_generic_handler(PUT.service, puts)
        for first in range(0, ranks := mesh_from_proto(self._shape).size, RANKS_PER_SERVER):
            server = grpc.aio.server(options=SERVER_OPTIONS)
            server.add_generic_rpc_handlers((handler, transfers))
            for _ in range(min(RANKS_PER_SERVER, ranks - first)):
                self._ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            self._servers.append(server)
        return self._ports[0]

    async def stop(self) -> None:
        self._stopped.set()
        for server in self._servers:
            await server.stop(None)

    @staticmethod
    def _answer_of(method: Method) -> Any:
        timing = common_pb2.Timing(arrived_unix_s=1.0, queue_s=1e-5, store_s=1e-5)
        return method.response(outcome=common_pb2.Outcome(timing=timing, policy_version=1))

    async def _describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        mesh = mesh_from_proto(self._shape)
        ranks = []
        for rank, port in enumerate(() if request.brief else self._ports):
            stage, tensor, data = mesh.position(rank)
            endpoint = common_pb2.Endpoint(
                address=f"127.0.0.1:{port}",
                host_id=f"{self._role} host {rank // self._ranks_per_host}",
                epoch=EPOCH,
                service=self._role,
                rank=rank,
                adverts=ADVERTS,
            )
            position = worker_pb2.MeshPosition(pipeline=stage, tensor=tensor, data=data)
            ranks.append(worker_pb2.RankInfo(endpoint=endpoint, position=position, device="cpu", pid=rank))
        return worker_pb2.DescribeResponse(
            role=self._role, service=self._role, epoch=EPOCH, ranks=ranks, mesh=self._shape, dispatches=True
        )

    async def _cancel(self, request: Any, context: Any) -> worker_pb2.CancelResponse:
        return worker_pb2.CancelResponse()

    async def _release(self, request: Any, context: Any) -> worker_pb2.ReleaseResponse:
        return worker_pb2.ReleaseResponse()

    async def _introduce(self, request: Any, context: Any) -> worker_pb2.IntroduceResponse:
        return worker_pb2.IntroduceResponse()

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        """A service where nothing changes."""
        yield worker_pb2.WatchResponse(epoch=EPOCH)
        await self._stopped.wait()

    async def _dispatch(self, request: Any, context: Any) -> None:
        await context.send_initial_metadata(())
        while isinstance(message := await context.read(), worker_pb2.DispatchRequest):
            if message.method:
                answer = self._answers[message.method]
                await context.write(worker_pb2.DispatchResponse(number=message.number, response=answer))

    async def _put(self, request: transfer_pb2.PutRequest, context: Any) -> transfer_pb2.PutResponse:
        """Keeps nothing."""
        batch = from_proto(request.batch)
        columns: dict[str, Column] = {}
        for number, (name, column) in enumerate(batch.columns.items(), start=1):
            assert isinstance(column, LocalColumn)
            is_text = isinstance(column.values, list)
            values = encode_texts(column.values) if isinstance(column.values, list) else column.values
            array = values.values if isinstance(values, Jagged) else values
            rows = values.lengths if isinstance(values, Jagged) else len(values)
            shard = Shard(HOLDER, number, 64, array.nbytes)
            dtype = TEXT if is_text else str(array.dtype)
            columns[name] = RemoteColumn.of_shard(dtype, array.shape[1:], rows, shard)
        return transfer_pb2.PutResponse(batch=to_proto(Batch(batch.rows, columns)))


def _unary(method: Method, handler: Any) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        handler,
        method.request.FromString,  # type: ignore[attr-defined]
        method.response.SerializeToString,  # type: ignore[attr-defined]
    )


async def _serve(role: str, mesh: tuple[int, int, int], ranks_per_host: int) -> None:
    service = SimulatedService(role, mesh, ranks_per_host)
    print(await service.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    with contextlib.suppress(asyncio.CancelledError):
        await service.stop()


def main() -> None:
    """Serves what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", required=True)
    parser.add_argument("--mesh", required=True, help="p-t-d")
    parser.add_argument("--ranks-per-host", type=int, default=8)
    flags = parser.parse_args()
    pipeline, tensor, data = map(int, flags.mesh.split("-"))
    asyncio.run(_serve(flags.role, (pipeline, tensor, data), flags.ranks_per_host))


if __name__ == "__main__":
    main()
