"""That what benchmarks/transfer.py times on a GPU runs, on a GPU made of the host."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import transfer_gpu
from benchmarks.transfer import main
from benchmarks.transfer_gpu import expected, measure_cuda_ipc
from benchmarks.transfer_tables import aims, device_table
from contract.host_devices import HostCuda
from contract.host_tensors import HostTensors
from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcTransport

pytestmark = pytest.mark.timeout(60)

SIZES = (1 << 20, (3 << 20) + 17)


def host_gpu() -> tuple[Cuda, DeviceTensors]:
    cuda = HostCuda("GPU")
    return cuda, HostTensors(cuda)


def test_cuda_ipc_is_timed_with_its_parts_and_its_anchor():
    figures = measure_cuda_ipc(host_gpu, SIZES, rounds=2, slot_bytes=1 << 20)
    assert [f.nbytes for f in figures] == list(SIZES)
    assert all(seconds > 0 for f in figures for name, seconds in asdict(f).items() if name.endswith("_s"))
    assert device_table(figures).row_count == len(SIZES)
    assert len(aims([], [], [], figures)) == len(SIZES)


def test_bytes_that_arrive_wrong_are_no_measurement(monkeypatch):
    monkeypatch.setattr(transfer_gpu, "expected", lambda nbytes: expected(nbytes) + np.uint8(1))
    with pytest.raises(click.ClickException, match="arrived wrong"):
        measure_cuda_ipc(host_gpu, SIZES[:1], rounds=1, slot_bytes=1 << 20)


def test_without_a_gpu_a_line_says_why_cuda_ipc_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(CudaIpcTransport, "unavailable", lambda self: "no GPU")
    figures = tmp_path / "figures.json"
    ran = CliRunner().invoke(main, ["--part", "cuda_ipc", "--json", str(figures)])
    assert ran.exit_code == 0, ran.output
    assert ran.output.splitlines()[0] == "cuda_ipc is left out: no GPU"
    assert json.loads(figures.read_text())["cuda_ipc"] == []
