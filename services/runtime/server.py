"""The gRPC server of one rank: the role's service, WorkerService, TransferService, health and reflection.

The methods of calls run on a thread of `CallQueue`, not on the event loop, so a rank that computes still answers
health checks, Describe, Watch, Cancel and Release without delay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from nccl_transfer.bucket_board import BucketBoard
from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire_ranks import endpoint_to_proto
from nccl_transfer.registry import create_readers, served_transports, unavailable
from nccl_transfer.sources import Sources
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports import host_id
from nccl_transfer.transports.base import Handler
from rlhf.channels import listen, open_server
from rlhf.contract import CHANNEL_OPTIONS, SERVICES, Method, role_methods
from rlhf.errors import ConfigError
from rlhf.file_limit import most_connections
from rlhf.rendezvous import is_on_one_host
from rlhf.security import current
from rlhf.stacks import dump_tasks_too
from rlhf.v1 import worker_pb2
from services.runtime.boundary import RpcBoundary, timeout_s
from services.runtime.execution import CallQueue
from services.runtime.gpus import DRIVER
from services.runtime.hosts import check_reachable, host_addresses
from services.runtime.transfer_handlers import TransferHandlers
from services.runtime.worker import Worker, registered_methods
from services.runtime.worker_handlers import WorkerHandlers
from settings.service import ServiceTable

SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
)
"""gRPC options of a rank's server."""


class RankServer:
    """gRPC server of one worker. `serve` runs it until SIGTERM or SIGINT; then it refuses all calls but the running
    one, waits up to `execution.GRACE_S` seconds for that to end, and stops.

    Args:
        worker: The rank's worker, loaded and ready.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.methods = registered_methods(type(worker))
        table = worker.table
        gpu = worker.gpu()
        self._on_gpu = gpu is not None
        self.store = TensorStore(table.arena_mb << 20, table.checksums, _device_arena(gpu, table))
        self.fetcher = Fetcher(host_id(), create_readers(table.transports, on_gpu=self._on_gpu), self.store)
        self.worker.buckets, self.worker.fetcher = BucketBoard(self.store), self.fetcher
        self.unavailable = unavailable(on_gpu=self._on_gpu)
        self._hosts = host_addresses(table)
        self._stop = asyncio.Event()
        self._drained = asyncio.Event()

    async def serve(self, drained: Callable[[], None] = lambda: None) -> None:
        """Serves until SIGTERM or SIGINT, then drains and stops the server.

        Args:
            drained: Called after the last call has been answered and before the server stops. Default: no action.

        Raises:
            ConfigError: The server cannot listen on the configured address, or another host cannot reach a rank.
            OutOfStep: A rank of the service did not start in time.
        """
        self._log_missing_transports()
        self.queue = CallQueue(self.worker, self.store, self.fetcher)
        offered = served_transports(self.worker.table.transports, on_gpu=self._on_gpu)
        self.sources = Sources(self.store, self._hosts.listen.strip("[]"), offered)
        try:
            classes = {each.path: each.access for some in self._services().values() for each in some.values()}
            most = ("grpc.max_allowed_incoming_connections", most_connections())
            server, self._guard = open_server((*SERVER_OPTIONS, most), classes)
            self.port = self._bind(server, self.worker.table)
            ranks_info = self._meet_peers(self.port)
            # Not before: the loop handles no signal while ranks wait here for a rank that has failed.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
            dump_tasks_too(asyncio.get_running_loop())
            serving: Any = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
            self._add_services(server, ranks_info, serving)
            await server.start()
            for service in ("", *self._services()):
                await serving.set(service, health_pb2.HealthCheckResponse.SERVING)
            self._print_ready_line()
            await self._stop.wait()
            await serving.enter_graceful_shutdown()
            await self.queue.drain()
            self._drained.set()
            drained()
            self.sources.close_rpcs()
            await server.stop(grace=1.0)
        finally:
            self.sources.close()
            self.fetcher.close()
            self.store.close()

    def _log_missing_transports(self) -> None:
        """Logs which transports are not available and why; on rank 0 alone, and only on a host with NVIDIA GPUs."""
        if self.worker.ranks.rank == 0 and DRIVER.exists():
            for reason in sorted(set(self.unavailable.values())):
                missing = [name for name, why in self.unavailable.items() if why == reason]
                logging.info("not available: transport %s: %s", ", ".join(missing), reason)

    def _print_ready_line(self) -> None:
        """Prints name, address and number of ranks of the service, on rank 0 alone."""
        size = self.worker.ranks.size
        if self.worker.ranks.rank == 0:
            ranks = "1 rank" if size == 1 else f"{size} ranks"
            print(
                f"ready: {self.worker.service} at {self._hosts.advertised}:{self.port}, {ranks}", flush=True
            )

    def _bind(self, server: grpc.aio.Server, table: ServiceTable) -> int:
        """Binds the server to the configured address on rank 0, and to a free port on any other rank; returns the
        port. Raises ConfigError if the address is in use or invalid."""
        address = table.bind_address if self.worker.ranks.rank == 0 else f"{self._hosts.listen}:0"
        key = f"services.{self.worker.service}.{table.bind_key}"
        try:
            port = listen(server, address)
        except RuntimeError as error:
            raise ConfigError(f"{key}: cannot listen on {address}: {error}") from None
        if port == 0:
            raise ConfigError(f"{key}: {address} is in use")
        return port

    def _meet_peers(self, port: int) -> list[worker_pb2.RankInfo]:
        """Exchanges addresses with all ranks of the service and sets `store.endpoint`; returns one RankInfo per rank,
        in rank order. Collective.

        Raises:
            OutOfStep: A peer did not come.
            ConfigError: Ranks are on several hosts, and one of them has a loopback address.
        """
        ranks = self.worker.ranks
        own = Endpoint(
            f"{self._hosts.advertised}:{port}",
            host_id(),
            ranks.epoch,
            self.worker.service,
            ranks.rank,
            self.sources.adverts(),
        )
        self.store.endpoint = own
        device_arena = self.store.stat().device_arena_bytes
        details = ranks.exchange(
            own, {"pid": os.getpid(), "device_arena_bytes": device_arena, **self.worker.device()}
        )
        check_reachable(ranks.endpoints, self._hosts.listen)
        self._warn_of_plain_collectives()
        infos = []
        for rank, (endpoint, detail) in enumerate(zip(ranks.endpoints, details, strict=True)):
            pipeline, tensor, data = ranks.mesh.position(rank)
            position = worker_pb2.MeshPosition(pipeline=pipeline, tensor=tensor, data=data)
            infos.append(
                worker_pb2.RankInfo(endpoint=endpoint_to_proto(endpoint), position=position, **detail)
            )
        return infos

    def _warn_of_plain_collectives(self) -> None:
        """Logs a warning, on rank 0, if this process has certificates and the ranks are on several hosts."""
        if current().certificates and self.worker.ranks.rank == 0 and not is_on_one_host(os.environ):
            logging.warning(
                "warning: gloo, NCCL and the store between the hosts of this service have no TLS; they need a network "
                "that nobody else reaches (SECURITY.md)"
            )

    def _add_services(
        self, server: grpc.aio.Server, ranks_info: Sequence[worker_pb2.RankInfo], serving: Any
    ) -> None:
        """Adds the handlers of the role's services, WorkerService, TransferService, health and reflection to the
        server."""
        boundary = RpcBoundary(self.worker, self._stop)
        worker, transfer = SERVICES["worker"], SERVICES["transfer"]
        own = WorkerHandlers(
            self.worker,
            self.methods,
            self.queue,
            self.store,
            ranks_info,
            boundary,
            self._guard,
            self._stop,
            self._drained,
        )
        rows = TransferHandlers(
            self.store, self.fetcher, self.worker.buckets, self.queue.sessions, self.unavailable
        )
        direct = {
            **{worker[name].path: handler for name, handler in own.handlers().items()},
            **{transfer[name].path: handler for name, handler in rows.handlers().items()},
            **self.sources.handlers(),
        }
        for service, methods in self._services().items():
            table = {}
            for method in methods.values():
                handler = self._in_turn(method) if method.path in self.methods else direct.get(method.path)
                if handler is None:
                    raise ConfigError(
                        f"{method.path}: the source of its transport has no handler of this name"
                    )
                table[method.name] = boundary.rpc_handler(method, handler)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, table),))
        health_pb2_grpc.add_HealthServicer_to_server(serving, server)
        names = [*self._services(), health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)

    def _in_turn(self, method: Method) -> Handler:
        """Returns a handler that queues each call of a method and awaits its response; queued calls of all methods
        run one at a time on this rank, in the order of their sequence numbers."""
        method, registration = self.methods[method.path]

        async def run(request: Any, context: Any) -> Any:
            self._guard.check(self._guard.granted(context), method, request)
            if method.name == "Profile" and not request.HasField("call"):
                path = await asyncio.to_thread(self.worker.request_profile, request)
                return worker_pb2.ProfileResponse(path=path)
            response = self.queue.start(method, registration, request, timeout_s(context))
            return await self.queue.wait(request.call.call_id, response)

        return run

    def _services(self) -> dict[str, Mapping[str, Method]]:
        """Returns the methods of the services of the worker's roles, of WorkerService, TransferService and those of
        transports, by full name of the service."""
        roles = [role_methods(role) for role in (self.worker.role, *self.worker.also_serves)]
        found = (*roles, SERVICES["worker"], SERVICES["transfer"], *self.sources.services())
        return {next(iter(methods.values())).service: methods for methods in found}


def _device_arena(
    gpu: tuple[Cuda, DeviceTensors] | None, table: ServiceTable
) -> tuple[DeviceArena, DeviceTensors] | None:
    """Returns the arena on a rank's GPU and the factory of tensors in it; None if the rank has no such arena.

    Raises:
        OutOfSpace: The GPU has too little free memory.
    """
    if gpu is None or not table.device_arena_bytes:
        return None
    cuda, tensors = gpu
    return DeviceArena(cuda, table.device_arena_bytes), tensors
