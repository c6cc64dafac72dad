"""Sums over micro-batches and ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from services.engines.tally import Tally


def test_a_tally_can_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_two_ranks_alike(x: Tensor) -> None:
        x.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", of_two_ranks_alike)
    tally = Tally(torch.device("cpu"))
    tally.add(torch.tensor(1.5), {"tokens": torch.tensor(4)})
    tally.add(torch.tensor(0.5), {"tokens": torch.tensor(3)})
    for _ in range(2):
        assert tally.over_ranks() == (4.0, {"tokens": torch.tensor(7.0)})
