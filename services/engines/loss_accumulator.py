"""Sums of a step over micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class LossAccumulator:
    """Loss and statistics, in float64 on the device where they are computed."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._counts: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=torch.float64, device=device)
        )

    def add(self, loss: Tensor, counts: Mapping[str, Tensor]) -> None:
        """Those of a micro-batch."""
        self._loss += loss.detach()
        for name, count in counts.items():
            self._counts[name] += count

    def total(self, *, counts: bool = True) -> tuple[float, dict[str, Tensor]]:
        """The loss of all ranks that count, and this rank's statistics. Collective.

        Args:
            counts: whether this rank's loss is no other's too.
        """
        total = self._loss.clone() if counts else torch.zeros_like(self._loss)
        dist.all_reduce(total)
        return float(total), dict(self._counts)
