"""What is read off a model's output at the positions that predict response tokens, as [B, R] grids.

A head is a function of the model's raw output and the micro-batch, so every engine shares it, whichever way the
engine came by the output. The raw output covers the last K positions of the sequences, where K is at least
`MicroBatch.num_scored`: values as a tensor [B, K], logits as a tensor [B, K, V] or, where no rank holds those of all
tokens, as `Logits`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from services.engines.logits import Logits, WholeLogits, at_least_float32
from services.engines.microbatch import MicroBatch

Output = TypeVar("Output")
Head = Callable[[Any, MicroBatch], Output]


@dataclass(frozen=True, eq=False)
class PolicyOutput:
    """What a policy says about response tokens, in float32 or the model's own dtype, if that is finer.

    Args:
        log_probs_BR: log-probability of each response token, in nats.
        entropy_BR: entropy of the distribution it was drawn from, in nats.
    """

    log_probs_BR: Tensor
    entropy_BR: Tensor


@dataclass(frozen=True)
class PolicyHead:
    """Logits [B, K, V] to log-probabilities and entropy under softmax(logits / temperature).

    Args:
        temperature: above 0. The policy that sampled is the one at the sampling temperature, so give that one.
        entropy_gradient: keep the graph of the entropy, for a loss that contains it.
    """

    temperature: float = 1.0
    entropy_gradient: bool = False

    def __call__(self, raw: Tensor | Logits, micro_batch: MicroBatch) -> PolicyOutput:
        logits = raw if isinstance(raw, Logits) else WholeLogits(at_least_float32(raw))
        if self.temperature != 1.0:
            logits = logits.divided(self.temperature)
        log_normalizer_BK = logits.log_normalizer()
        # The last position predicts a token that is not there: any id will do.
        next_ids_BK = F.pad(micro_batch.input_ids_BT, (0, 1))[:, -log_normalizer_BK.shape[1] :]
        log_probs_BK = logits.of_tokens(next_ids_BK) - log_normalizer_BK
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy_BK = log_normalizer_BK - logits.expected(log_normalizer_BK)
        return PolicyOutput(_predicting(log_probs_BK, micro_batch), _predicting(entropy_BK, micro_batch))


def value_head(values_BK: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Values [B, K] of all positions to those [B, R] of the states in which response tokens are chosen."""
    return _predicting(at_least_float32(values_BK), micro_batch)


def _predicting(x_BK: Tensor, micro_batch: MicroBatch) -> Tensor:
    skipped = micro_batch.input_ids_BT.shape[1] - x_BK.shape[1]
    return x_BK.gather(1, micro_batch.predicting_BR - skipped)
