"""Settings of the critic."""

from __future__ import annotations

from typing import Literal

from settings.model import ModelTable, OptimizerTable


class CriticTable(ModelTable):
    """Settings of a value model: the backbone of `model` with a value head."""

    role: Literal["critic"]
    """Always critic."""
    optimizer: OptimizerTable = OptimizerTable()
    """Optimizer of the critic."""

    @property
    def mini_batch_parts(self) -> int:
        """Number of data-parallel ranks that the rows of a mini-batch are divided over: `data_ranks`."""
        return self.data_ranks
