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
"""oneDNN is chosen if it is faster than MKL by more than this factor; above 1, so that near ties are decided alike at
every start."""
_ROWS = (64, 1024)
"""Numbers of rows of the measured products, typical of a decoding step and of a micro-batch."""
_INPUTS, _OUTPUTS = 256, 768
_REPEATS = 9

_in_use: list[Backend] = []


def use(backend: Backend) -> None:
    """Sets the library with which this process multiplies float32 matrices on the CPU from now on (`linear`).

    Raises:
        ValueError: This build of torch has no oneDNN.
    """
    if backend == "onednn" and onednn_linear is None:
        raise ValueError("matmul: this build of torch has no oneDNN; allowed are auto and mkl")
    _in_use[:] = [backend]


def backend() -> Backend:
    """Returns the library in use. If `use` was not called, measures both, and uses the faster one from then on."""
    if not _in_use:
        use(faster(*measure()))
    return _in_use[0]


def faster(mkl: float, onednn: float) -> Backend:
    """Returns the library to choose, given the times of MKL and oneDNN, from `measure` or summed over ranks."""
    return "onednn" if onednn * LEAST_GAIN < mkl else "mkl"


def measure() -> tuple[float, float]:
    """Measures MKL and oneDNN on the products of a linear layer's forward pass and weight gradient, at two numbers of
    rows, with torch's current number of threads, for about 0.1 s.

    Returns:
        (MKL, oneDNN): for each library, the sum over the products of its fraction of both libraries' time; without
        unit. (0, inf) in a build of torch without oneDNN.
    """
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
    """Returns x [..., in] @ weight.T, with weight [out, in], computed by oneDNN."""
    return onednn_linear(x, weight, None, "none", [], "")


def _take_turns(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[float, float]:
    """Calls two functions alternately, and returns the least seconds that a call of each took, without the first. The
    minimum, since other processes on the same cores can only make a call longer."""
    times: tuple[list[float], list[float]] = [], []
    for repeat in range(_REPEATS + 1):
        for function, taken in zip((first, second), times, strict=True):
            begun = time.perf_counter()
            function()
            if repeat:
                taken.append(time.perf_counter() - begun)
    return min(times[0]), min(times[1])
