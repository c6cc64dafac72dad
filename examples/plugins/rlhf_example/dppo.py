"""DPPO with binary total variation (Qi et al. 2026, arXiv 2602.04879)."""

import torch
from torch import Tensor

from rlhf_example.losses import DppoOptions
from services.roles.losses import token_sums


def dppo_loss(
    log_probs_BT: Tensor, old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, options: DppoOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss per token, -M r A with r = pi / mu, log r clamped to +-20. M is 0 where |pi - mu| > delta and
    the update would move pi further from mu (A > 0 and r > 1, or A < 0 and r < 1), else 1; it has no gradient. mu is
    the policy of the old log-probabilities: with `recompute_log_probs = false` the rollout's, as in the paper."""
    ratio = torch.exp(torch.clamp(log_probs_BT - old_BT, -20.0, 20.0))
    tv = (log_probs_BT.detach().exp() - old_BT.exp()).abs()
    is_away = advantages_BT * (ratio.detach() - 1) > 0
    is_masked = (tv > options.delta) & is_away
    loss_BT = torch.where(is_masked, 0.0, -advantages_BT * ratio)
    return loss_BT, token_sums({"ratio": ratio, "tv": tv, "masked": is_masked}, mask_BT, loss_BT.dtype)
