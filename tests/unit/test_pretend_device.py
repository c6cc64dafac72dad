"""The pretend device punishes what a GPU punishes: every planted copy, wait and mixture of devices is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from pretend_device import DEVICE, Log, OnDevice, pretending
from torch import Tensor


@pytest.fixture
def log() -> Iterator[Log]:
    with pretending() as log:
        yield log


def on_device(log: Log, n: int = 4) -> Tensor:
    x = torch.arange(float(n)).to(DEVICE)
    log.clear()
    return x


def test_tensors_stay_on_the_device_and_compute_as_the_host_does(log: Log) -> None:
    x = on_device(log).requires_grad_()
    y = torch.stack((x * 2, torch.ones(4, device=DEVICE))).sum() + x.new_zeros(())
    y.backward()
    assert isinstance(y, OnDevice)
    assert (y.device, x.grad.device) == (DEVICE, DEVICE)  # type: ignore[union-attr]
    assert log == Log()
    assert (float(y.detach()), x.grad.tolist()) == (16.0, [2.0] * 4)  # type: ignore[union-attr]


PLANTED_COPIES: dict[str, Callable[[Tensor], object]] = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "tolist": lambda x: x.tolist(),
    "copy_": lambda x: torch.empty(4).copy_(x),
    "cast": lambda x: x.to("cpu", torch.float64),
}


@pytest.mark.parametrize("copy", PLANTED_COPIES.values(), ids=PLANTED_COPIES.keys())
def test_a_planted_copy_to_the_host_is_seen_with_its_line(log: Log, copy: Callable[[Tensor], object]) -> None:
    copy(on_device(log))
    (seen,) = log.to_host
    assert (seen.dtype, seen.numel) == (torch.float32, 4)
    assert seen.where.startswith("tests/unit/test_pretend_device.py:")
    assert log.to_device == []


PLANTED_UPLOADS: dict[str, Callable[[Tensor], object]] = {
    "to": lambda x: torch.zeros(4).to(DEVICE),
    "tensor": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE),
    "copy_": lambda x: x.copy_(torch.zeros(4)),
    "index": lambda x: x[torch.tensor([0, 1, 2, 3])],
}


@pytest.mark.parametrize("copy", PLANTED_UPLOADS.values(), ids=PLANTED_UPLOADS.keys())
def test_a_planted_copy_to_the_device_is_seen(log: Log, copy: Callable[[Tensor], object]) -> None:
    copy(on_device(log))
    (seen,) = log.to_device
    assert seen.numel == 4
    assert log.to_host == []


PLANTED_WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: bool(x.isfinite().all()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "masked assignment": lambda x: x.__setitem__(x > 1, x.new_zeros(2)),
    "repeat": lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 1]).to(DEVICE)),
}


@pytest.mark.parametrize("wait", PLANTED_WAITS.values(), ids=PLANTED_WAITS.keys())
def test_a_planted_wait_for_the_device_is_seen_with_its_line(
    log: Log, wait: Callable[[Tensor], object]
) -> None:
    wait(on_device(log))
    (seen,) = log.waits
    assert "tests/unit/test_pretend_device.py:" in seen


MIXTURES: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: x + torch.ones(4),
    "stack": lambda x: torch.stack((x, torch.ones(4))),
    "mask": lambda x: x.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
    "values": lambda x: x.index_put_((torch.tensor([0, 1]).to(DEVICE),), torch.ones(2)),
}


@pytest.mark.parametrize("mix", MIXTURES.values(), ids=MIXTURES.keys())
def test_tensors_of_host_and_device_do_not_mix(log: Log, mix: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        mix(on_device(log))


def test_numpy_takes_no_tensor_of_the_device(log: Log) -> None:
    with pytest.raises((RuntimeError, TypeError), match="numpy"):
        on_device(log).numpy()


def test_a_scalar_of_the_host_mixes_without_a_copy(log: Log) -> None:
    x = on_device(log) * torch.tensor(2.0)
    assert (x.device, log) == (DEVICE, Log())
