"""The library that multiplies matrices is the faster one, and stays the one that was chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from services.compute import matmul
from services.compute.linear import linear


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = list(matmul._in_use)
    yield
    matmul._in_use[:] = before


@pytest.mark.parametrize(
    ("mkl", "onednn", "expected"),
    [
        (2.0, 1.0, "onednn"),
        (1.0, 2.0, "mkl"),
        (1.0, 1.0, "mkl"),
        (1.0, 0.95, "mkl"),
        (0.0, float("inf"), "mkl"),
    ],
)
def test_onednn_is_chosen_where_it_is_clearly_faster(mkl: float, onednn: float, expected: str):
    assert matmul.faster(mkl, onednn) == expected


def test_the_measurement_times_both_libraries():
    measured = [matmul.measure() for _ in range(3)]
    assert all(mkl > 0 and onednn > 0 for mkl, onednn in measured)


@pytest.mark.parametrize("backend", ["mkl", "onednn"])
def test_products_are_computed_by_the_library_in_use(
    backend: matmul.Backend, monkeypatch: pytest.MonkeyPatch
):
    calls: list[int] = []
    by_onednn = matmul.onednn_linear
    monkeypatch.setattr(matmul, "onednn_linear", lambda *a: calls.append(1) or by_onednn(*a))
    matmul.use(backend)
    x, weight = torch.randn(7, 48), torch.randn(20, 48)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-5, rtol=1e-5)
    assert bool(calls) == (backend == "onednn")
    assert matmul.backend() == backend


def test_a_library_that_this_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matmul, "onednn_linear", None)
    with pytest.raises(ValueError, match="allowed are auto and mkl"):
        matmul.use("onednn")
    assert matmul.faster(*matmul.measure()) == "mkl"
