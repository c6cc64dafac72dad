"""Attention that the fused kernels do not compute: scores that are capped (Gemma 2), and attention sinks (gpt-oss).

Scores are tensors here: of all queries where these are few, otherwise of a part at a time, and then computed again in
the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MOST_SCORES = 1 << 25
"""Most scores that are in memory at a time: 128 MiB of float32, and as much again for each tensor derived from them;
more if one position of all rows has more."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Changes that attention makes to the scores of queries and keys, s = scaling q k.

    Args:
        cap: bound of the scores, which become cap tanh(s / cap) (Gemma Team 2024, "Gemma 2", section 2). Default: they
            are not capped.
        sinks_H: logit of each head's sink, whose exponential is added to the sum by which softmax divides (gpt-oss;
            the "zero sink" of Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", with a
            learned logit). Default: no sinks.
    """

    cap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def are_changed(self) -> bool:
        """Whether scores differ from those that fused kernels compute."""
        return self.cap is not None or self.sinks_H is not None

    def of_heads(self, heads: slice) -> Scores:
        """Returns the changes of some of the heads."""
        return self if self.sinks_H is None else replace(self, sinks_H=self.sinks_H[heads])

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor:
        """Computes attention with these scores.

        Args:
            query: [B, H, T, D].
            key, value: [B, K, S, D] and [B, K, S, E], K a divisor of H: each is shared by H / K consecutive queries.
            mask: True where a query attends to a key, [B or 1, 1, T, S]. Default: the T queries are the last tokens of
                the S, and each attends to itself and earlier ones.
            scaling: factor of the products of queries and keys. Default: 1 / sqrt(D).

        Returns:
            Outputs [B, T, H, E], in the type of `value`.
        """
        if mask is None:
            mask = query.new_ones((1, 1, query.shape[2], key.shape[2]), dtype=torch.bool)
            mask = mask.tril(key.shape[2] - query.shape[2])
        size = max(1, MOST_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
        attend: Any = partial(_attend, self.cap, scaling or query.shape[-1] ** -0.5)
        if query.shape[2] > size and torch.is_grad_enabled():
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        chunks = zip(query.split(size, dim=2), mask.split(size, dim=2), strict=True)
        return torch.cat([attend(q, key, value, m, self.sinks_H) for q, m in chunks], dim=1)


def _attend(
    cap: float | None,
    scaling: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sinks_H: Tensor | None,
) -> Tensor:
    """Computes attention of some of the queries, as `Scores.attend`."""
    num_keys = key.shape[2]
    products = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3) @ key.transpose(2, 3)
    scores = products.view(*query.shape[:3], num_keys)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scaling
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    # Not -inf, which gives nan where a query in the padding attends to nothing.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    shares = scores.softmax(dim=-1)[..., :num_keys].to(value.dtype)
    attended = shares.unflatten(1, (key.shape[1], -1)).flatten(2, 3) @ value
    return attended.view(*query.shape[:3], value.shape[-1]).transpose(1, 2)
