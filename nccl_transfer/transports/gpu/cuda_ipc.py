"""The cuda_ipc transport, between processes on the same GPU. Rows on the GPU are read from the source's arena there
(see `arena_reads`). For rows in host memory the source shares staging memory, and the reader copies from it.

Staging memory is divided into slots. The reader chooses the slot that the source fills next, so that it never
overwrites bytes that it still needs; with two slots the source fills one while the reader copies from the other. A
CUDA event per slot orders the copies on the GPU. The header of each slot contains a generation, the number of the
request that filled it. The reader checks it before and after its copy, so it raises an error if the slot was filled
for another request.
"""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from nccl_transfer.devices.cuda import Cuda, Event, check_uuid
from nccl_transfer.devices.cupy_cuda import own_cuda, why_no_cuda
from nccl_transfer.refs.ranges import ByteRange, cut_chunks
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import (
    DEVICE_TO_DEVICE,
    HOST_TO_HOST,
    DeviceMemory,
    Reader,
    Reading,
    Transport,
)
from nccl_transfer.transports.common import layout, remaining_s
from nccl_transfer.transports.gpu.arena_reads import ArenaClient
from nccl_transfer.transports.gpu.cuda_ipc_source import GENERATION, HEADER_BYTES, SLOT_BYTES, CudaIpcSource
from nccl_transfer.transports.gpu.device_read import DeviceRead
from nccl_transfer.transports.gpu.liveness import LivenessStream, wait_for_answer
from nccl_transfer.transports.gpu.peer_connection import PeerConnection, PeerConnections
from nccl_transfer.transports.memfd import MemfdReader
from rlhf.errors import TransferError
from rlhf.v1 import cuda_ipc_pb2 as pb
from rlhf.v1.cuda_ipc_pb2_grpc import CudaIpcServiceStub

ROUTES = frozenset({HOST_TO_HOST, DEVICE_TO_DEVICE})


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a range that fits into the rest of a slot; `target` is its offset in the reader's buffer, in bytes."""

    range: ByteRange
    target: int


def cut_slots(ranges: Sequence[ByteRange], slot_bytes: int) -> Iterator[list[_Piece]]:
    """Yields the pieces of the ranges in order, as one list per slot; each list fills a slot, except the last."""
    offsets, _ = layout(r.nbytes for r in ranges)
    for chunk in cut_chunks((r.nbytes for r in ranges), slot_bytes):
        yield [
            _Piece(replace(ranges[n], start=ranges[n].start + start, nbytes=nbytes), offsets[n] + start)
            for n, start, nbytes in chunk
        ]


class CudaIpcReader(Reader):
    """Reads from a source on the same GPU, from memory that the source shares by CUDA IPC: its arena, and staging
    memory for rows in host memory.

    Args:
        cuda: The GPU.
    """

    name = "cuda_ipc"
    routes = ROUTES

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._clients = PeerConnections(partial(StagingClient, self._cuda))
        self._headers = MemfdReader()
        self._arenas = PeerConnections(partial(ArenaClient, self._cuda, self._headers))

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        advert = source.adverts.get(self.name)
        if advert is None:
            return "it has no GPU"
        if advert != self._cuda.uuid.encode():
            return f"it is on {advert.decode(errors='replace')}, not on {self._cuda.uuid}"
        return None

    def check_advert(self, advert: bytes) -> None:
        check_uuid(advert)

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        offsets, total = layout(r.nbytes for r in ranges)
        data = np.empty(total, np.uint8).data

        def copy_out(target: int, pointer: int, nbytes: int) -> None:
            self._cuda.copy_out(data[target : target + nbytes], pointer)

        self._clients.to(source).read(source, ranges, copy_out, deadline)
        return Reading([data[o : o + r.nbytes] for o, r in zip(offsets, ranges, strict=True)])

    def receive(
        self,
        source: Endpoint,
        ranges: Sequence[ByteRange],
        memory: DeviceMemory,
        offsets: Sequence[int],
        deadline: float,
    ) -> None:
        self._arenas.to(source).receive(DeviceRead(source, ranges, memory, offsets, deadline))

    def forget(self, source: Endpoint) -> None:
        self._clients.forget(source)
        self._arenas.forget(source)
        self._headers.forget(source)

    def close(self) -> None:
        self._arenas.close()
        self._clients.close()
        self._headers.close()


class _MappedStaging:
    """Staging memory and events of a source, opened in this process."""

    def __init__(self, cuda: Cuda, liveness: LivenessStream, shared: pb.OpenStagingResponse) -> None:
        self.liveness = liveness
        self.slot_bytes = shared.slot_bytes
        self.generations = itertools.count(1)
        self.events: list[Event] = []
        self._cuda = cuda
        with ExitStack() as unless_mapped:
            for handle in shared.event_handles:
                self.events.append(cuda.open_event(handle))
                unless_mapped.callback(self.events[-1].close)
            self._memory = cuda.open(shared.memory_handle)
            unless_mapped.pop_all()

    def slot(self, number: int) -> int:
        """Returns the address of the header of slot `number`, in device memory."""
        return self._memory + number * (HEADER_BYTES + self.slot_bytes)

    def generation(self, number: int) -> int:
        """Returns the generation that the header of slot `number` contains now."""
        header = memoryview(bytearray(GENERATION.size))
        self._cuda.copy_out(header, self.slot(number))
        return GENERATION.unpack(header)[0]

    def end(self) -> None:
        """Closes the memory and the events, then ends the liveness stream, upon which the source frees them."""
        self._cuda.synchronize()
        self._cuda.close(self._memory)
        for event in self.events:
            event.close()
        self.liveness.cancel()


class StagingClient(PeerConnection[CudaIpcServiceStub, _MappedStaging]):
    """Reads from the staging memory of one source, one read at a time; concurrent reads wait for each other."""

    def __init__(self, cuda: Cuda, address: str) -> None:
        super().__init__(address, CudaIpcServiceStub)
        self._cuda = cuda
        self._reader = uuid.uuid4().hex

    def read(
        self,
        source: Endpoint,
        ranges: Sequence[ByteRange],
        copy: Callable[[int, int, int], None],
        deadline: float,
    ) -> None:
        """Reads ranges, and copies them with a function.

        Args:
            source: The rank that holds the shards.
            ranges: The bytes to read.
            copy: Called as `copy(target, pointer, nbytes)` for every piece: copies `nbytes` bytes at device address
                `pointer` to offset `target` of the result, which is laid out by `layout`.
            deadline: Time on the clock of `time.monotonic`, in seconds.

        Raises:
            TransferError: A slot was filled for another request. Other errors as raised by `Reader.read`.
        """
        with self.turn(source, str(source), deadline):
            try:
                staging = self.resources(source, f"{source}: open staging memory", deadline)
                in_flight: deque[tuple[list[_Piece], int, int, Any]] = deque()
                for number, pieces in enumerate(cut_slots(ranges, staging.slot_bytes)):
                    slot, generation = number % len(staging.events), next(staging.generations)
                    if len(in_flight) == len(staging.events):
                        self._copy_slot(source, staging, *in_flight.popleft(), copy, deadline)
                    call = self._request_slot(source, slot, generation, pieces, deadline)
                    in_flight.append((pieces, slot, generation, call))
                while in_flight:
                    self._copy_slot(source, staging, *in_flight.popleft(), copy, deadline)
            except BaseException:
                # Requests in flight would fill slots that the next read uses.
                self.end()
                raise

    def make_resources(self, source: Endpoint, where: str, deadline: float) -> _MappedStaging:
        request = pb.OpenStagingRequest(reader=self._reader, epoch=source.epoch, device_uuid=self._cuda.uuid)
        return self.opened(
            self.stub.OpenStaging(request), where, deadline, partial(_MappedStaging, self._cuda)
        )

    def _request_slot(
        self, source: Endpoint, slot: int, generation: int, pieces: Sequence[_Piece], deadline: float
    ) -> Any:
        request = pb.StageRequest(reader=self._reader, epoch=source.epoch, slot=slot, generation=generation)
        for piece in pieces:
            r = piece.range
            request.ranges.add(shard=r.shard.id, start=r.start, nbytes=r.nbytes)
        return self.stub.Stage.future(request, timeout=remaining_s(deadline, source))

    def _copy_slot(
        self,
        source: Endpoint,
        staging: _MappedStaging,
        pieces: Sequence[_Piece],
        slot: int,
        generation: int,
        call: Any,
        copy: Callable[[int, int, int], None],
        deadline: float,
    ) -> None:
        wait_for_answer(call, staging.liveness, deadline, f"{source}: slot {slot}")
        staging.events[slot].wait()
        self._check_generation(source, staging, slot, generation)
        pointer = staging.slot(slot) + HEADER_BYTES
        for piece in pieces:
            copy(piece.target, pointer, piece.range.nbytes)
            pointer += piece.range.nbytes
        self._check_generation(source, staging, slot, generation)

    def _check_generation(self, source: Endpoint, staging: _MappedStaging, slot: int, expected: int) -> None:
        """Raises TransferError unless the header of the slot contains generation `expected`."""
        found = staging.generation(slot)
        if found != expected:
            raise TransferError(f"{source}: slot {slot} holds generation {found}, not {expected}")


class CudaIpcTransport(Transport):
    """Copies between processes on the same GPU; the advert is the UUID of the GPU.

    Args:
        cuda: The GPU. Default: the current device of this process.
        slot_bytes: Data bytes of a slot of the staging memory. Default: SLOT_BYTES, 32 MiB.
    """

    name = CudaIpcReader.name
    routes = ROUTES
    needs_gpu = True
    is_secure = True

    def __init__(self, cuda: Cuda | None = None, slot_bytes: int = SLOT_BYTES) -> None:
        self._cuda = cuda
        self._slot_bytes = slot_bytes

    def unavailable(self) -> str | None:
        return why_no_cuda()

    def source(self, store: TensorStore, host: str) -> CudaIpcSource:
        cuda = self._cuda or (store.device.arena.cuda if store.device is not None else own_cuda())
        return CudaIpcSource(store, cuda, self._slot_bytes)

    def reader(self) -> CudaIpcReader:
        return CudaIpcReader(self._cuda or own_cuda())
