"""Handlers of those WorkerService methods that are not queued, and so are answered even while the rank computes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from nccl_transfer.refs.wire_ranks import mesh_to_proto
from nccl_transfer.store.stat import StoreStat
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Handler
from rlhf.access import Access
from rlhf.contract import Method
from rlhf.errors import InvalidRequest, RlhfError, ShuttingDown
from rlhf.guard import Guard
from rlhf.roles import find_role
from rlhf.v1 import worker_pb2
from services.runtime.boundary import RpcBoundary
from services.runtime.dispatch import DispatchStream
from services.runtime.execution import CallQueue
from services.runtime.hosts import cpu_name
from services.runtime.sessions import check_name
from services.runtime.worker import Registration, Worker, require
from services.storage.written import WrittenFile
from settings.strict import LONGEST_S

WATCH_PAUSE_S = 0.05
"""Least seconds between two statuses that Watch sends, so that it may not show every short call."""


class WorkerHandlers:
    """Handlers of Describe, Dispatch, Watch, Cancel, Release, EndSession, Introduce and AwaitCheckpoint.

    Args:
        worker: Worker of this rank.
        methods: Methods whose calls are queued, with their registrations, by path.
        queue: Queue of the rank's calls.
        store: Store of the rank's rows.
        ranks_info: RankInfo of each rank of the service, in rank order.
        boundary: Turns errors of calls on a Dispatch stream into statuses.
        guard: Knows what the client of an RPC may do.
        stop: Event that is set when the rank begins to shut down; ends Watch.
        drained: Event that is set once the last call has been answered; ends Dispatch.
    """

    def __init__(
        self,
        worker: Worker,
        methods: Mapping[str, tuple[Method, Registration]],
        queue: CallQueue,
        store: TensorStore,
        ranks_info: Sequence[worker_pb2.RankInfo],
        boundary: RpcBoundary,
        guard: Guard,
        stop: asyncio.Event,
        drained: asyncio.Event,
    ) -> None:
        self._worker = worker
        self._methods = methods
        self._queue = queue
        self._store = store
        self._ranks_info = ranks_info
        self._boundary = boundary
        self._guard = guard
        self._stop = stop
        self._drained = drained
        self._process = psutil.Process()
        # Read now: the directory may be removed while the service runs.
        self._working_directory = str(Path.cwd())
        self._version, self._cpu = importlib.metadata.version("rlhf-cluster"), cpu_name()

    def handlers(self) -> dict[str, Handler]:
        """Returns the handlers by method name."""
        return {
            "Describe": self._describe,
            "Dispatch": self._dispatch,
            "Watch": self._watch,
            "Cancel": self._cancel,
            "Release": self._release,
            "EndSession": self._end_session,
            "Introduce": self._introduce,
            "AwaitCheckpoint": self._await_checkpoint,
        }

    async def _describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        ranks, sessions = self._worker.ranks, self._queue.sessions
        answer = self._worker.describe()
        answer.MergeFrom(
            worker_pb2.DescribeResponse(
                role=find_role(self._worker.role).name,
                service=self._worker.service,
                rank=ranks.rank,
                epoch=ranks.epoch,
                mesh=mesh_to_proto(ranks.mesh),
                threads=self._worker.table.threads,
                policy_version=self._worker.policy_version,
                state_id=self._worker.state_id,
                version=self._version,
                cpu=self._cpu,
                dispatches=True,
                session=sessions.holder,
                session_is_connected=sessions.is_connected(sessions.holder),
                session_started_unix_ns=sessions.started_unix_ns,
                is_shared=sessions.is_shared,
                sessions=len(sessions.names),
                working_directory=self._working_directory,
                output_roots=map(str, self._worker.output_roots),
            )
        )
        if not request.brief:
            answer.ranks.extend(self._ranks_info)
            if self._guard.granted(context) < Access.CALL:
                _hide_keys(answer)
            answer.methods.extend(
                worker_pb2.MethodInfo(
                    name=method.path[1:],
                    transfer_protocol=registration.protocol,
                    beside=method.snake_name in self._worker.beside,
                )
                for method, registration in self._methods.values()
            )
            answer.table = self._worker.config_table.model_dump_json()
        return answer

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        """Yields the rank's status at each change of phase or call and at least every `interval_s` (0: 1 s), but not
        more often than every WATCH_PAUSE_S; raises ShuttingDown when the rank shuts down."""
        if not 0 <= request.interval_s <= LONGEST_S:
            raise InvalidRequest(
                f"Watch: interval_s is {request.interval_s:g}; it must be from 0 to {LONGEST_S:g}"
            )
        interval_s = max(request.interval_s or 1.0, WATCH_PAUSE_S)
        while not self._stop.is_set():
            changed = self._queue.phase.changed
            yield self._status()
            await asyncio.sleep(min(WATCH_PAUSE_S, interval_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), interval_s - WATCH_PAUSE_S)
        raise ShuttingDown("the service is shutting down")

    def _status(self) -> worker_pb2.WatchResponse:
        """Returns the rank's phase, memory, policy version and gauges, and the running call if there is one."""
        call = self._queue.phase.call
        status = worker_pb2.WatchResponse(
            epoch=self._worker.ranks.epoch,
            phase=self._queue.phase.phase,
            memory_bytes=self._process.memory_info().rss,
            device_memory_bytes=self._worker.device_memory(),
            arena_bytes=self._store.stat().used_bytes,
            policy_version=self._worker.policy_version,
            gauges={**self._worker.gauges(), **_device_gauges(self._store.stat())},
        )
        if call is not None:
            status.method = call.method.name
            status.done, status.done_of = call.context.done, call.context.done_of
            if not self._queue.sessions.is_shared:
                # It begins with the name of the session, by which other runs of a shared rank could end it.
                status.call_id = call.call_id
        return status

    async def _dispatch(self, requests: Any, context: Any) -> None:
        """Serves one Dispatch stream until its caller ends it; raises ShuttingDown once the rank has drained."""
        stream = DispatchStream(self._queue, self._methods, self._boundary.status_of, self._guard, context)
        serving = asyncio.ensure_future(stream.serve())
        stopping = asyncio.ensure_future(self._drained.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise ShuttingDown("the service is shutting down")
            await serving
        finally:
            serving.cancel()
            stopping.cancel()
            await asyncio.wait([serving])

    async def _cancel(self, request: Any, context: Any) -> worker_pb2.CancelResponse:
        return worker_pb2.CancelResponse(found=self._queue.cancel(request.call_id))

    async def _release(self, request: Any, context: Any) -> worker_pb2.ReleaseResponse:
        steps = None if request.all_steps else frozenset(request.steps)
        return worker_pb2.ReleaseResponse(freed_bytes=self._store.release(request.session, steps))

    async def _end_session(self, request: Any, context: Any) -> worker_pb2.EndSessionResponse:
        require(request, "session")
        check_name("session", request.session)
        self._queue.sessions.end(request.session)
        return worker_pb2.EndSessionResponse()

    async def _introduce(self, request: Any, context: Any) -> worker_pb2.IntroduceResponse:
        self._queue.introduce(request.session, request.endpoints)
        return worker_pb2.IntroduceResponse()

    async def _await_checkpoint(self, request: Any, context: Any) -> worker_pb2.AwaitCheckpointResponse:
        require(request, "directory")
        directory = self._worker.output_path(request.directory)
        writing = asyncio.wrap_future(self._worker.writing(directory))
        try:
            # A caller that leaves must not cancel the write.
            files = await asyncio.to_thread(checkpoint_files, directory, await asyncio.shield(writing))
        except OSError as error:
            raise RlhfError(
                f"{error.strerror}: {error.filename}" if error.filename else str(error)
            ) from error
        return worker_pb2.AwaitCheckpointResponse(files=files)


def _device_gauges(stat: StoreStat) -> dict[str, float]:
    """Returns the figures of the arena on a rank's GPU, if it has one, by name."""
    if not stat.device_arena_bytes:
        return {}
    return {
        "arena_device_bytes": stat.device_arena_bytes,
        "arena_device_used_bytes": stat.device_used_bytes,
        "host_copied_bytes": stat.host_copied_bytes,
    }


def checkpoint_files(directory: Path, files: Iterable[WrittenFile]) -> list[worker_pb2.CheckpointFile]:
    """Returns files below a directory with size and sha256. Raises OSError where one cannot be read."""
    return [
        worker_pb2.CheckpointFile(
            path=file.path.relative_to(directory).as_posix(),
            size=file.path.stat().st_size,
            sha256=file.digest(),
        )
        for file in files
    ]


def _hide_keys(answer: worker_pb2.DescribeResponse) -> None:
    """Removes from the endpoints of a description all that opens a way to the rows of a rank."""
    for rank in answer.ranks:
        rank.endpoint.ClearField("adverts")
