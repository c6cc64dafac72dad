"""The losses of the actor: PPO's clipped surrogate and what is added to it.

Shapes and masks as in `services.losses`. Statistics are sums over response tokens, detached scalars: add them
over micro-batches and data ranks, then divide by the tokens of the mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.losses import KL_KINDS, MAX_LOG_RATIO, aggregate, check_aggregation, kl_penalty, masked_sum


@dataclass(frozen=True)
class PolicyLossConfig:
    """Everything about the policy loss that does not change within a run.

    Args:
        clip_low: the ratio is clipped from below at 1 - clip_low, in [0, 1].
        clip_high: and from above at 1 + clip_high, at least 0.
        dual_clip: bound c > 1 on the ratio where the advantage is negative; None leaves it unbounded.
        entropy_coef: c_H, what a nat of entropy is worth.
        kl_coef: c_KL, what a nat of KL to the reference costs.
        kl_kind: a kind of `kl_penalty`.
        aggregation: a mode of `aggregate`.
        max_length: longest response in tokens, for the aggregation that asks for it.

    Raises:
        ValueError: a clip out of its range, or what `check_aggregation` and `kl_penalty` refuse.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    aggregation: str = "token-mean"
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low must be in [0, 1], got {self.clip_low}")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must be at least 0, got {self.clip_high}")
        check_aggregation(self.aggregation, self.max_length)
        if self.kl_kind not in KL_KINDS:
            raise ValueError(f"unknown KL penalty {self.kl_kind!r}; known: {', '.join(KL_KINDS)}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")


def ppo_clip_loss(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate loss per token (Schulman et al. 2017, eq. 7), negated to be minimised.

    With r = exp(log_probs - old_log_probs), the difference clamped to +-20:
    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and, where A < 0, L = min(L, -A dual_clip)
    (dual clip, Ye et al. 2020).

    Returns:
        The loss [B, T], and the sums `ratio`, `approx_kl` (r - 1 - log r, the k3 estimate of KL(old || new))
        and `clip_low`, `clip_high`, `clip_dual` (tokens whose gradient that bound cuts off).
    """
    log_ratio = torch.clamp(log_probs_BT - old_log_probs_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    clipped_ratio = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    loss_BT = torch.maximum(-advantages_BT * ratio, -advantages_BT * clipped_ratio)
    negative = advantages_BT < 0
    dual_clipped = torch.zeros_like(negative)
    if dual_clip is not None:
        bound = -advantages_BT * dual_clip
        dual_clipped = negative & (loss_BT > bound)
        loss_BT = torch.where(dual_clipped, bound, loss_BT)
    per_token = {
        "ratio": ratio,
        "approx_kl": torch.expm1(log_ratio) - log_ratio,
        "clip_low": negative & (ratio < 1 - clip_low),
        "clip_high": (advantages_BT > 0) & (ratio > 1 + clip_high),
        "clip_dual": dual_clipped,
    }
    return loss_BT, {name: masked_sum(x.detach().to(loss_BT.dtype), mask_BT) for name, x in per_token.items()}


def policy_loss(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: PolicyLossConfig,
    *,
    num_tokens: int,
    num_sequences: int,
    entropy_BT: Tensor | None = None,
    ref_log_probs_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the mini-batch's pg - c_H H + c_KL KL; shares add up as in `aggregate`.

    Args:
        num_tokens: response tokens of the whole mini-batch, over all micro-batches and data ranks.
        num_sequences: likewise.
        entropy_BT: H, entropy of the policy at each token in nats; needed for `entropy_coef`, else only a
            statistic (then pass it detached, or its graph is walked for nothing).
        ref_log_probs_BT: of the reference policy; needed for `kl_coef`, else only a statistic.

    Returns:
        The scalar to call backward on, and the sums of `ppo_clip_loss` with `pg_loss` and, where given,
        `entropy` and `ref_kl`.

    Raises:
        ValueError: a coefficient without its tensor, or what `kl_penalty` and `aggregate` refuse.
    """
    loss_BT, stats = ppo_clip_loss(
        log_probs_BT,
        old_log_probs_BT,
        advantages_BT,
        mask_BT,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    stats["pg_loss"] = masked_sum(loss_BT.detach(), mask_BT)
    if entropy_BT is not None:
        stats["entropy"] = masked_sum(entropy_BT.detach(), mask_BT)
        loss_BT = loss_BT - config.entropy_coef * entropy_BT
    elif config.entropy_coef != 0:
        raise ValueError(f"an entropy bonus of {config.entropy_coef} needs the entropy of the policy")
    if ref_log_probs_BT is not None:
        kl_BT = kl_penalty(log_probs_BT, ref_log_probs_BT, config.kl_kind)
        stats["ref_kl"] = masked_sum(kl_BT.detach(), mask_BT)
        loss_BT = loss_BT + config.kl_coef * kl_BT
    elif config.kl_coef != 0:
        raise ValueError(f"a KL loss of {config.kl_coef} needs a reference policy")
    loss = aggregate(
        loss_BT,
        mask_BT,
        config.aggregation,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_length=config.max_length,
    )
    return loss, stats
