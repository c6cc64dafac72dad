"""A rank that sends weights, within the test's process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from nccl_transfer.bucket_board import BucketBoard
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.plans import Slice
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.weight_plans import RankWeights, WeightSlice, WeightTransfer, plan_weights
from nccl_transfer.registry import create_readers, find_transports
from nccl_transfer.store.store import TensorStore
from nccl_transfer.testing.peer import Peer
from nccl_transfer.testing.serving import TRANSFER
from nccl_transfer.transports.base import Handler
from nccl_transfer.transports.host import host_id
from rlhf.v1 import common_pb2
from services.runtime.worker import CallContext
from services.storage.checkpoint import WeightShard
from services.weights.packing import WeightPacker, dtype_name, slice_of
from services.weights.receive import receive
from services.weights.sending import send


class OfferingPeer(Peer):
    """A rank that serves TakeBucket too."""

    def __init__(self, store: TensorStore, transports: Sequence[str]) -> None:
        super().__init__(store, 3, find_transports(transports))
        self.board = BucketBoard(store)

    def handlers(self) -> dict[str, Handler]:
        return {**super().handlers(), TRANSFER["TakeBucket"].path: self._take}

    async def _take(self, request: Any, context: Any) -> Any:
        return await self.board.take(request, context.time_remaining())


class WeightSource:
    """A rank that holds weights, served by an event loop in a thread.

    Args:
        shards: Name and shard of each tensor.
        transports: Names of the transports that it serves. Default: memfd.
        arena_mib: Size of its arena.
        checksums: Whether its buckets have checksums in place, too (config key `checksums`).
    """

    def __init__(
        self,
        shards: Sequence[tuple[str, WeightShard]],
        transports: Sequence[str] = ("memfd",),
        arena_mib: int = 8,
        checksums: bool = False,
    ) -> None:
        self.shards = list(shards)
        self.store = TensorStore(arena_mib << 20, checksums)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.peer = self._run(self._make(transports))
        self.endpoint: Endpoint = self._run(self.peer.start())
        self._sender = ThreadPoolExecutor(1)

    @property
    def weights(self) -> RankWeights:
        return RankWeights(self.endpoint, tuple(slice_of(name, shard) for name, shard in self.shards))

    def send(
        self, transfer: WeightTransfer, number: int = 0, within_s: float = 20.0
    ) -> tuple[Future[None], CallContext]:
        """Sends in the background; returns a future of its end, and its call."""
        call = CallContext(common_pb2.Call(call_id="send", session="s"), time.monotonic() + within_s)
        buckets = plan_weights(transfer)[number]
        packer = WeightPacker(self.shards)
        return self._sender.submit(send, transfer, buckets, packer, self.peer.board, call), call

    def rest(self) -> None:
        """Waits until the thread that sends has nothing left to do, nor anything of what it did."""
        self._sender.submit(int).result(20)

    def close(self) -> None:
        self._run(self.peer.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._sender.shutdown()
        self.store.close()

    async def _make(self, transports: Sequence[str]) -> OfferingPeer:
        return OfferingPeer(self.store, transports)

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(20)


def fetcher_by(transports: Sequence[str]) -> Fetcher:
    return Fetcher(host_id(), create_readers(transports))


def receiver_of(number: int, slices: Sequence[WeightSlice]) -> RankWeights:
    return RankWeights(Endpoint(f"127.0.0.1:{9000 + number}", host_id(), 1, "rollout", number), tuple(slices))


def whole(name: str, tensor: Tensor, dtype: str = "") -> WeightSlice:
    """The slice that is all of a tensor."""
    shape = tuple(tensor.shape)
    return WeightSlice(name, shape, Slice.whole(shape), dtype or dtype_name(tensor.dtype))


def read_all(
    transfer: WeightTransfer, receiver: int, fetcher: Fetcher, within_s: float = 20.0
) -> tuple[dict[WeightSlice, Tensor], int]:
    """Receives everything; returns copies by piece, and the bytes that came."""
    pieces = {}
    for piece, values in receive(transfer, receiver, fetcher, time.monotonic() + within_s):
        assert piece not in pieces
        pieces[piece] = torch.empty(piece.box.shape, dtype=getattr(torch, piece.dtype))
        values.copy_to(pieces[piece])
    return pieces, sum(values.nbytes for values in pieces.values())


def assembled(wanted: Sequence[WeightSlice], pieces: Mapping[WeightSlice, Tensor]) -> dict[str, Tensor]:
    """Puts pieces into the slices that were wanted, one per name; nan where nothing came."""
    found = {}
    for each in wanted:
        mine = {piece: values for piece, values in pieces.items() if piece.name == each.name}
        target = next(iter(mine.values())).new_zeros(each.box.shape)
        for piece, values in mine.items():
            target[piece.box.within(each.box)] = values
        found[each.name] = target
    return found
