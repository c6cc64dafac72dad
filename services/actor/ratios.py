"""Computes log-ratios of sequences, and sums of statistics over response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from services.roles.losses import MAX_LOG_RATIO, masked, masked_sum


def sequence_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, *, mean: bool) -> Tensor:
    """Returns the log-ratio of each sequence, [B, 1]: the mean over its response tokens, or the sum if not `mean`. This
    mean or sum is clamped to +-20; it is 0 for an empty sequence."""
    total_B1 = masked(log_ratio_BT, mask_BT).sum(dim=1, keepdim=True)
    if mean:
        total_B1 = total_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.clamp(total_B1, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_sums(per_token: dict[str, Tensor], mask_BT: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the sum of each statistic over the response tokens: scalar tensors of type `dtype`, without
    gradient."""
    return {name: masked_sum(x.detach().to(dtype), mask_BT) for name, x in per_token.items()}
