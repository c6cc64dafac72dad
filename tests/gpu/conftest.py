"""Tests that need an NVIDIA GPU; `make test-gpu` runs them."""

import os

import pytest

from nccl_transfer.devices.cupy_cuda import why_no_cuda
from nccl_transfer.transports.gpu.communicator import why_no_nccl

# As services do, before the first matrix product: else torch warns of each where kernels are to be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session")
def gpu():
    """The GPU of this process as a device of torch."""
    import torch

    if not torch.cuda.is_available():
        pytest.fail("`-m gpu` asks for a GPU, and torch finds none")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def two_gpus(gpu):
    """Skips the tests of hosts with one GPU."""
    import torch

    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs two GPUs, this host shows {count}")


@pytest.fixture(scope="session")
def cuda():
    """The GPU of this process."""
    reason = why_no_cuda()
    if reason is not None:
        pytest.fail(f"`-m gpu` asks for a GPU: {reason}")
    from nccl_transfer.devices.cupy_cuda import own_cuda

    return own_cuda()


@pytest.fixture(scope="session")
def nccl(cuda):
    """NCCL on it."""
    reason = why_no_nccl()
    if reason is not None:
        pytest.fail(f"`-m gpu` asks for NCCL: {reason}")
    from nccl_transfer.transports.gpu.communicator import own_nccl

    return own_nccl()
