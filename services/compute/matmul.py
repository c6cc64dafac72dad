"""The library that multiplies float32 matrices on a CPU: MKL or oneDNN, both of which come with torch.

Neither is faster everywhere. On an AMD EPYC (Zen 5) oneDNN is twice as fast as MKL, which uses AVX-512 on Intel's CPUs
alone; on an Intel Xeon with AVX-512 MKL is faster, most of all for few rows and for gradients of weights. So a service
measures both at start. Results differ in their last bits, so a run records the choice, and `matmul` pins it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from services.compute.torch_internals import onednn_linear

Backend = Literal["mkl", "onednn"]

LEAST_GAIN = 1.1
"""oneDNN must be this many times as fast as MKL to be chosen, so that a tie is decided alike at every start."""
_ROWS = (64, 1024)
"""Rows of a decoding step and of a micro-batch."""
_INPUTS, _OUTPUTS = 256, 768
_REPEATS = 9

_in_use: list[Backend] = []


def use(backend: Backend) -> None:
    """Multiplies with this library from now on, in the whole process.

    Raises:
        ValueError: This build of torch has no oneDNN.
    """
    if backend == "onednn" and onednn_linear is None:
        raise ValueError("matmul: this build of torch has no oneDNN; allowed are auto and mkl")
    _in_use[:] = [backend]


def backend() -> Backend:
    """The library in use: the one given to `use`, else the faster one by a measurement of this process."""
    if not _in_use:
        use(faster(*measure()))
    return _in_use[0]


def faster(mkl: float, onednn: float) -> Backend:
    """The library to choose, by the times that `measure` found."""
    return "onednn" if onednn * LEAST_GAIN < mkl else "mkl"


def measure() -> tuple[float, float]:
    """Relative times of MKL and oneDNN: for a forward pass and a gradient of a linear layer at each number of rows, the
    share of each in the seconds that both take, added up. Uses the threads that torch has here and takes about 0.1 s.
    Without oneDNN its time is infinite."""
    if onednn_linear is None:
        return 0.0, float("inf")
    mkl = onednn = 0.0
    with torch.inference_mode():
        for rows in _ROWS:
            x, weight, of_y = (
                torch.ones(rows, _INPUTS),
                torch.ones(_OUTPUTS, _INPUTS),
                torch.ones(rows, _OUTPUTS),
            )
            for first, second in ((x, weight), (of_y.t(), x.t())):
                mkl_s, onednn_s = _take_turns(
                    lambda a=first, b=second: a @ b.t(), lambda a=first, b=second: onednn_product(a, b)
                )
                mkl, onednn = mkl + mkl_s / (mkl_s + onednn_s), onednn + onednn_s / (mkl_s + onednn_s)
    return mkl, onednn


def onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] @ weight.T, weight [out, in], by oneDNN."""
    return onednn_linear(x, weight, None, "none", [], "")


def _take_turns(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[float, float]:
    """Least seconds of two functions that are called alternately, after a call of each that does not count. The least,
    because other processes on the cores make single calls longer and none shorter."""
    times: tuple[list[float], list[float]] = [], []
    for repeat in range(_REPEATS + 1):
        for function, taken in zip((first, second), times, strict=True):
            begun = time.perf_counter()
            function()
            if repeat:
                taken.append(time.perf_counter() - begun)
    return min(times[0]), min(times[1])
