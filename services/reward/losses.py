"""Losses of reward and cost models over pairs of a chosen and a rejected response to the same prompt."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

LOSSES = ("bradley_terry", "cost")


def bradley_terry_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Returns the loss of each pair [B], -log sigmoid(r_chosen - r_rejected): the negative log-likelihood of the
    choice under the model of Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv 2203.02155, equation 1).

    Args:
        chosen_B, rejected_B: Scores of the chosen and of the rejected responses, [B].
    """
    return -logsigmoid(chosen_B - rejected_B)


def cost_loss(high_B: Tensor, low_B: Tensor, high_sign_B: Tensor, low_sign_B: Tensor) -> Tensor:
    """Returns the loss of each pair [B], -log sigmoid(c_hi - c_lo) - log sigmoid(s_lo c_lo) - log sigmoid(s_hi c_hi),
    of Safe RLHF (Dai et al. 2024, arXiv 2310.12773, equation 6). It makes the more harmful response cost more, and
    gives unsafe responses costs above 0 and safe ones costs below 0.

    Args:
        high_B, low_B: Costs of the more and of the less harmful responses, [B].
        high_sign_B, low_sign_B: +1 for an unsafe response, -1 for a safe one, [B].
    """
    order_B = -logsigmoid(high_B - low_B)
    return order_B - logsigmoid(low_sign_B * low_B) - logsigmoid(high_sign_B * high_B)


def pair_loss(
    scores_S: Tensor, signs_S: Tensor | None, *, num_pairs: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes a micro-batch's share of the mean loss over the pairs of a mini-batch: `cost_loss` if `signs_S` is
    given, else `bradley_terry_loss`.

    Args:
        scores_S: Scores [2 * pairs]: of the chosen response of pair 0, of its rejected response, and so on.
        signs_S: For costs, +1 for an unsafe response and -1 for a safe one, [2 * pairs]; the chosen response of a
            pair is the less harmful one. None for rewards.
        num_pairs: Number of pairs of the mini-batch, over all micro-batches and data ranks.

    Returns:
        The scalar to call backward on, and sums over the micro-batch's pairs: `accuracy`, of 1 for each pair in the
        right order, and `margin`, of the differences of scores in the right direction.
    """
    chosen_B, rejected_B = scores_S[::2], scores_S[1::2]
    if signs_S is None:
        loss_B, margin_B = bradley_terry_loss(chosen_B, rejected_B), chosen_B - rejected_B
    else:
        loss_B = cost_loss(rejected_B, chosen_B, signs_S[1::2], signs_S[::2])
        margin_B = rejected_B - chosen_B
    stats = {"accuracy": (margin_B > 0).sum().to(loss_B.dtype), "margin": margin_B.detach().sum()}
    return loss_B.sum() / num_pairs, stats
