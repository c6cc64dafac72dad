"""A forward pass as modules from tensors to tensors, around which DeepSpeed gathers and releases weights."""

from __future__ import annotations

from dataclasses import dataclass
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
    """A model up to the raw output that heads take.

    Args:
        compute_dtype: type of the output layer's products; default that of its weight.
    """

    def __init__(self, model: PreTrainedModel | ValueModel, compute_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        layer = output_layer(model)
        self._scorer = None if layer is None else _Scorer(layer.weight_VH, compute_dtype)

    def read(self, micro_batch: MicroBatch) -> Tensor | DeferredLogits:
        """The raw output."""
        raw = self(micro_batch.input_ids_BT, micro_batch.num_scored)
        return raw if self._scorer is None else DeferredLogits(raw, _ScoredByModule(scorer=self._scorer))

    def forward(self, input_ids_BT: Tensor, num_scored: int) -> Tensor:
        model: Any = self.model
        if self._scorer is not None:
            return model.get_decoder()(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        output = model(input_ids=input_ids_BT, use_cache=False, logits_to_keep=num_scored)
        return output if isinstance(output, Tensor) else output.logits


def dummy_loss(raw: Tensor | DeferredLogits, micro_batch: MicroBatch) -> Tensor:
    """Zero-weight loss of a dummy micro-batch, with a gradient for every weight: ranks reduce the gradients of the same
    weights together."""
    if isinstance(raw, DeferredLogits):
        raw = PolicyHead()(raw, micro_batch).log_probs_BR
    return raw.sum() * 0


class _Scorer(nn.Module):
    """The output layer, computed chunk by chunk. Its output is one tensor, so that the backward pass gathers the weight
    once, whichever outputs the loss uses: ranks must gather in the same order."""

    def __init__(self, weight_VH: Any, compute_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = weight_VH
        self._compute_dtype = compute_dtype

    def forward(self, hidden_NH: Tensor, ids_N: Tensor, temperature: float) -> Tensor:
        layer = OutputLayer(self.weight, compute_dtype=self._compute_dtype)
        return torch.stack(layer.scores(hidden_NH, ids_N, temperature))


@dataclass(frozen=True, eq=False)
class _ScoredByModule(OutputLayer):
    """An output layer whose weight is gathered only while `scorer` computes."""

    scorer: _Scorer | None = None

    def scores(self, hidden_NH: Tensor, ids_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        assert self.scorer is not None
        log_probs_N, entropy_N = self.scorer(hidden_NH, ids_N, temperature)
        return log_probs_N, entropy_N
