"""The gRPC server of one rank: the role's service, WorkerService, TransferService, health and reflection.

The event loop only answers and waits; calls compute on the queue's thread, so a busy rank still answers
Health, Describe, Watch, Cancel and Release at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from google.rpc import status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.refs.wire_ranks import endpoint_to_proto, mesh_to_proto
from nccl_transfer.registry import create_transports, unavailable
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import (
    ArenaServer,
    ByteServer,
    host_id,
    mark_corrupt_response,
    serve_fetch,
    stat_response,
)
from nccl_transfer.transports.gpu.sources import DeviceSources
from rlhf.channels import listen
from rlhf.contract import CHANNEL_OPTIONS, SERVICES, Method
from rlhf.errors import (
    STATUS_KEY,
    CallCancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    PeerFailed,
    Refused,
    RewardFailed,
    ServiceLost,
    full_traceback,
    shortened,
    to_status,
)
from rlhf.v1 import transfer_pb2, worker_pb2
from services.runtime.dispatch import DispatchStream
from services.runtime.execution import LONGEST_S, CallQueue, time_to_answer
from services.runtime.hosts import check_reachable, cpu_name, host_addresses
from services.runtime.sessions import MAX_NAME, check_name
from services.runtime.worker import Registration, Worker, registered_methods
from settings.service import ServiceTable

DEFAULT_TIMEOUT_S = 600.0
"""Deadline of a call whose client set none."""

NOT_OF_THIS_RANK = (CallCancelled, DeadlineExceeded, InvalidRequest, PeerFailed, Refused, RewardFailed)
"""Errors whose text says all there is to say in the log of this rank."""

WATCH_PAUSE_S = 0.05
"""Shortest time between two statuses: of short calls, Watch tells only some."""

SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class RankServer:
    """Serves one worker until SIGTERM or SIGINT, then drains.

    Args:
        worker: The rank's worker, loaded and ready.
        name: Name of the service in the config.
    """

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker = worker
        self.name = name
        self.methods = registered_methods(type(worker))
        table = worker.table
        self.store = TensorStore(table.arena_mb << 20, table.checksums)
        self.fetcher = Fetcher(host_id(), create_transports(table.transports), self.store)
        self.sources = DeviceSources.of_this_process(self.store)
        self.unavailable = unavailable()
        self._hosts = host_addresses(table)
        self._stop = asyncio.Event()
        self._drained = asyncio.Event()
        self._process = psutil.Process()
        self._ranks_info: list[worker_pb2.RankInfo] = []

    async def serve(self, drained: Callable[[], None] = lambda: None) -> None:
        """Serves until told to stop.

        Args:
            drained: Called when the last call is answered, and nothing is left but to leave.

        Raises:
            ConfigError: The address is in use.
        """
        self._tell_of_missing_transports()
        self.queue = CallQueue(self.worker, self.store, self.fetcher)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        self.port = self._bind(server, self.worker.table)
        arena = ArenaServer(self.store)
        stream = ByteServer(self.store, self._hosts.listen.strip("[]"))
        try:
            self._meet_peers(self.port, arena, stream)
            # Not before: the loop could not hear of a signal while ranks wait for one that has failed.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
            serving: Any = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
            self._add_services(server, serving)
            await server.start()
            for service in ("", *self._service_names()):
                await serving.set(service, health_pb2.HealthCheckResponse.SERVING)
            self._say_ready()
            await self._stop.wait()
            await serving.enter_graceful_shutdown()
            await self.queue.drain()
            self._drained.set()
            drained()
            self.sources.close()
            await server.stop(grace=1.0)
        finally:
            arena.close()
            stream.close()
            self.fetcher.close()
            self.store.close()

    def _tell_of_missing_transports(self) -> None:
        """Once for the service, and only on a machine whose GPUs could use them."""
        if self.worker.ranks.rank == 0 and Path("/dev/nvidiactl").exists():
            for reason in sorted(set(self.unavailable.values())):
                missing = [name for name, why in self.unavailable.items() if why == reason]
                logging.info("not available: transport %s: %s", ", ".join(missing), reason)

    def _say_ready(self) -> None:
        """Prints one line: the service serves, where, and on how many ranks."""
        size = self.worker.ranks.size
        if self.worker.ranks.rank == 0:
            ranks = "1 rank" if size == 1 else f"{size} ranks"
            print(f"ready: {self.name} at {self._hosts.advertised}:{self.port}, {ranks}", flush=True)

    def _bind(self, server: grpc.aio.Server, table: ServiceTable) -> int:
        address = table.bind_address if self.worker.ranks.rank == 0 else f"{self._hosts.listen}:0"
        key = f"services.{self.name}.{table.bind_key}"
        try:
            port = listen(server, address)
        except RuntimeError as error:
            raise ConfigError(f"{key}: cannot listen on {address}: {error}") from None
        if port == 0:
            raise ConfigError(f"{key}: {address} is in use")
        return port

    def _meet_peers(self, port: int, arena: ArenaServer, stream: ByteServer) -> None:
        ranks = self.worker.ranks
        own = Endpoint(
            f"{self._hosts.advertised}:{port}",
            host_id(),
            arena.name,
            ranks.epoch,
            self.name,
            ranks.rank,
            self.sources.device_uuid,
            stream.port,
            stream.key,
            self.sources.nccl_version,
        )
        self.store.endpoint = own
        details = ranks.exchange(own, {"pid": os.getpid(), **self.worker.device()})
        check_reachable(ranks.endpoints, self._hosts.listen)
        for rank, (endpoint, detail) in enumerate(zip(ranks.endpoints, details, strict=True)):
            pipeline, tensor, data = ranks.mesh.position(rank)
            self._ranks_info.append(
                worker_pb2.RankInfo(
                    endpoint=endpoint_to_proto(endpoint),
                    position=worker_pb2.MeshPosition(pipeline=pipeline, tensor=tensor, data=data),
                    **detail,
                )
            )

    def _add_services(self, server: grpc.aio.Server, serving: Any) -> None:
        worker = {
            "Describe": self._describe,
            "Dispatch": self._dispatch,
            "Watch": self._watch,
            "Cancel": self._cancel,
            "Release": self._release,
            "EndSession": self._end_session,
            "Introduce": self._introduce,
        }
        transfer = {
            "Fetch": self._fetch,
            "TakeRelayed": self._take_relayed,
            "Put": self._put,
            "Stat": self._stat,
            "Condemn": self._mark_corrupt,
            **self.sources.handlers(),
        }
        for key in self._served():
            table = {}
            for method in SERVICES[key].values():
                direct = {**worker, **transfer}.get(method.name)
                registered = self.methods.get(method.snake_name)
                handler = direct or self._runner(method, registered[1] if registered else None)
                table[method.name] = _rpc_handler(method, self._guarded(method, handler))
            service = next(iter(SERVICES[key].values())).service
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, table),))
        health_pb2_grpc.add_HealthServicer_to_server(serving, server)
        names = [*self._service_names(), health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)

    def _service_names(self) -> list[str]:
        """Full names of the gRPC services that this rank serves, for health and reflection."""
        return [next(iter(SERVICES[key].values())).service for key in self._served()]

    def _served(self) -> tuple[str, ...]:
        return (self.worker.role, *self.worker.also_serves, "worker", "transfer")

    def _runner(self, method: Method, registration: Registration | None) -> Callable[..., Awaitable[Any]]:
        assert registration is not None, f"{method.path} is neither direct nor registered"

        async def run(request: Any, context: Any) -> Any:
            response = self.queue.start(method, registration, request, _timeout_s(context))
            return await self.queue.wait(request.call.call_id, response)

        return run

    def _guarded(self, method: Method, handler: Callable[..., Any]) -> Callable[..., Any]:
        """The one boundary at which errors become gRPC statuses."""

        async def fail(error: Exception, request: Any, context: Any) -> None:
            call = getattr(request, "call", None)
            call_id = call.call_id[:MAX_NAME] if call is not None else ""
            status = self._status_of(error, method.name, call_id)
            context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
            code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
            await context.abort(code, status.message)

        async def unary(request: Any, context: Any) -> Any:
            try:
                request = request if method.takes_stream else method.parse(request)
                return await handler(request, context)
            except Exception as error:  # noqa: BLE001 - mapped to a status, with its traceback
                await fail(error, request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                request = method.parse(request)
                async for response in handler(request, context):
                    yield response
            except Exception as error:  # noqa: BLE001 - mapped to a status, with its traceback
                await fail(error, request, context)

        return stream if method.streams and not method.takes_stream else unary

    def _status_of(self, error: Exception, method: str, call_id: str) -> status_pb2.Status:
        """The status of a call that failed, which is noted in the log."""
        self._log_failure(error, method, call_id)
        where = {"service": self.name, "role": self.worker.role, "rank": str(self.worker.ranks.rank)}
        return to_status(error, {**where, "method": method, "call_id": call_id})

    def _log_failure(self, error: Exception, method: str, call_id: str) -> None:
        """Logs errors of the caller or a peer as one line, any other with its traceback."""
        if self._stop.is_set():
            return
        if isinstance(error, NOT_OF_THIS_RANK) and error.__cause__ is None:
            logging.info("%s %s: %s: %s", method, call_id, type(error).__name__, shortened(str(error)))
        else:
            logging.error("%s %s failed:\n%s", method, call_id, full_traceback(error))

    async def _describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        ranks, mesh = self.worker.ranks, self.worker.ranks.mesh
        session = self.queue.session
        answer = self.worker.describe()
        answer.MergeFrom(
            worker_pb2.DescribeResponse(
                role=self.worker.role,
                service=self.name,
                rank=ranks.rank,
                epoch=ranks.epoch,
                mesh=mesh_to_proto(mesh),
                threads=self.worker.table.threads,
                policy_version=self.worker.policy_version,
                version=importlib.metadata.version("rlhf-cluster"),
                cpu=cpu_name(),
                dispatches=True,
                session=session.holder,
                session_is_connected=session.is_connected,
                session_started_unix_ns=session.started_unix_ns,
                working_directory=str(Path.cwd()),
                output_roots=map(str, self.worker.output_roots),
            )
        )
        if not request.brief:
            answer.ranks.extend(self._ranks_info)
            answer.methods.extend(
                worker_pb2.MethodInfo(name=method.path[1:], transfer_protocol=registration.protocol)
                for method, registration in self.methods.values()
            )
            answer.table = self.worker.config_table.model_dump_json()
        return answer

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        if not 0 <= request.interval_s <= LONGEST_S:
            raise InvalidRequest(
                f"Watch: interval_s is {request.interval_s:g}; it must be from 0 to {LONGEST_S:g}"
            )
        interval_s = max(request.interval_s or 1.0, WATCH_PAUSE_S)
        while not self._stop.is_set():
            changed = self.queue.changed
            yield self._status()
            await asyncio.sleep(min(WATCH_PAUSE_S, interval_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), interval_s - WATCH_PAUSE_S)
        raise ServiceLost("the service is shutting down")

    def _status(self) -> worker_pb2.WatchResponse:
        running = self.queue.running
        status = worker_pb2.WatchResponse(
            epoch=self.worker.ranks.epoch,
            phase=self.queue.phase,
            memory_bytes=self._process.memory_info().rss,
            device_memory_bytes=self.worker.device_memory(),
            arena_bytes=self.store.stat().used_bytes,
            policy_version=self.worker.policy_version,
        )
        if running is not None:
            status.method, status.call_id = running.method.name, running.context.call.call_id
            status.done, status.done_of = running.context.done, running.context.done_of
        return status

    async def _dispatch(self, requests: Any, context: Any) -> None:
        methods = {method.path: (method, registration) for method, registration in self.methods.values()}
        stream = DispatchStream(self.queue, methods, self._status_of, context)
        serving = asyncio.ensure_future(stream.serve())
        stopping = asyncio.ensure_future(self._drained.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise ServiceLost("the service is shutting down")
            await serving
        finally:
            serving.cancel()
            stopping.cancel()
            await asyncio.wait([serving])

    async def _cancel(self, request: Any, context: Any) -> worker_pb2.CancelResponse:
        return worker_pb2.CancelResponse(found=self.queue.cancel(request.call_id))

    async def _release(self, request: Any, context: Any) -> worker_pb2.ReleaseResponse:
        steps = None if request.all_steps else frozenset(request.steps)
        return worker_pb2.ReleaseResponse(freed_bytes=self.store.release(request.session, steps))

    async def _end_session(self, request: Any, context: Any) -> worker_pb2.EndSessionResponse:
        check_name("session", request.session)
        self.queue.session.end(request.session)
        return worker_pb2.EndSessionResponse()

    async def _introduce(self, request: Any, context: Any) -> worker_pb2.IntroduceResponse:
        self.queue.introduce(request.session, request.endpoints)
        return worker_pb2.IntroduceResponse()

    def _fetch(self, request: Any, context: Any) -> AsyncIterator[transfer_pb2.FetchResponse]:
        return serve_fetch(self.store, request)

    async def _take_relayed(self, request: Any, context: Any) -> transfer_pb2.TakeRelayedResponse:
        return await self.fetcher.relays.take(request, _timeout_s(context))

    async def _put(self, request: transfer_pb2.PutRequest, context: Any) -> transfer_pb2.PutResponse:
        if not request.session or request.session != self.queue.session.name:
            raise Refused(f"session {request.session!r} is not the current one, so its rows are not kept")
        batch, lease = from_proto(request.batch), Lease(request.session, request.step)
        stored = await asyncio.to_thread(self.store.put_batch, batch, lease)
        return transfer_pb2.PutResponse(batch=to_proto(stored))

    async def _stat(self, request: Any, context: Any) -> transfer_pb2.StatResponse:
        return stat_response(self.store, self.fetcher.traffic(), self.unavailable)

    async def _mark_corrupt(self, request: Any, context: Any) -> transfer_pb2.CondemnResponse:
        return mark_corrupt_response(self.store, request)


def _timeout_s(context: Any) -> float:
    """Time to answer in, so that the caller hears what was late."""
    remaining = context.time_remaining()
    return DEFAULT_TIMEOUT_S if remaining is None else time_to_answer(remaining)


def _rpc_handler(method: Method, function: Callable[..., Any]) -> grpc.RpcMethodHandler:
    if method.takes_stream:
        make = grpc.stream_stream_rpc_method_handler
    elif method.streams:
        make = grpc.unary_stream_rpc_method_handler
    else:
        make = grpc.unary_unary_rpc_method_handler
    return make(
        function,
        request_deserializer=None,  # in `_guarded`, so that what cannot be read is told as any other bad request
        response_serializer=method.response.SerializeToString,  # type: ignore[attr-defined]
    )
