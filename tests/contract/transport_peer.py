"""A rank that only serves tensors: the other process of the transport suite.

Usage: `python -m contract.transport_peer ARENA_MIB EPOCH DEVICES CHECKSUMS UUID`. DEVICES is `host` for the host
implementation of a GPU and NCCL, `gpu` for those of this machine; CHECKSUMS is `True` or `False`; UUID overrides the
UUID of the GPU in the endpoint, unless empty. Prints its endpoint, then answers every line of JSON on stdin with a line
of JSON on stdout, and ends with stdin. Rows come from .npy files, so that the suite owns the expected values.
"""

import asyncio
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import grpc
import numpy as np

from contract.host_devices import HostCuda, HostNccl
from contract.loopback import CountedCuda
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire import to_proto
from nccl_transfer.refs.wire_ranks import endpoint_to_proto
from nccl_transfer.registry import unavailable
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.serving import add_transfer_service
from nccl_transfer.transfer_service import mark_corrupt_response, stat_response
from nccl_transfer.transports import (
    MemfdSource,
    TcpSource,
    host_id,
    serve_fetch,
)
from nccl_transfer.transports.gpu import cuda_ipc_source
from nccl_transfer.transports.gpu.communicator import Communicator, Message, Nccl, own_nccl, why_no_nccl
from nccl_transfer.transports.gpu.device import Event, own_cuda
from nccl_transfer.transports.gpu.sources import DeviceSources
from nccl_transfer.transports.tcp_source import cut_frames
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import RlhfError

SESSION = "session"

GPU = "GPU-of-the-peer"
"""UUID of the host implementation of a GPU."""

SLOT_BYTES = 1 << 20
"""Size of a staging slot: small, so that the suite fills many."""

LAYOUTS = {
    "as it is": lambda array: array,
    "transposed": lambda array: array.T,
    "strided": lambda array: array[::2, 1::3],
    "reversed": lambda array: array[::-1, ::-1],
    "broadcast": lambda array: np.broadcast_to(array[:1], array.shape),
}
"""Non-contiguous views of a matrix."""


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
    """NCCL whose joins can wait, or whose next group is not entered."""

    def __init__(self, nccl: Nccl, say: Say) -> None:
        self.version = nccl.version
        self.pausing = False
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


class Peer:
    """The rank.

    Args:
        arena_bytes: Size of its arena.
        epoch: Epoch of its service.
        cuda, nccl: Its GPU and NCCL.
        checksums: Whether it computes checksums.
        device_uuid: UUID of the GPU in its endpoint; empty: the real one.
        say: Called when it has paused.
    """

    def __init__(
        self,
        arena_bytes: int,
        epoch: int,
        cuda: CountedCuda,
        nccl: Nccl | None,
        checksums: bool,
        device_uuid: str,
        say: Say,
    ) -> None:
        self.epoch = epoch
        self.say = say
        self.store = PausingStore(arena_bytes, checksums, say)
        self.arena_server = MemfdSource(self.store)
        self.byte_server = TcpSource(self.store, "127.0.0.1", self.frames)
        self.cuda = cuda
        self.nccl = PausingNccl(nccl, say) if nccl is not None else None
        self.sources = DeviceSources(self.store, self.cuda, self.nccl, SLOT_BYTES)
        self.server: grpc.aio.Server | None = None
        self.device_uuid = device_uuid or self.sources.device_uuid
        self.configure()

    async def start(self) -> Endpoint:
        """Starts serving; returns the endpoint."""
        self.server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        add_transfer_service(self.server, self.handlers())
        address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.store.endpoint = Endpoint(
            address, host_id(), self.arena_server.name, self.epoch, "actor", os.getpid(), self.device_uuid,
            self.byte_server.port, self.byte_server.key, self.sources.nccl_version,
        )  # fmt: skip
        await self.server.start()
        return self.store.endpoint

    async def close(self) -> None:
        """Stops serving."""
        self.go_on()
        self.sources.close()
        if self.server is not None:
            await self.server.stop(None)
        self.arena_server.close()
        if not self.pause_after:
            self.byte_server.close()

    def handlers(self):
        return {
            "Fetch": self.fetch,
            "Stat": self.stat,
            "MarkCorrupt": self.mark_corrupt,
            **self.sources.handlers(),
        }

    async def fetch(self, request, context):
        chunks = 0
        async for response in serve_fetch(self.store, request):
            if chunks == self.pause_after:
                self.say(event="paused")
                await asyncio.Event().wait()
            if chunks == self.break_after:
                self.break_after = self.break_after if self.always else None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")
            yield response
            chunks += 1
            self.served_bytes += len(response.data)

    def frames(self, store, request):
        """As `fetch`, over plain tcp, also in chunks of 1 MiB."""
        for chunks, pieces in enumerate(cut_frames(store, request, 1 << 20)):
            if chunks == self.pause_after:
                self.say(event="paused")
                threading.Event().wait()
            if chunks == self.break_after:
                self.break_after = self.break_after if self.always else None
                raise ConnectionError("broken on purpose")
            yield pieces
            self.served_bytes += sum(map(len, pieces))

    async def stat(self, request, context):
        return stat_response(self.store, {}, unavailable())

    async def mark_corrupt(self, request, context):
        return mark_corrupt_response(self.store, request)

    def put(self, step, columns):
        stored = {}
        for name, column in columns.items():
            array = LAYOUTS[column["layout"]](np.load(column["path"]))
            lengths = column["lengths"]
            values = array if lengths is None else Jagged(array, np.array(lengths, np.int64))
            stored[name] = self.store.put_column(values, column["dtype"], Lease(SESSION, step))
        rows = next(iter(stored.values())).rows
        return {"batch": to_proto(Batch(rows, stored)).SerializeToString().hex()}

    def release(self):
        return {"freed": self.store.release(SESSION)}

    def configure(self, pause_after=None, break_after=None, always=False):
        """Makes streams stop, or break once or always, before the chunk of a number."""
        self.pause_after, self.break_after, self.always = pause_after, break_after, always
        self.served_bytes = 0
        return {}

    def served(self):
        return {"bytes": self.served_bytes}

    def flip(self, shard, byte):
        """Inverts a byte of a shard without the store's knowledge."""
        self.store._memory(self.store._allocations[shard].shard)[byte] ^= 0xFF
        return {}

    def limit_device(self, mib):
        """Changes the capacity of the GPU."""
        self.cuda.capacity = mib << 20
        return {}

    def device_used(self):
        return {"bytes": self.cuda.used}

    def freed_in_use(self):
        """Counts frees of memory in use, of the host implementation."""
        assert isinstance(self.cuda.cuda, HostCuda)
        return {"times": self.cuda.cuda.freed_in_use}

    def end_sessions(self):
        """Ends all sessions, as a restart at the same address does."""
        self.sources.close()
        return {}

    def pause(self, at, after=0):
        """Pauses the next transfer between GPUs: until `go_on` at copy number `after` or at its `join`, or for ever at
        its `send`. The peer reports the pause."""
        if at == "copy":
            self.store.copies_left = after
            return {}
        assert self.nccl is not None
        if at == "join":
            self.nccl.joining = threading.Event()
        else:
            self.nccl.pausing = True
        return {}

    def go_on(self):
        """Ends all pauses and limits."""
        self.store.copies_left = None
        self.store.going_on.set()
        self.store.going_on = threading.Event()
        if self.nccl is not None:
            self.nccl.pausing = False
            self.nccl.joining.set()
        self.cuda.capacity = CAPACITY
        return {}

    def communicator_epochs(self):
        assert self.sources._nccl is not None
        return {"epochs": [session.epoch for session in self.sources._nccl._sessions.values()]}

    def forge_generation(self):
        """Fills the next slot with its data and a wrong generation."""
        pack = cuda_ipc_source.GENERATION.pack

        def forge(generation):
            if generation:
                cuda_ipc_source.GENERATION = struct.Struct("<Q")
            return pack(4711 if generation else 0)

        cuda_ipc_source.GENERATION = SimpleNamespace(pack=forge)
        return {}

    def obey(self, line):
        command = json.loads(line)
        try:
            return getattr(self, command.pop("op"))(**command)
        except RlhfError as error:
            return {"error": type(error).__name__, "message": str(error)}


def say(**reply):
    print(json.dumps(reply), flush=True)


async def main(arena_mib: int, epoch: int, devices: str, checksums: bool, device_uuid: str) -> None:
    if devices == "host":
        cuda, nccl = HostCuda(GPU), HostNccl()
    else:
        cuda, nccl = own_cuda(), own_nccl() if why_no_nccl() is None else None
    peer = Peer(arena_mib << 20, epoch, CountedCuda(cuda), nccl, checksums, device_uuid, say)
    say(endpoint=endpoint_to_proto(await peer.start()).SerializeToString().hex())
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(**peer.obey(line))
    await peer.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True", sys.argv[5]))
