"""The losses of the actor: policy loss, pre-training loss and supervised loss.

Shapes and masks as in `services.roles.losses`. Statistics are sums over response tokens, detached scalars: add them
over micro-batches and data ranks, then divide by the tokens of the mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.actor.rollout_correction import CORRECTIONS, LEVELS, rollout_weights
from services.actor.surrogates import SURROGATES, cispo_loss, gspo_loss, ppo_clip_loss
from services.roles.losses import KL_KINDS, aggregate, check_aggregation, kl_penalty, masked_sum


@dataclass(frozen=True)
class PolicyLossConfig:
    """Options of the policy loss.

    Args:
        surrogate: "ppo" for `ppo_clip_loss`, "gspo" for `gspo_loss`, "cispo" for `cispo_loss`.
        clip_low: lower bound of the ratio is 1 - clip_low; in [0, 1].
        clip_high: upper bound of the ratio is 1 + clip_high; at least 0.
        dual_clip: dual_clip of `ppo_clip_loss`; above 1, or None for no bound.
        entropy_coef: c_H, coefficient of the entropy bonus per nat.
        kl_coef: c_KL, coefficient of the KL to the reference per nat.
        kl_kind: kind of `kl_penalty`.
        aggregation: mode of `aggregate`.
        max_length: longest response in tokens, for the aggregation seq-mean-token-sum-norm.
        correction: correction of `rollout_weights`, or "none".
        correction_level, correction_low, correction_high: level, low and high of `rollout_weights`.

    Raises:
        ValueError: an unknown name, a number out of its range, or an aggregation without its `max_length`.
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


def pretraining_loss(
    log_probs_BT: Tensor, mask_BT: Tensor, coefficient: float, *, num_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns this micro-batch's share of the pre-training loss: `coefficient` times the mean next-token
    cross-entropy of texts (PPO-ptx, Ouyang et al. 2022, arXiv 2203.02155, eq. 2).

    Args:
        log_probs_BT: log-probabilities of the tokens at temperature 1, in nats.
        mask_BT: 1 on the tokens that are predicted.
        coefficient: weight of the loss.
        num_tokens: tokens of the mini-batch's texts, over all micro-batches and data ranks.

    Returns:
        The scalar to call backward on, and the sum `pretrain_loss` over tokens, without the coefficient.
    """
    total = masked_sum(-log_probs_BT, mask_BT)
    return coefficient * total / max(num_tokens, 1), {"pretrain_loss": total.detach()}


def supervised_loss(log_probs_BT: Tensor, mask_BT: Tensor, *, num_tokens: int) -> Tensor:
    """Returns this micro-batch's share of the mean negative log-likelihood of the response tokens, a scalar: the loss
    of supervised fine-tuning (Ouyang et al. 2022, arXiv 2203.02155, section 3.5).

    Args:
        log_probs_BT: log-probabilities of the tokens at temperature 1, in nats.
        mask_BT: 1 on response tokens.
        num_tokens: response tokens of the mini-batch, over all micro-batches and data ranks.
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
    """Returns this micro-batch's share of the mini-batch's policy loss, w pg - c_H H + c_KL KL, with pg the surrogate
    per token, w the rollout correction's weight, H the entropy and KL the penalty. Shares add up as in `aggregate`.

    Args:
        log_probs_BT: log-probabilities of the sampled tokens under the weights that are trained.
        old_log_probs_BT: log-probabilities under the weights before the update.
        advantages_BT: advantages of the sampled tokens.
        mask_BT: 1 on response tokens.
        config: options of the loss.
        num_tokens: response tokens of the mini-batch, over all micro-batches and data ranks.
        num_sequences: sequences of the mini-batch, over all micro-batches and data ranks.
        entropy_BT: H, entropy at each token in nats; required for `entropy_coef`, else a statistic, to pass detached.
        ref_log_probs_BT: log-probabilities of the reference; required for `kl_coef`, else only a statistic.
        rollout_log_probs_BT: log-probabilities of the rollout engine; required for `correction`, without which w is 1.

    Returns:
        The scalar to call backward on, and the sums of the surrogate and of `rollout_weights` with `pg_loss` and,
        where given, `entropy` and `ref_kl`.

    Raises:
        ValueError: a coefficient or correction without its tensor.
    """
    loss_BT, stats = _surrogate(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, config)
    if config.correction != "none":
        weights_BT, weight_stats = _rollout_weights(old_log_probs_BT, rollout_log_probs_BT, mask_BT, config)
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


def _rollout_weights(
    old_log_probs_BT: Tensor, rollout_log_probs_BT: Tensor | None, mask_BT: Tensor, config: PolicyLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    if rollout_log_probs_BT is None:
        raise ValueError("a rollout correction needs the log-probabilities of the rollout")
    return rollout_weights(
        old_log_probs_BT,
        rollout_log_probs_BT,
        mask_BT,
        correction=config.correction,
        level=config.correction_level,
        low=config.correction_low,
        high=config.correction_high,
    )
