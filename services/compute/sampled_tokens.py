"""Selects the tokens of responses that the policy sampled: all of them, unless an environment has added others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from services.compute.jagged_rows import counts, take


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The tokens of B responses that the policy sampled, in host memory.

    Args:
        column_lengths: sampled tokens of every row of this rank, [rows] int64.
        lengths_B: sampled tokens of each of the B responses.
        tokens_BR: index in its response of each sampled token, or [1, R] where it is the same in all responses;
            anything in the padding.
        sampled_N: whether each token of the responses, concatenated, was sampled; None if all were.
    """

    column_lengths: np.ndarray
    lengths_B: np.ndarray
    tokens_BR: np.ndarray
    sampled_N: Tensor | None = None

    @classmethod
    def of(cls, responses: Jagged[Tensor], rows: np.ndarray, mask: Jagged[Tensor] | None) -> SampledTokens:
        """Returns those of the responses of `rows`, [B] int64; `mask` as for `pad`."""
        if mask is None:
            lengths = responses.lengths
            tokens_1R = np.arange(max(1, int(lengths[rows].max())))[None]
            return cls(lengths, lengths[rows], tokens_1R)
        lengths = counts(mask)
        sampled_N, all_lengths = take(mask, rows), responses.lengths[rows]
        starts = np.cumsum(all_lengths) - all_lengths
        tokens_N = np.arange(len(sampled_N)) - np.repeat(starts, all_lengths)
        tokens_BR = np.zeros((len(rows), max(1, int(lengths[rows].max()))), dtype=np.int64)
        cells = _cells(lengths[rows], tokens_BR.shape[1]).numpy()
        tokens_BR.reshape(-1)[cells] = tokens_N[sampled_N.numpy()]
        return cls(lengths, lengths[rows], tokens_BR, sampled_N)

    @property
    def mask_BR(self) -> np.ndarray:
        """Whether each cell of the grid [B, R] belongs to a token."""
        return np.arange(self.tokens_BR.shape[1]) < self.lengths_B[:, None]

    @property
    def cells_N(self) -> Tensor:
        """Flat index in [B, R] of each sampled token."""
        return _cells(self.lengths_B, self.tokens_BR.shape[1])

    def among(self, x_N: Tensor) -> Tensor:
        """Returns those of the values of all response tokens, concatenated, that belong to sampled ones."""
        return x_N if self.sampled_N is None else x_N[self.sampled_N.to(x_N.device)]


def _cells(lengths: np.ndarray, num_columns: int) -> Tensor:
    """Returns the flat indices in a grid [B, num_columns] of the first `lengths` cells of each row, row after row,
    int64."""
    return torch.from_numpy(np.flatnonzero(np.arange(num_columns) < lengths[:, None]))
