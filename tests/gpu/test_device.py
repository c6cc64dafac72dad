"""The calls of CUDA and NCCL that the data plane makes, on a real GPU; NCCL as one rank that sends to itself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from nccl_transfer.devices.cuda import DeviceBuffer
from nccl_transfer.refs.dtypes import ITEM_BYTES
from nccl_transfer.transports.gpu.communicator import Communicator, CommunicatorError, Message
from rlhf.errors import OutOfSpace

pytestmark = pytest.mark.gpu

SIZES = [1, 63, 4096, (1 << 20) + 1, 64 << 20]


def random_bytes(nbytes: int) -> memoryview:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).data


def read(cuda, buffer: DeviceBuffer) -> bytearray:
    data = bytearray(buffer.nbytes)
    cuda.copy_out(memoryview(data), buffer.pointer)
    return data


def wait(done: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


@pytest.fixture
def alone(nccl) -> Communicator:
    return nccl.join(nccl.unique_id(), 0, 1)


def test_the_uuid_is_the_one_that_torch_reports(cuda):
    torch = pytest.importorskip("torch")
    assert cuda.uuid == f"GPU-{torch.cuda.get_device_properties(cuda.number).uuid}"


@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_go_to_the_gpu_across_it_and_back(cuda, nbytes):
    data, first, second = random_bytes(nbytes), DeviceBuffer(cuda, nbytes), DeviceBuffer(cuda, nbytes)
    cuda.copy_in(first.pointer, data)
    cuda.copy(second.pointer, first.pointer, nbytes)
    assert read(cuda, second) == bytes(data)


def test_too_much_memory_is_out_of_space(cuda):
    with pytest.raises(OutOfSpace, match="bytes left"):
        DeviceBuffer(cuda, 1 << 50)


def test_another_process_opens_memory_and_event_by_their_handles(cuda):
    data, buffer, event = random_bytes(1 << 20), DeviceBuffer(cuda, 1 << 20), cuda.event()
    cuda.copy_in(buffer.pointer, data)
    event.record()
    code = (
        "import hashlib, sys; from nccl_transfer.devices.cupy_cuda import own_cuda; cuda = own_cuda();"
        "event = cuda.open_event(bytes.fromhex(sys.argv[2])); event.wait();"
        "pointer = cuda.open(bytes.fromhex(sys.argv[1])); data = bytearray(1 << 20);"
        "cuda.copy_out(memoryview(data), pointer); cuda.close(pointer); sys.stdout.buffer.write(data)"
    )
    command = [sys.executable, "-c", code, cuda.share(buffer.pointer).hex(), event.handle.hex()]
    ran = subprocess.run(command, capture_output=True, timeout=60)
    assert ran.stdout == bytes(data), ran.stderr.decode()
    event.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_rank_sends_to_itself(cuda, alone, nbytes):
    data, sent, received = random_bytes(nbytes), DeviceBuffer(cuda, nbytes), DeviceBuffer(cuda, nbytes)
    event = cuda.event()
    cuda.copy_in(sent.pointer, data)
    event.record()
    alone.wait(event)
    alone.group([Message(0, sent.pointer, nbytes)], [Message(0, received.pointer, nbytes)])
    wait(alone.done)
    assert read(cuda, received) == bytes(data)
    alone.abort()


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_element_type_travels_as_bytes(cuda, alone, dtype):
    torch = pytest.importorskip("torch")
    sent = torch.randint(0, 2, (257,), device="cuda").to(getattr(torch, dtype))
    received = torch.zeros_like(sent)
    torch.cuda.synchronize()
    nbytes = sent.numel() * ITEM_BYTES[dtype]
    alone.group([Message(0, sent.data_ptr(), nbytes)], [Message(0, received.data_ptr(), nbytes)])
    wait(alone.done)
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))
    alone.abort()


def test_many_messages_of_a_group_arrive_in_their_order(cuda, alone):
    count = 300
    sent, received = DeviceBuffer(cuda, 64 * count), DeviceBuffer(cuda, 64 * count)
    cuda.copy_in(sent.pointer, random_bytes(64 * count))
    cuda.synchronize()
    messages = [
        [Message(0, buffer.pointer + 64 * i, 1 + i % 64) for i in range(count)] for buffer in (sent, received)
    ]
    alone.group(*messages)
    wait(alone.done)
    expected, got = read(cuda, sent), read(cuda, received)
    for i in range(count):
        assert got[64 * i : 64 * i + 1 + i % 64] == expected[64 * i : 64 * i + 1 + i % 64]
    alone.abort()


def test_an_abort_is_an_error_wherever_the_communicator_is_used_next(alone):
    threads = [threading.Thread(target=alone.abort) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    with pytest.raises(CommunicatorError, match="aborted"):
        alone.done()


def test_torch_sees_received_bytes_without_a_copy(cuda):
    torch = pytest.importorskip("torch")
    buffer = DeviceBuffer(cuda, 4096)
    cuda.copy_in(buffer.pointer, random_bytes(4096))
    cuda.synchronize()
    tensor = torch.as_tensor(buffer, device="cuda")
    assert tensor.data_ptr() == buffer.pointer
    assert tensor.cpu().numpy().tobytes() == bytes(random_bytes(4096))
