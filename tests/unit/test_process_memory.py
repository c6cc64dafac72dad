"""Memory of other processes is read run by run, and only that of the process that is meant."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as st

from nccl_transfer.process_memory import IOV_MAX, NONCE_BYTES, OwnMemory, ProcessMemory, Runs, run_bytes

HERE = OwnMemory()
OWN = HERE.memory
HOLDER = """
import sys
from nccl_transfer.process_memory import OwnMemory
own = OwnMemory()
print(own.memory.pid, own.memory.nonce_address, own.memory.nonce.hex(), flush=True)
sys.stdin.read()
"""


def runs_of(x: np.ndarray) -> Runs:
    return Runs.of_box(x.ctypes.data, x.shape, x.strides, x.itemsize)


@st.composite
def boxes(draw: st.DrawFn) -> np.ndarray:
    """A view of some elements of an array, with its axes in any order."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    x = np.random.default_rng(1).integers(0, 1 << 30, shape, np.int32)
    places = [draw(st.tuples(st.integers(0, size - 1), st.integers(1, size))) for size in shape]
    view = x[tuple(slice(a, max(a + 1, b)) for a, b in places)]
    return view.transpose(draw(st.permutations(range(view.ndim))))


@given(boxes(), st.data())
@options(deadline=None, max_examples=100)
def test_any_part_of_any_box_is_read_in_row_major_order(box: np.ndarray, data: st.DataObject) -> None:
    runs = runs_of(box)
    assert (runs.nbytes, runs.run_bytes) == (box.nbytes, run_bytes(box.shape, box.strides, box.itemsize))
    start = data.draw(st.integers(0, box.nbytes - 1))
    stop = data.draw(st.integers(start + 1, box.nbytes))
    found = np.zeros(stop - start, np.uint8)
    OWN.read(runs, start, stop, found)
    assert found.tobytes() == box.tobytes()[start:stop]


@pytest.mark.parametrize(
    ("cut", "runs", "nbytes"),
    [
        (lambda x: x, 1, 2400),
        (lambda x: x[3:5], 1, 800),
        (lambda x: x[3:4, 2:7], 1, 200),
        (lambda x: x[:, 2:7], 6, 200),
        (lambda x: x[..., 1:], 60, 36),
        (lambda x: x[:, :, ::2], 300, 4),
    ],
)
def test_what_lies_together_is_one_run(
    cut: Callable[[np.ndarray], np.ndarray], runs: int, nbytes: int
) -> None:
    found = runs_of(cut(np.zeros((6, 10, 10), np.float32)))
    assert (len(found.addresses), found.run_bytes) == (runs, nbytes)


def test_more_runs_are_read_than_a_system_call_takes() -> None:
    columns = np.arange(6 * IOV_MAX, dtype=np.int32).reshape(-1, 2)[:, 0]
    found = np.zeros(len(columns), np.int32)
    OWN.read(runs_of(columns), 0, found.nbytes, found)
    assert np.array_equal(found, columns)


def test_another_process_is_read_until_it_ends() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid, address, nonce = holder.stdout.readline().split()
        memory = ProcessMemory(int(pid), int(address), bytes.fromhex(nonce))
        assert memory.why_not() is None
        assert (
            replace(memory, nonce=bytes(NONCE_BYTES)).why_not()
            == f"process {pid} of this host is not the source"
        )
        holder.communicate("", timeout=60)
    with pytest.raises(ProcessLookupError):
        memory.read(Runs(np.array([memory.nonce_address], np.uint64), 16), 0, 16, np.zeros(16, np.uint8))
    assert memory.why_not() == f"process {pid}: No such process"


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad address") as raised:
        OWN.read(Runs(np.array([0], np.uint64), 8), 0, 8, np.zeros(8, np.uint8))
    assert raised.value.errno == errno.EFAULT
    assert (
        ProcessMemory(os.getpid(), 0, bytes(NONCE_BYTES)).why_not() == f"process {os.getpid()}: Bad address"
    )
