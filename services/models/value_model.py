"""Value models: a transformer with a scalar head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """A transformer with a head of one output, the value of the state at each position.

    A new head is zero, so the values of a new critic are 0, and its first update changes the head alone.

    Args:
        backbone: the transformer, without an output layer.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, dtype=backbone.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: Tensor, *, logits_to_keep: int = 0, **arguments: Any) -> Tensor:
        """Returns the values [B, K] at the last K positions.

        Args:
            input_ids: token ids [B, T].
            logits_to_keep: K; 0 for all T positions.
            arguments: further keyword arguments of the backbone.
        """
        hidden_BTH = self.backbone(input_ids=input_ids, **arguments).last_hidden_state
        return self.value_head(hidden_BTH[:, -logits_to_keep:])[..., 0]


def transformer_of(model: PreTrainedModel | ValueModel) -> PreTrainedModel:
    """Returns the transformers model in a model: the backbone of a value model, or the model itself."""
    return model.backbone if isinstance(model, ValueModel) else model
