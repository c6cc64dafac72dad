"""A source in the reader's own process, and communicators by which a rank sends to itself: how the `nccl` transport
runs where there is one GPU, of which NCCL takes one rank."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence

import grpc.aio
import numpy as np

from nccl_transfer.batch import Batch, Endpoint, RemoteColumn
from nccl_transfer.columns import Jagged
from nccl_transfer.communicator import Communicator, Message, Nccl
from nccl_transfer.device import Cuda, Event
from nccl_transfer.serving import add_transfer_service
from nccl_transfer.sources import DeviceSources
from nccl_transfer.store import Lease, TensorStore
from nccl_transfer.transports import host_id
from rlhf.contract import CHANNEL_OPTIONS

EPOCH = 3


class LoopbackNccl(Nccl):
    """The two ranks of a communicator are one rank of another: what one sends, the same rank receives."""

    def __init__(self, nccl: Nccl) -> None:
        self.version = nccl.version
        self._nccl = nccl
        self._joined: dict[bytes, _Loop] = {}
        self._lock = threading.Lock()

    def unique_id(self) -> bytes:
        return self._nccl.unique_id()

    def join(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        assert size == 2
        with self._lock:
            if unique_id not in self._joined:
                self._joined[unique_id] = _Loop(self._nccl.join(unique_id, 0, 1))
            return self._joined[unique_id]


class _Loop(Communicator):
    """Both ends: a group goes out when its sends and its receives are there."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sends: list[Message] = []
        self._receives: list[Message] = []
        self._lock = threading.Lock()

    def wait(self, event: Event) -> None:
        self._communicator.wait(event)

    def group(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        with self._lock:
            self._sends += [Message(0, message.pointer, message.nbytes) for message in sends]
            self._receives += [Message(0, message.pointer, message.nbytes) for message in receives]
            if len(self._sends) == len(self._receives):
                self._communicator.group(self._sends, self._receives)
                self._sends, self._receives = [], []

    def done(self) -> bool:
        with self._lock:
            return not self._sends and not self._receives and self._communicator.done()

    def abort(self) -> None:
        self._communicator.abort()


class OwnPeer:
    """A source on a thread of this process, with the part of `PeerProcess` that needs no other process."""

    def __init__(self, nccl: Nccl, cuda: Cuda, arena_bytes: int) -> None:
        self.store = TensorStore(arena_bytes)
        self._sources = DeviceSources(self.store, cuda, nccl)
        self._steps = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(started),))
        self._thread.start()
        assert started.wait(20)

    @property
    def endpoint(self) -> Endpoint:
        assert self.store.endpoint is not None
        return self.store.endpoint

    def put_columns(
        self, columns: dict[str, tuple[np.ndarray, str, list[int] | None]], layout: str = "as it is"
    ) -> Batch:
        assert layout == "as it is"
        lease, stored = Lease("session", next(self._steps)), {}
        for name, (array, dtype, lengths) in columns.items():
            values = array if lengths is None else Jagged(array, np.array(lengths, np.int64))
            stored[name] = self.store.put_column(values, dtype, lease)
        first = next(iter(stored.values()))
        assert isinstance(first, RemoteColumn)
        return Batch(first.rows, stored)

    def put(self, array: np.ndarray, dtype: str = "", lengths: list[int] | None = None) -> Batch:
        return self.put_columns({"x": (array, dtype or str(array.dtype), lengths)})

    def release(self) -> None:
        self.store.release("session")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()
        self.store.close()

    async def _serve(self, started: threading.Event) -> None:
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        add_transfer_service(server, self._sources.handlers())
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        # The reader believes that this is another GPU.
        self.store.endpoint = Endpoint(
            address, host_id(), "", EPOCH, "actor", 0, "GPU-itself", nccl_version=self._sources.nccl_version
        )
        await server.start()
        started.set()
        await self._stop.wait()
        self._sources.close()
        await server.stop(None)
