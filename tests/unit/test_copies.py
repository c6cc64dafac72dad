"""Tensors that go to a device together arrive as they were, in one copy."""

from __future__ import annotations

import torch
from pretend_device import DEVICE, pretending

from services.compute.copies import copy_together


def test_tensors_arrive_as_they_were_in_one_copy() -> None:
    with pretending() as log:
        there = torch.arange(3).to(DEVICE)
        sent = [
            torch.arange(7),
            torch.tensor([True, False, True]),
            there,
            torch.zeros(0, 3),
            torch.empty_strided((0,), (0,), dtype=torch.int64),
            torch.randn(2, 5).t(),
            torch.tensor(2.5, dtype=torch.float64),
        ]
        log.clear()
        arrived = copy_together(sent, DEVICE)
        assert (len(log.to_device), log.to_host, log.waits) == (1, [], [])
        assert arrived[2] is there
        for x, y in zip(arrived, sent, strict=True):
            assert (x.device, x.dtype, x.shape) == (DEVICE, y.dtype, y.shape)
            assert x.tolist() == y.tolist()


def test_on_a_cpu_nothing_is_copied() -> None:
    sent = [torch.arange(3), torch.zeros(2)]
    for x, y in zip(copy_together(sent, torch.device("cpu")), sent, strict=True):
        assert x is y
