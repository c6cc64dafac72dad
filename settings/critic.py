"""Settings of the critic."""

from __future__ import annotations

from typing import Literal

from settings.model import ModelTable, OptimizerTable


class CriticTable(ModelTable):
    """The value model: the backbone of `model` with a value head."""

    role: Literal["critic"]
    """critic"""
    optimizer: OptimizerTable = OptimizerTable()
    """How the critic learns."""

    @property
    def mini_batch_parts(self) -> int:
        """Parts that the rows of an update are dealt out to."""
        return self.data_ranks
