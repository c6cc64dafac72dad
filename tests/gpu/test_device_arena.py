"""The arena on a GPU, with tensors of torch."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.shards import Endpoint, Space
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.device_arrays import DeviceArray
from nccl_transfer.store.device_shards import DeviceShards
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import host_id

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
torch = pytest.importorskip("torch")
MIB = 1 << 20


@pytest.fixture
def store(cuda) -> Iterator[TensorStore]:
    from nccl_transfer.store.torch_device import TorchDevice

    tensors = TorchDevice(torch.device("cuda", torch.cuda.current_device()))
    store = TensorStore(64 * MIB, device=(DeviceArena(cuda, 16 * MIB), tensors))
    store.endpoint = Endpoint("here:1", host_id(), 1)
    yield store
    torch.cuda.synchronize()
    store.close()


def device_of(store: TensorStore) -> DeviceShards:
    assert store.device is not None
    return store.device


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_a_column_is_read_in_place_with_its_bits(store, dtype):
    values = torch.randint(0, 2, (1000, 3), device="cuda").to(getattr(torch, dtype))
    column = device_of(store).put_column(Jagged(values, np.array([400, 0, 600])), Lease("s", 1))
    assert column.shards[0].space is Space.DEVICE
    fetcher = Fetcher(host_id(), [], store)
    rows = fetcher.fetch(Batch(3, {"x": column}), time.monotonic() + 20, on_device=["x"])
    found = rows["x"]
    assert isinstance(found, Jagged)
    assert isinstance(found.values, DeviceArray)
    tensor, arena = found.values.tensor(), device_of(store).arena
    assert torch.equal(tensor.view(torch.uint8), values.view(torch.uint8))
    assert arena.pointer <= tensor.data_ptr() < arena.pointer + arena.nbytes
    store.release("s")
    assert arena.used_bytes > 0
    del tensor, found, rows
    arena.settle()
    assert arena.used_bytes == 0
    fetcher.close()


def test_blocks_are_given_out_again_behind_kernels_that_read_them(store):
    slow = torch.randn(4096, 4096, device="cuda")
    fetcher = Fetcher(host_id(), [], store)
    for step in range(50):
        values = torch.full((2 * MIB,), float(step), device="cuda")
        column = device_of(store).put_column(values, Lease("s", step))
        batch = Batch(2 * MIB, {"x": column})
        found = fetcher.fetch(batch, time.monotonic() + 20, on_device=["x"])["x"]
        assert isinstance(found, DeviceArray)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensor = found.tensor()
            torch.mm(slow, slow)
            total = tensor.sum()
        del tensor, found
        store.release("s", {step})
        side.synchronize()
        assert total.item() == step * 2 * MIB
    fetcher.close()


def test_a_host_reader_gets_a_copy(store):
    values = torch.arange(1000.0, device="cuda")
    column = device_of(store).put_column(values, Lease("s", 1))
    fetcher = Fetcher(host_id(), [], store)
    rows = fetcher.fetch(Batch(1000, {"x": column}), time.monotonic() + 20)
    found = rows["x"]
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, np.arange(1000, dtype=np.float32))
    assert store.stat().host_copied_bytes == 4000
    fetcher.close()
