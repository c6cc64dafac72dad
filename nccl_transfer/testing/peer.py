"""A rank that only serves tensors: the other process of the contract of transports.

Usage: `python -m nccl_transfer.testing.peer ARENA_MIB EPOCH CHECKSUMS TRANSPORT...`: CHECKSUMS is `True` or `False`,
each TRANSPORT a name or "module:object". Prints its endpoint, then answers every line of JSON on stdin with a line of
JSON on stdout, and ends with stdin. Rows come from .npy files, so that the suite owns the expected values.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire import to_proto
from nccl_transfer.refs.wire_ranks import endpoint_to_proto
from nccl_transfer.registry import find_transport, unavailable
from nccl_transfer.sources import Sources
from nccl_transfer.spill import spill_response
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.serving import TRANSFER, add_handlers
from nccl_transfer.transfer_service import mark_corrupt_response, stat_response
from nccl_transfer.transports.base import Handler, Transport
from nccl_transfer.transports.host import host_id
from rlhf.channels import listen, open_server
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import RlhfError

SESSION = "session"
SPILL_S = 20.0

LAYOUTS = {
    "as it is": lambda array: array,
    "transposed": lambda array: array.T,
    "strided": lambda array: array[::2, 1::3],
    "reversed": lambda array: array[::-1, ::-1],
    "broadcast": lambda array: np.broadcast_to(array[:1], array.shape),
}
"""Non-contiguous views of a matrix."""


class Peer:
    """The rank. Each method that `obey` calls returns a reply that JSON can represent.

    Args:
        store: Its store.
        epoch: Epoch of its service.
        transports: Transports by which it gives out its rows.
    """

    def __init__(self, store: TensorStore, epoch: int, transports: Sequence[Transport]) -> None:
        self.store = store
        self.epoch = epoch
        self.sources = Sources(store, "127.0.0.1", transports)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> Endpoint:
        """Starts serving; returns the endpoint."""
        methods = [TRANSFER, *self.sources.services()]
        services = {next(iter(each.values())).service: each for each in methods}
        classes = {method.path: method.access for each in services.values() for method in each.values()}
        self._server, _ = open_server([*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)], classes)
        add_handlers(self._server, self.handlers(), services.values())
        address = f"127.0.0.1:{listen(self._server, '127.0.0.1:0')}"
        adverts = self.sources.adverts()
        self.store.endpoint = Endpoint(address, host_id(), self.epoch, "actor", os.getpid(), adverts)
        await self._server.start()
        return self.store.endpoint

    async def close(self) -> None:
        """Stops serving."""
        self.sources.close_rpcs()
        if self._server is not None:
            await self._server.stop(None)
        self.sources.close()

    def handlers(self) -> dict[str, Handler]:
        """Returns the handlers of all RPCs, by path."""
        return {
            **self.sources.handlers(),
            TRANSFER["Spill"].path: self._spill,
            TRANSFER["Stat"].path: self._stat,
            TRANSFER["MarkCorrupt"].path: self._mark_corrupt,
        }

    async def _spill(self, request: Any, context: Any) -> Any:
        return await spill_response(self.store, request, context.time_remaining() or SPILL_S)

    async def _stat(self, request: Any, context: Any) -> Any:
        return stat_response(self.store, {}, unavailable())

    async def _mark_corrupt(self, request: Any, context: Any) -> Any:
        return mark_corrupt_response(self.store, request)

    def put(self, step: int, columns: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Stores columns: of each the path of its values, its element type, lengths of its rows and layout."""
        stored = {}
        for name, column in columns.items():
            array = LAYOUTS[column["layout"]](np.load(Path(column["path"])))
            lengths = column["lengths"]
            values = array if lengths is None else Jagged(array, np.array(lengths, np.int64))
            stored[name] = self.store.put_column(values, column["dtype"], Lease(SESSION, step))
        rows = next(iter(stored.values())).rows
        return {"batch": to_proto(Batch(rows, stored)).SerializeToString().hex()}

    def adverts(self) -> dict[str, Any]:
        """Returns the adverts as hexadecimal digits."""
        return {"adverts": {name: advert.hex() for name, advert in self.sources.adverts().items()}}

    def release(self) -> dict[str, Any]:
        """Frees all rows."""
        return {"freed": self.store.release(SESSION)}

    def flip(self, shard: int, byte: int) -> dict[str, Any]:
        """Inverts a byte of a shard without the store's knowledge."""
        self.store._memory(self.store._allocations[shard].shard)[byte] ^= 0xFF
        return {}

    def obey(self, line: str) -> dict[str, Any]:
        """Runs a command, an object in JSON with the name of a method, `op`, and its arguments; returns its reply, or
        class and text of its error."""
        command = json.loads(line)
        try:
            return getattr(self, command.pop("op"))(**command)
        except RlhfError as error:
            return {"error": type(error).__name__, "message": str(error)}


def say(**reply: Any) -> None:
    """Prints a reply as a line of JSON."""
    print(json.dumps(reply), flush=True)


async def serve(peer: Peer) -> None:
    """Serves until stdin ends, and answers its lines."""
    say(endpoint=endpoint_to_proto(await peer.start()).SerializeToString().hex())
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(**peer.obey(line))
    await peer.close()


if __name__ == "__main__":
    arena_mib, epoch, checksums, *names = sys.argv[1:]
    store = TensorStore(int(arena_mib) << 20, checksums == "True")
    asyncio.run(serve(Peer(store, int(epoch), [find_transport(name) for name in names])))
