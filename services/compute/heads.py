"""Heads, which turn a model's raw output into grids [B, R] of one result per response token.

A head is a function of the model's raw output and the micro-batch, so all engines share it. The raw output covers the
last K columns, with K at least `MicroBatch.num_scored`. It is a tensor of values [B, K]; for a policy `DeferredLogits`,
so that logits never exist for all positions at once; or logits [B, K, V] of a model whose output layer does more than
multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.compute.collectives import sum_over
from services.compute.logits import DeferredLogits, at_least_float32
from services.compute.microbatch import MicroBatch

Output = TypeVar("Output")
Head = Callable[[Any, MicroBatch], Output]
"""Function of a model's raw output and its micro-batch that returns the output for response tokens: a grid [B, R], or a
dataclass of such grids."""


@dataclass(frozen=True, eq=False)
class PolicyOutput:
    """Log-probabilities and entropies of response tokens under the model's policy, softmax(logits / temperature)
    without top-k or top-p, with 0 in the padding; in float32 or a finer dtype of the model.

    Args:
        log_probs_BR: log-probability of each response token, in nats.
        entropy_BR: entropy of the policy's distribution at the position of each response token, in nats.
    """

    log_probs_BR: Tensor
    entropy_BR: Tensor


@dataclass(frozen=True)
class PolicyHead:
    """Head that computes log-probabilities and entropies under softmax(logits / temperature), with 0 in the padding.
    From `DeferredLogits`, logits are computed only at positions that predict a response token.

    Args:
        temperature: divisor of the logits, above 0; that of sampling, since it is part of the policy.
        entropy_gradient: whether gradients flow through the entropy, for a loss with an entropy term.
    """

    temperature: float = 1.0
    entropy_gradient: bool = False

    def __call__(self, raw: Tensor | DeferredLogits, micro_batch: MicroBatch) -> PolicyOutput:
        logits = raw if isinstance(raw, DeferredLogits) else DeferredLogits(raw)
        predicting_N = micro_batch.collect(micro_batch.predicting_BR)
        hidden_NH = micro_batch.read(logits.hidden_BKH, predicting_N)
        log_probs_N, entropy_N = logits.layer.scores(hidden_NH, micro_batch.response_ids_N, self.temperature)
        if not self.entropy_gradient:
            entropy_N = entropy_N.detach()
        return PolicyOutput(micro_batch.grid(log_probs_N), micro_batch.grid(entropy_N))


def value_head(values_BK: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Head that returns the values [B, R] of the states in which response tokens were chosen, at least float32, from
    the values [B, K] of the last K positions. In the padding, values are arbitrary."""
    return micro_batch.read(at_least_float32(values_BK), micro_batch.predicting_BR)


def dummy_head(raw: Tensor | DeferredLogits, micro_batch: MicroBatch) -> Tensor:
    """Head that returns the sum of the raw output, a scalar. Multiplied by 0, it is the loss of a dummy micro-batch,
    whose backward pass takes part in collectives."""
    return (raw.hidden_BKH if isinstance(raw, DeferredLogits) else raw).sum()


def whole_output(output: Output, part: MicroBatch) -> Output:
    """Returns a head's output for all response tokens of a sequence-parallel micro-batch, given its output for the
    shard of this rank. The result is the same on all ranks of the group, which all compute the same loss from it.
    Collective over the group.

    Args:
        output: output of the head for `part`.
        part: shard of this rank, `MicroBatch.part`.
    """
    assert part.packing is not None, "parts are packed"
    assert part.packing.ranks is not None, "several ranks have parts"
    group, mask_BR = part.packing.ranks.group, part.response_mask_BR

    def whole(x_BR: Tensor) -> Tensor:
        return sum_over(x_BR.where(mask_BR, 0), group)

    if isinstance(output, Tensor):
        return whole(output)  # type: ignore[return-value]
    return replace(output, **{name: whole(x_BR) for name, x_BR in vars(output).items()})  # type: ignore[type-var]


def zero_loss(output: Any) -> Tensor:
    """Returns a loss of 0 whose graph includes the given output of a head, for a micro-batch whose loss function
    failed: its backward pass still takes part in collectives."""
    tensors = [output] if isinstance(output, Tensor) else list(vars(output).values())
    return torch.stack([x.sum() for x in tensors if x.requires_grad]).sum() * 0
