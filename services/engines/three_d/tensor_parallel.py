"""Tensor-parallel layers, sharded over the ranks of a tensor group (Shoeybi et al. 2019, "Megatron-LM", section 3).

Between layers all ranks have the same activations, and compute the same loss from them. So the gradient of an
activation is whole on every rank, except that of the input of a column-parallel layer.

Weights are constructed on the meta device; `ModelStage.allocate` allocates them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from services.compute.collectives import fan_out, sum_over
from services.compute.linear import linear
from services.compute.logits import DeferredLogits, OutputLayer, local_rows


def fan_out_input(block: nn.Module, group: ProcessGroup) -> None:
    """Registers a hook on a block that passes its argument `hidden_states`, the first, through `fan_out`."""

    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (fan_out(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": fan_out(kwargs["hidden_states"], group)}

    block.register_forward_pre_hook(hook, with_kwargs=True)


class ColumnParallelLinear(nn.Module):
    """Linear layer sharded by outputs over the t ranks of a group: weight [out / t, in], bias [out / t].

    Its input must have gone through `fan_out`, once for all layers that share it.
    """

    def __init__(self, whole: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        num_outputs = whole.out_features // group.size()
        self.weight = _empty(whole.weight, (num_outputs, whole.in_features))
        self.bias = _empty(whole.bias, (num_outputs,)) if whole.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Linear layer sharded by inputs over the t ranks of a group: weight [in / t, out], bias [out]. Its output is the
    same on all ranks.

    The weight is stored transposed, so that the concatenated shards of a group are the transposed weight, and gathering
    it is one contiguous copy.
    """

    def __init__(self, whole: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group
        num_inputs = whole.in_features // group.size()
        self.weight = _empty(whole.weight, (num_inputs, whole.out_features))
        self.bias = _empty(whole.bias, (whole.out_features,)) if whole.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        y = sum_over(linear(x, self.weight.t()), self._group)
        return y if self.bias is None else y + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Embedding sharded by tokens over the t ranks of a group: weight [padded vocabulary / t, hidden].

    Args:
        whole: The whole embedding.
        num_rows: Tokens per rank, padding included.
        group: The ranks.
    """

    def __init__(self, whole: nn.Embedding, num_rows: int, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._first_id = group.rank() * num_rows
        self.weight = _empty(whole.weight, (num_rows, whole.embedding_dim))
        padding_row = -1 if whole.padding_idx is None else whole.padding_idx - self._first_id
        # As in the whole embedding, the row of the padding token gets no gradient.
        self._padding_row = padding_row if 0 <= padding_row < num_rows else None

    def forward(self, ids_BT: Tensor) -> Tensor:
        rows_BT, is_ours_BT = local_rows(ids_BT, self._first_id, len(self.weight))
        ours_BTH = F.embedding(rows_BT, self.weight, self._padding_row) * is_ours_BT[..., None]
        return sum_over(ours_BTH, self._group)


class VocabularyParallelHead(nn.Module):
    """Output layer sharded by tokens over the t ranks of a group: weight [padded vocabulary / t, hidden].

    In training no rank has the logits of all tokens: ranks exchange sums and maxima over the vocabulary, a few numbers
    per position.

    Args:
        weight: Shard of this rank.
        vocabulary: Number of tokens of the vocabulary, without padding.
        group: The ranks.
    """

    def __init__(self, weight: nn.Parameter, vocabulary: int, group: ProcessGroup) -> None:
        super().__init__()
        self._group, self._vocabulary = group, vocabulary
        self._first_id = group.rank() * len(weight)
        self._num_real = min(max(vocabulary - self._first_id, 0), len(weight))
        self.weight = weight

    def forward(self, hidden_BKH: Tensor) -> DeferredLogits:
        layer = OutputLayer(self.weight, self._num_real, self._first_id, self._group)
        return DeferredLogits(fan_out(hidden_BKH, self._group), layer)

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Returns the logits [B, V] of all tokens, on every rank of the group, without gradient. Collective."""
        ours_BV = linear(hidden_BH, self.weight)
        parts = [ours_BV]
        if self._group.size() > 1:
            parts = [torch.empty_like(ours_BV) for _ in range(self._group.size())]
            dist.all_gather(parts, ours_BV, group=self._group)
        return torch.cat(parts, dim=-1)[:, : self._vocabulary]


def _empty(like: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    """Returns a parameter on the meta device of the given shape and the type of `like`."""
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"))
