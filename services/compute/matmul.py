"""The library that multiplies float32 matrices on a CPU: MKL or oneDNN, both of which come with torch.

Neither is faster on all CPUs. On an AMD EPYC (Zen 5) oneDNN is twice as fast as MKL, which uses AVX-512 on Intel CPUs
only; on an Intel Xeon with AVX-512 MKL is faster, especially for few rows and for gradients of weights. A service
measures both at start. Results differ in their last bits, so runs record the choice and the setting `matmul` pins it.
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
"""Speed-up over MKL from which oneDNN is chosen; above 1, so that near ties are decided alike at every start."""
_ROWS = (64, 1024)
"""Rows of the measured products: those of a decoding step and of a micro-batch."""
_INPUTS, _OUTPUTS = 256, 768
_REPEATS = 9

_in_use: list[Backend] = []


def use(backend: Backend) -> None:
    """Sets the library of this process.

    Raises:
        ValueError: This build of torch has no oneDNN.
    """
    if backend == "onednn" and onednn_linear is None:
        raise ValueError("matmul: this build of torch has no oneDNN; allowed are auto and mkl")
    _in_use[:] = [backend]


def backend() -> Backend:
    """The library in use: the one set by `use`, or else the faster one as measured by this process."""
    if not _in_use:
        use(faster(*measure()))
    return _in_use[0]


def faster(mkl: float, onednn: float) -> Backend:
    """The library to choose, given the relative times of `measure`."""
    return "onednn" if onednn * LEAST_GAIN < mkl else "mkl"


def measure() -> tuple[float, float]:
    """Relative times of MKL and oneDNN: each library's share of their joint time, added up over a forward pass and a
    weight gradient of a linear layer at each number of rows. Runs on torch's current threads for about 0.1 s. The time
    of oneDNN is infinite in a build of torch without it."""
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
    """Times two functions called alternately, after one warm-up call each; returns the minimum seconds per call,
    since other processes on the cores only make calls longer."""
    times: tuple[list[float], list[float]] = [], []
    for repeat in range(_REPEATS + 1):
        for function, taken in zip((first, second), times, strict=True):
            begun = time.perf_counter()
            function()
            if repeat:
                taken.append(time.perf_counter() - begun)
    return min(times[0]), min(times[1])
