"""Sums the loss and the statistics of an optimizer step over its micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class LossAccumulator:
    """Sums the loss and the statistics of micro-batches, in float64 on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._stats: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=torch.float64, device=device)
        )

    def add(self, loss: Tensor, stats: Mapping[str, Tensor]) -> None:
        """Adds the loss and the statistics of a micro-batch, which are scalar tensors."""
        self._loss += loss.detach()
        for name, value in stats.items():
            self._stats[name] += value

    def total(self, *, is_primary: bool = True) -> tuple[float, dict[str, Tensor]]:
        """Returns the sum of the losses added on all ranks, and by name the sums of the statistics added on this
        rank alone. Collective.

        Args:
            is_primary: whether this rank's loss is added to the sum. False if it replicates that of another rank.
        """
        total = self._loss.clone() if is_primary else torch.zeros_like(self._loss)
        dist.all_reduce(total)
        return float(total), dict(self._stats)


def numbers(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns scalar tensors as numbers, by name; the host waits for a device once for all of them."""
    return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True)) if scalars else {}
