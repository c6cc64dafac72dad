"""Losses of reward and cost models: pairs of responses to the same prompt, of which people chose one."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

LOSSES = ("bradley_terry", "cost")


def bradley_terry_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected) of each pair [B]: the negative log-likelihood of the choices under the model
    of Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv 2203.02155, equation 1).

    Args:
        chosen_B, rejected_B: scores of the two responses.
    """
    return -logsigmoid(chosen_B - rejected_B)


def cost_loss(high_B: Tensor, low_B: Tensor, high_sign_B: Tensor, low_sign_B: Tensor) -> Tensor:
    """-log sigmoid(c_hi - c_lo) - log sigmoid(s_lo c_lo) - log sigmoid(s_hi c_hi) of each pair [B] (Dai et al. 2024,
    Safe RLHF, arXiv 2310.12773, equation 6): the more harmful response costs more, and what is unsafe more than 0.

    Args:
        high_B, low_B: costs of the more and of the less harmful response.
        high_sign_B, low_sign_B: +1 where the response is unsafe, -1 where it is safe.
    """
    order_B = -logsigmoid(high_B - low_B)
    return order_B - logsigmoid(low_sign_B * low_B) - logsigmoid(high_sign_B * high_B)
