"""Building blocks of the losses: masked sums, log-ratios of sequences, aggregation over a mini-batch, KL penalties.

A micro-batch is right-padded: `x_BT` holds B responses of at most T tokens; `mask_BT`, bool or float, is 1 on
response tokens; a row may have none. Padding may hold any finite number and affects no result.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from settings.losses import Aggregation, KlEstimator

MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0

AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
KL_KINDS: tuple[str, ...] = get_args(KlEstimator)


def masked(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns `x_BT` with 0 where the mask is 0."""
    return torch.where(mask_BT.bool(), x_BT, 0)


def masked_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns the sum of `x_BT` over the tokens where the mask is 1, a scalar tensor."""
    return masked(x_BT, mask_BT).sum()


def token_sums(per_token: dict[str, Tensor], mask_BT: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the sum of each statistic over the response tokens: scalar tensors of type `dtype`, without
    gradient."""
    return {name: masked_sum(x.detach().to(dtype), mask_BT) for name, x in per_token.items()}


def sequence_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, *, mean: bool) -> Tensor:
    """Returns the log-ratio of each sequence, [B, 1]: the mean over its response tokens, or the sum if not `mean`. This
    mean or sum is clamped to +-20; it is 0 for an empty sequence."""
    total_B1 = masked(log_ratio_BT, mask_BT).sum(dim=1, keepdim=True)
    if mean:
        total_B1 = total_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.clamp(total_B1, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    *,
    num_tokens: int,
    num_sequences: int,
    max_response_tokens: int | None = None,
) -> Tensor:
    """Returns this micro-batch's share of the loss of the whole mini-batch, a scalar tensor.

    The shares of all micro-batches on all data ranks add up to the loss, however rows are distributed; so gradients
    are summed over data ranks.
    With l the loss of a token, n_s the tokens of sequence s, N tokens and S sequences in the mini-batch:

    - token-mean: sum of all l / N.
    - seq-mean-token-sum: sum_s (sum_t l) / S.
    - seq-mean-token-mean: sum_s (sum_t l / n_s) / S.
    - seq-mean-token-sum-norm: sum_s (sum_t l) / (S max_response_tokens), without length bias (Liu et al. 2025).

    An empty sequence contributes 0 and still counts in S.

    Args:
        mode: one of `AGGREGATIONS`.
        num_tokens: N, response tokens of the whole mini-batch, over all micro-batches and data ranks.
        num_sequences: S, sequences of the whole mini-batch, likewise.
        max_response_tokens: the longest response that generation allows, in tokens; for seq-mean-token-sum-norm only.

    Raises:
        ValueError: an unknown mode, or seq-mean-token-sum-norm without a positive `max_response_tokens`.
    """
    check_aggregation(mode, max_response_tokens)
    loss_BT = masked(loss_BT, mask_BT)
    match mode:
        case "token-mean":
            return loss_BT.sum() / max(num_tokens, 1)  # a mini-batch of empty responses has loss 0, not nan
        case "seq-mean-token-sum":
            return loss_BT.sum() / num_sequences
        case "seq-mean-token-mean":
            return (loss_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum() / num_sequences
        case _:
            assert max_response_tokens is not None, "checked above"
            return loss_BT.sum() / (num_sequences * max_response_tokens)


def check_aggregation(mode: str, max_response_tokens: int | None) -> None:
    """Raises ValueError for an unknown mode, or seq-mean-token-sum-norm without a positive `max_response_tokens`."""
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm" and (max_response_tokens is None or max_response_tokens <= 0):
        raise ValueError(
            f"aggregation {mode} needs a positive max_response_tokens, got {max_response_tokens}"
        )


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Returns an estimate of KL(policy || reference), in nats, at every sampled token, in the shape of the inputs.

    With d = log_probs - ref_log_probs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1 (Schulman 2020,
    "Approximating KL Divergence"); k3 clamps d to +-20 and its result to +-10. On the policy's own samples
    the gradient of k2 is on average that of the KL, while that of k1 is 0 and that of k3 biased: so the
    straight-through k1+ and k3+ take the value of k1 and k3 and the gradient of k2.

    Raises:
        ValueError: a kind that is not one of `KL_KINDS`.
    """
    log_ratio = log_probs - ref_log_probs
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            inverse = torch.clamp(-log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
            return torch.clamp(torch.expm1(inverse) - inverse, -_MAX_K3, _MAX_K3)
        case "k1+" | "k3+":
            k2 = log_ratio.square() / 2
            return kl_penalty(log_probs, ref_log_probs, kind[:-1]).detach() + (k2 - k2.detach())
        case _:
            raise ValueError(f"unknown KL penalty {kind!r}; known: {', '.join(KL_KINDS)}")
