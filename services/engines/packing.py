"""Attention over sequences that lie end to end in one row, so that layers compute on no padding; and of one new token.

Transformers would attend over the whole row under a mask of [T, T]. Here the sequences are laid side by side again for
attention alone, those of like length together: no token is compared with one of another sequence, no mask is made, and
fused causal kernels do the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "sdpa_by_sequence"
"""Name in transformers of an attention that is sdpa's, and that knows packed rows."""

LIKE = 1.5
"""The longest of sequences that attend side by side is at most so many times as long as the shortest."""


@dataclass(frozen=True, eq=False)
class Group:
    """S neighbouring sequences of a row, side by side.

    Args:
        positions_ST: where each of their tokens lies in the row; anywhere in the padding.
        real_N: which cells of [S, T], in order, are no padding.
    """

    positions_ST: Tensor
    real_N: Tensor

    def side_by_side(self, x_HTD: Tensor) -> Tensor:
        """What all heads have of a row, as [S, H, T, D]."""
        x_ND = x_HTD.transpose(0, 1).index_select(0, self.positions_ST.flatten())
        return x_ND.unflatten(0, self.positions_ST.shape).transpose(1, 2)

    def end_to_end(self, x_STHD: Tensor) -> Tensor:
        """The inverse, without the padding: [N, H, D]."""
        return x_STHD.flatten(0, 1).index_select(0, self.real_N)


@dataclass(frozen=True, eq=False)
class Packing:
    """How sequences lie in a row of T tokens.

    Args:
        position_ids_1T: of each token in its sequence.
        groups: the sequences, in order.
    """

    position_ids_1T: Tensor
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, lengths: np.ndarray) -> Packing:
        """Sequences of these lengths, each at least 1, end to end."""
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        groups = tuple(_group(lengths[run], int(starts[run.start])) for run in _runs_of_like_length(lengths))
        return cls(torch.from_numpy(positions)[None], groups)

    def to(self, device: torch.device) -> Packing:
        groups = (Group(each.positions_ST.to(device), each.real_N.to(device)) for each in self.groups)
        return Packing(self.position_ids_1T.to(device), tuple(groups))

    def arguments(self) -> dict[str, Any]:
        """What a model whose attention is `ATTENTION` takes beside the row."""
        # A mask of four dimensions is handed on as it is, where transformers would make one of the positions.
        no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=self.position_ids_1T.device)
        return {
            "position_ids": self.position_ids_1T,
            "attention_mask": no_mask,
            "sequence_groups": self.groups,
        }


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_groups: tuple[Group, ...] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, [1, H, T, D] to [1, T, H, D]; of any rows where no groups are given."""
    if sequence_groups is None and query.shape[2] == 1 and query.shape[1] > key.shape[1]:
        return _attend_with_one_token(query, key, value, attention_mask, options["scaling"]), None
    if sequence_groups is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, sliding_window=sliding_window, **options
        )
    parts = []
    for group in sequence_groups:
        own_query, own_key, own_value = (group.side_by_side(x[0]) for x in (query, key, value))
        mask = _window_mask(group.positions_ST, sliding_window)
        attended_STHD, _ = sdpa_attention_forward(module, own_query, own_key, own_value, mask, **options)
        parts.append(group.end_to_end(attended_STHD))
    return torch.cat(parts)[None], None


def _attend_with_one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention of one token per row to all before it, [B, H, 1, D] to [B, 1, H, D].

    The query heads that share a key head stand in the place of its tokens, so that keys and values are read once and
    not repeated for each of them. On CPUs plain products read them faster than torch's fused kernel.
    """
    own_query = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    if key.is_cpu and key.dtype in (torch.float32, torch.float64):
        scores = (own_query * (scaling or query.shape[-1] ** -0.5)) @ key.transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        attended = scores.softmax(dim=-1) @ value
    else:
        attended = F.scaled_dot_product_attention(own_query, key, value, attn_mask=mask, scale=scaling)
    return attended.flatten(1, 2).unsqueeze(1)


def _window_mask(positions_ST: Tensor, sliding_window: int | None) -> Tensor | None:
    """Which of the last `sliding_window` tokens, itself included, each token sees; None where that is all."""
    length = positions_ST.shape[1]
    if sliding_window is None or sliding_window >= length:
        return None
    whole = torch.ones((1, 1, length, length), dtype=torch.bool, device=positions_ST.device)
    return whole.tril().triu(1 - sliding_window)


def _runs_of_like_length(lengths: np.ndarray) -> Iterator[slice]:
    first, shortest, longest = 0, np.inf, 0.0
    for number, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if longest > LIKE * shortest:
            yield slice(first, number)
            first, shortest, longest = number, length, length
    yield slice(first, len(lengths))


def _group(lengths: np.ndarray, start: int) -> Group:
    cells_T = np.arange(lengths.max())
    starts_S1 = (start + np.cumsum(lengths) - lengths)[:, None]
    is_real_ST = cells_T < lengths[:, None]
    positions_ST = np.where(is_real_ST, starts_S1 + cells_T, start)
    return Group(torch.from_numpy(positions_ST), torch.from_numpy(np.flatnonzero(is_real_ST)))


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
