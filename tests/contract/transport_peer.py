"""The peer of the contract of transports, with all transports of this project, which a test can make stop in the middle
of a transfer.

Usage: `python -m contract.transport_peer ARENA_MIB EPOCH CHECKSUMS DEVICES UUID`. DEVICES is `host` for the host
implementation of a GPU and NCCL, `fake` for those over the fake of cupy, `gpu` for those of this machine; UUID
overrides the UUID of the GPU in the advert of nccl, unless empty. The rest is as for `nccl_transfer.testing.peer`.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import fake_cupy
import grpc
import numpy as np

from contract.host_devices import HostCuda, HostNccl
from contract.host_tensors import HostTensor, HostTensors
from contract.loopback import CountedCuda
from nccl_transfer.devices.cuda import Event
from nccl_transfer.devices.cupy_cuda import own_cuda
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.wire import to_proto
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.device_shards import DeviceShards
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.peer import SESSION, Peer, say, serve
from nccl_transfer.transports.base import Handler, Transport
from nccl_transfer.transports.gpu import cuda_ipc_source
from nccl_transfer.transports.gpu.communicator import (
    Communicator,
    CommunicatorError,
    Message,
    Nccl,
    own_nccl,
    why_no_nccl,
)
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcTransport
from nccl_transfer.transports.gpu.nccl import NcclTransport
from nccl_transfer.transports.gpu.nccl_source import ADVERT, NcclSource
from nccl_transfer.transports.grpc_stream import GrpcSource, GrpcTransport
from nccl_transfer.transports.memfd import MemfdTransport
from nccl_transfer.transports.sink import Pieces
from nccl_transfer.transports.tcp import TcpTransport
from nccl_transfer.transports.tcp_source import TcpSource, cut_frames
from rlhf.v1 import transfer_pb2

GPU = "GPU-of-the-peer"
"""UUID of the host implementation of a GPU."""

SLOT_BYTES = 1 << 20
"""Size of a staging slot: small, so that the suite fills many."""

CAPACITY = 4 << 30
"""Capacity of the GPU in bytes."""

Say = Callable[..., None]
"""Sends a line to the suite."""


class PausingStore(TensorStore):
    def __init__(self, arena_bytes: int, checksums: bool, say: Say) -> None:
        super().__init__(arena_bytes, checksums)
        self.copies_left: int | None = None
        self.going_on = threading.Event()
        self.say = say

    def copy(self, shard_id, start, nbytes, copy):
        if self.copies_left == 0:
            self.copies_left, going_on = None, self.going_on
            self.say(event="paused")
            going_on.wait()
        if self.copies_left is not None:
            self.copies_left -= 1
        return super().copy(shard_id, start, nbytes, copy)


class PausingNccl(Nccl):
    """NCCL whose joins can wait or fail, or whose next group is not entered."""

    def __init__(self, nccl: Nccl, say: Say) -> None:
        self.version = nccl.version
        self.pausing = False
        self.failing = False
        self.joining = threading.Event()
        self.joining.set()
        self.say = say
        self._nccl = nccl

    def unique_id(self) -> bytes:
        return self._nccl.unique_id()

    def join(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        if not self.joining.is_set():
            self.say(event="paused")
            self.joining.wait()
        if self.failing:
            raise CommunicatorError("no cable")
        return _Pausing(self._nccl.join(unique_id, rank, size), self)


class _Pausing(Communicator):
    def __init__(self, communicator: Communicator, nccl: PausingNccl) -> None:
        self._communicator = communicator
        self._nccl = nccl
        self._paused = False

    def wait(self, event: Event) -> None:
        self._communicator.wait(event)

    def group(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if self._nccl.pausing:
            self._nccl.pausing, self._paused = False, True
            self._nccl.say(event="paused")
        else:
            self._communicator.group(sends, receives)

    def done(self) -> bool:
        return self._communicator.done() and not self._paused

    def abort(self) -> None:
        self._communicator.abort()


class Streams:
    """Where streams over tcp and grpc stop or break, and the bytes that they have sent."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.configure()

    def configure(
        self, pause_after: int | None = None, break_after: int | None = None, always: bool = False
    ) -> None:
        self.pause_after, self.break_after, self.always = pause_after, break_after, always
        self.served_bytes = 0

    def pauses(self, chunk: int) -> bool:
        """Whether a stream pauses before the chunk of a number, of which it tells."""
        if chunk == self.pause_after:
            self.say(event="paused")
        return chunk == self.pause_after

    def breaks(self, chunk: int) -> bool:
        """Whether a stream breaks before the chunk of a number."""
        if chunk != self.break_after:
            return False
        self.break_after = self.break_after if self.always else None
        return True

    def frames(self, store: TensorStore, request: transfer_pb2.FetchRequest) -> Iterator[Pieces]:
        """Frames of tcp, in chunks of 1 MiB, as grpc has them."""
        for chunk, pieces in enumerate(cut_frames(store, request, 1 << 20)):
            if self.pauses(chunk):
                threading.Event().wait()
            if self.breaks(chunk):
                raise ConnectionError("broken on purpose")
            yield pieces
            self.served_bytes += sum(map(len, pieces))


class PausingTcp(TcpTransport):
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def source(self, store: TensorStore, host: str) -> TcpSource:
        return TcpSource(store, host, self._streams.frames)


class PausingGrpc(GrpcTransport):
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def source(self, store: TensorStore, host: str) -> GrpcSource:
        return _PausingGrpcSource(store, self._streams)


class _PausingGrpcSource(GrpcSource):
    def __init__(self, store: TensorStore, streams: Streams) -> None:
        super().__init__(store)
        self._streams = streams

    def handlers(self) -> Mapping[str, Handler]:
        fetch, streams = super().handlers()["Fetch"], self._streams

        async def pausing(request: Any, context: Any) -> Any:
            chunk = 0
            async for response in fetch(request, context):
                if streams.pauses(chunk):
                    await asyncio.Event().wait()
                if streams.breaks(chunk):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")
                yield response
                chunk += 1
                streams.served_bytes += len(response.data)

        return {"Fetch": pausing}


class Disguised(NcclTransport):
    """Advertises another GPU; keeps its source as `made`."""

    made: NcclSource

    def __init__(self, nccl: Nccl, cuda: CountedCuda, uuid: str) -> None:
        super().__init__(nccl, cuda)
        self._uuid = uuid

    def source(self, store: TensorStore, host: str) -> NcclSource:
        self.made = super().source(store, host)
        if self._uuid:
            advert = self.made.advert()[: ADVERT.size] + self._uuid.encode()
            self.made.advert = lambda: advert
        return self.made


class PausingPeer(Peer):
    """The peer.

    Args:
        store: Its store.
        epoch: Epoch of its service.
        cuda, nccl: Its GPU and NCCL.
        device_uuid: UUID of the GPU in the advert of nccl; empty: the real one.
        say: Called when it has paused.
    """

    def __init__(
        self,
        store: PausingStore,
        epoch: int,
        cuda: CountedCuda,
        nccl: Nccl | None,
        device_uuid: str,
        say: Say,
    ) -> None:
        self.pausing_store = store
        self.cuda = cuda
        self.streams = Streams(say)
        ipc = CudaIpcTransport(cuda, SLOT_BYTES)
        transports: list[Transport] = [
            MemfdTransport(), ipc, PausingTcp(self.streams), PausingGrpc(self.streams)
        ]  # fmt: skip
        self.nccl = PausingNccl(nccl, say) if nccl is not None else None
        self.sends = Disguised(self.nccl, cuda, device_uuid) if self.nccl is not None else None
        super().__init__(store, epoch, [*transports, self.sends] if self.sends is not None else transports)

    async def close(self) -> None:
        """Stops serving. A stream of tcp that has paused for good would wait for ever, and is left."""
        self.go_on()
        if self.streams.pause_after is None:
            await super().close()

    def configure(self, **where: Any) -> dict[str, Any]:
        """Makes streams stop, or break once or always, before the chunk of a number."""
        self.streams.configure(**where)
        return {}

    def fail_joins(self) -> dict[str, Any]:
        """Makes all joins of communicators fail."""
        assert self.nccl is not None
        self.nccl.failing = True
        return {}

    def served(self) -> dict[str, Any]:
        return {"bytes": self.streams.served_bytes}

    def limit_device(self, mib):
        """Changes the capacity of the GPU."""
        self.cuda.capacity = mib << 20
        return {}

    def lend_device(self, mib):
        """Makes an arena on the GPU, if there is none."""
        self.store.device = self.store.device or DeviceShards(
            DeviceArena(self.cuda, mib << 20), HostTensors(self.cuda.cuda), self.store
        )
        return {}

    def put_device(self, step, columns):
        """Stores columns on the GPU, as `put` does in host memory."""
        device, stored = self.store.device, {}
        assert device is not None
        for name, column in columns.items():
            tensor: Any = HostTensor(np.load(column["path"]), column["dtype"])
            lengths = column["lengths"]
            values = tensor if lengths is None else Jagged(tensor, np.array(lengths, np.int64))
            stored[name] = device.put_column(values, Lease(SESSION, step))
        rows = next(iter(stored.values())).rows
        return {"batch": to_proto(Batch(rows, stored)).SerializeToString().hex()}

    def mallocs(self):
        return {"times": self.cuda.mallocs}

    def device_stat(self):
        if self.store.device is not None:
            self.store.device.arena.settle()
        stat = self.store.stat()
        return {
            "used": stat.device_used_bytes, "spilled": stat.spilled_bytes, "copied": stat.host_copied_bytes
        }  # fmt: skip

    def device_used(self):
        return {"bytes": self.cuda.used}

    def freed_in_use(self):
        """Counts frees of memory in use, of the host implementation."""
        assert isinstance(self.cuda.cuda, HostCuda)
        return {"times": self.cuda.cuda.freed_in_use}

    def end_sessions(self):
        """Ends all sessions, as a restart at the same address does."""
        for source in self.sources._sources.values():
            if source.service:
                source.close()
        return {}

    def pause(self, at, after=0):
        """Pauses the next transfer between GPUs: until `go_on` at copy number `after` or at its `join`, or for ever at
        its `send`. The peer reports the pause."""
        if at == "copy":
            self.pausing_store.copies_left = after
            return {}
        assert self.nccl is not None
        if at == "join":
            self.nccl.joining = threading.Event()
        else:
            self.nccl.pausing = True
        return {}

    def go_on(self):
        """Ends all pauses and limits."""
        self.pausing_store.copies_left = None
        self.pausing_store.going_on.set()
        self.pausing_store.going_on = threading.Event()
        if self.nccl is not None:
            self.nccl.pausing = False
            self.nccl.joining.set()
        self.cuda.capacity = CAPACITY
        return {}

    def communicator_epochs(self):
        assert self.sends is not None
        return {"epochs": [session.epoch for session in self.sends.made._sessions.values()]}

    def forge_generation(self):
        """Fills the next slot with its data and a wrong generation."""
        pack = cuda_ipc_source.GENERATION.pack

        def forge(generation):
            if generation:
                cuda_ipc_source.GENERATION = struct.Struct("<Q")
            return pack(4711 if generation else 0)

        cuda_ipc_source.GENERATION = SimpleNamespace(pack=forge)
        return {}


def devices_of(name: str) -> tuple[CountedCuda, Nccl | None]:
    if name == "host":
        return CountedCuda(HostCuda(GPU)), HostNccl()
    if name == "fake":
        fake_cupy.install(fake_cupy.UUIDS.index(GPU))
    return CountedCuda(own_cuda()), own_nccl() if why_no_nccl() is None else None


if __name__ == "__main__":
    arena_mib, epoch, checksums, devices, uuid = sys.argv[1:]
    store = PausingStore(int(arena_mib) << 20, checksums == "True", say)
    asyncio.run(serve(PausingPeer(store, int(epoch), *devices_of(devices), uuid, say)))
