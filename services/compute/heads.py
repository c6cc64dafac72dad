"""Heads: read a model's output at the positions that predict response tokens, as [B, R] grids.

A head is a function of the model's raw output and the micro-batch, so every engine shares it, whichever way the
engine came by the output. The raw output covers its last K columns, where K is at least
`MicroBatch.num_scored`: values as a tensor [B, K]; of a policy what logits are made of, `DeferredLogits`, so that they
never exist for all positions at once, or, where a model does more than multiply, its logits [B, K, V].
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
    """Log-probabilities and entropies of response tokens, in float32 or the model's own dtype, if that is finer.

    Args:
        log_probs_BR: log-probability of each response token, in nats.
        entropy_BR: entropy of the distribution it was drawn from, in nats.
    """

    log_probs_BR: Tensor
    entropy_BR: Tensor


@dataclass(frozen=True)
class PolicyHead:
    """Logits [B, K, V] to log-probabilities and entropy under softmax(logits / temperature); both are 0 in the padding.

    Only positions that predict a response token are looked at.

    Args:
        temperature: above 0. The policy that sampled is the one at the sampling temperature, so give that one.
        entropy_gradient: keep the graph of the entropy, for a loss that contains it.
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
    """Values [B, K] of all positions to those [B, R] of the states in which response tokens are chosen."""
    return micro_batch.read(at_least_float32(values_BK), micro_batch.predicting_BR)


def dummy_head(raw: Tensor | DeferredLogits, micro_batch: MicroBatch) -> Tensor:
    """A scalar of all there is, for a micro-batch of which nothing counts."""
    return (raw.hidden_BKH if isinstance(raw, DeferredLogits) else raw).sum()


def zero_loss(output: Any) -> Tensor:
    """A loss of 0, whose backward pass reaches all weights, for a micro-batch whose own loss failed."""
    tensors = [output] if isinstance(output, Tensor) else list(vars(output).values())
    return torch.stack([x.sum() for x in tensors if x.requires_grad]).sum() * 0


def _grid(x_N: Tensor, mask_BR: Tensor) -> Tensor:
    """The values of all response tokens end to end as [B, R], 0 in the padding."""
    return x_N.new_zeros(mask_BR.shape).masked_scatter(mask_BR, x_N)
