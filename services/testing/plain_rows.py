"""Distributions of a row's tokens by plain transformers, with which rollout engines are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.rollout.base import SamplingOptions


@torch.no_grad()
def plain_logits(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    """Returns the logits of the positions that predict a response's tokens, [tokens, V], from one forward pass of
    plain transformers over this row alone, without a cache."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]


def plain_log_probs(
    model: PreTrainedModel, prompt: list[int], response: list[int], options: SamplingOptions
) -> Tensor:
    """Returns the log-probabilities of all tokens under the distribution that each token of a response is drawn from,
    [tokens, V] float64, by transformers' processors of logits, in the order of vLLM."""
    processors = LogitsProcessorList()
    if options.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if not options.greedy:
        processors.append(TemperatureLogitsWarper(float(options.temperature)))
        processors.append(MinPLogitsWarper(options.min_p))
        if options.top_k:
            processors.append(TopKLogitsWarper(options.top_k))
        processors.append(TopPLogitsWarper(options.top_p))
    logits_NV: Any = plain_logits(model, prompt, response).double()
    contexts: list[Any] = [torch.tensor([prompt + response[:n]]) for n in range(len(response))]
    rows: list[Any] = [processors(ids, logits_NV[n : n + 1].clone()) for n, ids in enumerate(contexts)]
    return torch.cat(rows).log_softmax(dim=-1)
