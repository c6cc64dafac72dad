"""A rank that only serves tensors: the other process of the transport suite.

Started as `python transport_peer.py ARENA_MIB EPOCH`. Prints its endpoint, then answers every line of JSON on stdin
with a line of JSON on stdout, and ends with stdin. What it stores comes from .npy files, so that the suite owns
the expected values.
"""

import asyncio
import json
import os
import sys

import grpc
import numpy as np

from nccl_transfer.batch import Batch, Endpoint
from nccl_transfer.columns import Jagged
from nccl_transfer.store import Lease, TensorStore
from nccl_transfer.transports import ArenaServer, host_id, serve_fetch, stat_response
from nccl_transfer.wire import endpoint_to_proto, to_proto
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import STATUS_KEY, RlhfError, to_status
from rlhf.v1 import transfer_pb2_grpc

SESSION = "session"

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


class Peer(transfer_pb2_grpc.TransferServiceServicer):
    def __init__(self, arena_bytes: int, epoch: int) -> None:
        self.epoch = epoch
        self.store = TensorStore(arena_bytes)
        self.arena_server = ArenaServer(self.store)
        self.configure()

    async def Fetch(self, request, context):
        try:
            chunks = 0
            async for response in serve_fetch(self.store, self.epoch, request):
                if chunks == self.pause_after:
                    say(event="paused")
                    await asyncio.Event().wait()
                if chunks == self.break_after:
                    self.break_after = self.break_after if self.always else None
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")
                yield response
                chunks += 1
                self.served_bytes += len(response.data)
        except RlhfError as error:
            details = to_status(error, {}).SerializeToString()
            await context.abort(error.code, str(error), trailing_metadata=((STATUS_KEY, details),))

    async def Stat(self, request, context):
        return stat_response(self.store, {})

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

    def obey(self, line):
        command = json.loads(line)
        try:
            return getattr(self, command.pop("op"))(**command)
        except RlhfError as error:
            return {"error": type(error).__name__, "message": str(error)}


async def main(arena_mib: int, epoch: int) -> None:
    peer = Peer(arena_mib << 20, epoch)
    server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(peer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    peer.store.endpoint = Endpoint(address, host_id(), peer.arena_server.name, epoch, "actor", os.getpid())
    await server.start()
    say(endpoint=endpoint_to_proto(peer.store.endpoint).SerializeToString().hex())
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(**peer.obey(line))
    await server.stop(None)
    peer.arena_server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
