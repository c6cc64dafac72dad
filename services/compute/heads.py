"""Heads: model outputs at the positions that predict response tokens, as [B, R] grids.

A head is a function of the model's raw output and the micro-batch, so all engines share it. The raw output covers the
last K columns, with K at least `MicroBatch.num_scored`. It is a tensor of values [B, K]; for a policy `DeferredLogits`,
so that logits never exist for all positions at once; or logits [B, K, V] of a model whose output layer does more than
multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.compute.logits import DeferredLogits, at_least_float32
from services.compute.microbatch import MicroBatch

Output = TypeVar("Output")
Head = Callable[[Any, MicroBatch], Output]


@dataclass(frozen=True, eq=False)
class PolicyOutput:
    """Log-probabilities and entropies of response tokens, in float32 or a finer dtype of the model.

    Args:
        log_probs_BR: log-probability of each response token, in nats.
        entropy_BR: entropy of the distribution at its position, in nats.
    """

    log_probs_BR: Tensor
    entropy_BR: Tensor


@dataclass(frozen=True)
class PolicyHead:
    """Log-probabilities and entropy under softmax(logits / temperature), 0 in the padding. Logits are computed only at
    positions that predict a response token.

    Args:
        temperature: above 0; the sampling temperature, since it is part of the policy that sampled.
        entropy_gradient: keep the graph of the entropy, for a loss with an entropy term.
    """

    temperature: float = 1.0
    entropy_gradient: bool = False

    def __call__(self, raw: Tensor | DeferredLogits, micro_batch: MicroBatch) -> PolicyOutput:
        logits = raw if isinstance(raw, DeferredLogits) else DeferredLogits(raw)
        mask_BR = micro_batch.response_mask_BR
        hidden_NH = micro_batch.read(logits.hidden_BKH, micro_batch.predicting_BR[mask_BR])
        log_probs_N, entropy_N = logits.layer.scores(hidden_NH, micro_batch.response_ids_N, self.temperature)
        if not self.entropy_gradient:
            entropy_N = entropy_N.detach()
        return PolicyOutput(_grid(log_probs_N, mask_BR), _grid(entropy_N, mask_BR))


def value_head(values_BK: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Values [B, R] of the states in which response tokens are chosen, from values [B, K] of all positions."""
    return micro_batch.read(at_least_float32(values_BK), micro_batch.predicting_BR)


def dummy_head(raw: Tensor | DeferredLogits, micro_batch: MicroBatch) -> Tensor:
    """Sum of the raw output; times zero, a loss that keeps the graph connected for a dummy micro-batch."""
    return (raw.hidden_BKH if isinstance(raw, DeferredLogits) else raw).sum()


def zero_loss(output: Any) -> Tensor:
    """Zero-weight loss that keeps the graph connected for a micro-batch whose loss function failed."""
    tensors = [output] if isinstance(output, Tensor) else list(vars(output).values())
    return torch.stack([x.sum() for x in tensors if x.requires_grad]).sum() * 0


def _grid(x_N: Tensor, mask_BR: Tensor) -> Tensor:
    """Concatenated values of all response tokens as a grid [B, R], 0 in the padding."""
    return x_N.new_zeros(mask_BR.shape).masked_scatter(mask_BR, x_N)
