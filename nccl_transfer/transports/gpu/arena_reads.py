"""Reads from the arenas that other processes have on the same GPU: the reader opens an arena once, and copies from it.

The source takes no part in a read. Its headers, which the reader maps by memfd, say where the bytes are and which
event is complete once they are there. The reader checks the header before its copy and after it, as it does in host
memory, so a shard that was released meanwhile is an error."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from nccl_transfer.devices.cuda import Cuda, Event
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.store.arena import ArenaReader, DevicePlace
from nccl_transfer.transports.gpu.device_read import DeviceRead
from nccl_transfer.transports.gpu.liveness import LivenessStream
from nccl_transfer.transports.gpu.peer_connection import PeerConnection
from nccl_transfer.transports.host import host_id
from nccl_transfer.transports.memfd import MemfdReader
from rlhf.errors import AttachFailed, TransferError
from rlhf.v1 import cuda_ipc_pb2 as pb
from rlhf.v1.cuda_ipc_pb2_grpc import CudaIpcServiceStub


class _OpenedArena:
    """An arena of another process on the same GPU, opened in this process.

    Args:
        cuda: The GPU.
        liveness: Stream that is open while the other process lives.
        shared: The handles.

    Raises:
        TransferError: The arena cannot be opened.
    """

    def __init__(self, cuda: Cuda, liveness: LivenessStream, shared: pb.OpenArenaResponse) -> None:
        self.liveness = liveness
        self.nbytes = shared.nbytes
        self._cuda = cuda
        with ExitStack() as unless_opened:
            self.pointer = cuda.open(shared.memory_handle)
            unless_opened.callback(cuda.close, self.pointer)
            self.copied = cuda.event()
            unless_opened.pop_all()
        self._handles = shared.event_handles
        self._ready: dict[int, Event] = {}

    def ready(self, number: int) -> Event:
        """Returns an event of readiness; opens it at the first call."""
        if number not in self._ready:
            self._ready[number] = self._cuda.open_event(self._handles[number])
        return self._ready[number]

    def end(self) -> None:
        """Closes memory and events, then ends the stream."""
        self._cuda.synchronize()
        self._cuda.close(self.pointer)
        for event in (self.copied, *self._ready.values()):
            event.close()
        self.liveness.cancel()


class ArenaClient(PeerConnection[CudaIpcServiceStub, _OpenedArena]):
    """Reads from the arena of one source, one read at a time.

    Args:
        cuda: The GPU.
        headers: Maps the source's headers.
        address: Address of the source.
    """

    def __init__(self, cuda: Cuda, headers: MemfdReader, address: str) -> None:
        super().__init__(address, CudaIpcServiceStub)
        self._cuda = cuda
        self._headers = headers

    def receive(self, read: DeviceRead) -> None:
        """Copies ranges; raises as `Reader.receive` does."""
        source, deadline = read.source, read.deadline
        try:
            with self.turn(source, str(source), deadline):
                headers = self._map_headers(source, deadline)
                arena = self.resources(source, f"{source}: open the arena", deadline)
                self._copy(read, arena, headers)
        except BaseException:
            read.memory.free()
            raise

    def _copy(self, read: DeviceRead, arena: _OpenedArena, headers: ArenaReader) -> None:
        source, deadline = read.source, read.deadline
        shards = list(dict.fromkeys(r.shard for r in read.ranges))
        headers.check(shards)
        arena.liveness.wait(
            lambda: all(self._is_ready(arena, headers, shard) for shard in shards),
            deadline,
            f"{source}: ready",
        )
        for r, offset in zip(read.ranges, read.offsets, strict=True):
            place = headers.device_place(r.shard)
            headers.check([r.shard])
            if place.offset + r.shard.nbytes > arena.nbytes:
                raise TransferError(f"{source}: shard {r.shard.id} reaches beyond the arena on the GPU")
            self._cuda.copy(read.memory.pointer + offset, arena.pointer + place.offset + r.start, r.nbytes)
        arena.copied.record()
        arena.liveness.wait(arena.copied.done, deadline, f"{source}: copy")
        headers.check(shards)

    def _is_ready(self, arena: _OpenedArena, headers: ArenaReader, shard: Shard) -> bool:
        """Returns whether the bytes of a shard are there."""
        place: DevicePlace = headers.device_place(shard)
        headers.check([shard])
        return place.event is not None and arena.ready(place.event).done()

    def _map_headers(self, source: Endpoint, deadline: float) -> ArenaReader:
        if reason := self._headers.why_not(source, host_id()):
            raise AttachFailed(f"{source}: its headers cannot be read: {reason}")
        return self._headers.arena(source, deadline)

    def make_resources(self, source: Endpoint, where: str, deadline: float) -> _OpenedArena:
        request = pb.OpenArenaRequest(epoch=source.epoch, device_uuid=self._cuda.uuid)
        return self.opened(self.stub.OpenArena(request), where, deadline, partial(_OpenedArena, self._cuda))
