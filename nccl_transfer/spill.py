"""Reads of shards on GPUs by processes without a route there: the rank that holds them copies them to its host memory,
once for all readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import grpc

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard, Space
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.common import Channels, check_epoch, remaining_s
from rlhf.errors import InvalidRequest, TransferError, from_rpc_error
from rlhf.v1 import transfer_pb2 as pb
from rlhf.v1 import transfer_pb2_grpc as pb_grpc


class Spiller:
    """Finds or makes the copies in host memory of shards on GPUs. Thread-safe.

    Args:
        store: This rank's own store; None for a process without one.
    """

    def __init__(self, store: TensorStore | None) -> None:
        self._store = store
        self._channels = Channels()

    def on_host(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Sequence[ByteRange]:
        """Returns ranges of host memory with the same bytes, in the same order; blocks until they are there.

        Args:
            source: The rank that holds the shards.
            ranges: Ranges of its shards.
            deadline: Time on the clock of `time.monotonic`, in seconds.

        Raises:
            RlhfError: The rank could not copy its shards, with its error: Refused, OutOfSpace, DeadlineExceeded or
                ServiceLost.
        """
        shards = list(dict.fromkeys(r.shard for r in ranges if r.shard.space is Space.DEVICE))
        if not shards:
            return ranges
        if self._store is not None and source == self._store.endpoint:
            copies = spill(self._store, [shard.id for shard in shards], deadline)
        else:
            copies = self._ask(source, shards, deadline)
        by_id = dict(zip((shard.id for shard in shards), copies, strict=True))
        return [replace(r, shard=by_id[r.shard.id]) if r.shard.space is Space.DEVICE else r for r in ranges]

    def forget(self, source: Endpoint) -> None:
        """Closes the connection to a rank that no call can refer to any longer; as `Reader.forget`."""
        self._channels.forget(source.address)

    def close(self) -> None:
        """Closes all connections."""
        self._channels.close()

    def _ask(self, source: Endpoint, shards: Sequence[Shard], deadline: float) -> list[Shard]:
        """Has the rank copy its shards; returns the copies."""
        stub = pb_grpc.TransferServiceStub(self._channels.to(source.address))
        request = pb.SpillRequest(epoch=source.epoch, shards=[shard.id for shard in shards])
        try:
            answer = stub.Spill(request, timeout=remaining_s(deadline, source))
        except grpc.RpcError as error:
            raise from_rpc_error(error, str(source)) from error
        if [copy.nbytes for copy in answer.shards] != [shard.nbytes for shard in shards]:
            raise TransferError(f"{source}: copied other bytes to its host memory than it was asked for")
        return [Shard(source, copy.shard, copy.offset, copy.nbytes) for copy in answer.shards]


def spill(store: TensorStore, shard_ids: Sequence[int], deadline: float) -> list[Shard]:
    """Returns the copies in host memory of shards that a store has on its GPU; blocks until they are there.

    Raises:
        InvalidRequest: The store has no shards on a GPU. Other errors as raised by `DeviceShards.copy_to_host`.
    """
    if store.device is None:
        raise InvalidRequest("this rank has no arena on a GPU")
    return [store.device.copy_to_host(shard_id, deadline) for shard_id in shard_ids]


async def spill_response(store: TensorStore, request: pb.SpillRequest, timeout_s: float) -> pb.SpillResponse:
    """Handles the Spill RPC on a thread of its own. Raises Refused for another epoch, and as `spill` does.

    Args:
        store: Store of this rank.
        request: The request.
        timeout_s: Most seconds to wait for the bytes.
    """
    check_epoch(store, request.epoch)
    deadline = time.monotonic() + timeout_s
    copies = await asyncio.to_thread(spill, store, list(request.shards), deadline)
    return pb.SpillResponse(
        shards=[pb.SpilledShard(shard=copy.id, offset=copy.offset, nbytes=copy.nbytes) for copy in copies]
    )
