"""Importance weights for tokens that the rollout engine has sampled, whose probabilities differ from those of the
training engine."""

from __future__ import annotations

import torch
from torch import Tensor

from services.roles.losses import MAX_LOG_RATIO, sequence_log_ratio, token_sums


def rollout_weights(
    old_log_probs_BT: Tensor,
    rollout_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    correction: str,
    level: str,
    low: float,
    high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns importance weights of sampled tokens, derived from the ratio of the probability under the training
    engine to that under the rollout engine.

    The ratio is w = exp(old_log_probs - rollout_log_probs), the difference clamped to +-20; at level "sequence", the
    difference is summed over the sequence's tokens. The weight is, by `correction`:

    - truncate: min(w, high), truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly
      Brings You Off-Policy RL Training"; Espeholt et al. 2018, arXiv 1802.01561).
    - mask: w where low <= w <= high, else 0 (IcePop, Ling Team 2025, arXiv 2510.18855, for tokens).
    - taper: 1 where the advantage is not negative, else min(w, 1) (TOPR, Le Roux et al. 2025, arXiv 2503.14286, which
      has it for sequences): older rows go on to teach what succeeded, and no longer suppress what has become rare.

    Args:
        old_log_probs_BT: log-probabilities of the training engine, with the weights that the tokens were sampled
            with.
        rollout_log_probs_BT: log-probabilities of the rollout engine, under the distribution that it sampled from.
        advantages_BT: advantages of the tokens, whose sign "taper" reads.
        mask_BT: 1 on response tokens.
        correction: "truncate", "mask" or "taper".
        level: "token" for one ratio per token, "sequence" for one per sequence.
        low: lower bound of the ratio, for "mask".
        high: upper bound of the ratio, for "mask" and "truncate".

    Returns:
        The weights [B, T], without gradient, and the sums over tokens `rollout_ratio` (w) and `rollout_cut` (tokens
        whose weight is not w).
    """
    log_ratio = (old_log_probs_BT - rollout_log_probs_BT).detach()
    if level == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, mask_BT, mean=False).expand_as(log_ratio)
    ratio = torch.exp(torch.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if correction == "truncate":
        weights_BT = ratio.clamp(max=high)
    elif correction == "mask":
        weights_BT = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    else:
        weights_BT = torch.where(advantages_BT < 0, ratio.clamp(max=1.0), 1.0)
    per_token = {"rollout_ratio": ratio, "rollout_cut": weights_BT != ratio}
    return weights_BT, token_sums(per_token, mask_BT, ratio.dtype)
