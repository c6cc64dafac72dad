"""Layers of which every rank of a tensor group holds a part (Shoeybi et al. 2019, "Megatron-LM", section 3).

Between layers all ranks hold the same activations, and all compute the same loss from them; so the gradient of an
activation is whole on every rank, unless it went into a layer that is cut by columns.

Layers are made without memory, on the meta device: the model that they are put into gives their weights memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from services.compute.linear import linear
from services.compute.logits import DeferredLogits, OutputLayer, local_rows


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks of a group; backward, each rank's part gets the whole gradient."""
    return x if group.size() == 1 else _SumForward.apply(x, group)


def fan_out(x: Tensor, group: ProcessGroup) -> Tensor:
    """The same activation for ranks that each compute a part of what follows; backward, gradients are summed."""
    return x if group.size() == 1 else _SumBackward.apply(x, group)


def fan_out_input(block: nn.Module, group: ProcessGroup) -> None:
    """Make the first argument of a block, `hidden_states`, come through `fan_out`."""

    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (fan_out(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": fan_out(kwargs["hidden_states"], group)}

    block.register_forward_pre_hook(hook, with_kwargs=True)


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes some of the outputs. Weight [out / t, in], bias [out / t].

    Its input must come through `fan_out`, once for all such layers that share it.
    """

    def __init__(self, whole: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        num_outputs = whole.out_features // group.size()
        self.weight = _empty(whole.weight, (num_outputs, whole.in_features))
        self.bias = _empty(whole.bias, (num_outputs,)) if whole.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank multiplies some of the inputs. Weight [in / t, out], bias [out].

    The weight is stored transposed: so the parts of a group, end to end, are the (transposed) weight, and gathering
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
    """An embedding of which each rank holds the rows of some tokens. Weight [padded vocabulary / t, hidden].

    Args:
        whole: The embedding that is cut.
        num_rows: Tokens of each rank, those of the padding included.
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
    """An output layer of which each rank computes the logits of some tokens. Weight [padded vocabulary / t, hidden].

    In training no rank ever has the logits of all tokens: only sums and maxima over the vocabulary are exchanged, a few
    numbers per position.

    Args:
        weight: Of this rank.
        vocabulary: Number of tokens that exist; the others are padding.
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
        """Logits [B, V] of all tokens, on every rank. Without a gradient."""
        ours_BV = linear(hidden_BH, self.weight)
        parts = [ours_BV]
        if self._group.size() > 1:
            parts = [torch.empty_like(ours_BV) for _ in range(self._group.size())]
            dist.all_gather(parts, ours_BV, group=self._group)
        return torch.cat(parts, dim=-1)[:, : self._vocabulary]


def _empty(like: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"))


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
