"""A rank that only serves tensors: the other process of the transport suite.

Started as `python transport_peer.py ARENA_MIB EPOCH DEVICES CHECKSUMS`. DEVICES is `host` for a GPU and NCCL made
of the host, `gpu` for those of this machine; CHECKSUMS is `True` or `False`. Prints its endpoint, then answers every
line of JSON on stdin with a line of JSON on stdout, and ends with stdin. What it stores comes from .npy files, so
that the suite owns the expected values.
"""

import asyncio
import json
import os
import struct
import sys
import threading
from types import SimpleNamespace

import grpc
import numpy as np

from host_devices import HostCuda, HostNccl
from nccl_transfer.batch import Batch, Endpoint
from nccl_transfer.columns import Jagged
from nccl_transfer.serving import add_transfer_service
from nccl_transfer.sources import DeviceSources
from nccl_transfer.store import Lease, TensorStore
from nccl_transfer.transports import (
    ArenaServer,
    ByteServer,
    condemn_response,
    host_id,
    serve_fetch,
    staging,
    stat_response,
    unavailable,
)
from nccl_transfer.transports.tcp import cut_frames
from nccl_transfer.wire import endpoint_to_proto, to_proto
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import RlhfError

SESSION = "session"

GPU = "GPU-of-the-peer"
"""UUID of the GPU made of the host."""

SLOT_BYTES = 1 << 20
"""Of staging memory: small, so that the suite fills many."""

LAYOUTS = {
    "as it is": lambda array: array,
    "transposed": lambda array: array.T,
    "strided": lambda array: array[::2, 1::3],
    "reversed": lambda array: array[::-1, ::-1],
    "broadcast": lambda array: np.broadcast_to(array[:1], array.shape),
}
"""Non-contiguous views of a matrix."""


def say(**reply):
    print(json.dumps(reply), flush=True)


class PausingStore(TensorStore):
    copies_left: int | None = None
    going_on = threading.Event()

    def copy(self, shard_id, start, nbytes, copy):
        if self.copies_left == 0:
            self.copies_left, going_on = None, self.going_on
            say(event="paused")
            going_on.wait()
        if self.copies_left is not None:
            self.copies_left -= 1
        return super().copy(shard_id, start, nbytes, copy)


class PausingNccl(HostNccl):
    pausing = False
    joining = threading.Event()
    joining.set()

    def join(self, unique_id, rank, size):
        if not self.joining.is_set():
            say(event="paused")
            self.joining.wait()
        communicator = super().join(unique_id, rank, size)
        group, done = communicator.group, communicator.done

        def group_or_pause(sends, receives):
            if self.pausing:
                self.pausing = False
                communicator.done = lambda: done() and False
                say(event="paused")
            else:
                group(sends, receives)

        communicator.group = group_or_pause
        return communicator


class Peer:
    def __init__(self, arena_bytes: int, epoch: int, devices: str, checksums: bool) -> None:
        self.epoch = epoch
        self.store = PausingStore(arena_bytes, checksums)
        self.arena_server = ArenaServer(self.store)
        self.byte_server = ByteServer(self.store, "127.0.0.1", self.frames)
        if devices == "host":
            self.cuda, self.nccl = HostCuda(GPU), PausingNccl()
            self.sources = DeviceSources(self.store, self.cuda, self.nccl, SLOT_BYTES)
        else:
            self.sources = DeviceSources.of_this_process(self.store)
        self.configure()

    def handlers(self):
        return {
            "Fetch": self.fetch,
            "Stat": self.stat,
            "Condemn": self.condemn,
            **self.sources.handlers(),
        }

    async def fetch(self, request, context):
        chunks = 0
        async for response in serve_fetch(self.store, request):
            if chunks == self.pause_after:
                say(event="paused")
                await asyncio.Event().wait()
            if chunks == self.break_after:
                self.break_after = self.break_after if self.always else None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")
            yield response
            chunks += 1
            self.served_bytes += len(response.data)

    def frames(self, store, request):
        """The same over plain tcp, in chunks of 1 MiB too."""
        for chunks, pieces in enumerate(cut_frames(store, request, 1 << 20)):
            if chunks == self.pause_after:
                say(event="paused")
                threading.Event().wait()
            if chunks == self.break_after:
                self.break_after = self.break_after if self.always else None
                raise ConnectionError("broken on purpose")
            yield pieces
            self.served_bytes += sum(map(len, pieces))

    async def stat(self, request, context):
        return stat_response(self.store, {}, unavailable())

    async def condemn(self, request, context):
        return condemn_response(self.store, request)

    def put(self, step, columns):
        stored = {}
        for name, column in columns.items():
            array = LAYOUTS[column["layout"]](np.load(column["path"]))
            lengths = column["lengths"]
            values = array if lengths is None else Jagged(array, np.array(lengths, np.int64))
            stored[name] = self.store.put_column(values, column["dtype"], Lease(SESSION, step))
        rows = next(iter(stored.values())).rows
        return {"batch": to_proto(Batch(rows, stored)).SerializeToString().hex()}

    def release(self, through_step):
        return {"freed": self.store.release(SESSION, through_step)}

    def configure(self, pause_after=None, break_after=None, always=False):
        """Streams stop, or break once or always, before the chunk of this number."""
        self.pause_after, self.break_after, self.always = pause_after, break_after, always
        self.served_bytes = 0
        return {}

    def served(self):
        return {"bytes": self.served_bytes}

    def flip(self, shard, byte):
        """Turns over a byte of a shard behind the store's back."""
        self.store._memory(self.store._allocations[shard].shard)[byte] ^= 0xFF
        return {}

    def limit_device(self, mib):
        """The GPU gets another size."""
        self.cuda.capacity = mib << 20
        return {}

    def device_used(self):
        return {"bytes": self.cuda.used}

    def pause(self, at, after=0):
        """The next transfer between GPUs stops until `go_on` at its `copy`, after so many of them, or at its `join`, or
        for good at its `send`; says so when it does."""
        if at == "copy":
            self.store.copies_left = after
        elif at == "join":
            self.nccl.joining = threading.Event()
        else:
            self.nccl.pausing = True
        return {}

    def go_on(self):
        self.store.copies_left, self.nccl.pausing = None, False
        self.store.going_on.set()
        self.nccl.joining.set()
        self.store.going_on = threading.Event()
        return {}

    def communicator_epochs(self):
        assert self.sources._nccl is not None
        return {"epochs": [offer.epoch for offer in self.sources._nccl._offers.values()]}

    def forge_generation(self):
        """The next slot is filled with the data, but for its generation."""
        pack = staging.GENERATION.pack

        def forge(generation):
            if generation:
                staging.GENERATION = struct.Struct("<Q")
            return pack(4711 if generation else 0)

        staging.GENERATION = SimpleNamespace(pack=forge)
        return {}

    def obey(self, line):
        command = json.loads(line)
        try:
            return getattr(self, command.pop("op"))(**command)
        except RlhfError as error:
            return {"error": type(error).__name__, "message": str(error)}


async def main(arena_mib: int, epoch: int, devices: str, checksums: bool) -> None:
    peer = Peer(arena_mib << 20, epoch, devices, checksums)
    server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
    add_transfer_service(server, peer.handlers())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    peer.store.endpoint = Endpoint(
        address, host_id(), peer.arena_server.name, epoch, "actor", os.getpid(), peer.sources.device_uuid,
        peer.byte_server.port, peer.byte_server.key, peer.sources.nccl_version,
    )  # fmt: skip
    await server.start()
    say(endpoint=endpoint_to_proto(peer.store.endpoint).SerializeToString().hex())
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(**peer.obey(line))
    peer.sources.close()
    await server.stop(None)
    peer.arena_server.close()
    if not peer.pause_after:
        peer.byte_server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"))
