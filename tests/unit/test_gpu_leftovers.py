"""Either side of `cuda_ipc` gives back what it has of a GPU where it cannot have all that it needs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contract.host_devices import HostCuda
from nccl_transfer.devices.cuda import Event
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.gpu.arena_reads import _OpenedArena
from nccl_transfer.transports.gpu.cuda_ipc_source import CudaIpcSource
from rlhf.v1 import cuda_ipc_pb2 as pb


class OutOfEvents(HostCuda):
    """A GPU that makes `events` events, and no more."""

    def __init__(self, events: int = 1 << 30) -> None:
        super().__init__("GPU-1")
        self.events = events

    def event(self) -> Event:
        self.events -= 1
        if self.events < 0:
            raise RuntimeError("cudaErrorUnknown")
        return super().event()


def test_an_arena_is_closed_where_the_reader_gets_no_event() -> None:
    source, reader, stream = HostCuda("GPU-1"), OutOfEvents(0), object()
    pointer = source.malloc(64)
    shared = pb.OpenArenaResponse(memory_handle=source.share(pointer), nbytes=64)
    with pytest.raises(RuntimeError, match="cudaErrorUnknown"):
        _OpenedArena(reader, stream, shared)  # type: ignore[arg-type]
    source.free(pointer)
    assert source.freed_in_use == 0


@pytest.mark.parametrize("events", [0, 1])
def test_staging_memory_and_its_events_are_freed_where_it_gets_no_further_event(events: int) -> None:
    cuda, store = OutOfEvents(events), TensorStore(1 << 20)
    store.endpoint = Endpoint("127.0.0.1:1", epoch=1)
    request = pb.OpenStagingRequest(reader="r", epoch=1, device_uuid=cuda.uuid)

    async def open_staging() -> Any:
        return [each async for each in CudaIpcSource(store, cuda, 64).open_staging(request)]

    with pytest.raises(RuntimeError, match="cudaErrorUnknown"):
        asyncio.run(open_staging())
    assert cuda._blocks == {}
    store.close()
