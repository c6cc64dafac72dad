"""Sums over micro-batches and ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from services.engines.loss_accumulator import LossAccumulator


def test_a_tally_can_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_two_ranks_alike(x: Tensor) -> None:
        x.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", of_two_ranks_alike)
    accumulator = LossAccumulator(torch.device("cpu"))
    accumulator.add(torch.tensor(1.5), {"tokens": torch.tensor(4)})
    accumulator.add(torch.tensor(0.5), {"tokens": torch.tensor(3)})
    for _ in range(2):
        assert accumulator.total() == (4.0, {"tokens": torch.tensor(7.0)})
