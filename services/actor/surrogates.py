"""Surrogates of the policy's objective: the losses per token of PPO, GSPO and CISPO.

Shapes and masks as in `services.roles.losses`. Statistics are sums over response tokens, detached scalars: add them
over micro-batches and data ranks, then divide by the tokens of the mini-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.roles.losses import MAX_LOG_RATIO, sequence_log_ratio, token_sums
from settings.losses import ClipOptions, PpoOptions


def ppo_clip_loss(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    options: PpoOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate loss per token (Schulman et al. 2017, eq. 7), negated to be minimised.

    With r = exp(log_probs - old_log_probs), the difference clamped to +-20:
    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and, where A < 0, L = min(L, -A dual_clip)
    (dual clip, Ye et al. 2020; off where dual_clip is 0).

    Returns:
        The loss [B, T], and the sums `ratio`, `approx_kl` (r - 1 - log r, the k3 estimate of KL(old || new))
        and `clip_low`, `clip_high`, `clip_dual` (tokens whose gradient that bound cuts off).
    """
    log_ratio = torch.clamp(log_probs_BT - old_log_probs_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    clipped_ratio = torch.clamp(ratio, 1 - options.clip_low, 1 + options.clip_high)
    loss_BT = torch.maximum(-advantages_BT * ratio, -advantages_BT * clipped_ratio)
    negative = advantages_BT < 0
    dual_clipped = torch.zeros_like(negative)
    if options.dual_clip:
        bound = -advantages_BT * options.dual_clip
        dual_clipped = negative & (loss_BT > bound)
        loss_BT = torch.where(dual_clipped, bound, loss_BT)
    per_token = {
        "ratio": ratio,
        "approx_kl": torch.expm1(log_ratio) - log_ratio,
        "clip_low": negative & (ratio < 1 - options.clip_low),
        "clip_high": (advantages_BT > 0) & (ratio > 1 + options.clip_high),
        "clip_dual": dual_clipped,
    }
    return loss_BT, token_sums(per_token, mask_BT, loss_BT.dtype)


def gspo_loss(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    options: ClipOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO's clipped surrogate per token (Zheng et al. 2025, arXiv 2507.18071, section 4.3, the token-level form).

    With s = exp(mean over the sequence of log_probs - old_log_probs), the mean clamped to +-20, and
    s_t = stopgrad(s) exp(log_probs - stopgrad(log_probs)), which has the value of s and at every token the gradient
    of the token's own log-probability: L = max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high)). Averaged over each
    sequence (seq-mean-token-mean), with one advantage per sequence, this is GSPO (section 4.1).

    Returns:
        The loss [B, T], and the sums over tokens `ratio` (s), `approx_kl` (s - 1 - log s), `clip_low` and `clip_high`.
    """
    log_ratio_B1 = sequence_log_ratio(log_probs_BT - old_log_probs_BT, mask_BT, mean=True)
    own_BT = torch.exp(log_probs_BT - log_probs_BT.detach())
    ratio = torch.exp(log_ratio_B1.detach()) * own_BT
    clipped_ratio = torch.clamp(ratio, 1 - options.clip_low, 1 + options.clip_high)
    loss_BT = torch.maximum(-advantages_BT * ratio, -advantages_BT * clipped_ratio)
    per_token = {
        "ratio": ratio,
        "approx_kl": (torch.expm1(log_ratio_B1) - log_ratio_B1).expand_as(loss_BT),
        "clip_low": (advantages_BT < 0) & (ratio < 1 - options.clip_low),
        "clip_high": (advantages_BT > 0) & (ratio > 1 + options.clip_high),
    }
    return loss_BT, token_sums(per_token, mask_BT, loss_BT.dtype)


def cispo_loss(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    options: ClipOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO's loss per token (MiniMax-M1, Chen et al. 2025, arXiv 2506.13585, eq. 4 and 5):
    L = -stopgrad(clip(r, 1 - clip_low, 1 + clip_high)) A log_probs.

    r is the ratio of `ppo_clip_loss`. The clip bounds how much a token weighs; unlike PPO's it cuts off no token's
    gradient.

    Returns:
        The loss [B, T], and the sums `ratio`, `approx_kl`, `clip_low` and `clip_high` (tokens whose weight that bound
        changes).
    """
    log_ratio = torch.clamp(log_probs_BT - old_log_probs_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO).detach()
    ratio = torch.exp(log_ratio)
    weight = torch.clamp(ratio, 1 - options.clip_low, 1 + options.clip_high)
    loss_BT = -weight * advantages_BT * log_probs_BT
    per_token = {
        "ratio": ratio,
        "approx_kl": torch.expm1(log_ratio) - log_ratio,
        "clip_low": ratio < 1 - options.clip_low,
        "clip_high": ratio > 1 + options.clip_high,
    }
    return loss_BT, token_sums(per_token, mask_BT, loss_BT.dtype)
