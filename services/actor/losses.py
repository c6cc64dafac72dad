"""The losses of the actor: a surrogate of the policy's objective, and what it is weighed by and added to.

Shapes and masks as in `services.roles.losses`. Statistics are sums over response tokens, detached scalars: add them
over micro-batches and data ranks, then divide by the tokens of the mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.roles.losses import (
    KL_KINDS,
    MAX_LOG_RATIO,
    aggregate,
    check_aggregation,
    kl_penalty,
    masked,
    masked_sum,
)

SURROGATES = ("ppo", "gspo", "cispo")
CORRECTIONS = ("none", "truncate", "mask")
LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class PolicyLossConfig:
    """Everything about the policy loss that does not change within a run.

    Args:
        surrogate: ppo for `ppo_clip_loss`, gspo for `gspo_loss`, cispo for `cispo_loss`.
        clip_low: the ratio is clipped from below at 1 - clip_low, in [0, 1].
        clip_high: and from above at 1 + clip_high, at least 0.
        dual_clip: of `ppo_clip_loss`; None leaves the loss unbounded.
        entropy_coef: c_H, what a nat of entropy is worth.
        kl_coef: c_KL, what a nat of KL to the reference costs.
        kl_kind: a kind of `kl_penalty`.
        aggregation: a mode of `aggregate`.
        max_length: longest response in tokens, for the aggregation that asks for it.
        correction: of `rollout_weights`; likewise level, low and high.

    Raises:
        ValueError: an unknown name, a clip or bound out of its range, or what `check_aggregation` and `kl_penalty`
            refuse.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    aggregation: str = "token-mean"
    max_length: int | None = None
    surrogate: str = "ppo"
    correction: str = "none"
    correction_level: str = "token"
    correction_low: float = 0.5
    correction_high: float = 2.0

    def __post_init__(self) -> None:
        _require_known("surrogate", self.surrogate, SURROGATES)
        _require_known("rollout correction", self.correction, CORRECTIONS)
        _require_known("level of the rollout correction", self.correction_level, LEVELS)
        if self.correction != "none" and not 0 <= self.correction_low < self.correction_high:
            raise ValueError(
                f"a rollout correction needs 0 <= low < high, got {self.correction_low} and {self.correction_high}"
            )
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low must be in [0, 1], got {self.clip_low}")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must be at least 0, got {self.clip_high}")
        check_aggregation(self.aggregation, self.max_length)
        if self.kl_kind not in KL_KINDS:
            raise ValueError(f"unknown KL penalty {self.kl_kind!r}; known: {', '.join(KL_KINDS)}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")


def _require_known(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}")


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
    return loss_BT, _sums(per_token, mask_BT, loss_BT.dtype)


def gspo_loss(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO's clipped surrogate per token (Zheng et al. 2025, arXiv 2507.18071, section 4.3, the token-level form).

    With s = exp(mean over the sequence of log_probs - old_log_probs), the mean clamped to +-20, and
    s_t = stopgrad(s) exp(log_probs - stopgrad(log_probs)), which has the value of s and at every token the gradient
    of the token's own log-probability: L = max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high)). Averaged over each
    sequence (seq-mean-token-mean), with one advantage per sequence, this is GSPO (section 4.1).

    Returns:
        The loss [B, T], and the sums over tokens `ratio` (s), `approx_kl` (s - 1 - log s), `clip_low` and `clip_high`.
    """
    log_ratio_B1 = _sequence_log_ratio(log_probs_BT - old_log_probs_BT, mask_BT, mean=True)
    own_BT = torch.exp(log_probs_BT - log_probs_BT.detach())
    ratio = torch.exp(log_ratio_B1.detach()) * own_BT
    clipped_ratio = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    loss_BT = torch.maximum(-advantages_BT * ratio, -advantages_BT * clipped_ratio)
    per_token = {
        "ratio": ratio,
        "approx_kl": (torch.expm1(log_ratio_B1) - log_ratio_B1).expand_as(loss_BT),
        "clip_low": (advantages_BT < 0) & (ratio < 1 - clip_low),
        "clip_high": (advantages_BT > 0) & (ratio > 1 + clip_high),
    }
    return loss_BT, _sums(per_token, mask_BT, loss_BT.dtype)


def cispo_loss(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
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
    weight = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    loss_BT = -weight * advantages_BT * log_probs_BT
    per_token = {
        "ratio": ratio,
        "approx_kl": torch.expm1(log_ratio) - log_ratio,
        "clip_low": ratio < 1 - clip_low,
        "clip_high": ratio > 1 + clip_high,
    }
    return loss_BT, _sums(per_token, mask_BT, loss_BT.dtype)


def rollout_weights(
    old_log_probs_BT: Tensor,
    rollout_log_probs_BT: Tensor,
    mask_BT: Tensor,
    *,
    correction: str,
    level: str,
    low: float,
    high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance weights of tokens that another engine sampled than the one that learns.

    With w = exp(old_log_probs - rollout_log_probs), the difference clamped to +-20, for the token, or for the sequence
    the exponential of the sum over its tokens:

    - truncate: min(w, high), truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly
      Brings You Off-Policy RL Training"; Espeholt et al. 2018, arXiv 1802.01561).
    - mask: w where low <= w <= high, else 0 (IcePop, Ling Team 2025, arXiv 2510.18855, for tokens).

    Args:
        old_log_probs_BT: of the training engine, under the weights that sampled.
        rollout_log_probs_BT: of the rollout engine, of the distribution that was sampled.

    Returns:
        The weights [B, T], without gradient, and the sums over tokens `rollout_ratio` (w) and `rollout_cut` (tokens
        whose weight is not w).
    """
    log_ratio = (old_log_probs_BT - rollout_log_probs_BT).detach()
    if level == "sequence":
        log_ratio = _sequence_log_ratio(log_ratio, mask_BT, mean=False).expand_as(log_ratio)
    ratio = torch.exp(torch.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    within = ratio <= high if correction == "truncate" else (ratio >= low) & (ratio <= high)
    weights_BT = torch.where(within, ratio, high if correction == "truncate" else 0.0)
    per_token = {"rollout_ratio": ratio, "rollout_cut": ~within}
    return weights_BT, _sums(per_token, mask_BT, ratio.dtype)


def pretraining_loss(
    log_probs_BT: Tensor, mask_BT: Tensor, coefficient: float, *, num_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of coefficient times the mean next-token cross-entropy of texts (PPO-ptx, Ouyang et al.
    2022, arXiv 2203.02155, eq. 2).

    Args:
        log_probs_BT: of the tokens of the texts at temperature 1.
        num_tokens: tokens of the texts of the whole mini-batch, over all micro-batches and data ranks.

    Returns:
        The scalar to call backward on, and the sum `pretrain_loss` over tokens, without the coefficient.
    """
    total = masked_sum(-log_probs_BT, mask_BT)
    return coefficient * total / max(num_tokens, 1), {"pretrain_loss": total.detach()}


def supervised_loss(log_probs_BT: Tensor, mask_BT: Tensor, *, num_tokens: int) -> Tensor:
    """This micro-batch's share of the mean negative log-likelihood of tokens, a scalar: the loss of supervised
    fine-tuning, with the mask on the tokens of the responses (Ouyang et al. 2022, arXiv 2203.02155, section 3.5).

    Args:
        log_probs_BT: of the tokens at temperature 1.
        num_tokens: tokens of the whole mini-batch, over all micro-batches and data ranks.
    """
    return masked_sum(-log_probs_BT, mask_BT) / max(num_tokens, 1)


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
    rollout_log_probs_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the mini-batch's w pg - c_H H + c_KL KL; shares add up as in `aggregate`.

    Args:
        num_tokens: response tokens of the whole mini-batch, over all micro-batches and data ranks.
        num_sequences: likewise.
        entropy_BT: H, entropy of the policy at each token in nats; needed for `entropy_coef`, else only a
            statistic (then pass it detached, or its graph is walked for nothing).
        ref_log_probs_BT: of the reference policy; needed for `kl_coef`, else only a statistic.
        rollout_log_probs_BT: of the rollout engine; needed for `correction`, else not read. Without one, w is 1.

    Returns:
        The scalar to call backward on, and the sums of the surrogate and of `rollout_weights` with `pg_loss` and,
        where given, `entropy` and `ref_kl`.

    Raises:
        ValueError: a coefficient without its tensor, or what `kl_penalty` and `aggregate` refuse.
    """
    loss_BT, stats = _surrogate(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, config)
    if config.correction != "none":
        if rollout_log_probs_BT is None:
            raise ValueError("a rollout correction needs the log-probabilities of the rollout")
        weights_BT, weight_stats = rollout_weights(
            old_log_probs_BT,
            rollout_log_probs_BT,
            mask_BT,
            correction=config.correction,
            level=config.correction_level,
            low=config.correction_low,
            high=config.correction_high,
        )
        loss_BT, stats = weights_BT * loss_BT, stats | weight_stats
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


def _surrogate(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: PolicyLossConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    columns = (log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT)
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    match config.surrogate:
        case "gspo":
            return gspo_loss(*columns, **clips)
        case "cispo":
            return cispo_loss(*columns, **clips)
        case _:
            return ppo_clip_loss(*columns, **clips, dual_clip=config.dual_clip)


def _sequence_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, *, mean: bool) -> Tensor:
    """Sum or mean over each sequence's tokens, clamped to +-20 [B, 1]; 0 for an empty one."""
    total_B1 = masked(log_ratio_BT, mask_BT).sum(dim=1, keepdim=True)
    if mean:
        total_B1 = total_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.clamp(total_B1, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sums(per_token: dict[str, Tensor], mask_BT: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: masked_sum(x.detach().to(dtype), mask_BT) for name, x in per_token.items()}
