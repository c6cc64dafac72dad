"""`cuda_ipc`: slots of staging memory and their generations."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from contract.host_devices import HostCuda
from contract.peer_process import GPU
from nccl_transfer.fetch import Fetcher
from nccl_transfer.registry import create_readers
from nccl_transfer.testing.peer_process import MIB
from nccl_transfer.testing.transports.rows import assert_same_bits, fetch, random_array, wait_until
from nccl_transfer.transports import host_id
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcReader
from rlhf.errors import (
    TransferError,
)
from rlhf.v1 import cuda_ipc_pb2, cuda_ipc_pb2_grpc

pytestmark = pytest.mark.timeout(60)

OVER_CUDA_IPC = pytest.mark.parametrize("transport", ["cuda_ipc"], indirect=True)


@pytest.mark.parametrize("reading", [False, True])
def test_closing_lets_go_of_the_memory_of_a_source_before_that_frees_it(mortal_peer, reading):
    copying = threading.Event()

    class Slow(HostCuda):
        def copy_out(self, data, pointer):
            copying.set()
            self.synchronize()
            super().copy_out(data, pointer)

        def synchronize(self):
            time.sleep(0.1)

    fetcher = Fetcher(host_id(), [CudaIpcReader(Slow(GPU))])
    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(fetch, fetcher, mortal_peer.put(random_array("uint8", (3, MIB))))
        assert copying.wait(20) if reading else fetching.result(20)
        fetcher.close()
        assert (fetching.exception(5) is not None) == reading
    wait_until(lambda: mortal_peer.ask("device_used")["bytes"] == 0)
    assert mortal_peer.ask("freed_in_use") == {"times": 0}


@pytest.mark.parametrize("what", ["open", "open_event"])
def test_rows_come_by_the_next_transport_where_memory_of_the_source_cannot_be_opened(mortal_peer, what):
    """Containers on one GPU without a common IPC namespace, for example."""
    gpu, array = HostCuda(GPU), random_array("int32", (4,))

    def refuse(handle):
        raise RuntimeError("cudaErrorMapBufferObjectFailed")

    setattr(gpu, what, refuse)
    fetcher = Fetcher(host_id(), [CudaIpcReader(gpu), *create_readers(["tcp"])])
    for _ in range(2):
        assert_same_bits(fetch(fetcher, mortal_peer.put(array))["x"], array)
    assert {name: moved.transfers for name, moved in fetcher.traffic().items()} == {"tcp": 2}
    assert fetcher.failures() == {
        "cuda_ipc": f"{mortal_peer.endpoint}: open staging memory: RuntimeError: cudaErrorMapBufferObjectFailed"
    }
    wait_until(lambda: mortal_peer.ask("device_used")["bytes"] == 0)
    assert mortal_peer.ask("freed_in_use") == {"times": 0}
    fetcher.close()


def test_requests_for_different_slots_may_arrive_in_any_order(peer):
    with grpc.insecure_channel(peer.endpoint.address) as channel:
        stub = cuda_ipc_pb2_grpc.CudaIpcServiceStub(channel)
        lent = stub.OpenStaging(cuda_ipc_pb2.OpenStagingRequest(reader="reader", device_uuid=GPU), timeout=10)
        next(lent)
        for slot, generation in ((1, 2), (0, 1)):
            request = cuda_ipc_pb2.StageRequest(reader="reader", slot=slot, generation=generation)
            assert stub.Stage(request, timeout=10).generation == generation
        with pytest.raises(grpc.RpcError, match="generation 1 is not newer than 1"):
            stub.Stage(request, timeout=10)


@OVER_CUDA_IPC
def test_a_slot_that_holds_another_generation_is_an_error(fetcher, peer):
    batch = peer.put(random_array("uint8", (1, 3 * MIB)))
    peer.ask("forge_generation")
    with pytest.raises(TransferError, match=r"slot 0 holds generation 4711, not 1"):
        fetch(fetcher, batch)
    fetch(fetcher, batch)


@OVER_CUDA_IPC
def test_a_slot_that_changes_while_it_is_read_is_an_error(in_use, peer):
    (fetcher, gpu), batch = in_use, peer.put(random_array("uint8", (1, 3 * MIB)))
    copy_out = gpu.copy_out

    def copy_out_and_overtake(data, pointer):
        copy_out(data, pointer)
        if len(data) > 8:
            gpu.copy_in(pointer - 64, memoryview((4711).to_bytes(8, "little")))

    gpu.copy_out = copy_out_and_overtake
    with pytest.raises(TransferError, match=r"slot 0 holds generation 4711, not 1"):
        fetch(fetcher, batch)
