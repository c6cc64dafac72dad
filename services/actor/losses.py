"""The losses of the actor: policy loss, pre-training loss and supervised loss.

Shapes and masks as in `services.roles.losses`. Statistics are sums over response tokens, detached scalars: add them
over micro-batches and data ranks, then divide by the tokens of the mini-batch.
"""

from __future__ import annotations

from torch import Tensor

from services.actor.rollout_correction import rollout_weights
from services.roles.loss_options import PolicyLossOptions, TokenLoss, token_loss
from services.roles.losses import aggregate, kl_penalty, masked_sum
from settings.losses import find_policy_loss

STATISTICS = ("pg_loss", "entropy", "ref_kl", "rollout_ratio", "rollout_cut", "pretrain_loss")
"""Names of the statistics of the policy loss beside those of its surrogate."""


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


def surrogate_of(options: PolicyLossOptions) -> TokenLoss:
    """Returns the surrogate that `options.surrogate` names, with `options.surrogate_options` bound to it. Raises
    InvalidRequest as `token_loss`."""
    name = options.surrogate
    return token_loss("surrogate", name, find_policy_loss(name), options.surrogate_options, STATISTICS)


def policy_loss(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    surrogate: TokenLoss,
    options: PolicyLossOptions,
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
        surrogate: the loss per token, of these four columns.
        options: knobs of the loss; c_H is `entropy_coefficient`, c_KL `kl_loss_coefficient`.
        num_tokens: response tokens of the mini-batch, over all micro-batches and data ranks.
        num_sequences: sequences of the mini-batch, over all micro-batches and data ranks.
        entropy_BT: H, entropy at each token in nats; required for c_H, else a statistic, to pass detached.
        ref_log_probs_BT: log-probabilities of the reference; required for c_KL, else only a statistic.
        rollout_log_probs_BT: those of the rollout engine; required for `rollout_correction`, without which w is 1.

    Returns:
        The scalar to call backward on, and the sums of the surrogate and of `rollout_weights` with `pg_loss` and,
        where given, `entropy` and `ref_kl`.

    Raises:
        ValueError: a coefficient or correction without its tensor.
    """
    loss_BT, stats = surrogate(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT)
    if options.rollout_correction != "none":
        weights_BT, weight_stats = _rollout_weights(
            old_log_probs_BT, rollout_log_probs_BT, advantages_BT, mask_BT, options
        )
        loss_BT, stats = weights_BT * loss_BT, stats | weight_stats
    stats["pg_loss"] = masked_sum(loss_BT.detach(), mask_BT)
    if entropy_BT is not None:
        stats["entropy"] = masked_sum(entropy_BT.detach(), mask_BT)
        loss_BT = loss_BT - options.entropy_coefficient * entropy_BT
    elif options.entropy_coefficient != 0:
        raise ValueError(f"an entropy bonus of {options.entropy_coefficient} needs the entropy of the policy")
    if ref_log_probs_BT is not None:
        kl_BT = kl_penalty(log_probs_BT, ref_log_probs_BT, options.kl_loss_estimator)
        stats["ref_kl"] = masked_sum(kl_BT.detach(), mask_BT)
        loss_BT = loss_BT + options.kl_loss_coefficient * kl_BT
    elif options.kl_loss_coefficient != 0:
        raise ValueError(f"a KL loss of {options.kl_loss_coefficient} needs a reference policy")
    sizes = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    most = options.max_response_tokens
    return aggregate(loss_BT, mask_BT, options.aggregation, **sizes, max_response_tokens=most), stats


def _rollout_weights(
    old_log_probs_BT: Tensor,
    rollout_log_probs_BT: Tensor | None,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    options: PolicyLossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns `rollout_weights` with the settings in `options`; raises ValueError if `rollout_log_probs_BT` is
    None."""
    if rollout_log_probs_BT is None:
        raise ValueError("a rollout correction needs the log-probabilities of the rollout")
    return rollout_weights(
        old_log_probs_BT,
        rollout_log_probs_BT,
        advantages_BT,
        mask_BT,
        correction=options.rollout_correction,
        level=options.rollout_correction_level,
        low=options.rollout_correction_low,
        high=options.rollout_correction_high,
    )
