"""The loss of the critic: a clipped squared error.

Shapes and masks as in `services.roles.losses`. Statistics are sums over response tokens, detached scalars: add them
over micro-batches and data ranks, then divide by the tokens of the mini-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.roles.losses import token_sums
from settings.losses import ValueClipOptions


def clipped_squared_error(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    options: ValueClipOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the clipped squared error per token, max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2, as in
    OpenAI Baselines' PPO: moving V further than `value_clip` from V_old never lowers the loss.

    Args:
        values_BT: V, values under the weights that are trained.
        old_values_BT: V_old, values before the update, from which the advantages were computed.
        returns_BT: R, the targets.
        mask_BT: 1 on response tokens.
        options: `value_clip`, in units of the value; 0 for the plain squared error, without old values.

    Returns:
        The loss [B, T], for `services.roles.losses.aggregate`, and the sums `value`, `squared_error` and `clip`
        (tokens whose gradient the clip cuts off).
    """
    clip = options.value_clip
    squared_error = (values_BT - returns_BT).square()
    loss_BT, is_clipped = squared_error, torch.zeros_like(squared_error)
    if clip:
        clipped_values = torch.clamp(values_BT, old_values_BT - clip, old_values_BT + clip)
        clipped_error = (clipped_values - returns_BT).square()
        loss_BT, is_clipped = torch.maximum(squared_error, clipped_error), clipped_error > squared_error
    per_token = {"value": values_BT, "squared_error": squared_error, "clip": is_clipped}
    return loss_BT / 2, token_sums(per_token, mask_BT, loss_BT.dtype)
