"""Values of weights are copied part by part: each part is verified before it is copied, and hashed after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as st
from torch import Tensor

from nccl_transfer.refs.checksums import RunningDigests, digests
from rlhf.errors import TransferError
from services.weights import copying
from services.weights.copying import Values, copy_values

KINDS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "plain": lambda x: (torch.zeros_like(x), x),
    "cast": lambda x: (torch.zeros_like(x, dtype=torch.bfloat16), x),
    "strided": lambda x: (torch.zeros_like(x), x.t().contiguous().t()),
    "strided target": lambda x: (torch.zeros((50, 70)).t(), x),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PART_BYTES", 1000)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_announced_before_they_are_copied_and_after(kind: str) -> None:
    target, values = KINDS[kind](torch.randn(70, 50))
    target.fill_(7.0)
    steps: list[tuple[str, int]] = []

    def copied() -> int:
        return int((target == values.to(target.dtype)).sum())

    copy_values(
        target,
        values,
        before=lambda stop: (
            steps.append(("before", stop)) if copied() < stop else pytest.fail("copied first")
        ),
        after=lambda stop: steps.append(("after", stop)) if copied() == stop else pytest.fail("not copied"),
    )
    assert torch.equal(target, values.to(target.dtype))
    stops = [stop for name, stop in steps if name == "after"]
    assert steps == [(name, stop) for stop in stops for name in ("before", "after")]
    assert stops[-1] == values.numel()
    assert len(stops) > 7


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_a_small_tensor_is_one_part(shape: tuple[int, ...]) -> None:
    values, stops = torch.randn(shape), []
    copy_values(torch.zeros(shape), values, after=stops.append)
    assert stops == [values.numel()]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_that_does_not_match(kind: str) -> None:
    target, values = KINDS[kind](torch.ones(70, 50))
    target.zero_()

    def verify(stop: int) -> None:
        if stop > 2000:
            raise TransferError("flipped")

    with pytest.raises(TransferError):
        Values(values, verify).copy_to(target)
    assert 0 < target.sum() <= 2000


@given(st.integers(1, 300_000), st.lists(st.integers(0, 300_000)))
@options(deadline=None, max_examples=25)
def test_checksums_behind_a_writer_are_those_of_all_bytes(nbytes: int, stops: list[int]) -> None:
    data = memoryview(bytearray(nbytes))
    running = RunningDigests(data)
    written = 0
    for stop in sorted({min(stop, nbytes) for stop in stops} | {nbytes}):
        data[written:stop] = bytes(each % 251 for each in range(written, stop))
        running.advance(stop)
        written = stop
    assert running.values == list(digests(data))
