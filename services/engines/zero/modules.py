"""The forward pass as modules whose inputs and outputs are tensors, so that DeepSpeed's hooks around modules gather
and release weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.compute.heads import PolicyHead
from services.compute.logits import DeferredLogits, OutputLayer
from services.compute.microbatch import MicroBatch
from services.engines.fsdp.engine import output_layer
from services.models.value_model import ValueModel


class ForwardPass(nn.Module):
    """Module that runs a model up to the raw output that heads take.

    Args:
        model: the model.
        compute_dtype: type of the output layer's products. Default: that of its weight.
    """

    def __init__(self, model: PreTrainedModel | ValueModel, compute_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        layer = output_layer(model)
        self._scorer = None if layer is None else _Scorer(replace(layer, compute_dtype=compute_dtype))

    def read(self, micro_batch: MicroBatch) -> Tensor | DeferredLogits:
        """Runs the forward pass of a micro-batch; returns the raw output that heads take: values or logits, or
        `DeferredLogits` if the output layer is computed chunk by chunk."""
        raw = self(micro_batch.input_ids_BT, micro_batch.num_scored)
        return raw if self._scorer is None else DeferredLogits(raw, _ScoredByModule(scorer=self._scorer))

    def forward(self, input_ids_BT: Tensor, num_scored: int) -> Tensor:
        model: Any = self.model
        if self._scorer is not None:
            return model.get_decoder()(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        output = model(input_ids=input_ids_BT, use_cache=False, logits_to_keep=num_scored)
        return output if isinstance(output, Tensor) else output.logits


def dummy_loss(raw: Tensor | DeferredLogits, micro_batch: MicroBatch) -> Tensor:
    """Head that returns a loss of 0 for a dummy micro-batch, whose graph includes every weight: all ranks must reduce
    the gradients of the same weights."""
    if isinstance(raw, DeferredLogits):
        raw = PolicyHead()(raw, micro_batch).log_probs_BR
    return raw.sum() * 0


class _Scorer(nn.Module):
    """Module that computes the output layer's scores chunk by chunk: log-probabilities and entropies, stacked [2, N].
    Its output is a single tensor, so that the backward pass gathers the weight exactly once, whichever scores the
    loss uses: all ranks must gather in the same order."""

    def __init__(self, layer: OutputLayer) -> None:
        super().__init__()
        self.weight: Any = layer.weight_VH
        self._layer = replace(layer, weight_VH=None)  # DeepSpeed replaces the weight

    def forward(self, hidden_NH: Tensor, ids_N: Tensor, temperature: float) -> Tensor:
        layer = replace(self._layer, weight_VH=self.weight)
        return torch.stack(layer.scores(hidden_NH, ids_N, temperature))


@dataclass(frozen=True, eq=False)
class _ScoredByModule(OutputLayer):
    """Output layer that delegates to the module `scorer`. Its weight is gathered only while that module computes."""

    scorer: _Scorer | None = None

    def scores(self, hidden_NH: Tensor, ids_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        assert self.scorer is not None
        log_probs_N, entropy_N = self.scorer(hidden_NH, ids_N, temperature)
        return log_probs_N, entropy_N
