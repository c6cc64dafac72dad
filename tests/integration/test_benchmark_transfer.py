"""That what benchmarks/transfer.py times on a GPU runs, on a GPU made of the host."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import click
import numpy as np
import pytest

from benchmarks import transfer_gpu
from benchmarks.transfer import aims, device_table
from benchmarks.transfer_gpu import expected, measure_cuda_ipc
from contract.host_devices import HostCuda

pytestmark = pytest.mark.timeout(60)

SIZES = (1 << 20, (3 << 20) + 17)


def test_cuda_ipc_is_timed_with_its_parts_and_its_anchor():
    figures = measure_cuda_ipc(partial(HostCuda, "GPU"), SIZES, rounds=2, slot_bytes=1 << 20)
    assert [f.nbytes for f in figures] == list(SIZES)
    assert all(seconds > 0 for f in figures for name, seconds in asdict(f).items() if name.endswith("_s"))
    assert device_table(figures).row_count == len(SIZES)
    assert len(aims([], [], [], figures)) == 2


def test_bytes_that_arrive_wrong_are_no_measurement(monkeypatch):
    monkeypatch.setattr(transfer_gpu, "expected", lambda nbytes: expected(nbytes) + np.uint8(1))
    with pytest.raises(click.ClickException, match="arrived wrong"):
        measure_cuda_ipc(partial(HostCuda, "GPU"), SIZES[:1], rounds=1, slot_bytes=1 << 20)
