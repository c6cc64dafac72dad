"""Columns of a rank that stay on its GPU, from a method's result to the next method's rows; and ranks without a GPU."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_cupy
import numpy as np
import pytest
from unit.test_requests import Echo, SharedProcess

from contract.host_devices import HostCuda, HostNccl
from contract.host_tensors import HostTensor, HostTensors
from contract.loopback import CountedCuda
from nccl_transfer import registry
from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.refs.batch import Batch, concat_columns
from nccl_transfer.refs.checksums import digests
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard, Space
from nccl_transfer.refs.wire import from_proto, to_proto
from nccl_transfer.spill import spill_response
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.device_arrays import DeviceArray
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports.gpu.cuda_ipc_source import CudaIpcSource
from nccl_transfer.transports.gpu.nccl_source import NcclSource
from rlhf.errors import InvalidRequest, Refused, TransferError
from rlhf.v1 import common_pb2, cuda_ipc_pb2, nccl_pb2, transfer_pb2
from services.runtime.encoding import ResponseEncoder
from services.runtime.fetches import fetch_rows
from services.runtime.server import RankServer
from services.runtime.worker import CallContext, CallResult, CallRows
from settings.reference import ReferenceTable

CALL = common_pb2.Call(call_id="1", session="session", step=1)
COLUMN = "ref_log_probs"


class OnGpu(Echo):
    on_device = frozenset({COLUMN})

    def gpu(self) -> tuple[Cuda, DeviceTensors]:
        cuda = HostCuda("GPU-1")
        return cuda, HostTensors(cuda)


def rank_of(worker: type[Echo], **settings: object) -> RankServer:
    table = ReferenceTable.model_validate(
        {"role": "reference", "address": "127.0.0.1:7000", "model": Path(), "arena_mb": 1, **settings}
    )
    mesh = Mesh(1, 1, 1)
    server = RankServer(worker(table, SharedProcess(0, 1, 1, endpoints=[], model_mesh=mesh)))
    server.store.endpoint = Endpoint("127.0.0.1:7000", epoch=1)
    return server


@pytest.fixture
def made() -> Iterator[list[RankServer]]:
    servers: list[RankServer] = []
    yield servers
    for server in servers:
        server.fetcher.close()
        server.store.close()


def result(values: np.ndarray, lengths: list[int]) -> CallResult:
    return CallResult({COLUMN: Jagged(HostTensor(values, "float32"), np.array(lengths))})  # type: ignore[arg-type]


def respond(server: RankServer, values: np.ndarray, lengths: list[int]) -> common_pb2.Batch:
    method = server.methods["/rlhf.v1.ReferenceService/ComputeRefLogProb"][0]
    timing = common_pb2.Timing()
    response = ResponseEncoder(server.worker, server.store).encode(
        method, CALL, timing, result(values, lengths)
    )
    assert response.outcome.timing.stored_bytes == values.nbytes
    assert response.outcome.timing.spilled_bytes == server.store.stat().spilled_bytes
    return response.batch


def rows_of(server: RankServer, batch: common_pb2.Batch) -> CallRows:
    context = CallContext(CALL, time.monotonic() + 20)
    on_device = server.worker.on_device
    return fetch_rows(server.fetcher, batch, context, common_pb2.Timing(), writable=True, on_device=on_device)


def test_a_column_that_a_method_leaves_on_the_gpu_is_read_there_by_the_next(made) -> None:
    made.append(server := rank_of(OnGpu, arena_device_mb=2))
    values = np.arange(6, dtype=np.float32)
    batch = respond(server, values, [4, 2])
    assert batch.shards[0].space == common_pb2.SPACE_DEVICE
    column = rows_of(server, batch)[COLUMN]
    assert isinstance(column, Jagged)
    assert isinstance(column.values, DeviceArray)
    assert column.values.tensor().array.tolist() == values.tolist()
    stat = server.store.stat()
    assert (stat.device_arena_bytes, stat.device_used_bytes, stat.host_copied_bytes) == (2 << 20, 256, 0)


def test_the_part_of_a_column_that_is_in_host_memory_is_verified(made) -> None:
    """Rows of a service on GPUs and of one with checksums, in one batch."""
    made.append(server := rank_of(OnGpu, arena_device_mb=2))
    store, lease = server.store, Lease("session", 1)
    assert store.device is not None
    values = np.arange(4, dtype=np.float32)
    there = store.device.put_column(HostTensor(values, "float32"), lease)

    def write(memory: memoryview) -> list[int]:
        memory[:] = values.tobytes()
        return list(digests(memory))

    shard = store.fill(values.nbytes, lease, write)
    here = RemoteColumn.of_shard("float32", (), 4, shard)
    batch = Batch(8, {COLUMN: concat_columns([there, here])})
    fetched = server.fetcher.fetch(batch, time.monotonic() + 20, on_device={COLUMN})
    assert isinstance(fetched[COLUMN], DeviceArray)
    store.view(shard.id, 0, 1)[0] ^= 1
    with pytest.raises(TransferError, match=f"column '{COLUMN}', shard {shard.id}: .* checksum"):
        server.fetcher.fetch(batch, time.monotonic() + 20, on_device={COLUMN})


def test_a_column_for_which_the_arena_has_no_room_goes_to_the_host_and_is_counted(made) -> None:
    made.append(server := rank_of(OnGpu, arena_device_mb=1, arena_mb=3))
    values = np.ones((2 << 20) // 4, np.float32)
    batch = respond(server, values, [len(values)])
    assert batch.shards[0].space == common_pb2.SPACE_UNSPECIFIED
    assert server.store.stat().spilled_bytes == values.nbytes
    column = rows_of(server, batch)[COLUMN]
    assert isinstance(column, Jagged)
    assert isinstance(column.values, np.ndarray)


@pytest.mark.parametrize("settings", [{"arena_device_mb": 0}, {"checksums": True}])
def test_without_an_arena_on_the_gpu_and_with_checksums_there_is_none(made, settings) -> None:
    made.append(server := rank_of(OnGpu, **settings))
    assert server.store.device is None
    made.append(server := rank_of(Echo))
    assert server.store.device is None


def test_a_process_without_a_gpu_of_its_own_makes_nothing_on_those_of_the_host() -> None:
    fake_cupy.install(0)
    try:
        fake_cupy.streams.clear()
        names = {each.name for each in (*registry.served_transports(), *registry.create_readers())}
        assert names == {"memfd", "tcp", "grpc"}
        assert not fake_cupy.streams
        assert registry.unavailable()["nccl"] == "this process does not compute on a GPU"
        assert {each.name for each in registry.served_transports(on_gpu=True)} > {"cuda_ipc", "nccl"}
    finally:
        fake_cupy.remove()


class OffTheLoop(CountedCuda):
    """A GPU that refuses calls of one thread."""

    def __getattribute__(self, name: str) -> object:
        if name in ("malloc", "free", "share", "event", "copy_in", "synchronize", "open"):
            assert threading.current_thread() is not threading.main_thread(), f"{name} on the event loop"
        return super().__getattribute__(name)


def test_sources_call_cuda_on_threads_of_their_own() -> None:
    bare = HostCuda("GPU-1")
    store = TensorStore(1 << 20, device=(DeviceArena(bare, 1 << 20), HostTensors(bare)))
    store.endpoint = Endpoint("127.0.0.1:7000")
    shard = store.put(np.zeros(64, np.uint8), Lease("s", 1))
    cuda = OffTheLoop(bare)

    async def use() -> None:
        ipc, nccl = CudaIpcSource(store, cuda, 1024), NcclSource(store, HostNccl(), cuda)
        staging = ipc.open_staging(cuda_ipc_pb2.OpenStagingRequest(reader="r", device_uuid="GPU-1"))
        await anext(staging)
        stage = cuda_ipc_pb2.StageRequest(reader="r", generation=1)
        stage.ranges.add(shard=shard.id, nbytes=64)
        await ipc.stage(stage)
        arena = ipc.open_arena(cuda_ipc_pb2.OpenArenaRequest(device_uuid="GPU-1"))
        assert (await anext(arena)).nbytes == 1 << 20
        attached = nccl.attach(
            nccl_pb2.AttachRequest(reader="r", communicator_epoch=1, unique_id=b"none", nccl_version=22703)
        )
        await anext(attached)
        for stream in (staging, arena, attached):
            await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue] - they are generators
        ipc.close()
        nccl.close()

    asyncio.run(use())
    store.close()


def test_a_release_and_stat_call_no_cuda() -> None:
    bare = HostCuda("GPU-1")

    def fill() -> TensorStore:
        arena = DeviceArena(OffTheLoop(bare), 1 << 20)
        store = TensorStore(1 << 20, device=(arena, HostTensors(bare)))
        store.endpoint = Endpoint("127.0.0.1:7000")
        assert store.device is not None
        column = store.device.put_column(HostTensor(np.zeros(64, np.float32), "float32"), Lease("s", 1))
        store.device.pin(column.shards[0].id, 0, 256).wait(7)  # dropped at once
        return store

    with ThreadPoolExecutor(1) as thread:
        store = thread.submit(fill).result(20)
        assert store.stat().device_used_bytes == 256
        store.release("s")
        assert store.stat().device_used_bytes == 256
        assert store.device is not None
        thread.submit(store.device.arena.settle).result(20)
        assert store.stat().device_used_bytes == 0
        thread.submit(store.close).result(20)


def test_the_space_of_a_shard_travels_and_an_unknown_one_is_refused() -> None:
    shard = Shard(Endpoint("a:1"), 7, 64, 16, space=Space.DEVICE)
    message = to_proto(Batch(4, {"x": RemoteColumn.of_shard("float32", (), 4, shard)}))
    column = from_proto(message)["x"]
    assert isinstance(column, RemoteColumn)
    assert column.shards[0] == shard
    message.shards[0].space = 5  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="shard 7 lies in memory of unknown kind 5"):
        from_proto(message)


def test_a_copy_on_the_host_of_rows_that_are_there_already_is_refused(made) -> None:
    made.append(server := rank_of(Echo))
    with pytest.raises(InvalidRequest, match="this rank has no arena on a GPU"):
        asyncio.run(spill_response(server.store, transfer_pb2.SpillRequest(shards=[1]), 1.0))
    made.append(server := rank_of(OnGpu))
    shard = server.store.put(np.zeros(4, np.uint8), Lease("s", 1))
    with pytest.raises(Refused, match=rf"shard {shard.id} was released, or is not on the GPU"):
        asyncio.run(spill_response(server.store, transfer_pb2.SpillRequest(shards=[shard.id]), 1.0))
    with pytest.raises(Refused, match="the epoch is 1, the rows are of epoch 2"):
        asyncio.run(spill_response(server.store, transfer_pb2.SpillRequest(epoch=2), 1.0))
