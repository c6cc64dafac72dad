"""The source's side of the cuda_ipc transport; see `nccl_transfer.transports.gpu.cuda_ipc`."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from nccl_transfer.devices.cuda import Cuda, DeviceBuffer, Event
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Handler, Source
from nccl_transfer.transports.common import check_epoch
from rlhf.errors import InvalidRequest, Refused
from rlhf.v1 import cuda_ipc_pb2 as pb

HEADER_BYTES = 64
GENERATION = struct.Struct("<Q")
"""Format of the generation, the first field of the header of a slot."""

SLOTS = 2
SLOT_BYTES = 32 << 20
"""Data bytes of a slot. A source allocates SLOTS slots of device memory for each reader."""


class _StagingMemory:
    """Staging memory for one reader, the events of its slots, and the thread that fills it."""

    def __init__(self, cuda: Cuda, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.ended = asyncio.Event()
        self.events: list[Event] = []
        with ExitStack() as unless_made:
            self.memory = DeviceBuffer(cuda, SLOTS * (HEADER_BYTES + slot_bytes))
            unless_made.callback(self.memory.free)
            for _ in range(SLOTS):
                self.events.append(cuda.event())
                unless_made.callback(self.events[-1].close)
            self.handles = pb.OpenStagingResponse(
                memory_handle=cuda.share(self.memory.pointer),
                event_handles=[event.handle for event in self.events],
                slot_bytes=slot_bytes,
            )
            unless_made.pop_all()
        self._cuda = cuda
        self._newest = [0] * SLOTS
        self._worker = ThreadPoolExecutor(1, "staging")

    def check(self, request: pb.StageRequest) -> None:
        """Checks a request and records its generation as the newest of its slot.

        Raises:
            InvalidRequest: The slot does not exist, or is too small.
            Refused: The generation is not newer than an earlier one of the slot.
        """
        nbytes = sum(r.nbytes for r in request.ranges)
        if request.slot >= SLOTS or nbytes > self.slot_bytes:
            raise InvalidRequest(
                f"{nbytes} bytes in slot {request.slot}: there are {SLOTS} of {self.slot_bytes}"
            )
        newest = self._newest[request.slot]  # requests for different slots may arrive in any order
        if request.generation <= newest:
            raise Refused(f"slot {request.slot}: generation {request.generation} is not newer than {newest}")
        self._newest[request.slot] = request.generation

    async def fill(self, store: TensorStore, request: pb.StageRequest) -> None:
        """Enqueues, in the thread, the copies of the request's ranges into its slot. Raises as `TensorStore.copy`."""
        await asyncio.wrap_future(self._worker.submit(self._fill, store, request))

    def end(self) -> None:
        """Frees memory and events once the thread has finished its current work; does not wait for it. Idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            self._worker.submit(self._free)
            self._worker.shutdown(wait=False)

    def _fill(self, store: TensorStore, request: pb.StageRequest) -> None:
        header = self.memory.pointer + request.slot * (HEADER_BYTES + self.slot_bytes)
        self._cuda.copy_in(header, memoryview(GENERATION.pack(0)))
        pointer = header + HEADER_BYTES
        for r in request.ranges:
            store.copy(r.shard, r.start, r.nbytes, lambda data, to=pointer: self._cuda.copy_in(to, data))
            pointer += r.nbytes
        self._cuda.copy_in(header, memoryview(GENERATION.pack(request.generation)))
        self.events[request.slot].record()

    def _free(self) -> None:
        self._cuda.synchronize()
        self.memory.free()
        for event in self.events:
            event.close()


def _handles(arena: DeviceArena) -> pb.OpenArenaResponse:
    """Returns the handles by which another process opens an arena."""
    return pb.OpenArenaResponse(
        memory_handle=arena.cuda.share(arena.pointer),
        nbytes=arena.nbytes,
        event_handles=[event.handle for event in arena.ready],
    )


class CudaIpcSource(Source):
    """Handlers of the RPCs by which a rank sends its shards by CUDA IPC. They run in the event loop and copy in one
    thread per reader.

    Args:
        store: Store that holds the shards.
        cuda: The GPU on which bytes are staged.
        slot_bytes: Data bytes of a slot. Default: SLOT_BYTES, 32 MiB.
    """

    service = "rlhf.v1.cuda_ipc_pb2:CudaIpcService"

    def __init__(self, store: TensorStore, cuda: Cuda, slot_bytes: int = SLOT_BYTES) -> None:
        self._store = store
        self._cuda = cuda
        self._slot_bytes = slot_bytes
        self._stagings: dict[str, _StagingMemory] = {}
        self._closed = asyncio.Event()

    def advert(self) -> bytes:
        """Returns the UUID of the GPU."""
        return self._cuda.uuid.encode()

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "OpenArena": lambda request, _: self.open_arena(request),
            "OpenStaging": lambda request, _: self.open_staging(request),
            "Stage": lambda request, _: self.stage(request),
        }

    async def open_arena(self, request: pb.OpenArenaRequest) -> AsyncIterator[pb.OpenArenaResponse]:
        """Handles the OpenArena RPC: yields the handles of the store's arena on the GPU, and stays open until the
        source is closed or the reader leaves.

        Raises:
            Refused: The request is for another epoch of the service, the reader is on another GPU, or the store has
                no arena on its GPU.
        """
        check_epoch(self._store, request.epoch)
        self._check_gpu(request.device_uuid)
        if self._store.device is None:
            raise Refused("this rank has no arena on its GPU: its arena_device_mb is 0")
        yield await asyncio.to_thread(_handles, self._store.device.arena)
        await self._closed.wait()

    async def _make_staging(self) -> _StagingMemory:
        """Allocates staging memory on a thread; frees it if this is cancelled meanwhile."""
        making = asyncio.ensure_future(asyncio.to_thread(_StagingMemory, self._cuda, self._slot_bytes))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: made.exception() or made.result().end())
            raise

    def _check_gpu(self, uuid: str) -> None:
        """Raises Refused if a reader is on another GPU."""
        if uuid != self._cuda.uuid:
            raise Refused(f"the reader is on {uuid}, this rank on {self._cuda.uuid}")

    async def open_staging(self, request: pb.OpenStagingRequest) -> AsyncIterator[pb.OpenStagingResponse]:
        """Handles the OpenStaging RPC: allocates staging memory for the reader, and frees it when the stream ends.
        Frees earlier staging memory of this reader.

        Raises:
            Refused: The request is for another epoch of the service, or the reader is on another GPU.
            OutOfSpace: The GPU has too little free memory.
        """
        check_epoch(self._store, request.epoch)
        self._check_gpu(request.device_uuid)
        staging = await self._make_staging()
        before = self._stagings.get(request.reader)
        if before is not None:
            before.end()
        self._stagings[request.reader] = staging
        try:
            yield staging.handles
            await staging.ended.wait()
        finally:
            staging.end()
            if self._stagings.get(request.reader) is staging:
                del self._stagings[request.reader]

    async def stage(self, request: pb.StageRequest) -> pb.StageResponse:
        """Handles the Stage RPC: enqueues the copies of ranges into a slot, records the slot's event behind them, and
        then responds, without waiting for the copies.

        Raises:
            Refused: The request is for another epoch of the service, the reader has no staging memory, the generation
                is not newer than an earlier one of the slot, or a shard was released.
            InvalidRequest: The slot does not exist, or is too small.
            TransferError: A range reaches beyond its shard, or a shard was marked corrupt.
        """
        check_epoch(self._store, request.epoch)
        staging = self._stagings.get(request.reader)
        if staging is None or staging.ended.is_set():
            raise Refused(
                f"reader {request.reader} has no staging memory here: OpenStaging has to come first"
            )
        staging.check(request)
        await staging.fill(self._store, request)
        return pb.StageResponse(generation=request.generation)

    def close(self) -> None:
        """Ends all streams, and frees the staging memory of all readers."""
        self._closed.set()
        for staging in self._stagings.values():
            staging.end()
