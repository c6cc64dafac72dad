"""Computes log-probabilities and entropies of tokens, with the logits of only a chunk of positions in memory at a
time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from services.compute.linear import linear

MOST_LOGITS = 1 << 25
"""Most logits that a rank computes at a time: 128 MiB of float32, and as much again for derived tensors."""

CACHED_LOGITS = 1 << 18
"""Most logits that are computed at a time on CPUs, so that they stay in a core's cache, unless these are of fewer
than `POSITIONS_TOGETHER` positions."""

POSITIONS_TOGETHER = 256
"""Positions that are computed at a time on CPUs if CACHED_LOGITS would allow fewer, since products of few rows are
slow."""

PADDING_LOGIT = -1e30
"""Logit of padding tokens: far below any other, and finite, so that its product with a probability of 0 is 0."""


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """Output layer from hidden states to logits, or this rank's shard of it.

    Args:
        weight_VH: Weight with one row per token; None if the hidden states are the logits themselves.
        num_tokens: Number of rows that are tokens; later rows are padding. Default: all.
        first_id: Token id of the first row.
        group: Process group of the ranks with the other shards, which have the same hidden states; None for one rank.
            Each rank scores all positions, and computes the part of the hidden states' gradient that its tokens give.
        compute_dtype: Type of matrix products. Default: that of the weight.
        scale: Factor of the products, as in Granite and Cohere.
        cap: Bound of the logits, cap tanh(scale product / cap), as in Gemma 2. Default: not capped.
    """

    weight_VH: Tensor | None = None
    num_tokens: int | None = None
    first_id: int = 0
    group: ProcessGroup | None = None
    compute_dtype: torch.dtype | None = None
    scale: float = 1.0
    cap: float | None = None

    def scores(self, hidden_NH: Tensor, ids_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Computes the log-probability of one token per position, and the entropy of each position's distribution,
        softmax(logits / temperature). Logits are computed chunk by chunk, and again in the backward pass. Collective
        over `group`.

        Args:
            hidden_NH: Hidden states of N positions.
            ids_N: Token id of each position, within the whole vocabulary.
            temperature: Divisor of the logits.

        Returns:
            Log-probabilities [N] and entropies [N], in nats, in float32 or the finer type of the hidden states.
        """
        return _Scores.apply(hidden_NH, self.weight_VH, ids_N, self, temperature)  # type: ignore[return-value]

    def _operands(self, hidden_NH: Tensor, weight_VH: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns hidden states and weight, converted to the type of their product; without a weight, the hidden
        states unchanged and None."""
        if weight_VH is None:
            return hidden_NH, None
        dtype = self.compute_dtype or weight_VH.dtype
        return hidden_NH.to(dtype), weight_VH.to(dtype)

    def _logits(self, hidden_NH: Tensor, weight_VH: Tensor | None, temperature: float) -> Tensor:
        """Returns the logits [N, V] of this rank's tokens, divided by the temperature; a tensor that the caller may
        overwrite."""
        logits_NV = hidden_NH.clone() if weight_VH is None else linear(hidden_NH, weight_VH)
        logits_NV = at_least_float32(logits_NV)
        if self.scale != 1:
            logits_NV.mul_(self.scale)
        if self.cap is not None:
            logits_NV.div_(self.cap).tanh_().mul_(self.cap)
        if temperature != 1:
            logits_NV.div_(temperature)
        if self.num_tokens is not None:
            logits_NV[:, self.num_tokens :] = PADDING_LOGIT
        return logits_NV

    def _slope_of_cap(self, logits_NV: Tensor, temperature: float) -> Tensor | None:
        """Returns the derivative of the capped logits [N, V], given divided by the temperature, by those that are not
        capped; None if logits are not capped."""
        if self.cap is None:
            return None
        return (logits_NV * (temperature / self.cap)).square_().neg_().add_(1).clamp_(min=0)

    def _reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """All-reduces a tensor over `group`, in place, if there are other shards; returns it."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, operation, group=self.group)
        return x


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Logits [B, K, V] that are not computed yet.

    Args:
        hidden_BKH: Hidden states of the last K positions, the input of `layer`.
        layer: Output layer. Default: one by which the hidden states are the logits themselves.
    """

    hidden_BKH: Tensor
    layer: OutputLayer = OutputLayer()


class _Scores(torch.autograd.Function):
    """Autograd function of `OutputLayer.scores`.

    With p = softmax(z): d log p_i / d z_j = [i = j] - p_j, and d H / d z_j = -p_j (log p_j + H).

    The backward pass is local: normalizer and entropy are saved by the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor | None,
        ids_N: Tensor,
        layer: OutputLayer,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        log_probs_N, normalizer_N, entropy_N = at_least_float32(hidden_NH.new_empty(3, len(hidden_NH)))
        hidden, weight = layer._operands(hidden_NH, weight_VH)
        for chunk in _chunks(hidden, weight):
            z_NV = layer._logits(hidden[chunk], weight, temperature)
            largest_N = layer._reduce(z_NV.amax(dim=-1), dist.ReduceOp.MAX)
            z_NV -= largest_N[:, None]
            columns_N, is_ours_N = local_rows(ids_N[chunk], layer.first_id, z_NV.shape[-1])
            of_token_N = z_NV.gather(-1, columns_N[:, None])[:, 0] * is_ours_N
            weights_NV = z_NV.exp()
            total_N = weights_NV.sum(dim=-1)
            weighted_N = weights_NV.mul_(z_NV).sum(dim=-1)
            of_token_N, total_N, weighted_N = layer._reduce(torch.stack((of_token_N, total_N, weighted_N)))
            log_probs_N[chunk] = of_token_N - total_N.log()
            normalizer_N[chunk] = largest_N + total_N.log()
            entropy_N[chunk] = total_N.log() - weighted_N / total_N
        ctx.save_for_backward(hidden_NH, weight_VH, ids_N, normalizer_N, entropy_N)
        ctx.layer, ctx.temperature = layer, temperature
        ctx.set_materialize_grads(False)
        return log_probs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_log_probs_N, of_entropy_N = gradients
        hidden_NH, weight_VH, ids_N, normalizer_N, entropy_N = ctx.saved_tensors
        if of_log_probs_N is None:
            of_log_probs_N = torch.zeros_like(normalizer_N)
        layer = ctx.layer
        of_hidden_NH = torch.empty_like(hidden_NH)
        of_weight_VH = at_least_float32(torch.zeros_like(weight_VH)) if ctx.needs_input_grad[1] else None
        hidden, weight = layer._operands(hidden_NH, weight_VH)
        for chunk in _chunks(hidden, weight):
            log_p_NV = layer._logits(hidden[chunk], weight, ctx.temperature)
            slope_of_cap = layer._slope_of_cap(log_p_NV, ctx.temperature)
            log_p_NV -= normalizer_N[chunk, None]
            of_z_NV = log_p_NV.exp()
            columns_N, is_ours_N = local_rows(ids_N[chunk], layer.first_id, of_z_NV.shape[-1])
            slope = of_log_probs_N[chunk, None]
            if of_entropy_N is not None:
                log_p_NV += entropy_N[chunk, None]
                slope = log_p_NV.mul_(of_entropy_N[chunk, None]).add_(slope)
            of_z_NV.mul_(slope).neg_()
            of_z_NV.scatter_add_(-1, columns_N[:, None], (of_log_probs_N[chunk] * is_ours_N)[:, None])
            if ctx.temperature != 1:
                of_z_NV.div_(ctx.temperature)
            if slope_of_cap is not None:
                of_z_NV.mul_(slope_of_cap)
            if layer.scale != 1:
                of_z_NV.mul_(layer.scale)
            of_z_NV = of_z_NV.to(hidden.dtype)
            of_hidden_NH[chunk] = of_z_NV if weight is None else linear(of_z_NV, weight.t())
            if of_weight_VH is not None:
                of_weight_VH += linear(of_z_NV.t(), hidden[chunk].t())
        if of_weight_VH is not None:
            of_weight_VH = of_weight_VH.to(weight_VH.dtype)
        return of_hidden_NH, of_weight_VH, None, None, None


def _chunks(hidden_NH: Tensor, weight_VH: Tensor | None) -> Iterator[slice]:
    """Yields slices of positions whose logits are computed at a time."""
    vocabulary = hidden_NH.shape[-1] if weight_VH is None else len(weight_VH)
    size = max(1, MOST_LOGITS // vocabulary)
    if hidden_NH.is_cpu:
        size = min(size, max(CACHED_LOGITS // vocabulary, POSITIONS_TOGETHER))
    for first in range(0, len(hidden_NH), size):
        yield slice(first, first + size)


def local_rows(ids: Tensor, first_id: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns the row of each token id in this rank's shard (0 for tokens of other shards), and whether the token is
    in the shard.

    Args:
        ids: Token ids, of any shape.
        first_id: Token id of the shard's first row.
        num_rows: Rows of the shard.
    """
    rows = ids - first_id
    is_ours = (rows >= 0) & (rows < num_rows)
    return torch.where(is_ours, rows, 0), is_ours


def at_least_float32(x: Tensor) -> Tensor:
    """Converts a tensor to float32, unless its type is finer."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
